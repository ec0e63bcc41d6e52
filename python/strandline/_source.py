"""Finds the statement that stores into a name: the line that keeps a leak alive.

Must not know: tensors, how the name was found.
Invariant: reads source only, runs none of it.
"""

import ast
import re
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ._code import File, Files, Functions, Statement, expressions, last_name, text, words

ADDERS = {
    "append", "appendleft", "extend", "extendleft", "insert", "add", "setdefault", "update", "push", "put",
    "put_nowait", "enqueue", "store", "add_param_group", "heappush", "insort", "record", "log", "submit",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_backward_hook",
    "register_full_backward_pre_hook", "register_hook", "register_prehook", "register_buffer", "add_module", "__setitem__",
}  # fmt: skip
HOOKS = {
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "param_groups": "add_param_group",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_NAMING = {"register_buffer", "register_parameter", "add_module", "register_module", "__setattr__"}
_READERS = {
    "get", "items", "values", "keys", "compute", "reset", "clear", "mean", "sum", "item", "state_dict", "to", "eval",
    "train", "close", "sample", "result", "summary", "parameters", "zero_grad",
}  # fmt: skip
_MAKERS = {
    "list",
    "dict",
    "set",
    "tuple",
    "deque",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "WeakKeyDictionary",
    "zeros",
    "zeros_like",
}


# Where one of these words stands, a name may be stored into that is spelled out or made up.
_SPELLING = _NAMING | {
    "setattr", "globals", "vars", "locals", "__dict__", "_buffers", "_parameters", "_modules",
}  # fmt: skip


class Holder(NamedTuple):
    """A name to look for. `kind`: "local", "global", "attribute"."""

    kind: str
    name: str
    file: str = ""  # where the name lives (for an attribute: the class's file)
    function: str = ""
    first_line: int = 0
    classes: Tuple[str, ...] = ()  # of an attribute: the owner's class and its bases, by name
    keys: Tuple[str, ...] = ()  # the keys between the name and the container that grows


class Store(NamedTuple):
    """A statement that stores into the name. `how`: "augment", "again", "add", "item", "assign", "init", "call"."""

    score: int
    how: str
    file: File
    statement: Statement

    @property
    def line(self) -> int:
        return self.statement.line


def stripped(node: Any) -> Tuple[Any, List[str]]:
    """The expression under subscripts and `.setdefault(…)`, `.get(…)`, with the keys passed, outermost first."""
    keys: List[str] = []
    while True:
        if isinstance(node, ast.Subscript):
            keys.insert(0, f"[{text(node.slice)}]")
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("setdefault", "get")
            and node.args
        ):
            keys.insert(0, f"[{text(node.args[0])}]")
            node = node.func.value
        else:
            return node, keys


Matcher = Callable[[Any], bool]


def finds(holder: Holder) -> Matcher:
    """A test for the expressions that are the holder itself."""
    if holder.kind == "attribute":
        return lambda node: isinstance(node, ast.Attribute) and node.attr == holder.name
    return lambda node: isinstance(node, ast.Name) and node.id == holder.name


class Finder:
    """Looks for stores. `user_files` are searched for attributes beyond the class's own file."""

    def __init__(
        self, files: Files, user_files: Sequence[str], stack: Sequence[Tuple[str, str, int]] = ()
    ) -> None:
        self.files = files
        self.user_files = list(user_files)
        self.stack = list(stack)  # of the allocation: file, function, line
        self._stores: Dict[Holder, List[Store]] = {}

    def stores(self, holder: Holder) -> List[Store]:
        """All of them, the best first."""
        known = self._stores.get(holder)
        if known is None:
            known = self._stores[holder] = self._find_stores(holder)
        return known

    def _find_stores(self, holder: Holder) -> List[Store]:
        match = finds(holder)
        found: List[Store] = []
        for file, statements in self.scopes(holder):
            found.extend(self._in(file, statements, match, holder, follow=2))
        best: Dict[Tuple[str, int], Store] = {}
        for store in found:
            at = (store.file.name, store.line)
            if at not in best or best[at].score < store.score:
                best[at] = store
        return sorted(best.values(), key=lambda store: -store.score)

    def calls(self, holder: Holder, method: str, plain: bool = True) -> List[Store]:
        """Statements that call a method of the holder, or the holder itself; `method` is the one that stores. Without
        `plain` the holder itself only for what its call runs: a module's `forward` adds no modules."""
        match = finds(holder)
        found: List[Store] = []
        for file, statements in self.scopes(holder):
            for statement in statements:
                if holder.name not in words(statement.node):
                    continue
                for node in expressions(statement.node):
                    if not isinstance(node, ast.Call):
                        continue
                    base, _ = stripped(node.func)
                    if match(base):
                        run = method in ("forward", "__call__", "update", "_wrapped_update")
                        if not run and not plain:
                            continue
                        score = 60 if run else 30
                    elif isinstance(node.func, ast.Attribute) and match(stripped(node.func.value)[0]):
                        name = node.func.attr
                        if name == method or name == method.lstrip("_"):
                            score = 90
                        elif name in ADDERS:
                            score = 70
                        else:
                            score = 5 if name in _READERS else 40
                    else:
                        continue
                    found.append(Store(self._adjusted(score, file, statement), "call", file, statement))
        return sorted(found, key=lambda store: -store.score)

    def call(self, names: Sequence[str], keyword: str = "", argument: str = "") -> Optional[Tuple[File, int]]:
        """The line of the user's that calls one of `names` (any function: no names) with a keyword that is true, or
        hands over `argument` (a function's name); files of the allocation's stack first."""
        for place in self.user_files:
            file = self.files.get(place)
            for statement in file.statements:
                for node in expressions(statement.node):
                    if isinstance(node, ast.Call) and _is_call(node, names, keyword, argument):
                        return file, statement.line
        return None

    # scopes
    def scopes(self, holder: Holder) -> Iterator[Tuple[File, List[Statement]]]:
        if holder.kind == "local":
            file = self.files.get(holder.file)
            function = file.function_at(holder.function, holder.first_line)
            yield (
                file,
                [s for s in file.statements if _inside(s, function, file)] if function is not None else [],
            )
            return
        names = [holder.file] if holder.file else []
        if holder.kind == "attribute" or holder.kind == "global":
            names += [name for name in self.user_files if name not in names]
        for name in names:
            file = self.files.get(name)
            if holder.kind == "global" and name == holder.file:
                hidden = [node for node, _ in file.functions if _rebinds(node, holder.name)]
                yield file, [s for s in file.statements if s.function not in hidden]
            elif holder.kind == "attribute":
                yield file, file.statements

    # one scope
    def _in(
        self, file: File, statements: List[Statement], match: Matcher, holder: Holder, follow: int
    ) -> Iterator[Store]:
        aliases = _aliases(statements, match, holder.name)
        hook = "register_hook" if holder.name == "_backward_hooks" else holder.name
        storing = {holder.name, HOOKS.get(holder.name, holder.name), hook}.union(
            _SPELLING, (name for _, name in aliases)
        )

        def is_it(node: Any, function: Any) -> bool:
            return match(node) or (isinstance(node, ast.Name) and (function, node.id) in aliases)

        for statement in statements:
            node, function = statement.node, statement.function
            if storing.isdisjoint(words(node)):
                continue
            for score, how, keys, target in _ways(
                node, lambda n, f=function: is_it(n, f), match, holder.name
            ):
                score += self._of_attribute(holder, statement, target)
                if holder.keys and keys:
                    wanted, given = holder.keys[: len(keys)], tuple(keys[: len(holder.keys)])
                    if given == wanted:
                        score += 12
                    elif all(_constant(key) for key in given) and all(_constant(key) for key in wanted):
                        score -= 25
                if how in ("assign", "init", "again") and not match(target):
                    continue  # only the alias was bound
                yield Store(self._adjusted(score, file, statement), how, file, statement)
            if follow > 0:
                yield from self._through_calls(file, statement, is_it, holder, follow)

    def _of_attribute(self, holder: Holder, statement: Statement, target: Any) -> int:
        if holder.kind != "attribute":
            return 0
        if not isinstance(target, ast.Attribute):  # an alias in a method
            return 15 if statement.cls in holder.classes else 0
        base = target.value
        if isinstance(base, ast.Name) and base.id in ("self", "cls"):
            return 15 if statement.cls in holder.classes else -60
        if isinstance(base, ast.Name) and base.id in holder.classes:
            return 15
        return 0

    def _adjusted(self, score: int, file: File, statement: Statement) -> int:
        function = getattr(statement.function, "name", "<module>")
        if statement.loops:
            score += 4
        if function in ("__init__", "__new__", "setUp", "__post_init__"):
            score -= 20
        for depth, (name, inside, line) in enumerate(self.stack):
            if name == file.name and inside in (function, f"{statement.cls}.{function}"):
                score += 3 if depth == 0 else 2
                if 0 <= statement.line - line <= 40:
                    score += 1
                break
        return score

    def _through_calls(
        self, file: File, statement: Statement, is_it: Any, holder: Holder, follow: int
    ) -> Iterator[Store]:
        for node in expressions(statement.node):
            if not isinstance(node, ast.Call):
                continue
            for position, argument in enumerate(node.args):
                if is_it(stripped(argument)[0], statement.function):
                    yield from self._in_callee(file, node.func, position, None, holder, follow)
            for keyword in node.keywords:
                if keyword.arg and is_it(stripped(keyword.value)[0], statement.function):
                    yield from self._in_callee(file, node.func, None, keyword.arg, holder, follow)

    def _in_callee(
        self,
        file: File,
        called: Any,
        position: Optional[int],
        keyword: Optional[str],
        holder: Holder,
        follow: int,
    ) -> Iterator[Store]:
        name = (
            called.id
            if isinstance(called, ast.Name)
            else called.attr
            if isinstance(called, ast.Attribute)
            else None
        )
        if name is None or name in ADDERS:
            return
        seen = 0
        for place in [file.name, *[other for other in self.user_files if other != file.name]]:
            there = self.files.get(place)
            for node, cls in there.functions:
                is_init = node.name == "__init__" and cls == name
                if node.name != name and not is_init:
                    continue
                names = [
                    argument.arg for argument in [*getattr(node.args, "posonlyargs", []), *node.args.args]
                ]
                if cls is not None and names and names[0] in ("self", "cls"):
                    names = names[1:]
                if position is not None:
                    parameter = names[position] if position < len(names) else None
                else:
                    parameter = (
                        keyword
                        if keyword in names or any(k.arg == keyword for k in node.args.kwonlyargs)
                        else None
                    )
                if parameter is None:
                    continue
                seen += 1
                inner = Holder("local", parameter, place, node.name, node.lineno, keys=holder.keys)
                statements = [s for s in there.statements if _inside(s, node, there)]
                for store in self._in(there, statements, finds(inner), inner, follow - 1):
                    if store.how not in (
                        "assign",
                        "init",
                        "again",
                    ):  # binding the parameter anew keeps nothing
                        yield store._replace(score=store.score - 3)
            if seen:
                return


def _is_call(node: Any, names: Sequence[str], keyword: str, argument: str) -> bool:
    name = last_name(node.func)
    if names and name not in names:
        return False
    if keyword:
        values = [each.value for each in node.keywords if each.arg == keyword]
        return any(not isinstance(value, ast.Constant) or bool(value.value) for value in values)
    if argument:
        values = [*node.args, *[each.value for each in node.keywords]]
        return any(text(value).rsplit(".", 1)[-1] == argument.rsplit(".", 1)[-1] for value in values)
    return True


def _inside(statement: Statement, function: Any, file: File) -> bool:
    """Whether the statement stands in the function or in one nested in it."""
    inner = statement.function
    if inner is function:
        return True
    return (
        inner is not None
        and function is not None
        and function.lineno <= inner.lineno <= (function.end_lineno or 0)
    )


def _rebinds(function: Any, name: str) -> bool:
    """Whether a function has a local of its own with this name."""
    bindings = getattr(function, "_bindings", None)
    if bindings is None:
        bindings = function._bindings = _bindings(function)
    arguments, elsewhere, bound = bindings
    return name in arguments or (name in bound and name not in elsewhere)


def _bindings(function: Any) -> Tuple[Set[str], Set[str], Set[str]]:
    """The names of a function's arguments, those that it says are others' (global, nonlocal), and those it binds."""
    every = function.args
    arguments = [
        *getattr(every, "posonlyargs", []),
        *every.args,
        *every.kwonlyargs,
        every.vararg,
        every.kwarg,
    ]
    elsewhere: Set[str] = set()
    bound: Set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return {argument.arg for argument in arguments if argument is not None}, elsewhere, bound


def _aliases(statements: List[Statement], match: Matcher, name: str) -> Dict[Tuple[Any, str], None]:
    """Local names for the holder, or for a container inside it. `name`: what `match` finds."""
    found: Dict[Tuple[Any, str], None] = {}
    for statement in statements:
        node = statement.node
        if name not in words(node):
            continue
        if isinstance(node, ast.Assign) and match(stripped(node.value)[0]):
            for target in node.targets:
                if isinstance(target, ast.Name) and not match(target):
                    found[statement.function, target.id] = None
        elif isinstance(node, (ast.For, ast.AsyncFor)) and isinstance(node.iter, ast.Call):
            called = node.iter.func
            if (
                isinstance(called, ast.Attribute)
                and called.attr in ("values", "items")
                and match(stripped(called.value)[0])
            ):
                last = (
                    node.target.elts[-1]
                    if isinstance(node.target, ast.Tuple) and node.target.elts
                    else node.target
                )
                if isinstance(last, ast.Name):
                    found[statement.function, last.id] = None
    return found


def _ways(node: Any, is_it: Matcher, match: Matcher, name: str) -> Iterator[Tuple[int, str, List[str], Any]]:
    """The ways in which a statement stores into the holder: score, how, keys passed, the matched expression."""
    if isinstance(node, ast.AugAssign):
        base, keys = stripped(node.target)
        if is_it(base):
            yield 100, "augment", keys, base
    for target in node.targets if isinstance(node, ast.Assign) else []:
        if isinstance(target, ast.Subscript) and _names_of(target.value) and spells(target.slice, name):
            yield 85, "item", [], ast.Attribute(value=target.value, attr=name)
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign) and node.value
        else []
    )
    for target in targets:
        for single, value in _pairs(target, node.value):
            if isinstance(single, ast.Attribute) and single.attr == "data" and not match(single):
                single = single.value  # x.data = …
            base, keys = stripped(single)
            if not is_it(base):
                continue
            if isinstance(single, ast.Subscript):
                yield 90, "item", keys, base
            elif any(
                match(part)
                for part in ast.walk(value)
                if isinstance(part, (ast.Name, ast.Attribute)) and part is not base
            ):
                yield 95, "again", keys, base
            elif _empty(value):
                yield 10, "init", keys, base
            else:
                yield 50, "assign", keys, base
    if isinstance(node, (ast.For, ast.AsyncFor)) and is_it(node.target):
        yield 25, "assign", [], node.target
    for part in expressions(node):
        if isinstance(part, ast.NamedExpr) and is_it(part.target):
            yield 50, "assign", [], part.target
        if not isinstance(part, ast.Call):
            continue
        called = part.func
        if isinstance(called, ast.Attribute):
            base, keys = stripped(called.value)
            if called.attr == "setdefault" and len(part.args) == 2 and _empty(part.args[1]):
                if is_it(base):
                    yield 60, "add", keys, base  # only makes the bucket
            elif called.attr in ADDERS and is_it(base):
                yield (
                    (85 if called.attr in ("update", "record", "log", "store", "submit") else 90),
                    "add",
                    keys,
                    base,
                )
            elif called.attr in ("resize_", "set_") and match(called.value):
                yield 95, "again", keys, base
            if called.attr == HOOKS.get(name) or (
                name == "_backward_hooks" and called.attr == "register_hook"
            ):
                yield 88, "add", [], called
            named = part.args[0] if called.attr in _NAMING and len(part.args) > 1 else None
            if named is not None and spells(named, name):
                yield 85, "add", [], ast.Attribute(value=called.value, attr=name)
        function = last_name(called)
        if (
            function in ("heappush", "insort", "insort_left", "insort_right")
            and part.args
            and is_it(stripped(part.args[0])[0])
        ):
            yield 90, "add", [], part.args[0]
        if function == "setattr" and len(part.args) == 3 and spells(part.args[1], name):
            plain = isinstance(part.args[1], ast.Constant)
            how = "assign" if plain else "add"
            yield (60 if plain else 85), how, [], ast.Attribute(value=part.args[0], attr=name)


def spells(node: Any, name: str) -> bool:
    """Whether an expression may give this name: the constant, an f-string that fits, or a made-up name."""
    if isinstance(node, ast.Constant):
        return bool(node.value == name)
    if isinstance(node, ast.JoinedStr):
        parts = [
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in node.values
        ]
        return re.fullmatch("".join(parts), name) is not None
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant):
        start = re.split(r"%|\{", str(node.left.value))[0]
        return name.startswith(start) and name != start
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return isinstance(node.func.value, ast.Constant) and name.startswith(
            str(node.func.value.value).split("{")[0]
        )
    return isinstance(node, ast.Name) and any(letter.isdigit() for letter in name)


def _names_of(node: Any) -> bool:
    """`globals()`, `vars(x)`, `x.__dict__`: names by another way."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("globals", "vars", "locals")
    return isinstance(node, ast.Attribute) and node.attr in (
        "__dict__",
        "_buffers",
        "_parameters",
        "_modules",
    )


def _pairs(target: Any, value: Any) -> Iterator[Tuple[Any, Any]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        values = (
            value.elts
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            else None
        )
        for position, item in enumerate(target.elts):
            inner = item.value if isinstance(item, ast.Starred) else item
            yield from _pairs(inner, values[position] if values else value)
    else:
        yield target, value


def _empty(value: Any) -> bool:
    """An initial value: None, a constant, an empty container."""
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.UnaryOp):
        return _empty(value.operand)
    if isinstance(value, ast.Call):
        called = text(value.func).rsplit(".", 1)[-1]
        return called in _MAKERS and not (called in ("list", "dict", "tuple", "set") and value.args)
    return False


def _constant(key: str) -> bool:
    return key[1:2] in "'\"" or key[1:-1].lstrip("-").isdigit()


def decorator_line(files: Files, function: Any) -> Optional[Tuple[File, int]]:
    """The line of the cache decorator on a function, else of its def."""
    inner = function
    while getattr(inner, "__wrapped__", None) is not None:
        inner = inner.__wrapped__
    code = getattr(inner, "__code__", None)
    if code is None:
        return None
    file = files.get(code.co_filename)
    node = file.function_at(code.co_name, code.co_firstlineno)
    if node is None:
        return None
    for decorator in node.decorator_list:
        if "cache" in text(decorator):
            return file, decorator.lineno
    for statement in file.statements:  # match = functools.lru_cache(None)(match)
        if (
            isinstance(statement.node, ast.Assign)
            and "cache" in text(statement.node.value)
            and node.name in text(statement.node.value)
        ):
            return file, statement.line
    return file, node.lineno


def context_line(files: Files, forward_class: Any, attribute: str) -> Optional[Tuple[File, int]]:
    """The line of a custom Function that stores `attribute` on its ctx."""
    for kind in forward_class.__mro__:
        for name in ("forward", "setup_context"):
            function = kind.__dict__.get(name)
            function = getattr(function, "__func__", function)
            code = getattr(function, "__code__", None)
            if code is None:
                continue
            file = files.get(code.co_filename)
            node = file.function_at(code.co_name, code.co_firstlineno)
            for statement in file.statements:
                if node is None or statement.function is not node:
                    continue
                for part in expressions(statement.node):
                    if (
                        isinstance(part, ast.Attribute)
                        and part.attr == attribute
                        and isinstance(part.ctx, ast.Store)
                    ):
                        return file, statement.line
    return None


__all__ = ["Finder", "Functions", "Holder", "Store", "context_line", "decorator_line"]
