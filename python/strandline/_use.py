"""Tells what a program does with what it keeps, as far as its source shows: nothing, read it, read it again and again.

Must not know: tensors, paths, who asks.
Invariant: reads source only. Adding, taking out, asking for the length or whether it is None is no reading; neither is
what happens only together with the storing.
"""

import ast
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set

from ._code import _BODIES, _COMPOUND, File, Functions, Statement, expressions, text
from ._source import ADDERS, Finder, Holder, Matcher, Store, finds, stripped

NEVER, READ, AGAIN = "never", "read", "again"
_TAKERS = {"pop", "popleft", "popitem", "clear", "remove", "discard"}
_ALWAYS = ("forward", "__call__", "__getitem__", "__iter__", "training_step", "validation_step")
_NEAR = 2  # lines between statements that may fill one thing's containers


class Used(NamedTuple):
    how: str
    where: Optional[Statement]
    file: Optional[File]


def use(finder: Finder, holder: Holder, store: Store) -> Used:
    """How the program uses the name that `store` stores into."""
    match = finds(holder)
    best = Used(NEVER, None, None)
    for file, statements in finder._scopes(holder):
        for statement in statements:
            if statement.node is store.statement.node or not reads(statement.node, match):
                continue
            if _again(file, statement, store, finder):
                return Used(AGAIN, statement, file)
            if best.how == NEVER:
                best = Used(READ, statement, file)
    return best


def reads(node: Any, match: Matcher) -> bool:
    """Whether a statement itself reads what `match` finds."""
    if isinstance(node, (*Functions, ast.Delete)):
        return False
    for field, value in ast.iter_fields(node):
        if field in _BODIES and isinstance(node, _COMPOUND):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST) and _read(item, match):
                return True
    return False


def _read(node: Any, match: Matcher) -> bool:
    if match(node):
        return isinstance(getattr(node, "ctx", None), ast.Load)
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _read(node.slice, match)  # x[k] = …: the key is read
    if isinstance(node, ast.Compare) and any(
        isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops
    ):
        return _read(node.left, match) and not match(node.left)
    if isinstance(node, ast.Call):
        called = node.func
        inside: List[Any] = [*node.args, *[keyword.value for keyword in node.keywords]]
        if isinstance(called, ast.Attribute):
            if not (called.attr in ADDERS | _TAKERS and match(stripped(called.value)[0])):
                inside.append(called)
        elif text(called) == "len":
            inside = [argument for argument in inside if not match(argument)]
        else:
            inside.append(called)
        return any(_read(part, match) for part in inside)
    return any(_read(part, match) for part in ast.iter_child_nodes(node))


def _again(file: File, statement: Statement, store: Store, finder: Finder) -> bool:
    """Whether a statement that reads runs again and again, and not only together with the storing."""
    if any(_once(test.test) for test in statement.tests if isinstance(test, ast.If)):
        return False
    if statement.function is store.statement.function and file.name == store.file.name:
        conditions = [test for test in store.statement.tests if isinstance(test, ast.If)]
        together = bool(conditions) and all(test in statement.tests for test in conditions)
        grows = not conditions and statement.loops == store.statement.loops
        if together or grows:
            return False
    if statement.loops or statement.function is None:
        return bool(statement.loops)
    return _runs_often(statement.function.name, finder, 3, set())


def _runs_often(function: str, finder: Finder, depth: int, seen: Set[str]) -> bool:
    """Whether a function is called from a loop, as far as names tell."""
    if function in _ALWAYS:
        return True
    if depth == 0 or function in seen or function == "__init__":
        return False
    seen.add(function)
    for place in finder.user_files:
        for statement in finder.files.get(place).statements:
            if not _calls(statement, function):
                continue
            if any(_once(test.test) for test in statement.tests if isinstance(test, ast.If)):
                continue
            if statement.loops:
                return True
            name = getattr(statement.function, "name", "")
            if name and _runs_often(name, finder, depth - 1, seen):
                return True
    return False


def _calls(statement: Statement, function: str) -> bool:
    for node in expressions(statement.node):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name == function:
                return True
    return False


def _once(test: Any) -> bool:
    """`if epoch == 3`: true once in a loop; `step % 10 == 0` is not."""
    for part in ast.walk(test):
        if isinstance(part, ast.Compare) and any(isinstance(op, ast.Eq) for op in part.ops):
            return not any(isinstance(inner, ast.Mod) for inner in ast.walk(part))
    return False


def together(finder: Finder, holder: Holder, store: Store) -> str:
    """A word for the containers that are filled next to each other and read in one statement elsewhere, or are
    attributes of one object: `preds.append(p)`, `targets.append(t)`, then `metric(preds, targets)`. "" if there is
    none."""
    file, here = store.file, store.statement
    own = {holder.name}
    near: Dict[str, str] = {}
    for statement in file.statements:
        if statement.function is not here.function or statement.loops != here.loops:
            continue
        if 0 < abs(statement.line - here.line) <= _NEAR:
            for base in _filled(statement):
                name = base.attr if isinstance(base, ast.Attribute) else base.id
                owner = text(base.value) if isinstance(base, ast.Attribute) else ""
                if name not in own:
                    near[name] = owner
    if not near:
        return ""
    if holder.kind == "attribute":
        mine = next((text(base.value) for base in _filled(here) if isinstance(base, ast.Attribute)), "")
        if mine and mine in near.values():
            return f"{file.name}: {mine}"
    match = finds(holder)
    others = [finds(holder._replace(name=name)) for name in near]
    for _, statements in finder._scopes(holder):
        for statement in statements:
            if statement.node is here.node or not reads(statement.node, match):
                continue
            if any(reads(statement.node, other) for other in others):
                return f"{file.name}:{statement.line}"
    return ""


def _filled(statement: Statement) -> Iterator[Any]:
    """The names and attributes that a statement adds to."""
    for node in expressions(statement.node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDERS:
            base = stripped(node.func.value)[0]
            if isinstance(base, (ast.Name, ast.Attribute)):
                yield base
    node = statement.node
    for target in node.targets if isinstance(node, ast.Assign) else []:
        base = stripped(target)[0]
        if base is not target and isinstance(base, (ast.Name, ast.Attribute)):
            yield base
