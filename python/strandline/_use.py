"""Tells what a program does with what it keeps, as far as its source shows: nothing, read it, read it again and again.

Must not know: tensors, paths, who asks.
Invariant: reads source only. Adding, taking out, asking for the length or whether it is None is no reading; neither is
what happens only together with the storing.
"""

import ast
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from ._code import _BODIES, _COMPOUND, File, Functions, Statement, expressions, last_name, text, words
from ._source import ADDERS, Finder, Holder, Matcher, Store, finds, stripped

NEVER, READ, GATHERED, AGAIN = "never", "read", "gathered", "again"
_TAKERS = {"pop", "popleft", "popitem", "clear", "remove", "discard"}
_MOVERS = {"reset", "to", "cpu", "cuda", "train", "eval", "double", "float", "half", "close"}
_ALWAYS = ("forward", "__call__", "__getitem__", "__iter__", "training_step", "validation_step")
_CALLED = ("forward", "__call__")  # by a call of the object
_METHODS = {name for kind in (dict, list, set, str) for name in vars(kind) if not name.startswith("_")}
_NEAR = 2  # lines between statements that may fill one thing's containers


class Used(NamedTuple):
    how: str
    where: Optional[Statement]
    file: Optional[File]


def use(finder: Finder, holder: Holder, store: Store) -> Used:
    """How the program uses the name that `store` stores into."""
    match = finds(holder)
    cls = holder.classes[0] if holder.kind == "attribute" and holder.classes else None
    best = Used(NEVER, None, None)
    for file, statements in finder.scopes(holder):
        for statement in statements:
            if statement.node is store.statement.node or holder.name not in words(statement.node):
                continue

            def of_it(node: Any, statement: Statement = statement) -> bool:
                return match(node) and (cls is None or _is_a(node.value, cls, statement, finder) is not False)

            if not reads(statement.node, of_it):
                continue
            if _again(file, statement, store, finder):
                return Used(AGAIN, statement, file)
            how = GATHERED if _after(file, statement, store, match, finder) else READ
            if best.how == NEVER or (best.how == READ and how == GATHERED):
                best = Used(how, statement, file)
    return best


def whole(used: Optional[Used], holder: Holder, keyed: bool) -> bool:
    """Whether a reading is of more than one entry that the source names, as `outs[-1]` is. `keyed`: of a dict, which
    is asked for one entry by `d[k]`."""
    if used is None or used.where is None:
        return False
    match = finds(holder)
    every = list(expressions(used.where.node))
    glances = [
        part.value
        for part in every
        if (
            (
                isinstance(part, ast.Subscript)
                and (keyed or isinstance(part.slice, (ast.Constant, ast.UnaryOp)))
            )
            or (isinstance(part, ast.Attribute) and part.attr == "get")
        )
        and match(part.value)
    ]
    return any(match(part) and not any(part is glance for glance in glances) for part in every)


def of_object(finder: Finder, holder: Holder, store: Store) -> Optional[str]:
    """The same of an object in which a library's code keeps something: `metric.compute()` reads what `metric.update(x)`
    stored. None where nothing shows: the library may read it by itself."""
    match = finds(holder)
    best: Optional[str] = None
    for file, statements in finder.scopes(holder):
        for statement in statements:
            if statement.node is store.statement.node or holder.name not in words(statement.node):
                continue
            if not _asks(statement, match):
                continue
            if _after(file, statement, store, match, finder):
                return GATHERED
            best = READ
    return best


def _asks(statement: Statement, match: Matcher) -> bool:
    """Whether a statement calls a method of the object that neither fills nor empties nor moves it."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr not in ADDERS | _TAKERS | _MOVERS
        and match(stripped(node.func.value)[0])
        for node in expressions(statement.node)
    )


def _after(file: File, statement: Statement, store: Store, match: Matcher, finder: Finder) -> bool:
    """Whether a statement reads once all is gathered: outside of the loops that store, in code that is called."""
    value = getattr(statement.node, "value", None)
    if isinstance(statement.node, ast.Return) and value is not None and match(value):
        return False  # handed over, not read
    if statement.function is store.statement.function and file.name == store.file.name:
        here, there = statement.loops[:1], store.statement.loops[:1]
        return bool(there) and here != there and statement.line > store.line
    function = statement.function
    if function is None:
        return True
    if function.name.startswith("__") and function.name != "__call__":
        return False
    return any(
        _calls(finder.files.get(place), each, function, statement.cls, finder)
        for place in dict.fromkeys([file.name, *finder.user_files])
        for each in finder.files.get(place).statements
    )


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
        if match(called) and isinstance(called, ast.Attribute) and called.attr in _METHODS:
            inside.append(called.value)  # `d.values()` asks a dict, no attribute `values`
        elif isinstance(called, ast.Attribute):
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
    return runs_often(statement.function, statement.cls, finder)


def runs_often(function: Any, cls: Optional[str], finder: Finder) -> bool:
    """Whether a function runs again and again, as far as names tell."""
    return _runs_often(function, cls, finder, 3, set())


def runs_once(function: Any, cls: Optional[str], finder: Finder) -> bool:
    """Whether the source calls a function, and from nowhere again and again: not one that nothing calls by its name."""
    return any(
        _calls(finder.files.get(place), statement, function, cls, finder)
        for place in finder.user_files
        for statement in finder.files.get(place).statements
    ) and not runs_often(function, cls, finder)


def _runs_often(function: Any, cls: Optional[str], finder: Finder, depth: int, seen: Set[int]) -> bool:
    """Whether a function is called from a loop, as far as names tell."""
    if function.name in _ALWAYS:
        return True
    if depth == 0 or id(function) in seen or function.name == "__init__":
        return False
    seen.add(id(function))
    for place in finder.user_files:
        file = finder.files.get(place)
        for statement in file.statements:
            if not _calls(file, statement, function, cls, finder):
                continue
            if any(_once(test.test) for test in statement.tests if isinstance(test, ast.If)):
                continue
            if statement.loops:
                return True
            around = statement.function
            if around is not None and _runs_often(around, statement.cls, finder, depth - 1, seen):
                return True
    return False


def _knows(file: File, cls: Optional[str], finder: Finder) -> bool:
    """Whether a file has to do with a class: it defines it, or imports it or from where it is defined."""
    if cls is None or cls in file.classes:
        return True
    homes = {
        os.path.splitext(os.path.basename(place))[0]
        for place in finder.user_files
        if cls in finder.files.get(place).classes
    }
    for statement in file.statements:
        node = statement.node
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in homes:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(
            each.name.split(".")[-1] in (cls, *homes) for each in node.names
        ):
            return True
    return False


def _calls(file: File, statement: Statement, function: Any, cls: Optional[str], finder: Finder) -> bool:
    """Whether a statement calls the function: by its name, or as a method of what may be such an object."""
    called_itself = cls is not None and function.name in _CALLED
    if not called_itself and function.name not in words(statement.node):
        return False
    return any(
        is_call(node, file, statement, function, cls, finder)
        for node in expressions(statement.node)
        if isinstance(node, ast.Call)
    )


def is_call(
    node: Any, file: File, statement: Statement, function: Any, cls: Optional[str], finder: Finder
) -> bool:
    """The same of one call."""
    called = node.func
    if isinstance(called, ast.Name) and called.id == function.name:
        return _means(file, function)
    if cls is not None and function.name in _CALLED and last_name(called) != function.name:
        return _is_a(called, cls, statement, finder) is True  # `model(x)`
    if not isinstance(called, ast.Attribute) or called.attr != function.name:
        return False
    if cls is None:
        return _is_home(called.value, file, function, finder)
    return _may_be(called.value, cls, file, statement, finder)


def _is_home(receiver: Any, file: File, function: Any, finder: Finder) -> bool:
    """Whether a name stands for the module (or a package around it) that a function is defined in: `json.load()` calls
    no other `load`."""
    if not isinstance(receiver, ast.Name):
        return False
    modules = {
        each.name.split(".")[-1]
        for statement in file.statements
        if isinstance(statement.node, (ast.Import, ast.ImportFrom))
        for each in statement.node.names
        if receiver.id == (each.asname or each.name.split(".")[0])
    }
    return bool(modules) and any(
        modules.intersection(os.path.splitext(place)[0].split(os.sep))
        for place in finder.user_files
        if any(node is function for node, _ in finder.files.get(place).functions)
    )


def _means(file: File, function: Any) -> bool:
    """Whether a function's name means that function in a file: it is defined or bound there, and no other is."""
    here = [node for node, _ in file.functions if node.name == function.name]
    return function in here or (not here and function.name in _bound_in(file))


def _may_be(receiver: Any, cls: Optional[str], file: File, statement: Statement, finder: Finder) -> bool:
    """Whether a receiver may be an instance of the class. Where nothing says so, it may, in a file that knows the
    class."""
    told = _is_a(receiver, cls, statement, finder)
    return _knows(file, cls, finder) if told is None else told


def _is_a(receiver: Any, cls: Optional[str], statement: Statement, finder: Finder) -> Optional[bool]:
    """Whether a receiver is an instance of the class, as what it is bound to says: `optimizer.step()` calls no method
    `step` of another class. None where nothing tells."""
    base = stripped(receiver)[0]
    if isinstance(base, ast.Call):  # super().update(), Meter().update()
        name = last_name(base.func)
        return True if name in ("super", cls) else False if name[:1].isupper() else None
    name = last_name(base)
    if name in ("self", "cls") and isinstance(base, ast.Name):
        return statement.cls is not None and _related(statement.cls, cls, finder)
    other = False
    for value in _bound(finder, name):
        made = [last_name(part.func) for part in ast.walk(value) if isinstance(part, ast.Call)]
        if any(each == cls or _related(each, cls, finder) for each in made):
            return True
        if value is _IMPORT:
            other = True
        elif isinstance(value, ast.Call):
            same = any(name in (getattr(p, "id", ""), getattr(p, "attr", "")) for p in ast.walk(value))
            other = other or not (same or _of_the_users(made[0], finder))
    return False if other else None


_IMPORT = ast.Pass()  # stands for what an import binds


def _bound(finder: Finder, name: str) -> List[Any]:
    """What a name is bound to anywhere in the user's files."""
    found: List[Any] = []
    for place in finder.user_files:
        found += _bound_in(finder.files.get(place)).get(name, [])
    return found


def _bound_in(file: File) -> Dict[str, List[Any]]:
    """What the names in a file are bound to."""
    if file.bound is None:
        file.bound = {}
        for statement in file.statements:
            for target, value in _bindings(statement.node):
                file.bound.setdefault(target, []).append(value)
    return file.bound


def _bindings(node: Any) -> Iterator[Tuple[str, Any]]:
    pairs: List[Tuple[Any, Any]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        pairs = [(i.optional_vars, i.context_expr) for i in node.items if i.optional_vars is not None]
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for each in node.names:
            yield (each.asname or each.name).split(".")[0], _IMPORT
    for target, value in pairs:
        name = last_name(target)
        if name:
            yield name, value


def _of_the_users(name: str, finder: Finder) -> bool:
    """A function of the user's, which may make anything."""
    return any(
        node.name == name and name not in finder.files.get(place).classes
        for place in finder.user_files
        for node, _ in finder.files.get(place).functions
    )


def _related(one: str, other: str, finder: Finder) -> bool:
    """Whether two classes are the same, or one of them derives from the other, as far as names tell."""
    if one == other:
        return True
    for name, base in ((one, other), (other, one)):
        todo, seen = [name], set()
        while todo:
            current = todo.pop()
            if current == base:
                return True
            if current in seen:
                continue
            seen.add(current)
            for place in finder.user_files:
                node = finder.files.get(place).classes.get(current)
                if node is not None:
                    todo += map(last_name, node.bases)
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
    for _, statements in finder.scopes(holder):
        for statement in statements:
            if statement.node is here.node or holder.name not in words(statement.node):
                continue
            if not reads(statement.node, match):
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
