"""A leak, but the run ends after 18 steps: said as undecided, with what would decide it."""

import torch
from small import batch, make, update

kept = []
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(18):
    update(net, optimizer)
    kept.append(batch(64)[0])
