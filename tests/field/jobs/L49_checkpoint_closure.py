"""A reentrant checkpoint's function captures a dict that gets the output: a cycle that gc can break."""

import gc

import torch
from small import make, update
from torch.utils.checkpoint import checkpoint


def step(scale):
    seen = {}

    def block(x):
        hidden = x * scale  # ALLOCATES
        return hidden.exp() if not seen else hidden.exp() + 0 * seen["x"].detach()  # ALLOCATES

    x = torch.randn(4096, requires_grad=True)  # ALLOCATES
    out = checkpoint(block, x, use_reentrant=True)  # ALLOCATES
    seen["x"] = out  # KEEPS


gc.disable()
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(70):
    step(2.0)
    update(net, optimizer)
