"""A replay buffer of detached observations fills up and then replaces the oldest."""

import collections

import torch
from small import batch, make, update

policy = make()
optimizer = torch.optim.Adam(policy.parameters())
replay = collections.deque(maxlen=70)
for _step in range(160):
    replay.append(batch(32)[0])
    update(policy, optimizer)
