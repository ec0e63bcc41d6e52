"""Walks autograd graphs from Python tensors to the blocks that graph nodes keep.

Must not know: who holds the tensors that the walk starts from.
Invariant: never raises on freed graphs, never runs an unpack hook (saved tensors with one are skipped: the
packed object is looked at instead), never walks past its deadline; leaves no reference behind.
"""

import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ._tensors import Blocks, parts, storage_address


class Saved(NamedTuple):
    """Where the walk met a block: in `node`, under `name`, reached from `source` over `trail` (outermost first)."""

    source: Any
    trail: Tuple[str, ...]
    name: str


class Walk:
    """What one walk has met: blocks, and the ctx objects of the user's own autograd functions."""

    def __init__(self) -> None:
        self.blocks: Dict[int, Saved] = {}
        self.contexts: Dict[int, Saved] = {}  # and the hooks and packed objects of saved tensors
        self.complete = True

    def clear(self) -> None:
        self.blocks.clear()
        self.contexts.clear()


def walk(sources: Iterable[Any], blocks: Blocks, deadline: float, wanted: Optional[int] = None) -> Walk:
    """Breadth first from all sources at once: a block is credited to the source nearest to it."""
    result = Walk()
    enough = len(blocks) if wanted is None else wanted
    names: Dict[type, List[Tuple[str, str]]] = {}
    # A node's wrapper must stay alive for its identity to mean anything: `seen` keeps it until the walk ends.
    seen: Dict[int, Tuple[Any, int, Any]] = {}  # id -> node, id of the node that led here, source
    level: List[Any] = []
    for source in sources:
        try:
            node = source.grad_fn
        except Exception:
            continue
        if node is not None and id(node) not in seen:
            seen[id(node)] = (node, 0, source)
            level.append(node)
    count = 0
    while level:
        following: List[Any] = []
        for node in level:
            count += 1
            if count % 256 == 0 and time.thread_time() > deadline:
                result.complete = False
                following = []
                break
            identity = id(node)
            source = seen[identity][2]
            for thing in _hooks_of(node, names):
                result.contexts.setdefault(
                    id(thing), Saved(source, _trail(seen, identity), "saved by a hook")
                )
            for name, tensor in _kept(node, names):
                for part in parts(tensor):
                    block = blocks.at(storage_address(part))
                    if block is not None and block not in result.blocks:
                        result.blocks[block] = Saved(source, _trail(seen, identity), name)
            if hasattr(node, "_forward_cls"):
                result.contexts.setdefault(identity, Saved(source, _trail(seen, identity), "ctx"))
            try:
                edges = node.next_functions
            except Exception:
                continue
            for edge in edges:
                ahead = edge[0]
                if ahead is not None and id(ahead) not in seen:
                    seen[id(ahead)] = (ahead, identity, source)
                    following.append(ahead)
        if len(result.blocks) >= enough:
            break
        level = following
    return result


_COUNTED = 50_000  # nodes of a graph that are counted at most


class Graph(NamedTuple):
    """The graph behind a tensor: how many nodes, and the numbers that autograd gives to its nodes as it makes them,
    which rise (none from a torch that does not tell them, none of a leaf's node)."""

    nodes: int
    numbers: Set[int]
    root: Optional[int]  # the number of the tensor's own node


def measure(source: Any, deadline: float) -> Graph:
    """As far as the deadline allows."""
    seen: Dict[int, Any] = {}
    numbers: Set[int] = set()
    root: Optional[int] = None
    try:
        level = [source.grad_fn]
        root = _number(level[0])
        while level and len(seen) < _COUNTED and time.thread_time() < deadline:
            following = []
            for node in level:
                if node is not None and id(node) not in seen:
                    seen[id(node)] = node
                    number = _number(node)
                    if number is not None:
                        numbers.add(number)
                    following.extend(edge[0] for edge in node.next_functions)
            level = following
    except Exception:
        return Graph(0, set(), None)
    return Graph(len(seen), numbers, root)


def _number(node: Any) -> Optional[int]:
    number = getattr(node, "_sequence_nr", None)
    value = number() if number is not None else _LEAF
    return value if value < _LEAF else None


_LEAF = (1 << 64) - 1  # what the node that accumulates a leaf's gradient says


def _trail(seen: Dict[int, Tuple[Any, int, Any]], identity: int) -> Tuple[str, ...]:
    """The names of the nodes from the source to this one, runs and long middles shortened."""
    names: List[str] = []
    while identity:
        node, identity, _ = seen[identity]
        names.append(node_name(node))
    names.reverse()
    runs: List[Tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    short = [name if times == 1 else f"{name} x{times}" for name, times in runs]
    return tuple(short if len(short) <= 6 else [*short[:3], f"… {len(short) - 5} more …", *short[-2:]])


def node_name(node: Any) -> str:
    return type(node).__name__


def _hooks_of(node: Any, names: Dict[type, List[Tuple[str, str]]]) -> List[Any]:
    """The Python objects that stand for saved tensors: what a pack hook made, and the unpack hook."""
    found: List[Any] = []
    for _, raw_name in _pairs_of(node, names):
        try:
            raw = getattr(node, raw_name)
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                if saved.unpack_hook is not None:
                    found.extend((saved.unpack_hook, saved.data))
        except Exception:
            continue
    return found


def _pairs_of(node: Any, names: Dict[type, List[Tuple[str, str]]]) -> List[Tuple[str, str]]:
    """The attributes of a node's type that hold saved tensors: (unpacked, raw)."""
    kind = type(node)
    pairs = names.get(kind)
    if pairs is None:
        everything = dir(kind)
        raw = {name for name in everything if name.startswith("_raw_saved_")}
        pairs = [
            (name, "_raw" + name)
            for name in everything
            if name.startswith("_saved_") and "_raw" + name in raw
        ]
        if "_raw_saved_tensors" in raw and "saved_tensors" in everything:
            pairs = [("saved_tensors", "_raw_saved_tensors")]
        names[kind] = pairs
    return pairs


def _kept(node: Any, names: Dict[type, List[Tuple[str, str]]]) -> List[Tuple[str, Any]]:
    """The tensors that a node keeps, each with a word for it."""
    kept: List[Tuple[str, Any]] = []
    for name, raw_name in _pairs_of(node, names):
        try:
            raw = getattr(node, raw_name)
        except Exception:  # the graph has been freed
            continue
        for number, saved in enumerate(raw if isinstance(raw, (tuple, list)) else (raw,)):
            label = (
                name.replace("_saved_", "saved ", 1)
                if name != "saved_tensors"
                else f"saved_tensors[{number}]"
            )
            tensor = _unpacked(node, name, saved, number if isinstance(raw, (tuple, list)) else None)
            if tensor is not None:
                kept.append((label, tensor))
    try:
        variable = node.variable  # AccumulateGrad
        kept.append(("leaf", variable))
        if variable.grad is not None:
            kept.append(("leaf's grad", variable.grad))
    except Exception:
        pass
    return kept


def _unpacked(node: Any, name: str, saved: Any, number: Optional[int]) -> Any:
    import torch

    try:
        data = saved.data  # torch 2.8 and later: what is kept, without running a hook
        if isinstance(data, torch.Tensor):
            return data
        if saved.unpack_hook is not None:
            return (
                next((part for part in data if isinstance(part, torch.Tensor)), None)
                if type(data) in (tuple, list)
                else None
            )
        return None
    except AttributeError:
        pass
    except Exception:
        return None
    if not reading_is_safe:
        return None
    try:
        value = getattr(node, name)
        if number is not None:
            value = value[number]
        return value if isinstance(value, torch.Tensor) else None
    except Exception:
        return None


# Before torch 2.8 nothing tells whether a saved tensor has an unpack hook (activation checkpointing would run its
# forward again): the search clears this when it meets a checkpoint's holder.
reading_is_safe = True
