"""Where in the paths to a candidate's blocks the growth is: the container that holds one more each time.

Must not know: words, source code.
Invariant: pure functions of the paths.
"""

import re
from typing import Any, Dict, List, Optional, Set, Tuple

from . import _limits
from ._path import Path

_NUMBER = re.compile(r"\d+")


def beginning(path: Path) -> Any:
    """What paths to blocks in one container have in common: all before the first index."""
    names = [step.text for step in path.steps]
    first = next((at for at, step in enumerate(path.steps) if step.kind == "index"), len(names))
    return (path.root, path.prefix if path.root != "cycle" else "", *names[:first])


def largest(paths: List[Tuple[int, Path]]) -> List[Tuple[int, Path]]:
    """The paths that share a beginning with most others; of equals those with the oldest block."""
    groups: Dict[Any, List[Tuple[int, Path]]] = {}
    for born, path in paths:
        name = next((step.name for step in path.steps if step.kind == "name"), "")
        name = _NUMBER.sub("#", name)  # names that are made up: globals()[f"batch_{i}"]
        groups.setdefault((path.root, path.prefix if path.root != "cycle" else "", name), []).append(
            (born, path)
        )
    return max(groups.values(), key=len)


def growth(group: List[Tuple[int, Path]], steps: int = 0) -> Optional[int]:
    """The outermost container in which blocks of different steps lie at different places. One that has fewer entries
    than there are steps that left a block (`steps`) did not get one in each: its entries grow."""
    if group[0][1].around:
        return None
    births = len({born for born, _ in group})
    best: Optional[int] = None
    most = 1
    outer: Optional[int] = None
    for position in range(min(len(path.steps) for _, path in group)):
        kind = group[0][1].steps[position].kind
        different = len({tuple(path.keys()[: position + 1]) for _, path in group})
        if different > most and births > 1:
            if kind == "index" and _too_few(group, position, steps):
                outer = position if outer is None else outer
                continue
            if kind == "index" and not _one_grows(group, position) and outer is None:
                continue
            if kind != "index":
                if different >= births and outer is None and not _mixed(group, position):
                    parents = [path.steps[position].parent for _, path in group]
                    same, listed = len(set(map(id, parents))) == 1, all(map(of_modules, parents))
                    if kind in ("attribute", "name") and (listed or (same and births >= 3)):
                        best = position  # an attribute more each time
                    break
                continue
            best, most = position, different
            if different >= births:
                break
    if (best is None and births == 1) or len(group) == 1:
        return _widest(group[0][1]) if len(group) == 1 else None
    return outer if best is None else best


def of_modules(parent: Any) -> bool:
    """Whether it is torch's list or dict of modules or parameters."""
    kinds = ("ModuleList", "ModuleDict", "Sequential", "ParameterList", "ParameterDict")
    return any(base.__name__ in kinds for base in type(parent).__mro__)


def _mixed(group: List[Tuple[int, Path]], position: int) -> bool:
    """Whether blocks of different steps lie in one place: the growth is further in."""
    births: Dict[Any, Set[int]] = {}
    for born, path in group:
        births.setdefault(tuple(path.keys()[: position + 1]), set()).add(born)
    return any(len(each) > 1 for each in births.values())


def _too_few(group: List[Tuple[int, Path]], position: int, steps: int) -> bool:
    """Whether the containers at this place have too few entries for that many steps."""
    parents = {id(path.steps[position].parent): path.steps[position].parent for _, path in group}
    lengths = [_limits.length_of(parent) for parent in parents.values()]
    return all(length is not None for length in lengths) and 2 * sum(filter(None, lengths)) < steps


def _one_grows(group: List[Tuple[int, Path]], position: int) -> bool:
    """Whether one container holds blocks of different steps: dicts of which each thread has one do not grow."""
    births: Dict[int, Set[int]] = {}
    for born, path in group:
        births.setdefault(id(path.steps[position].parent), set()).add(born)
    return any(len(each) > 1 for each in births.values())


def _widest(path: Path) -> Optional[int]:
    """Of a single path: the outermost container with more than a few entries."""
    for position, step in enumerate(path.steps):
        if step.name == "lru_cache":
            return position
        length = _limits.length_of(step.parent)
        if step.kind == "index" and length is not None and length > 4:
            return position
    return None


def common(group: List[Tuple[int, Path]]) -> int:
    """The number of steps that all paths share."""
    if len(group) == 1:
        return len(group[0][1].steps)
    count = 0
    for position in range(min(len(path.steps) for _, path in group)):
        if len({path.steps[position].text for _, path in group}) > 1:
            break
        count = position + 1
    return count
