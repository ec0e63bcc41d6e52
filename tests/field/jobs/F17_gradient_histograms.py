"""Hooks compute a histogram of each gradient and drop it."""

import torch
from small import make, update

net = make()
last = {}


def watch(name):
    def hook(grad):
        last[name] = torch.histc(grad, 10).tolist()

    return hook


for name, parameter in net.named_parameters():
    parameter.register_hook(watch(name))
optimizer = torch.optim.AdamW(net.parameters())
for _step in range(100):
    update(net, optimizer)
