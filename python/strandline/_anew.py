"""Tells what is made anew from its input from what is made of itself: a name bound in each step to the newest output
from one to which each step adds.

Must not know: tensors, paths, who asks.
Invariant: reads source only. Excuses a store only where it runs again and again, and nothing that the source shows
leads from what is stored back to what was there: an alias, a container, a function that remembers.
"""

import ast
import os
from typing import Any, Iterator, List, NamedTuple, Optional, Set, Tuple

from ._code import File, Functions, Statement, expressions, last_name, text
from ._limits import Bound
from ._source import ADDERS, Finder, Holder, Matcher, Store, _pairs, finds, stripped
from ._use import runs_once

_JOINING = {
    "cat", "concat", "concatenate", "stack", "vstack", "hstack", "dstack", "column_stack", "row_stack", "pad", "append",
    "repeat", "repeat_interleave", "tile",
}  # fmt: skip
_MAKING = {
    "zeros",
    "empty",
    "full",
    "new_zeros",
    "new_empty",
    "new_full",
    "resize_",
}  # to copy what is there into
_SAME_SIZE = {
    "to", "cpu", "cuda", "detach", "contiguous", "clone", "float", "half", "double", "bfloat16", "type", "requires_grad_",
    "pin_memory", "detach_", "share_memory_",
}  # fmt: skip
_DEEP = 3  # functions followed one into the other


class _Scope(NamedTuple):
    file: File
    function: Any


def excuse(store: Store, holder: Holder, finder: Finder, newest: bool) -> Optional[Bound]:
    """The reason why what a name is bound to is no growth, if that holds for all that binds it again and again.
    `newest`: it may be the newest output."""
    own = [other for other in finder.stores(holder) if _binds(other) and not _foreign(other, holder)]
    often = [other for other in own if _again(other.statement, holder, finder)]
    first: Optional[Bound] = None
    for each in often or [store]:
        if _same_size(each, holder):
            continue
        found = larger_only(each, holder, finder)
        if found is None and newest and often:
            found = newest_only(each, holder, finder)
        if found is None:
            return None
        first = first or found
    return first


def grown(holder: Holder, finder: Finder) -> bool:
    """Whether a statement adds to what a name is bound to."""
    return any(
        each.how in ("again", "augment", "add", "item")
        and not _foreign(each, holder)
        and not _same_size(each, holder)
        for each in finder.stores(holder)
    )


def _binds(store: Store) -> bool:
    named = isinstance(store.statement.node, ast.Expr)  # register_buffer("mem", …), setattr(x, "mem", …)
    return store.how in ("assign", "init", "again", "augment") or (store.how == "add" and named)


def _foreign(store: Store, holder: Holder) -> bool:
    """Whether it is another class's own attribute of that name."""
    node, cls = store.statement.node, store.statement.cls
    if holder.kind != "attribute" or cls is None or cls in holder.classes:
        return False
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return any(
        isinstance(part, ast.Attribute) and part.attr == holder.name and text(part.value) in ("self", "cls")
        for target in targets
        if target is not None
        for part in ast.walk(target)
    )


def larger_only(store: Store, holder: Holder, finder: Finder) -> Optional[Bound]:
    """What is made anew only when the input is larger than what is there: as large as the largest input so far."""
    node, match = store.statement.node, finds(holder)
    if store.how == "add":  # self.register_buffer("cos", value)
        values = [each for call in _calls(node) for each in call.args if not isinstance(each, ast.Constant)]
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        values = [node.value]
    else:
        return None
    if any(_is_it(part, match, holder) for value in values for part in ast.walk(value)):
        return None  # x = cat((x, new)) grows by what is added
    parts = _closure(values, store, holder, finder)
    itself = any(part is None for part in parts)
    if itself and _calls_one(parts, _JOINING):
        return None
    counted = _counted(store.file) if itself and _calls_one(parts, _MAKING) else set()
    function = getattr(store.statement.function, "name", "")
    for place in dict.fromkeys([store.file.name, *finder.user_files]):
        for statement in finder.files.get(place).statements:
            same = statement.node is node
            if not same and not (
                function and any(last_name(c.func) == function for c in _calls(statement.node))
            ):
                continue
            for enclosing in statement.tests:
                if not isinstance(enclosing, ast.If) or not _compares_sizes(enclosing.test):
                    continue
                if counted.intersection(map(last_name, ast.walk(enclosing.test))):
                    continue  # `if self.n + len(x) > self.room`: what is there already counts
                where = f"{os.path.basename(place)}:{enclosing.lineno}"
                return Bound(
                    f"made anew only for a larger input than ever, when {text(enclosing.test)} ({where}): it is as "
                    "large as the largest input so far",
                    None,
                    None,
                )
    return None


def newest_only(store: Store, holder: Holder, finder: Finder) -> Optional[Bound]:
    """A name that each step binds anew, to what is not made of what it was bound to before, by whatever way: it is as
    large as the newest input."""
    if store.how not in ("assign", "init"):
        return None
    if of_itself(store, holder, finder):
        return None
    where = f"{os.path.basename(store.file.name)}:{store.line}"
    return Bound(f"made anew in each step, as large as its input: {holder.name} ({where})", None, None)


def of_itself(store: Store, holder: Holder, finder: Finder) -> bool:
    """Whether what is stored is made of what is there, by whatever way, or by what remembers."""
    node = store.statement.node
    if isinstance(node, ast.Expr):  # setattr(self, "mem", value)
        values: List[Any] = [call.args[-1] for call in _calls(node) if call.args]
    else:
        values = [node.value]
    return any(part is None for part in _closure(values, store, holder, finder))


def _closure(values: List[Any], store: Store, holder: Holder, finder: Finder) -> List[Any]:
    """All that values are made of, as far as the source shows. None is in it where that is the holder, or a function
    that remembers."""
    match = finds(holder)
    home = _Scope(store.file, store.statement.function)
    seen: Set[Tuple[int, str, bool]] = set()
    todo: List[Tuple[Any, _Scope, int]] = [(value, home, 0) for value in values]
    found: List[Any] = []
    while todo:
        value, scope, depth = todo.pop()
        for part in ast.walk(value):
            found.append(part)
            own = scope == home or holder.kind == "attribute"
            if own and part is not store.statement.node and _is_it(part, match, holder):
                found.append(None)
                continue
            if not isinstance(part, (ast.Name, ast.Attribute)):
                continue
            name, plain = last_name(part), isinstance(part, ast.Name)
            key = (id(scope.function) if plain else id(scope.file), name, plain)
            if not name or key in seen:
                continue
            seen.add(key)
            todo += [(each, scope, depth) for each in _values(name, plain, scope)]
            for file, function in _functions(name, scope, finder) if depth < _DEEP else ():
                if _remembers(function, file):
                    found.append(None)
                inner = _Scope(file, function)
                todo += [(each, inner, depth + 1) for each in _returns(function, file)]
    return found


def _is_it(part: Any, match: Matcher, holder: Holder) -> bool:
    if match(part):
        return True
    named = isinstance(part, ast.Constant) and part.value == holder.name  # getattr(self, "mem")
    return named and holder.kind == "attribute"


def _values(name: str, plain: bool, scope: _Scope) -> Iterator[Any]:
    """What a name is bound to in a function, or an attribute of that name anywhere in its file, and what is put into it."""
    for statement in scope.file.statements:
        near = statement.function is scope.function
        node = statement.node
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for single, value in _pairs(target, node.value):
                    base = stripped(single)[0]
                    if _names(base, name, plain, near):
                        yield value
        for call in _calls(node) if isinstance(node, ast.Expr) else ():
            into = call.func.value if isinstance(call.func, ast.Attribute) else None
            fills = into is not None and (call.func.attr in ADDERS or call.func.attr.endswith("_"))
            base = _root(into) if fills else None
            if base is not None and _names(base, name, plain, near):
                yield from call.args
            if any(each.arg == "out" and _names(each.value, name, plain, near) for each in call.keywords):
                yield call


def _names(base: Any, name: str, plain: bool, near: bool) -> bool:
    if plain:
        return near and isinstance(base, ast.Name) and base.id == name
    return isinstance(base, ast.Attribute) and base.attr == name


def _root(node: Any) -> Any:
    """The name at the bottom of `new[:n].narrow(0, 0, k)`; of `self.buf[0]` the attribute."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return node


def _functions(name: str, scope: _Scope, finder: Finder) -> List[Tuple[File, Any]]:
    """The user's functions and methods of a name, in its own file first; of a class what a call of an object runs."""
    for place in dict.fromkeys([scope.file.name, *finder.user_files]):
        file = finder.files.get(place)
        here = [
            (file, node)
            for node, cls in file.functions
            if node.name == name or (cls == name and node.name in ("forward", "__call__"))
        ]
        if here:
            return here
    return []


def _returns(function: Any, file: File) -> Iterator[Any]:
    for statement in file.statements:
        value = statement.node.value if isinstance(statement.node, ast.Return) else None
        if value is not None and statement.function is function:
            yield value


def _remembers(function: Any, file: File) -> bool:
    """Whether a function keeps something from call to call that grows, as far as it says so: a variable that is not its
    own, an attribute or an entry that it joins something to."""
    if any(isinstance(part, (ast.Global, ast.Nonlocal)) for part in ast.walk(function)):
        return True
    for statement in file.statements:
        node = statement.node
        if statement.function is not function or not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            for single, value in _pairs(target, node.value):
                if isinstance(single, (ast.Attribute, ast.Subscript)) and _joined_to(text(single), value):
                    return True
    return False


def _joined_to(name: str, value: Any) -> bool:
    return any(
        isinstance(part, ast.Call)
        and last_name(part.func) in _JOINING | _MAKING
        and any(text(inner) == name for inner in ast.walk(part))
        for part in ([] if isinstance(value, ast.Subscript) else ast.walk(value))  # cat(…)[-n:] is bounded
    )


def _calls_one(parts: List[Any], names: Set[str]) -> bool:
    return any(isinstance(part, ast.Call) and last_name(part.func) in names for part in parts)


def _same_size(store: Store, holder: Holder) -> bool:
    """`self.src = self.src.to(device)`, `x = x / 2`: what is there, and no more of it; or nothing at all."""
    node, match = store.statement.node, finds(holder)
    if not isinstance(node, ast.Assign):
        return False
    values = [
        value for target in node.targets for single, value in _pairs(target, node.value) if match(single)
    ]
    return bool(values) and all(
        (isinstance(value, ast.Constant) and value.value is None) or _converts(value, match)
        for value in values
    )


def _converts(value: Any, match: Matcher) -> bool:
    if isinstance(value, ast.Call):
        called = value.func
        return (
            isinstance(called, ast.Attribute) and called.attr in _SAME_SIZE and _converts(called.value, match)
        )
    if isinstance(value, ast.BinOp):
        sides = (value.left, value.right)
        return any(
            _converts(side, match) and isinstance(other, (ast.Constant, ast.Name, ast.Attribute))
            for side, other in (sides, sides[::-1])
        )
    if isinstance(value, ast.Subscript):
        return _converts(value.value, match)
    return match(value)


def _again(statement: Statement, holder: Holder, finder: Finder) -> bool:
    """Whether a statement may run again and again."""
    if statement.loops:
        return True
    function = statement.function
    if function is None:
        return False
    if function.name in ("__init__", "__new__", "__post_init__"):
        return not _made_once(holder.classes or (statement.cls or "",), finder, 3)
    return not runs_once(function, statement.cls, finder)


def _made_once(classes: Tuple[str, ...], finder: Finder, depth: int) -> bool:
    """Whether objects of these classes are made once, as far as the source shows: not in a loop, nor in a function that
    runs more than once. Not where nothing shows them to be made."""
    made = [
        statement
        for place in finder.user_files
        for statement in finder.files.get(place).statements
        if not isinstance(statement.node, Functions)
        and any(last_name(call.func) in classes for call in _calls(statement.node))
        and not any(last_name(call.func) == "super" for call in _calls(statement.node))
    ]
    return bool(made) and all(_stands_once(statement, finder, depth) for statement in made)


def _stands_once(statement: Statement, finder: Finder, depth: int) -> bool:
    if statement.loops or depth == 0:
        return not statement.loops
    function = statement.function
    if function is None:
        return True
    if function.name == "__init__" and statement.cls is not None:
        return _made_once((statement.cls,), finder, depth - 1)
    return runs_once(function, statement.cls, finder)


def _counted(file: File) -> Set[str]:
    """The names that a file adds to: `self.n += len(x)`, `n = n + k`."""
    found = set()
    for statement in file.statements:
        node = statement.node
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            found.add(last_name(node.target))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            sides = [text(node.value.left), text(node.value.right)]
            found.update(last_name(target) for target in node.targets if text(target) in sides)
    return found - {""}


def _compares_sizes(test: Any) -> bool:
    return any(
        isinstance(part, ast.Compare)
        and any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.NotEq)) for op in part.ops)
        and not any(isinstance(inner, ast.Mod) for inner in ast.walk(part))
        for part in ast.walk(test)
    )


def _calls(node: Any) -> List[Any]:
    return [part for part in expressions(node) if isinstance(part, ast.Call)]
