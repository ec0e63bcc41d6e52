"""Small programs with a known holder, after reports of real leaks. The kept line carries the mark KEEP.

A program calls `note(tensor)` when a block that stays is born, `tick()` when a step ends, `ask()` to have its blocks
explained. Expected: `kind` of the holder, `path` and `fix` (regular expressions), `not_leak`, `released`. `shape` and
`asked` are what the ledger says of the candidate; `used` is what must be said of its use, where that matters; with
`stack` the search is told where `note` was called.
"""

PATTERNS = {}


def pattern(
    name,
    source,
    kind=None,
    path="",
    fix="",
    not_leak=None,
    released="nothing",
    kept=True,
    bounded=None,
    shape="",
    asked=0,
    used=None,
    stack=False,
):
    PATTERNS[name] = dict(
        source=source,
        kind=kind,
        path=path,
        fix=fix,
        not_leak=not_leak,
        released=released,
        kept=kept,
        bounded=bounded,
        shape=shape,
        asked=asked,
        used=used,
        stack=stack,
    )


HEAD = """
import torch, functools, collections, types, weakref, gc, queue
from torch import nn
"""

from . import (  # noqa: E402, F401
    again,
    bounds,
    containers,
    emptied,
    graphs,
    innocent,
    keys,
    library,
    linked,
    names,
    objects,
    regrown,
    shared,
    uses,
)
