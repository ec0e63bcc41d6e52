"""Tells whether the keys under which a cache is filled come again: the index of a sample, a path from a list.

Such a cache has an entry for each sample, and the second pass over the data adds none. A key of something that is
always new (a step's number, an id, a random crop) is none of that kind.

Must not know: tensors, paths, who asks.
Invariant: reads source, and of the container only its keys; what the source does not show is taken for new.
"""

import ast
import itertools
import os
from typing import Any, Callable, Iterator, List, Optional, Tuple

from ._code import File, Functions, Statement, expressions, last_name, text
from ._limits import ONCE, Bound, length_of
from ._path import instance_dict
from ._source import Finder, Holder, Store, finds
from ._use import is_call, runs_often

_DEPTH = 4  # calls that a key is followed through
_LOOKED_AT = 64  # keys
_SAME = {"int", "str", "basename", "Path"}  # functions of a key that give a key of its kind
_TOGETHER = {"tuple", "join"}  # the same of several
_METHODS = {"item", "tolist", "numpy", "cpu", "split", "strip", "as_posix"}
_WRAPPERS = {"tqdm", "track", "progress", "list", "iter", "sorted", "reversed", "sample", "DataLoader"}
_SIDE_BY_SIDE = {"zip", "TensorDataset"}  # what they give is of one argument each
_DRAWN = {"randrange", "randint", "integers", "randint_like"}  # they give whole numbers
_PICKED = {"choice", "choices", "sample"}  # of what they are given
_MANY = 1_000_000  # of so many numbers, hardly one comes again
_RANGES = {"range", "trange", "arange", "randperm", "permutation"}


def per_sample(
    store: Store, holder: Holder, container: Any, owner: Any, finder: Finder, asked: int = 0
) -> Optional[Bound]:
    """The bound of a dict that gets an entry for each sample of the data, if the source shows that it does. `asked`: how
    often it was believed before."""
    key = key_of(store, holder)
    if key is None or isinstance(key, ast.Constant) or not _plain(container):
        return None
    keys = Keys(finder)
    if not keys.come_again(key, store.statement, store.file, _DEPTH) or (keys.guessed and asked >= ONCE):
        return None
    where = f"{os.path.basename(store.file.name)}:{store.line}"
    length, capacity = length_of(container), _samples(owner, finder)
    if capacity is not None and length is not None and length > capacity:
        return None  # it is no sample's number after all
    return Bound(
        f"filled once for each sample: its key {ast.unparse(key)} ({where}) comes again with the next pass over the data, "
        "which decides whether it goes on",
        length,
        capacity,
    )


def per_call(function: Any, finder: Finder) -> Optional[Bound]:
    """The same of an unbounded `functools.lru_cache`, whose keys are the arguments."""
    code = getattr(getattr(function, "__wrapped__", None), "__code__", None)
    if code is None:
        return None
    file = finder.files.get(code.co_filename)
    node = file.function_at(code.co_name, code.co_firstlineno)
    cls = next((cls for each, cls in file.functions if each is node), None)
    keys = Keys(finder)
    names = [name for name in _parameters(node) if node is not None]
    if not names or not all(keys.argument_comes_again(node, cls, name, file, _DEPTH) for name in names):
        return None
    return Bound(
        f"filled once for each sample: {code.co_name}() is called with {', '.join(names)} that come again with the next pass "
        "over the data, which decides whether it goes on",
        None,
        None,
    )


def key_of(store: Store, holder: Holder) -> Any:
    """The key of a statement `d[key] = …` or `d.setdefault(key, …)`."""
    match = finds(holder)
    node = store.statement.node
    for target in node.targets if isinstance(node, ast.Assign) else []:
        if isinstance(target, ast.Subscript) and match(target.value):
            return target.slice
    for part in expressions(node):
        if (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr == "setdefault"
            and len(part.args) == 2
            and match(part.func.value)
        ):
            return part.args[0]
    return None


def _plain(container: Any) -> bool:
    """Whether a dict's keys are such as come again: no tensors, no floats."""

    def is_plain(key: Any) -> bool:
        return type(key) in (int, str, bytes) or (type(key) is tuple and all(map(is_plain, key)))

    if dict not in type(container).__mro__:
        return False
    return all(is_plain(key) for key in itertools.islice(dict.keys(container), _LOOKED_AT))


def _samples(owner: Any, finder: Finder) -> Optional[int]:
    """How many samples a data set has that keeps the cache itself: what its `__len__` gives, read and not run."""
    names = instance_dict(owner)
    if names is None:
        return None
    kind = type(owner).__name__
    for place in finder.user_files:
        for statement in finder.files.get(place).statements:
            if statement.cls != kind or getattr(statement.function, "name", "") != "__len__":
                continue
            value = statement.node.value if isinstance(statement.node, ast.Return) else None
            inner = value.args[0] if isinstance(value, ast.Call) and value.args else value
            held = names.get(inner.attr) if isinstance(inner, ast.Attribute) else None
            if inner is value:
                return held if type(held) is int else None
            if isinstance(value, ast.Call) and last_name(value.func) == "len":
                return len(held) if type(held) in (list, tuple, range, dict) else None
    return None


class Keys:
    """Follows expressions to where their values come from."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._composed = 0  # keys of several parts that the one looked at is in
        self.guessed = False  # what was followed may well be new each time

    def come_again(self, node: Any, at: Statement, file: File, depth: int) -> bool:
        """Whether an expression takes its old values again when the program goes over its data once more."""
        if isinstance(node, (ast.Constant, ast.Slice)):
            return isinstance(node, ast.Constant)
        if isinstance(node, ast.Tuple):
            return self._all(node.elts, at, file, depth)
        if isinstance(node, (ast.ListComp, ast.SetComp)):
            self.guessed = True  # a batch drawn anew may never come again
            loops = tuple(ast.For(target=each.target, iter=each.iter) for each in node.generators)
            return self.come_again(node.elt, at._replace(loops=(*at.loops, *loops)), file, depth)
        if isinstance(node, ast.JoinedStr):
            parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            return self._all(parts, at, file, depth)
        if isinstance(node, ast.BinOp):
            return self._all([node.left, node.right], at, file, depth)
        if isinstance(node, ast.Attribute):
            return self.come_again(node.value, at, file, depth)
        if isinstance(node, ast.Subscript):
            inner = node.slice if isinstance(node.value, (ast.Name, ast.Attribute)) else node.value
            whole = isinstance(node.slice, ast.Constant)
            return self.come_again(node.value if whole else inner, at, file, depth)
        if isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
            if method and self.come_again(node.func.value, at, file, depth):
                return True
            if self._draws(node, at, file):
                return not self._composed  # a sample's number and where it is cropped: too many to come again
            if last_name(node.func) in _TOGETHER:
                return bool(node.args) and self._all(node.args, at, file, depth)
            known = last_name(node.func) in _SAME and bool(node.args)
            return known and all(self.come_again(part, at, file, depth) for part in node.args)
        return isinstance(node, ast.Name) and self._name(node.id, at, file, depth)

    def _draws(self, call: Any, at: Statement, file: File) -> bool:
        """Whether a call draws whole numbers from a range that is not too large, or from a collection."""
        name = last_name(call.func)
        base = text(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if name in _PICKED:
            return base == "" or "rand" in base or "rng" in base
        if name not in _DRAWN or not call.args:
            return False
        ends = [part for part in call.args if not isinstance(part, (ast.Tuple, ast.List))]
        return bool(ends) and all(self._is_small(part, at, file) for part in ends)

    def _is_small(self, node: Any, at: Statement, file: File) -> bool:
        if isinstance(node, ast.Constant):
            return type(node.value) is int and abs(node.value) <= _MANY
        if isinstance(node, ast.Call):
            return last_name(node.func) == "len"
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, (ast.Add, ast.Sub)) and all(
                self._is_small(part, at, file) for part in (node.left, node.right)
            )
        if not isinstance(node, ast.Name):
            return False
        bound = list(self._bound(node.id, at, file)) or list(
            self._bound(node.id, at._replace(function=None, cls=None), file)
        )
        return (
            len(bound) == 1
            and isinstance(bound[0][0], ast.Constant)
            and self._is_small(bound[0][0], at, file)
        )

    def _all(self, parts: List[Any], at: Statement, file: File, depth: int) -> bool:
        self._composed += 1
        try:
            return all(self.come_again(part, at, file, depth) for part in parts)
        finally:
            self._composed -= 1

    def _name(self, name: str, at: Statement, file: File, depth: int) -> bool:
        for position in reversed(range(len(at.loops))):
            loop = at.loops[position]
            if isinstance(loop, (ast.For, ast.AsyncFor)) and name in _names(loop.target):
                return self._of_loop(loop, name, position, at, file, depth)
        if at.function is None:
            bound = list(self._bound(name, at, file))
            return len(bound) == 1 and self._value(*bound[0], file, depth)
        bound = list(self._bound(name, at, file))
        if name in _parameters(at.function):
            return not bound and self.argument_comes_again(at.function, at.cls, name, file, depth)
        return len(bound) == 1 and self._value(*bound[0], file, depth)

    def _value(self, value: Any, where: Statement, file: File, depth: int) -> bool:
        return value is not None and depth > 0 and self.come_again(value, where, file, depth - 1)

    def _bound(self, name: str, at: Statement, file: File) -> Iterator[Tuple[Any, Statement]]:
        """What a name is bound to in the same scope; None for what makes it another one each time."""
        for statement in file.statements:
            node = statement.node
            if statement.function is not at.function or statement.cls != at.cls:
                continue
            if isinstance(node, ast.AugAssign) and name in _names(node.target):
                yield None, statement
            if isinstance(node, (ast.For, ast.AsyncFor)) and name in _names(node.target):
                yield None, statement  # of another loop: its last value
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and target.id == name:
                        yield node.value, statement
                    elif isinstance(target, (ast.Tuple, ast.List)) and name in _names(target):
                        yield node.value, statement  # a part of it

    def _of_loop(self, loop: Any, name: str, position: int, at: Statement, file: File, depth: int) -> bool:
        """Of a variable of a loop: whether the loop runs again over the same things."""
        again = position > 0 or (at.function is not None and runs_often(at.function, at.cls, self._finder))
        outside = at._replace(loops=at.loops[:position])
        source, target = loop.iter, loop.target
        if any(
            isinstance(part, ast.Call) and last_name(part.func) == "DataLoader" for part in ast.walk(source)
        ):
            self.guessed = True  # the data may be a stream
        source = _unwrapped(source)
        if (
            isinstance(source, ast.Call)
            and last_name(source.func) in ("enumerate", *_SIDE_BY_SIDE)
            and source.args
        ):
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
            index = next((n for n, part in enumerate(parts) if name in _names(part)), -1)
            if last_name(source.func) == "enumerate":
                if index == 0:
                    return again
                source = source.args[0]
            else:
                source = source.args[index] if 0 <= index < len(source.args) else source
        source = _unwrapped(source)
        if isinstance(source, ast.Call) and last_name(source.func) in _RANGES:
            return again and all(self._fixed(part, outside, file) for part in source.args)
        if isinstance(source, (ast.ListComp, ast.SetComp)):
            return self.come_again(source, outside, file, depth)
        if not isinstance(source, (ast.Name, ast.Attribute, ast.Subscript)):
            return False  # a generator: nobody knows what it gives
        base = source
        while isinstance(base, (ast.Attribute, ast.Subscript)):
            base = base.value
        inner = isinstance(base, ast.Name) and any(
            base.id in _names(outer.target) for outer in outside.loops if hasattr(outer, "target")
        )
        if inner:
            return self.come_again(source, outside, file, depth)
        return again and (not isinstance(base, ast.Name) or self._stays(base.id, outside, file, depth))

    def _stays(self, name: str, at: Statement, file: File, depth: int) -> bool:
        """Whether a name is the same collection each time the loop at this place begins: not made anew before it, and
        handed over by every caller as what stays."""
        for value, where in self._bound(name, at, file):
            once = not where.loops and (at.function is None or bool(at.loops))
            outside = bool(where.loops) and where.loops != at.loops[: len(where.loops)]
            if not (once or outside or self._value(value, where, file, depth)):
                return False
        if at.function is None or name not in _parameters(at.function):
            return True
        return depth > 0 and self._each_call(
            at.function,
            at.cls,
            name,
            lambda given, call, there: self._lasts(given, call, there, depth - 1),
        )

    def _lasts(self, given: Any, at: Statement, file: File, depth: int) -> bool:
        """The same of what a call hands over."""
        while isinstance(given, (ast.Attribute, ast.Subscript)):
            given = given.value
        if not isinstance(given, ast.Name):
            return False
        turning = any(given.id in _names(loop.target) for loop in at.loops if hasattr(loop, "target"))
        if turning:
            return self.come_again(given, at, file, depth)
        return self._stays(given.id, at, file, depth)

    def _fixed(self, node: Any, at: Statement, file: File) -> bool:
        """Whether an end of a range is the same each time, as far as the names in it show."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        moving = {each for loop in at.loops for each in _names(getattr(loop, "target", loop))}
        return not names & moving and not any(
            value is None for name in names for value, _ in self._bound(name, at, file)
        )

    def argument_comes_again(
        self, function: Any, cls: Optional[str], name: str, file: File, depth: int
    ) -> bool:
        """Whether every call of a function of the user's hands over what comes again."""
        names = _parameters(function)
        if function.name in ("__getitem__", "__getitems__"):
            return name == names[0] and any(
                each.name == "__len__" and of == cls for each, of in file.functions
            )
        if function.name.endswith("_step") and name == "batch_idx":
            return True  # the number of the batch in its epoch, as Lightning hands it over
        return depth > 0 and self._each_call(
            function, cls, name, lambda given, call, there: self.come_again(given, call, there, depth - 1)
        )

    def _each_call(
        self, function: Any, cls: Optional[str], name: str, holds: Callable[[Any, Statement, File], bool]
    ) -> bool:
        """Whether something holds of what every call of a function hands over under a name; there must be one."""
        names, seen = _parameters(function), 0
        for place in self._finder.user_files:
            there = self._finder.files.get(place)
            for statement in there.statements:
                for part in expressions(statement.node):
                    if not isinstance(part, ast.Call) or not is_call(
                        part, there, statement, function, cls, self._finder
                    ):
                        continue
                    given = _given(part, names, name)
                    if given is None or not holds(given, statement, there):
                        return False
                    seen += 1
        return seen > 0


def _unwrapped(source: Any) -> Any:
    """What a loop goes over, without what only shows progress, orders or converts it."""
    while isinstance(source, ast.Call):
        if last_name(source.func) in _WRAPPERS and source.args:
            source = source.args[0]
        elif (
            isinstance(source.func, ast.Attribute)
            and source.func.attr in (*_METHODS, "items", "keys")
            and not source.args
        ):
            source = source.func.value
        else:
            break
    return source


def _given(call: Any, names: List[str], name: str) -> Any:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    position = names.index(name)
    return call.args[position] if position < len(call.args) else None


def _parameters(function: Any) -> List[str]:
    """The names of a function's parameters, without `self`."""
    if not isinstance(function, Functions):
        return []
    arguments = function.args
    names = [each.arg for each in [*getattr(arguments, "posonlyargs", []), *arguments.args]]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    return names + [each.arg for each in arguments.kwonlyargs]


def _names(node: Any) -> List[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
