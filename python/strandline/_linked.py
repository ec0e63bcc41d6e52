"""Objects that each keep the one before: states linked by `prev`, a function wrapped around its wrapper.

Must not know: source code, how a path was found.
Invariant: pure functions of the paths.
"""

from typing import List, NamedTuple, Optional, Tuple

from ._path import Path, Step

_LONGEST = 3  # steps from one object to the next
_TIMES = 4  # as many objects in a row, at least, if another path has another number of them
_ALONE = 8  # and if there is no other path
_LINKS = ("attribute", "part", "index", "opaque")


class Linked(NamedTuple):
    """The repeated part of a path: `steps[start : start + length]`, `times` times."""

    start: int
    length: int
    times: int


def linked(paths: List[Path]) -> Optional[Tuple[Path, Linked]]:
    """The longest row of objects in the paths, and its path. Their number differs from block to block, as it does
    where every step adds an object; rows of one length (a nested tuple, layers within layers) are none."""
    rows = [(path, row) for path in paths for row in [_row(path.steps)] if row is not None]
    if not rows:
        return None
    path, row = max(rows, key=lambda found: found[1].times)
    if len(paths) > 1 and len({found.times for _, found in rows}) < 2:
        return None
    return (path, row) if row.times >= (_TIMES if len(paths) > 1 else _ALONE) else None


def _row(steps: List[Step]) -> Optional[Linked]:
    best: Optional[Linked] = None
    for length in range(1, _LONGEST + 1):
        start = 0
        while start + 2 * length <= len(steps):
            times = 1
            unit = steps[start : start + length]
            while _same(unit, steps[start + times * length : start + (times + 1) * length]):
                times += 1
            if times > 1 and (best is None or times * length > best.times * best.length):
                best = Linked(start, length, times)
            start += 1 if times == 1 else (times - 1) * length + 1
    return best


def _same(unit: List[Step], other: List[Step]) -> bool:
    return len(unit) == len(other) and all(
        one.text == two.text and one.kind in _LINKS and not one.weak and type(one.parent) is type(two.parent)
        for one, two in zip(unit, other)
    )


def link(path: Path, row: Linked) -> str:
    """How an object refers to the one before."""
    return "".join(step.text for step in path.steps[row.start : row.start + row.length])


def text(path: Path, row: Linked) -> str:
    """The path with the row written once."""
    end = row.start + row.length * row.times
    before = "".join(step.text for step in path.steps[: row.start])
    after = "".join(step.text for step in path.steps[end:])
    words = f"{path.prefix}{before} ({link(path, row)} x{row.times}){after}"
    return " > ".join([words, *path.tail])
