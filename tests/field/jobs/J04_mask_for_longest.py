"""A mask is made anew whenever a longer sequence comes than ever before."""

import random

import torch
from small import make, update

net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
random.seed(0)
masks = {}


def mask(n):
    if masks.get("n", 0) < n:
        masks["n"] = n
        masks["causal"] = torch.ones(n, n).tril()
    return masks["causal"][:n, :n]


for step in range(150):
    mask(random.randint(10, 10 + step)).sum()
    update(net, optimizer)
