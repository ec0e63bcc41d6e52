"""Tells what is no growth because others go for it: entries that are replaced, owners that are taken out, variables
that a running loop binds anew.

Must not know: tensors, autograd, who asks.
Invariant: excuses only what the source shows to happen again and again; reads nothing of the user's but frames' lines.
"""

import ast
import os
import sys
from typing import Any, List, Optional, Set

from ._anew import of_itself
from ._limits import Bound, evicting, guarded, length_of, takes
from ._source import Finder, Holder, Store, finds
from ._use import runs_often


def replaced(
    stores: List[Store], store: Store, holder: Holder, container: Any, owner: Any, finder: Finder
) -> Optional[Bound]:
    """A list whose entries are replaced where the blocks were made, and appended to under a bound or not at all."""

    def replaces(each: Store) -> bool:
        node = each.statement.node
        return isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice)
            for target in node.targets
        )

    if not isinstance(container, list) or not replaces(store) or of_itself(store, holder, finder):
        return None
    for each in stores:
        if each.how in ("assign", "init") or replaces(each):
            continue
        if (
            guarded(each, holder, container, owner) is None
            and evicting(each, holder, container, owner) is None
        ):
            return None
    where = f"{os.path.basename(store.file.name)}:{store.line}"
    length = length_of(container)
    return Bound(f"its entries are replaced, and none is added: a list of {length} ({where})", length, length)


def taken_out(holder: Holder, finder: Finder) -> Optional[Bound]:
    """The program takes entries out of what is named, again and again, and not always the same: what belongs to them
    goes with them."""
    match = finds(holder)
    for place in finder.user_files:
        for statement in finder.files.get(place).statements:
            node = statement.node
            often = bool(statement.loops) or (
                statement.function is not None and runs_often(statement.function, statement.cls, finder)
            )
            taken = isinstance(node, ast.Delete) or not isinstance(node, ast.Assign)
            if often and taken and takes(statement, match) and not _fixed(node):
                where = f"{os.path.basename(place)}:{statement.line}"
                return Bound(
                    f"belongs to an entry of {holder.name}, and entries are taken out of that ({where})",
                    None,
                    None,
                )
    return None


def _fixed(node: Any) -> bool:
    """Whether a statement takes out one entry that it names: `del d['lr']`, `d.pop('lr')`."""
    if isinstance(node, ast.Delete):
        return all(isinstance(getattr(target, "slice", None), ast.Constant) for target in node.targets)
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and part.args]
    return bool(calls) and all(isinstance(call.args[0], ast.Constant) for call in calls)


def comes_round(holder: Holder, finder: Finder) -> Optional[Bound]:
    """A variable that a loop binds anew when it comes there again, always or now and then, and the loop still runs."""
    for file, statements in finder.scopes(holder):
        for statement in statements:
            if not statement.loops or holder.name not in _bound_by(statement.node):
                continue
            outer = statement.loops[0]
            tests = [
                test
                for test in statement.tests
                if isinstance(test, ast.If) and outer.lineno <= test.lineno <= (outer.end_lineno or 0)
            ]
            if all(_regular(test.test) for test in tests) and _runs(outer, file.name):
                where = f"{os.path.basename(file.name)}:{statement.line}"
                return Bound(f"bound anew when its loop comes there again ({where})", None, None)
    return None


def _bound_by(node: Any) -> Set[str]:
    """The plain names that a statement binds."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, (ast.For, ast.AsyncFor, ast.AnnAssign)):
        targets = [node.target]
    parts = [each for target in targets for each in getattr(target, "elts", [target])]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _regular(test: Any) -> bool:
    return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) for part in ast.walk(test))


def _runs(loop: Any, file: str) -> bool:
    """Whether this thread is in a loop of the file."""
    frame: Any = sys._getframe()
    while frame is not None:
        if loop.lineno <= frame.f_lineno <= (loop.end_lineno or 0) and _same(frame.f_code.co_filename, file):
            return True
        frame = frame.f_back
    return False


def _same(one: str, other: str) -> bool:
    return os.path.basename(one) == os.path.basename(other) and os.path.abspath(one) == os.path.abspath(other)
