"""weakref.finalize is given the tensor that it should help to free: it holds what it is called with."""

import weakref

import torch
from small import make, update


class Owner:
    pass


def release(tensor):
    del tensor


owner = Owner()
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(80):
    x = torch.randn(256, 16)  # ALLOCATES
    weakref.finalize(owner, release, x)  # KEEPS
    update(net, optimizer)
