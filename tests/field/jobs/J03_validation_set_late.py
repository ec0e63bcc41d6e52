"""The validation set is loaded at the first validation, and used at each."""

import torch
from small import make, update

net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
held_out = None
for epoch in range(5):
    for _ in range(30):
        update(net, optimizer)
    if epoch >= 1:
        if held_out is None:
            held_out = torch.randn(4096, 16)
        with torch.no_grad():
            net(held_out).mean()
