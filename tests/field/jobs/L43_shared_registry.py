"""Each trainer registers its loader with a shared class dict, and the loader leads to the model."""

import torch
from small import make, update


class GradientState:
    _shared = {"dl": []}

    def __init__(self):
        self.__dict__ = self._shared


class Loader:
    def __init__(self, collate):
        self.collate = collate


class Trainer:
    def __init__(self):
        self.model = make(512)  # ALLOCATES
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        GradientState().dl.append(Loader(self.collate))  # KEEPS

    def collate(self, rows):
        return rows

    def train(self):
        for _ in range(12):
            update(self.model, self.optimizer)


for _trial in range(8):
    Trainer().train()
