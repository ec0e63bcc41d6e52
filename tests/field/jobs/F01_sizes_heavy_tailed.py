"""Images of random, heavy-tailed size: the peak is the largest seen so far, what lives after a step is flat."""

import random

import torch
from torch import nn

random.seed(3)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(120):
    side = min(160, int(8 * random.paretovariate(0.9)))
    loss = net(torch.randn(2, 3, side, side)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
