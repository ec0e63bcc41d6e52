"""Each task adds the parameters of a new head to the optimizer, which keeps those of all tasks before."""

import torch
from small import batch, make
from torch import nn

net = make(64)
optimizer = torch.optim.Adam(net.parameters())
for _ in range(8):
    head = nn.Linear(4, 4096)  # ALLOCATES
    optimizer.add_param_group({"params": head.parameters()})  # KEEPS
    for _ in range(12):
        x, _ = batch()
        loss = head(net(x)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # ALLOCATES
