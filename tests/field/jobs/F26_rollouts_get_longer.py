"""Each episode is a step longer than the one before: its graph is larger, and its own."""

import torch
from small import make
from torch.distributions import Categorical

policy = make()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
for episode in range(70):
    chosen = []
    for _turn in range(5 + episode):
        choice = Categorical(logits=policy(torch.randn(16)))
        chosen.append(choice.log_prob(choice.sample()))
    loss = -torch.stack(chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
