"""A hook stores the output of its module; the handle is removed, the attribute stays."""

import torch
from small import make, update

net = make(64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def capture(module, inputs, output):
    module.output = output.detach()  # KEEPS


for step in range(100):
    if step == 40:
        handle = net[1].register_forward_hook(capture)
        with torch.no_grad():
            net(torch.randn(4096, 16))  # ALLOCATES
        handle.remove()
    update(net, optimizer)
