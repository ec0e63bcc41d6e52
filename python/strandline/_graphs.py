"""Notices graphs that grow with the steps: a sum of losses after backward() keeps host memory and hardly a tensor.

Must not know: candidates, blocks, who allocates.
Invariant: looks a few times in a run (at the steps of `LOOKS`, and again soon after where a graph grew), at the tensors
that the user's globals and running functions name, and at those that their objects name; holds nothing afterwards;
bounded by a deadline. One graph is said once, whatever names it has, and not where a finding says it.
"""

import os
import sys
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Set, Tuple

from . import _autograd
from ._roots import is_ours, is_user_file, locals_of

LOOKS = (34, 60, 120, 1000, 2000)  # with the looks that confirm, later than a leak of every step is called
SOON = 4  # steps until a growing graph is looked at again
_SECONDS = 0.2
_CONFIRMED = 2  # times that a growing graph must have gone on growing
_NODES = 20_000
_SHARE = 0.9  # of the nodes seen before: so many are still there where a graph grows, and as many steps add a node each

explained: Set[int] = set()  # roots (`Graph.root`) of graphs that findings speak of


class Seen(NamedTuple):
    """What one look saw of a graph."""

    step: int
    nodes: int
    numbered: int  # nodes with a number
    newest: int  # the highest of these


class _Grown(NamedTuple):
    name: str
    graph: _autograd.Graph
    rate: float


class Graphs:
    """Compares, from look to look, how many nodes hang behind each named tensor."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._seen: Dict[str, Seen] = {}  # by name
        self._said: Dict[str, None] = {}
        self.doubtful = 0  # looks, each a few steps after the one before, that confirm: stairs do not go on

    def look(self, step: int) -> None:
        if "torch" not in sys.modules:
            return
        confirmed, self.doubtful = self.doubtful, 0
        before, self._seen = self._seen, {}
        deadline = time.thread_time() + _SECONDS
        grown: List[_Grown] = []
        for name, tensor in _named():
            if name in self._seen or time.thread_time() > deadline:
                continue
            graph = _autograd.measure(tensor, deadline)
            newest = max(graph.numbers, default=0)
            self._seen[name] = Seen(step, graph.nodes, len(graph.numbers), newest)
            then = before.get(name)
            if then is not None and _goes_on(graph, then, step):
                grown.append(_Grown(name, graph, (graph.nodes - then.nodes) / (step - then.step)))
            del tensor
        new = [one for one in causes(grown) if one.name not in self._said]
        if new and confirmed < _CONFIRMED:
            self.doubtful = confirmed + 1
            return
        for one in new:
            self._said[one.name] = None
            self._tell(one, step)

    def _tell(self, one: _Grown, step: int) -> None:
        short = one.name.rsplit(": ", 1)[-1]
        self._library.remark(
            {
                "kind": "growing-graph",
                "what": f"{one.name} carries an autograd graph that grows by {one.rate:.0f} nodes per step "
                f"({one.graph.nodes:,} at step {step})",
                "because": "what its nodes had saved is gone after backward(), so that host memory grows and "
                "not the GPU's; where it is not gone, a finding says so",
                "fix": f"compute {short} from numbers (loss.item()) or from detached tensors (loss.detach()), or detach "
                f"it after each step: {short} = {short}.detach()",
            }
        )


def _goes_on(graph: _autograd.Graph, then: Seen, step: int) -> bool:
    """Whether a graph has grown since, and on top of what it was: the graph of a step that is merely larger than that
    of the step before has none of its nodes."""
    if graph.nodes >= _NODES or graph.nodes - then.nodes < _SHARE * (step - then.step):
        return False
    old = sum(number <= then.newest for number in graph.numbers)
    return old >= _SHARE * then.numbered


def causes(grown: List[_Grown]) -> List[_Grown]:
    """Of graphs that grow, those that do so by themselves: not because another one is a part of them, and not what a
    finding speaks of. Of several names for one graph, an object's attribute, which stays, rather than a variable,
    which may be bound anew in each step."""
    grown = sorted(grown, key=lambda one: "." not in one.name.rsplit(": ", 1)[-1])
    found: List[_Grown] = []
    for at, one in enumerate(grown):
        if one.graph.numbers & explained:
            continue
        if not any(
            other.graph.root in one.graph.numbers and (other.graph.root != one.graph.root or before < at)
            for before, other in enumerate(grown)
            if other is not one
        ):
            found.append(one)
    return found


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
