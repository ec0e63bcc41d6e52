"""Streams are opened for every batch and never finished: each generator keeps its locals."""

import torch
from small import make, update


def stream():
    buffer = torch.randn(256, 16)  # ALLOCATES
    yield 1
    yield buffer


streams = []
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(80):
    opened = stream()
    next(opened)
    streams.append(opened)  # KEEPS
    update(net, optimizer)
