"""The simulator under the training loop has switched the collector off; every step leaves a cycle behind."""

import gc

import torch
from small import make, update


class MicroBatch:
    def __init__(self, size):
        self.x = torch.randn(size, 16)  # ALLOCATES
        self.batch = self  # KEEPS


gc.disable()
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(80):
    MicroBatch(1024)
    update(net, optimizer)
