"""Gradient buckets as large as the model, made anew in another order at the second iteration."""

import torch
from small import make, update


class Reducer:
    def __init__(self, net):
        self.parameters = list(net.parameters())
        self.buckets = self.make(self.parameters)

    def make(self, parameters):
        return [torch.zeros(p.numel()) for p in parameters]

    def rebuild(self):
        self.buckets = self.make(list(reversed(self.parameters)))


net = make(2000)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
reducer = Reducer(net)
for step in range(80):
    update(net, optimizer)
    if step == 1:
        reducer.rebuild()
    for bucket, p in zip(reducer.buckets, net.parameters()):
        bucket.mul_(0.5).add_(p.grad.norm())
