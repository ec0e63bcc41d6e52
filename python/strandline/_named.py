"""The names that the steps of a path have in the source, and which of a tensor's names is the one that stays.

Must not know: words, blocks, candidates.
Invariant: reads source and paths only.
"""

import ast
import sys
from typing import Any, List, Optional, Sequence, Tuple

from ._code import Files
from ._holders import Climb, isinstance_plain
from ._path import Path, Step, write
from ._roots import Roots, is_user_file
from ._source import Finder, Holder


def holder_of(step: Step, path: Path, keys: Tuple[str, ...]) -> Optional[Holder]:
    if step.text.startswith(".<closure") or step.text.startswith(".<default"):
        code = step.parent.__code__
        if step.text.startswith(".<default"):
            return Holder("local", step.name, code.co_filename, code.co_name, code.co_firstlineno, keys=keys)
        around = step.parent.__qualname__.split(".<locals>")
        return (
            Holder("local", step.name, code.co_filename, around[-2].split(".")[-1], 0, keys=keys)
            if len(around) > 1
            else None
        )
    if step.kind == "name":
        if step.where is not None:
            if step.name in ("self", "cls"):
                return None
            place = step.where
            return Holder("local", step.name, place.file, place.function, place.first_line, keys=keys)
        return Holder("global", step.name, path.file, keys=keys)
    return attribute_holder(step.parent, step.name, keys)


def attribute_holder(owner: Any, name: str, keys: Tuple[str, ...]) -> Holder:
    kind = owner if isinstance_plain(owner, type) else type(owner)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return Holder(
        "attribute",
        name,
        file,
        classes=tuple(base.__name__ for base in kind.__mro__ if base is not object),
        keys=keys,
    )


def methods_of(container: Any, keys: Tuple[str, ...], files: Files) -> List[Holder]:
    """What a container of a class of the user's own is called in the methods of that class."""
    kind = type(container)
    place = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if not is_user_file(place):
        return []
    names = [base.__name__ for base in kind.__mro__]
    methods = [node for node, cls in files.get(place).functions if cls in names and node.args.args]
    return [
        Holder("local", node.args.args[0].arg, place, node.name, node.lineno, keys=keys) for node in methods
    ]


def behind_loop(path: Path, climb: Climb, roots: Roots, finder: Finder) -> Optional[Path]:
    """What a loop's variable stands for at the moment (`for fisher, old in kept:`) is kept by what the loop goes over:
    the path to that, if the variable is bound by loops alone."""
    if path.around or not path.steps:
        return None  # a cycle begins nowhere
    variable = path.steps[0]
    if variable.kind != "name" or path.root not in ("global", "local"):
        return None
    holder = holder_of(variable, path, ())
    if holder is None or any(is_user_file(store.file.name) for store in finder.stores(holder)):
        return None
    loops = [
        part.id
        for _, statements in finder.scopes(holder)
        for statement in statements
        if isinstance(statement.node, (ast.For, ast.AsyncFor))
        for part in ast.walk(statement.node.target)
        if isinstance(part, ast.Name)
    ]
    if holder.name not in loops:
        return None
    for chain in climb.others(variable.value):
        other = write(chain, roots)
        if other.steps and other.steps[0].value is not variable.value:
            return other
    return None


def surviving(
    path: Path, climb: Climb, roots: Roots, finder: Finder, shape: str = "", others: Sequence[Path] = ()
) -> Optional[Path]:
    """A variable that is bound anew in each step, to what an object keeps and hands out (`acc = meter.update(x)`,
    which returns `self.value`), is not what keeps it: the path to the object's attribute, if there is one."""

    def best(step: Step) -> Tuple[int, str]:
        holder = holder_of(step, path, ())
        stores = [] if holder is None else finder.stores(holder)
        return next(((s.score, s.how) for s in stores if is_user_file(s.file.name)), (0, ""))

    variable = path.steps[0]
    if best(variable)[1] != "assign":
        return None
    ranked: List[Tuple[int, Path]] = []
    same = [write(chain, roots).ending_as(path) for chain in climb.others(variable.value)]
    for other in [*same, *others]:
        last = next((step for step in reversed(other.steps) if step.kind != "part"), other.steps[-1])
        score, how = best(last) if last.kind == "attribute" else (0, "")
        if how in ("again", "augment") or (how == "assign" and (path.through_graph or shape == "regrow")):
            ranked.append((score, other))
    return max(ranked, key=lambda item: item[0])[1] if ranked else None
