"""The last five checkpoints: the first of them looks as if it were kept for ever."""

import copy

import torch
from small import make, update

net = make(256)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
checkpoints = []
for step in range(200):
    update(net, optimizer)
    if step % 20 == 19:
        checkpoints.append(copy.deepcopy(net.state_dict()))
        if len(checkpoints) > 5:
            checkpoints.pop(0)
