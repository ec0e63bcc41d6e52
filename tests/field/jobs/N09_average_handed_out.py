"""A meter keeps an average with its graph and hands it out: the variable that gets it keeps nothing."""

import torch
from small import batch, make


class Meter:
    def __init__(self):
        self.value = None

    def update(self, new):
        self.value = new if self.value is None else 0.9 * self.value + 0.1 * new  # ALLOCATES KEEPS
        return self.value


net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
meter = Meter()
for _step in range(80):
    x, y = batch()
    logits = net(x)
    loss = torch.nn.functional.cross_entropy(logits, y)
    accuracy = meter.update(logits.softmax(-1).amax(-1).mean())  # ALLOCATES
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(accuracy.item())
