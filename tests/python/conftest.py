"""Lets tests import the package from the source tree, and gives them a stand-in for the library."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))


class FakeLibrary:
    """Counts what the clock tells it; offers nothing."""

    def __init__(self):
        self.steps = self.epochs = 0
        self.phases = []
        self.now = 0
        self.answers = {}
        self.offered = []

    def mode(self):
        return 3

    def start(self, mode, options=None):
        return 0

    def step(self):
        self.steps += 1
        return len(self.offered)

    def epoch(self):
        self.epochs += 1
        return 0

    def phase(self, phase):
        before, self.now = self.now, phase
        self.phases.append(phase)
        return before

    def candidates(self):
        offered, self.offered = self.offered, []
        return offered

    def explain(self, identity, answer):
        self.answers[identity] = answer
        return 0


@pytest.fixture
def library():
    return FakeLibrary()
