"""A leaky job and its report, for the tests of the report's forms."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess

from runner import COMMAND, Done

LEAKY = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.Adam(net.parameters())
history = []

def validate(x):
    net.eval()
    with torch.no_grad():
        net(x)
    net.train()

def train_step(x):
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
    history.append(torch.ones(64, 64))

data = [torch.randn(32, 64) for _ in range(10)]
for epoch in range(4):
    for x in torch.utils.data.DataLoader(data, batch_size=None):
        train_step(x)
    validate(data[0])
"""


def line_of(words: str) -> int:
    """The line of LEAKY that holds these words."""
    (number,) = (n for n, line in enumerate(LEAKY.splitlines(), 1) if words in line)
    return number


KEPT = line_of("history.append")
CALL = line_of("    train_step(x)")


@dataclasses.dataclass
class Job:
    """A run, and where its report lies."""

    err: str
    file: pathlib.Path
    shown: str

    @property
    def page(self) -> pathlib.Path:
        return self.file.with_name("report.html")

    @property
    def report(self):
        return json.loads(self.file.read_text())


def convert(path, form=None, out=None, *more) -> Done:
    """Runs `strandline report`."""
    words = [str(COMMAND), "report", str(path)]
    words += ["--format", form] if form else []
    words += ["-o", str(out)] if out else []
    done = subprocess.run([*words, *map(str, more)], capture_output=True, timeout=240)
    return Done(done.returncode, done.stdout, done.stderr.decode(), pathlib.Path("."))
