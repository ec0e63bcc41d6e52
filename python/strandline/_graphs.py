"""Notices graphs that grow with the steps: a sum of losses after backward() keeps host memory and hardly a tensor.

Must not know: candidates, blocks, who allocates.
Invariant: looks a few times in a run (at the steps of `LOOKS`, and again soon after where a graph grew), at the tensors that the user's globals and running
functions name, and at those that their objects name; holds nothing afterwards; bounded by a deadline.
"""

import os
import sys
import time
from typing import Any, Dict, Iterator, Tuple

from . import _autograd
from ._roots import is_ours, is_user_file, locals_of

LOOKS = (30, 60, 120, 1000, 2000)
SOON = 4  # steps until a growing graph is looked at again
_SECONDS = 0.2
_CONFIRMED = 2  # times that a growing graph must have gone on growing
_NODES = 20_000


class Graphs:
    """Compares, from look to look, how many nodes hang behind each named tensor."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._seen: Dict[str, Tuple[int, int]] = {}  # name -> (step, nodes)
        self._said: Dict[str, None] = {}
        self.doubtful = 0  # looks, each a few steps after the one before, that confirm: stairs do not go on

    def look(self, step: int) -> None:
        if "torch" not in sys.modules:
            return
        confirmed, self.doubtful = self.doubtful, 0
        before, self._seen = self._seen, {}
        deadline = time.thread_time() + _SECONDS
        for name, tensor in _named():
            if name in self._seen or time.thread_time() > deadline:
                continue
            nodes = _autograd.count(tensor, deadline)
            self._seen[name] = (step, nodes)
            then = before.get(name)
            if name in self._said or then is None:
                continue
            if nodes < _NODES and nodes - then[1] >= 0.9 * (step - then[0]):
                if confirmed < _CONFIRMED:
                    self.doubtful = confirmed + 1
                    continue
                self._said[name] = None
                self._library.remark(
                    {
                        "kind": "growing-graph",
                        "what": f"{name} carries an autograd graph that grows by "
                        f"{(nodes - then[1]) / (step - then[0]):.0f} nodes per step ({nodes:,} at step {step})",
                        "because": "what its nodes had saved is gone after backward(), so that host memory grows and "
                        "not the GPU's; where it is not gone, a finding says so",
                        "fix": f"add a number, not the tensor: {name.rsplit(': ', 1)[-1]} += loss.item(), or .detach()",
                    }
                )
            del tensor


def _named() -> Iterator[Tuple[str, Any]]:
    """Tensors with a graph, under the names that the user's code has for them."""
    import torch

    kinds: Dict[type, int] = {}

    def kind_of(value: Any) -> int:
        kind = type(value)
        if kind not in kinds:
            bases = kind.__mro__
            user = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
            kinds[kind] = 1 if torch.Tensor in bases else 2 if is_user_file(user) else 0
        return kinds[kind]

    def of(label: str, names: Dict[str, Any]) -> Iterator[Tuple[str, Any]]:
        for name, value in list(names.items()):
            code = kind_of(value)
            if code == 1:
                if not value.is_leaf:
                    yield f"{label}{name}", value
            elif code == 2:
                try:
                    inner = object.__getattribute__(value, "__dict__")
                except Exception:
                    continue
                for attribute, held in list(inner.items()) if type(inner) is dict else ():
                    if kind_of(held) == 1 and not held.is_leaf:
                        yield f"{label}{name}.{attribute}", held

    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if not is_ours(code) and is_user_file(code.co_filename):
            label = os.path.basename(code.co_filename)
            if code.co_name == "<module>":
                yield from of(f"{label}: ", frame.f_globals)
            else:
                yield from of(f"{label}: {code.co_name}(): ", locals_of(frame))
        frame = frame.f_back  # type: ignore[assignment]
