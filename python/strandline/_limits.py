"""Tells a container with a bound from one that only grows.

Must not know: tensors, autograd, who asks.
Invariant: a bound is claimed only when the container itself has one, or when the code that adds also takes out
under a condition that concerns the container's length or budget, or starts the container anew in an outer loop.
"""

import ast
import collections
import os
from typing import Any, Dict, List, NamedTuple, Optional

from ._code import Statement, expressions, text
from ._path import _LRU
from ._source import Holder, Matcher, Store, finds, stripped

_TAKERS = {"pop", "popleft", "popitem", "clear", "remove", "discard", "delete", "evict", "trim", "truncate"}


class Bound(NamedTuple):
    reason: str
    length: Optional[int]
    capacity: Optional[int]


def own_bound(container: Any) -> Optional[Bound]:
    """The bound that a container has by its type."""
    if type(container) is _LRU:
        facts = container.cache_info()
        if facts.maxsize is None:
            return None
        return Bound(
            f"bounded cache: {facts.currsize} of at most {facts.maxsize} entries",
            facts.currsize,
            facts.maxsize,
        )
    if collections.deque in type(container).__mro__ and container.maxlen is not None:
        length, most = len(container), container.maxlen
        return Bound(f"bounded container: deque of {length}, at most {most}", length, most)
    return None


def evicting(store: Store, holder: Holder, container: Any, owner: Any) -> Optional[Bound]:
    """A bound kept by the code around the statement that adds."""
    match = finds(holder)
    file = store.file
    here = store.statement
    called = _called_names([s for s in file.statements if s.function is here.function])
    for statement in file.statements:
        same = statement.function is here.function
        if not same and (statement.function is None or statement.function.name not in called):
            continue
        if same and here.loops and statement.loops[: len(here.loops)] != here.loops[: len(statement.loops)]:
            continue  # in another loop of this function
        if not _takes(statement, match):
            continue
        test = _bounding_test(statement, match, holder)
        if test is None:
            continue
        capacity = _capacity(test, owner)
        length = _length(container)
        if capacity is not None and length is not None and length > 2 * capacity + 16:
            continue  # the condition does not hold it back
        where = f"{os.path.basename(file.name)}:{statement.line}"
        return Bound(
            f"bounded by its own code: entries are dropped when {text(test)} ({where})", length, capacity
        )
    return None


def begun_anew(store: Store, holder: Holder) -> Optional[Bound]:
    """A local that an outer loop of the same function empties at each turn: a sawtooth, no leak."""
    if holder.kind == "attribute" or len(store.statement.loops) < 2:
        return None
    match = finds(holder)
    outer = store.statement.loops[:-1]
    for statement in store.file.statements:
        if statement.function is not store.statement.function or statement.loops not in (
            outer[: n + 1] for n in range(len(outer))
        ):
            continue
        node = statement.node
        if statement.tests != store.statement.tests[: len(statement.tests)] and statement.tests:
            continue
        emptied = isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
            match(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
        if not emptied and not (_takes(statement, match) and "clear" in text(node)):
            continue
        where = f"{os.path.basename(store.file.name)}:{statement.line}"
        return Bound(f"emptied at each turn of the outer loop ({where})", None, None)
    return None


def _called_names(statements: List[Statement]) -> Dict[str, None]:
    names: Dict[str, None] = {}
    for statement in statements:
        for node in expressions(statement.node):
            if isinstance(node, ast.Call):
                name = (
                    node.func.attr
                    if isinstance(node.func, ast.Attribute)
                    else node.func.id
                    if isinstance(node.func, ast.Name)
                    else ""
                )
                names[name] = None
    return names


def _takes(statement: Statement, match: Matcher) -> bool:
    node = statement.node
    if isinstance(node, ast.Delete):
        return any(
            match(stripped(target)[0]) and target is not stripped(target)[0] for target in node.targets
        )
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if match(stripped(target)[0]) and _is_cut(node.value) and match(stripped(node.value)[0]):
                return True  # x = x[-100:]
            if match(target) and not any(match(part) for part in ast.walk(node.value)):
                return bool(statement.tests)  # if len(x) > n: x = []
    for part in expressions(node):
        if (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in _TAKERS
            and match(stripped(part.func.value)[0])
        ):
            return True
    return False


def _bounding_test(statement: Statement, match: Matcher, holder: Holder) -> Any:
    """The condition under which the statement takes out, if it is one about size."""
    node = statement.node
    if isinstance(node, ast.Assign) and _is_cut(node.value) and not statement.tests:
        return node.value  # always cut to its last entries
    for enclosing in reversed(statement.tests):
        test = enclosing.test
        for part in ast.walk(test):
            if isinstance(part, ast.Compare) and any(
                isinstance(op, (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq)) for op in part.ops
            ):
                words = text(part).lower()
                calls = [inner for inner in ast.walk(part) if isinstance(inner, ast.Call) and inner.args]
                sized = any(text(call.func) == "len" and match(stripped(call.args[0])[0]) for call in calls)
                if sized or any(
                    word in words
                    for word in ("budget", "max", "capacity", "limit", "size", "bytes", "window", "keep")
                ):
                    return test
    return None


def _capacity(test: Any, owner: Any) -> Optional[int]:
    """The number that a length is compared with, if it is a constant or an attribute of the owner."""
    if _is_cut(test):
        lower = test.slice.lower
        return _number(lower.operand, owner) if isinstance(lower, ast.UnaryOp) else None
    for part in ast.walk(test):
        if isinstance(part, ast.Compare) and len(part.comparators) == 1:
            sides = [part.left, part.comparators[0]]
            if not any(isinstance(side, ast.Call) and text(side.func) == "len" for side in sides):
                continue
            for side in sides:
                number = _number(side, owner)
                if number is not None:
                    return number
    return None


def _number(node: Any, owner: Any) -> Optional[int]:
    """A constant, or an attribute of the owner that is a whole number."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Attribute) and owner is not None:
        try:
            value = object.__getattribute__(owner, "__dict__").get(node.attr)
        except Exception:
            return None
        if type(value) is int:
            return value
    return None


def _is_cut(node: Any) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)


def _length(container: Any) -> Optional[int]:
    kind = type(container)
    for base in (list, dict, set, collections.deque):
        if base in kind.__mro__:
            return base.__len__(container)  # type: ignore[attr-defined]
    return None
