"""The best weights so far are kept as a copy; each improvement replaces it."""

import copy
import random

import torch
from small import make, update

random.seed(0)
net = make(128)
optimizer = torch.optim.AdamW(net.parameters())
best, best_score = None, -1.0
for epoch in range(16):
    for _ in range(8):
        update(net, optimizer)
    score = random.random() + epoch / 20
    if score > best_score:
        best, best_score = copy.deepcopy(net.state_dict()), score
