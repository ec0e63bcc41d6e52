"""Tells whether a line that kept something once will keep more, and whether what it keeps is ever looked for.

Must not know: tensors, who asks.
Invariant: a line comes again only where a loop around it runs at this moment and no condition holds just once; reads
source, and of frames their lines.
"""

import ast
import os
import re
from typing import Any, Set

from ._code import File, Statement, expressions, words
from ._source import Finder, Holder, Store, finds
from ._turnover import _regular, _runs
from ._use import _calls

_DEPTH = 4  # calls between the loop and the line
# Methods that a library calls in each epoch or step: Lightning, transformers, keras-like loops.
_CALLED_BACK = re.compile(r"^on_.*(epoch|batch|step|validation|evaluate|save|log)|_epoch_end$|_step$")
_SHOWN = {"values", "items", "keys", "clear", "copy"}  # methods of a dict that look for no entry


def more_to_come(store: Store, finder: Finder) -> str:
    """Where a statement stands that adds in a loop, and the loop still runs: that it added once says nothing yet. ""
    where it may have been the only time."""
    adds = store.how in ("add", "augment", "again", "call") or (store.how == "item" and not _one_slot(store))
    if not _comes_again(store.statement, store.file, finder, adds, _DEPTH):
        return ""
    return f"{os.path.basename(store.file.name)}:{store.line}"


def _one_slot(store: Store) -> bool:
    """Whether a statement stores under a key that it names: the second time replaces the first."""
    node = store.statement.node
    targets = [t for t in getattr(node, "targets", []) if isinstance(t, ast.Subscript)]
    return bool(targets) and all(isinstance(target.slice, ast.Constant) for target in targets)


def _comes_again(statement: Statement, file: File, finder: Finder, adds: bool, depth: int) -> bool:
    if statement.handlers:
        return False  # what failed once need not fail again
    tests = [test for test in statement.tests if isinstance(test, ast.If)]
    for loop in statement.loops:
        if _runs(loop, file.name):
            inside = [test for test in tests if loop.lineno <= test.lineno <= (loop.end_lineno or 0)]
            return all(_repeats(test.test, adds) for test in inside)
    function = statement.function
    if function is None or depth == 0 or function.name == "__init__":
        return False
    if not all(_repeats(test.test, adds) for test in tests):
        return False
    derived = statement.cls is not None and bool(getattr(file.classes.get(statement.cls), "bases", None))
    if derived and _CALLED_BACK.search(function.name):
        return True
    for place in dict.fromkeys([file.name, *finder.user_files]):
        there = finder.files.get(place)
        for caller in there.statements:
            calls = caller.function is not function and _calls(there, caller, function, statement.cls, finder)
            if calls and _comes_again(caller, there, finder, adds, depth - 1):
                return True
    return False


def _repeats(test: Any, adds: bool) -> bool:
    """Whether a condition may hold again. Of what replaces the one before, only a regular one is believed to."""
    if _regular(test):
        return True
    return adds and not any(_holds_once(part) for part in ast.walk(test))


def _holds_once(part: Any) -> bool:
    """`epoch == 3`, `cache is None`, `not self.done`, `key not in seen`."""
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        return isinstance(part.operand, (ast.Name, ast.Attribute))
    return isinstance(part, ast.Compare) and any(
        isinstance(op, (ast.Eq, ast.Is, ast.NotIn)) for op in part.ops
    )


def looked_for(holder: Holder, finder: Finder) -> bool:
    """Whether the program may look for single entries of a dict, as it does of a cache; it does not where it only
    stores, counts, and goes over all of them."""
    match = finds(holder)
    for _, statements in finder.scopes(holder):
        for statement in statements:
            if holder.name not in words(statement.node):
                continue
            known = _known(statement.node)
            for part in expressions(statement.node):
                if match(part) and isinstance(part.ctx, ast.Load) and id(part) not in known:
                    return True
    return False


def _known(node: Any) -> Set[int]:
    """The places in a statement where a dict stands and no entry is looked for."""
    known: Set[int] = set()
    targets = node.targets if isinstance(node, ast.Assign) else []
    for target in targets:
        if isinstance(target, ast.Subscript):
            known.add(id(target.value))
    if isinstance(node, (ast.For, ast.AsyncFor)):
        known.add(id(node.iter))
    for part in expressions(node):
        if isinstance(part, ast.Call):
            if isinstance(part.func, ast.Name) and part.func.id in ("len", "list", "sorted"):
                known.update(map(id, part.args))
            elif isinstance(part.func, ast.Attribute) and part.func.attr in _SHOWN:
                known.add(id(part.func.value))
    return known
