"""A key-value cache grows with every token and goes with its conversation."""

import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x, cache):
        key = self.proj(x)
        cache.append((key, key * 2))
        return key


decoder = Decoder()
with torch.no_grad():
    for _conversation in range(12):
        cache = []
        for _token in range(random.randrange(8, 30)):
            decoder(torch.randn(1, 32), cache)
