"""An exponential average of the weights that begins after the warm-up: made once, used in every step."""

import copy

import torch
from small import make, update

net = make(256)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
average = None
for step in range(100):
    update(net, optimizer)
    if step == 50:
        average = copy.deepcopy(net)
    if average is not None:
        with torch.no_grad():
            for mean, now in zip(average.parameters(), net.parameters()):
                mean.lerp_(now, 0.01)
