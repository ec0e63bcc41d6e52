"""An interactive session ran into an error; sys.last_traceback keeps the frame's locals."""

import sys

import torch
from small import make, update


def failing_step():
    x = torch.randn(8192, 16)  # ALLOCATES
    raise RuntimeError(f"shape mismatch {tuple(x.shape)}")


net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(100):
    if step == 40:
        try:
            failing_step()
        except RuntimeError as error:
            sys.last_type, sys.last_value, sys.last_traceback = (
                type(error),
                error,
                error.__traceback__,
            )  # KEEPS
    update(net, optimizer)
