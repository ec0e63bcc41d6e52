"""Tells whether the program empties a container every so many steps: `if step % 50 == 0: logger.flush()`.

Must not know: tensors, paths, who asks.
Invariant: reads source only; claims it only where nothing but a count's remainder decides, and everything is taken out.
"""

import ast
import os
from typing import Any, List, Optional

from ._code import Statement, expressions, last_name, text
from ._limits import ONCE, Bound, empties, empties_own, emptying, holds, reaches, tells
from ._source import Finder, Holder, Store, finds


def at_intervals(
    store: Store, holder: Holder, receivers: List[str], finder: Finder, asked: int = 0
) -> Optional[Bound]:
    """`asked`: how often it was believed before."""
    if asked >= ONCE:
        return None
    names, match = emptying(store, holder), finds(holder)
    adder = getattr(store.statement.function, "name", "")
    for file, statements in finder.scopes(holder) if holder.kind != "attribute" else _all(finder):
        for statement in statements:
            test = _remainder(statement)
            if test is None:
                continue
            if holder.kind == "attribute":
                own = empties_own(statement, match, receivers, holder)
                if not own and not tells(statement, names, receivers, holder):
                    continue
            elif not empties(statement, match):
                continue
            same = statement.function is store.statement.function
            around = store.statement.loops
            if same and (
                around[: len(statement.loops)] != statement.loops or (around and not statement.loops)
            ):
                continue  # in another loop of this function, or in none
            turn = [s for s in statements if s.loops[: len(statement.loops)] == statement.loops]
            if not same and not (
                reaches(turn, adder, finder) if statement.loops else _runs(statement, finder)
            ):
                continue
            where = f"{os.path.basename(file.name)}:{statement.line}"
            return Bound(f"emptied every time {text(test)} ({where})", None, None)
    return None


def _runs(statement: Statement, finder: Finder) -> bool:
    """Whether anybody calls the function of a statement."""
    name = getattr(statement.function, "name", "")
    return not name or any(
        isinstance(part, ast.Call) and last_name(part.func) == name
        for _, statements in _all(finder)
        for each in statements
        for part in expressions(each.node)
    )


def _all(finder: Finder) -> Any:
    for place in finder.user_files:
        file = finder.files.get(place)
        yield file, file.statements


def _remainder(statement: Statement) -> Any:
    """The one condition of a statement, if it asks for nothing but the remainder of a count."""
    tests = [test for test in statement.tests if isinstance(test, ast.If)]
    if len(tests) != 1 or statement.handlers:
        return None
    if not holds(tests[0], statement):
        return None
    condition = tests[0].test
    parts = (
        condition.values
        if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And)
        else [condition]
    )
    counted = [part for part in parts if _is_remainder(part)]
    if len(counted) != 1:
        return None
    names = _names(counted[0])
    simple = not any(isinstance(part, ast.Call) for part in expressions(tests[0]))
    return condition if simple and all(_names(part) <= names for part in parts) else None


def _is_remainder(node: Any) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node = node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        node = node.left
    else:
        return False
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def _names(node: Any) -> Any:
    return {last_name(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))} - {
        "self"
    }
