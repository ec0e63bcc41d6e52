"""A metric with list states that is reset at the end of every epoch."""

import torch
from small import batch, make, update


class Metric:
    def __init__(self):
        self.preds = []

    def update(self, preds):
        self.preds.append(preds)

    def compute(self):
        return torch.cat(self.preds).mean().item()

    def reset(self):
        self.preds.clear()


metric = Metric()
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _epoch in range(6):
    for _step in range(25):
        update(net, optimizer)
        with torch.no_grad():
            metric.update(net(batch(64)[0]))
    print(metric.compute() < 1e9)
    metric.reset()
