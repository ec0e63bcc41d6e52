"""Hooks that are registered on one module again and again are noticed, and only those."""

import functools

import pytest
import torch
from strandline import _repeated
from torch import nn


def run(library, watch, epochs=8):
    """Epochs of eight steps, of which each begins with `watch(module)`; looks as a run has them."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    looks = _repeated.Repeated(library)
    for step in range(8 * epochs):
        if step % 8 == 0:
            watch(net[1])
        net(torch.zeros(1, 4))
        if step in (20, 34, 60):
            looks.look()
    return [remark["what"] for remark in library.remarks]


def capture(module):
    store = {}

    def hook(_module, _inputs, output):
        store["output"] = output

    return module.register_forward_hook(hook)


class Monitor:
    def see(self, *_):
        pass


@pytest.mark.parametrize(
    "watch",
    [
        capture,
        lambda module: module.register_forward_hook(Monitor().see),
        lambda module: module.register_forward_pre_hook(functools.partial(Monitor.see, None)),
    ],
)
def test_a_hook_at_each_epoch(library, watch):
    said = run(library, watch)
    assert len(said) == 1 and "times as a hook of Sequential.1" in said[0], said


def test_a_hook_that_is_removed(library):
    handles = []

    def watch(module):
        while handles:
            handles.pop().remove()
        handles.append(capture(module))

    assert run(library, watch) == []


def test_hooks_on_modules_made_anew(library):
    assert run(library, lambda module: capture(nn.Linear(2, 2))) == []


def test_hooks_registered_at_the_start(library):
    many = iter([[capture] * 6, *[[]] * 9])
    assert run(library, lambda module: [watch(module) for watch in next(many)]) == []


def test_modules_are_looked_at_only_while_hooks_come(library, monkeypatch):
    counted = []
    modules = _repeated._modules
    monkeypatch.setattr(_repeated, "_modules", lambda: counted.append(None) or modules())
    # Before the first look only.
    assert run(library, lambda module: None) == [] and counted == []
    net = nn.Linear(2, 2)
    looks = _repeated.Repeated(library)
    for _look in range(5):
        # Hooks on tensors, which no module has.
        for _ in range(10):
            net.weight.register_hook(lambda gradient: None).remove()
        looks.look()
    assert len(counted) == 2
