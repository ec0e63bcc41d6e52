"""Adam makes its state in the first step, and again for layers that are unfrozen later."""

import torch
from small import update
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
for parameter in net[2].parameters():
    parameter.requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters())
for step in range(100):
    if step == 50:
        for parameter in net[2].parameters():
            parameter.requires_grad_(True)
    update(net, optimizer)
