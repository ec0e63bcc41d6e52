"""A dataset makes each sample once: the first epoch is long, and the second adds nothing."""

import torch
from small import make, update
from torch.utils.data import DataLoader, Dataset


class Prepared(Dataset):
    def __init__(self, count):
        self.count, self.made = count, {}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index not in self.made:
            self.made[index] = torch.randn(64, 16)
        return self.made[index]


loader = DataLoader(Prepared(200), batch_size=2, shuffle=True)
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _epoch in range(2):
    for _batch in loader:
        update(net, optimizer)
