"""Networks made anew refer to themselves through a bound method: they live until the collector comes."""

import torch
from small import make, update
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2000, 64)  # ALLOCATES
        self.which = self.first  # KEEPS

    def first(self, x):
        return self.layer(x)


net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(90):
    update(net, optimizer)
    Net()
