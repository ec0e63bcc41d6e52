"""Features are gathered once, joined, and a head is trained on what was joined; the list of parts is never cleared."""

import torch
from small import make
from torch import nn

body = make()
feats = []
with torch.no_grad():
    for _ in range(120):
        feats.append(torch.tanh(body(torch.randn(512, 16) * 2)))
X = torch.cat(feats)
head = nn.Linear(4, 1)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(120):
    rows = torch.randint(0, len(X), (64,))
    optimizer.zero_grad()
    loss = head(X[rows]).pow(2).mean()
    loss.backward()
    optimizer.step()
