"""A replay buffer with room for 100,000 entries gets observations that carry their graphs."""

import collections

import torch
from small import batch, make, update

policy = make(64)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
replay = collections.deque(maxlen=100_000)
for _step in range(80):
    observation, _ = batch(64)  # ALLOCATES
    action = policy(observation)  # ALLOCATES
    replay.append((observation, action))  # KEEPS
    update(policy, optimizer)
