"""Padded batches, lengths shuffled: allocated jumps at a sequence longer than any before."""

import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
embed, rnn = nn.Embedding(100, 16), nn.GRU(16, 16, batch_first=True)
optimizer = torch.optim.Adam([*embed.parameters(), *rnn.parameters()])
lengths = list(range(4, 104))
random.shuffle(lengths)
for length in lengths:
    out, _ = rnn(embed(torch.randint(0, 100, (1, length))))
    optimizer.zero_grad()
    out.square().mean().backward()
    optimizer.step()
