"""Detached losses are appended for an epoch and dropped at its end."""

import torch
from small import make, update

net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _epoch in range(3):
    losses = []
    for _step in range(200):
        losses.append(update(net, optimizer).detach())
    print(torch.stack(losses).mean() > 0)
