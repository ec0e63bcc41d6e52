"""A notebook's output history: every displayed result stays in Out."""

import torch
from small import batch, make, update

In, Out = [""], {}  # as IPython has them in the user's namespace
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def run_cell(number):
    update(net, optimizer)
    with torch.no_grad():
        return net(batch(256)[0])  # ALLOCATES


for number in range(1, 90):
    Out[number] = run_cell(number)  # KEEPS
