"""Validation with gradients on: the running loss keeps the graph of every batch."""

import torch.nn.functional as F
from small import batch, make


def validate(net, batches):
    net.eval()
    total = 0.0
    for _ in range(batches):
        x, y = batch(32)
        out = net(x)  # ALLOCATES
        total = total + F.cross_entropy(out, y)  # ALLOCATES KEEPS
    return total / batches


print(float(validate(make(), 90)) > 0)
