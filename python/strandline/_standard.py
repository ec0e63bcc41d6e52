"""Objects of Python's own library, and keys, that keep things in a way of their own: what to do about each.

Must not know: how paths and lines are found.
Invariant: claims one only where the path goes through such an object, or the container's own keys show it.
"""

import ast
import itertools
import logging
from typing import Any, Optional, Sequence, Tuple

from . import _fixes
from ._code import Statement, last_name
from ._holders import isinstance_plain
from ._path import Step, type_name

_LOOKED_AT = 8  # keys
_TEE = type(itertools.tee(())[0])


def fix(steps: Sequence[Step], name: str) -> Optional[str]:
    """The fix for what lies in an iterator, or in a stack of contexts."""
    for step in steps:
        if type(step.parent) is _TEE:
            return _fixes.tee()
        if type(step.parent) is itertools.cycle:
            return _fixes.endless()
        if type_name(step.parent) in ("ExitStack", "AsyncExitStack"):
            return _fixes.exit_stack(name)
    return None


def record(steps: Sequence[Step]) -> Optional[Tuple[str, int]]:
    """Where a line was logged whose record keeps the traceback of an error."""
    for step in steps:
        if step.name == "exc_info" and isinstance_plain(step.parent, logging.LogRecord):
            names = object.__getattribute__(step.parent, "__dict__")
            file, line = names.get("pathname"), names.get("lineno")
            return (file, line) if type(file) is str and type(line) is int else ("", 0)
    return None


def new_keys(container: Any, key: Any, at: Statement, statements: Sequence[Statement]) -> str:
    """What the keys of a dict are if none is ever found again: tensors, which are equal only to themselves, or
    (`key`: how the source writes it) ids of objects. Else ""."""

    def is_tensor(value: Any) -> bool:
        if type(value) is tuple:
            return any(is_tensor(part) for part in value)
        return any(base.__name__ == "Tensor" for base in type(value).__mro__)

    if not isinstance_plain(container, dict):
        return ""
    known = list(itertools.islice(dict.keys(container), _LOOKED_AT))
    if known and all(is_tensor(each) for each in known):
        return "tensors"
    values = [key]
    if isinstance(key, ast.Name):
        values = [
            each.node.value
            for each in statements
            if each.function is at.function
            and isinstance(each.node, ast.Assign)
            and any(last_name(target) == key.id for target in each.node.targets)
        ]
    ids = [value for value in values if isinstance(value, ast.Call) and last_name(value.func) == "id"]
    return "ids of objects" if values and len(ids) == len(values) else ""


def resets(value: Any) -> str:
    """The method by which an object of a library is emptied, if its class has one."""
    return next(
        (name for name in ("reset", "clear") if any(name in vars(base) for base in type(value).__mro__)), ""
    )
