"""A first stage keeps every batch in a local list, then a second stage trains on without."""

import torch
from small import make, update

net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def pretrain():
    kept = []
    for _ in range(120):
        x = torch.randn(512, 16)  # ALLOCATES
        net(x).mean()
        kept.append(x)  # KEEPS
        update(net, optimizer)


def finetune():
    for _ in range(60):
        x = torch.randn(512, 16)
        net(x).mean()
        update(net, optimizer)


pretrain()
finetune()
