"""Every answer of a server keeps the key and value tensors that made it."""

import dataclasses
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass
class Output:
    logits: Any
    past_key_values: Any


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x):
        hidden = self.proj(x)
        past = [(hidden * 2, hidden * 3) for _ in range(2)]  # ALLOCATES
        return Output(hidden.argmax(-1), past)


class Session:
    def __init__(self):
        self.model = Decoder()
        self.results = []

    def instruct(self):
        with torch.no_grad():
            out = self.model(torch.randn(16, 32))
        self.results.append(out)  # KEEPS
        return out.logits


session = Session()
for _request in range(120):
    session.instruct()
