"""Helpers are hung on parameters and refer back to them; the engine is deleted, the parameters stay."""

import gc
import types

import torch
from small import make, update
from torch import nn


class HighPrecision:
    def __init__(self, parameter):
        self.lowp = parameter
        self.fp32 = parameter.detach().double()  # ALLOCATES


def full_state(self):
    return self._hp.fp32


class Engine:
    def __init__(self):
        self.model = nn.Linear(500, 64)  # ALLOCATES
        for parameter in self.model.parameters():
            parameter._hp = HighPrecision(parameter)  # KEEPS
            parameter.full_state = types.MethodType(full_state, parameter)  # KEEPS


gc.disable()
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(80):
    engine = Engine()
    del engine
    update(net, optimizer)
