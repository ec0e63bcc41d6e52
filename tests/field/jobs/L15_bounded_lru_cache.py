"""A cache of index tensors fills up to its maxsize."""

import functools

import torch
from small import make, update


@functools.lru_cache(maxsize=60)
def indices(length):
    return torch.arange(length)


net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(55):
    indices(2000 + step)
    update(net, optimizer)
