"""A backward pass fails once, the loop goes on, and what it had allocated stays: the error was kept."""

import torch
from small import batch, make, update


class Trainer:
    def __init__(self):
        self.net = make(64)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.last_error = None

    def large_step(self):
        x, _ = batch(4096)  # ALLOCATES
        hidden = self.net[1](self.net[0](x))  # ALLOCATES
        hidden.register_hook(self.out_of_memory)
        hidden.sum().backward()

    def out_of_memory(self, grad):
        raise RuntimeError("out of memory (simulated)")

    def run(self, steps):
        for step in range(steps):
            if step == 40:
                try:
                    self.large_step()
                except RuntimeError as error:
                    self.last_error = error  # KEEPS
            update(self.net, self.optimizer)


Trainer().run(100)
