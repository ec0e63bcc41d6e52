"""Each restart makes a new optimizer for the same parameters and keeps the old one, with its state."""

import torch
from small import make, update


class Schedule:
    def __init__(self):
        self.net = make(128)
        self.cycles = []

    def restart(self):
        optimizer = torch.optim.Adam(self.net.parameters())
        self.cycles.append(optimizer)  # KEEPS
        return optimizer


schedule = Schedule()
for _cycle in range(9):
    optimizer = schedule.restart()
    for _step in range(10):
        update(schedule.net, optimizer)
