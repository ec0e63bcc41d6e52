"""A study keeps an objective function for each trial, which captures the trial's model."""

import torch
from small import batch, make, update

study = {"trials": []}


def run_trial():
    model = make(400)  # ALLOCATES
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        update(model, optimizer)

    def objective():
        return model(batch()[0]).sum()

    study["trials"].append({"fn": objective})  # KEEPS


for _trial in range(9):
    run_trial()
