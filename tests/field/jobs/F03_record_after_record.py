"""Over many epochs now and then a batch denser than any before: ever rarer steps up of the peak."""

import random

import torch
from small import make, update
from torch.utils.data import DataLoader

random.seed(1)
net = make()
optimizer = torch.optim.AdamW(net.parameters())
loader = DataLoader(range(12))
for _epoch in range(14):
    for _ in loader:
        update(net, optimizer, n=8 + int(random.expovariate(0.02)))
