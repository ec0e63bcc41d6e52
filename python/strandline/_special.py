"""Holders that have words of their own: threads, finalizers, gradients with a graph, interactive sessions, notebooks.

Must not know: how a path was found.
Invariant: claims one of them only where the path itself shows it; None leaves the answer to the usual words.
"""

import ast
import contextvars
import re
import sys
import types
import weakref
from typing import Any, List, NamedTuple, Optional, Tuple

from . import _fixes, _standard
from ._code import expressions, last_name, text
from ._path import Path
from ._roots import Roots, is_user_file
from ._source import ADDERS, File, Finder

_LAST_ERROR = ("last_traceback", "last_value", "last_exc")
_HISTORY = re.compile(r"Out|_oh|_+|_\d+|_i+|_i\d+")


class Special(NamedTuple):
    kind: str
    path: str
    kept: Optional[Tuple[File, int]]
    fix: str
    released: str


def special(path: Path, container: Any, roots: Roots, finder: Finder) -> Optional[Special]:
    """What the usual words would describe badly, or None."""
    first = path.steps[0] if path.steps else None
    if path.root == "create_graph":
        kept = finder.call(("backward",), keyword="create_graph")
        return Special("autograd graph", path.text(), kept, _fixes.create_graph(), "nothing")
    if first is None:
        return None
    if path.root == "class" and any(step.parent is weakref.finalize for step in path.steps[:1]):
        kept = finder.call(("finalize",))
        inner = "".join(step.text for step in path.steps[2:])
        count = len(getattr(weakref.finalize, "_registry", ()))
        held = f"weakref.finalize (one of {count} that wait){inner}"
        return Special("weakref.finalize", held, kept, _fixes.finalizer(), "nothing")
    if first.name in _LAST_ERROR and path.root == "global" and first.parent is vars(sys):
        return Special("exception", path.text(), None, _fixes.last_error(first.name), "nothing")
    if path.root == "global" and _HISTORY.fullmatch(first.name) and _is_notebook(first.parent):
        return Special("notebook history", path.text(), None, _fixes.notebook(first.name), "nothing")
    if path.root == "stack" and type(first.parent) in (types.FunctionType, types.MethodType):
        return _registered(path, first.parent, finder)
    if type(first.parent) is contextvars.Context and first.kind == "part":
        return _of_variable(path, container, finder)
    logged = _standard.record(path.steps)
    if logged is not None and not path.through_graph:
        kept = (finder.files.get(logged[0]), logged[1]) if is_user_file(logged[0]) else None
        return Special("exception", path.text(), kept, _fixes.log_record(), "nothing")
    where = first.where
    if path.root == "local" and where is not None and not where.main and container is None:
        count = roots.threads.get((where.file, where.function), 1)
        rest = "".join(step.text for step in path.steps[1:])
        held = f"{_threads(count)} in {where.function}(): local {first.name}{rest}"
        kept = finder.call(("Thread", "Timer", "submit", "start_new_thread", "map"), argument=where.function)
        if kept is None and is_user_file(where.file):
            kept = finder.call((), argument=where.function)
        fix = _fixes.threads(where.function, f"{first.name}{rest}", count)
        return Special("thread", held, kept, fix, "nothing")
    return None


def _of_variable(path: Path, container: Any, finder: Finder) -> Special:
    """What a context variable keeps: the line that sets it, or adds to its value."""
    first = path.steps[0]
    names = {
        last_name(target)
        for place in finder.user_files
        for statement in finder.files.get(place).statements
        if isinstance(statement.node, (ast.Assign, ast.AnnAssign)) and statement.node.value is not None
        for target in getattr(statement.node, "targets", None) or [statement.node.target]
        if _makes_variable(statement.node.value, first.name)
    } or {first.name}
    found: List[Tuple[int, File, int, str]] = []
    for place in finder.user_files:
        file = finder.files.get(place)
        for statement in file.statements:
            for node in expressions(statement.node):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                base = node.func.value
                sets = node.func.attr == "set" and last_name(base) in names
                adds = (
                    node.func.attr in ADDERS
                    and isinstance(base, ast.Call)
                    and last_name(base.func) == "get"
                    and last_name(getattr(base.func, "value", None)) in names
                )
                if sets or adds:
                    first_choice = adds if container is not None else sets
                    found.append((0 if first_choice else 1, file, statement.line, text(base)))
    found.sort(key=lambda item: item[0])
    kept = (found[0][1], found[0][2]) if found else None
    name = min(names) if len(names) == 1 else first.name
    many = container is not None or any(step.kind == "part" for step in path.steps[1:2])
    return Special("ContextVar", path.text(), kept, _fixes.context_variable(name, many), "nothing")


def _makes_variable(value: Any, name: str) -> bool:
    return (
        isinstance(value, ast.Call)
        and last_name(value.func) == "ContextVar"
        and bool(value.args)
        and isinstance(value.args[0], ast.Constant)
        and value.args[0].value == name
    )


def _registered(path: Path, function: Any, finder: Finder) -> Optional[Special]:
    """A function that only C refers to: what was it handed to?"""
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    file = finder.files.get(code.co_filename)
    for statement in file.statements:
        for node in expressions(statement.node):
            if not isinstance(node, ast.Call):
                continue
            given = [*node.args, *[keyword.value for keyword in node.keywords]]
            own = any(
                isinstance(part, ast.Lambda) and part.lineno == code.co_firstlineno
                if code.co_name == "<lambda>"
                else isinstance(part, (ast.Name, ast.Attribute)) and text(part).endswith(code.co_name)
                for part in given
            )
            if own:
                call = text(node.func)
                rest = "".join(step.text for step in path.steps)
                held = f"{function.__qualname__}(), a function given to {call}(){rest}"
                return Special("callback", held, (file, statement.line), _fixes.callback(call), "nothing")
    return None


def _threads(count: int) -> str:
    return "a thread that runs" if count == 1 else f"one of {count} threads that run"


def _is_notebook(names: Any) -> bool:
    return type(names) is dict and (
        "get_ipython" in names or (type(names.get("Out")) is dict and "In" in names)
    )
