"""Tells a container with a bound from one that only grows.

Must not know: tensors, autograd, who asks.
Invariant: a bound is claimed only when the container itself has one, or when the code that adds also takes out
under a condition that concerns the container (its length, a count of it, its keys), or starts the container anew in an
outer loop. One of which the number is not known is believed until growth proves otherwise.
"""

import ast
import collections
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ._code import Statement, expressions, last_name, text
from ._path import _LRU
from ._source import Finder, Holder, Matcher, Store, _empty, _pairs, finds, stripped

TRUST = 3  # times that a bound which the source only suggests is believed of a container that went on growing
ONCE = 1  # the same of one that may well be another object's, or of code that never runs
_FIRM = 6  # times that one is whose condition is about the container, but compares with a number nobody knows
_WORDS = ("budget", "max", "capacity", "limit", "size", "bytes", "window", "keep")
_TURNS = ("step", "iter", "epoch", "round")
_TAKERS = {"pop", "popleft", "popitem", "clear", "remove", "discard", "delete", "evict", "trim", "truncate"}

_TAKING = {"heappop", "heapreplace", "heappushpop"}  # functions that take from what they are given


class Bound(NamedTuple):
    reason: str
    length: Optional[int]
    capacity: Optional[int]
    entries: bool = True  # length and capacity count entries, not bytes or the like


class _Test(NamedTuple):
    """A condition under which entries are dropped."""

    condition: Any
    compare: Any  # the comparison in it that says so
    firm: bool  # it is about the container itself
    sized: bool  # about its length


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


def evicting(store: Store, holder: Holder, container: Any, owner: Any, asked: int = 0) -> Optional[Bound]:
    """A bound kept by the code around the statement that adds. `asked`: how often it was believed before."""
    match = finds(holder)
    file = store.file
    here = store.statement
    called = _called_names([s for s in file.statements if s.function is here.function])
    by_name = emptying(store, holder) if asked < ONCE else []
    for statement in file.statements:
        same = statement.function is here.function
        if not same and (statement.function is None or statement.function.name not in called):
            continue
        if same and here.loops and statement.loops[: len(here.loops)] != here.loops[: len(statement.loops)]:
            continue  # in another loop of this function
        if not takes(statement, match) and not tells(statement, by_name, ["self", "cls"], holder):
            continue
        test = _bounding_test(statement, match, store)
        if test is None:
            continue
        length, capacity, entries = _measured(test, statement, store, container, owner)
        if capacity is not None and length is not None and length > 2 * capacity + 16:
            continue  # the condition does not hold it back
        if capacity is None and (asked >= (_FIRM if test.firm else TRUST) or _unlimited(test.compare, owner)):
            continue
        where = f"{os.path.basename(file.name)}:{statement.line}"
        reason = f"bounded by its own code: entries are dropped when {text(test.condition)} ({where})"
        return Bound(reason, length, capacity, entries)
    return None


def guarded(store: Store, holder: Holder, container: Any, owner: Any, asked: int = 0) -> Optional[Bound]:
    """A bound in the condition under which entries are added at all: `if len(items) < cap: items.append(x)`."""
    match, statement = finds(holder), store.statement
    loops = {name for loop in statement.loops for name in _names(getattr(loop, "target", loop.__class__))}
    for enclosing in statement.tests:
        if not any(inner is statement.node for part in enclosing.body for inner in ast.walk(part)):
            continue  # in the other branch
        for part in ast.walk(enclosing.test):
            if not isinstance(part, ast.Compare) or len(part.ops) != 1:
                continue
            small, large = part.left, part.comparators[0]
            if isinstance(part.ops[0], (ast.Gt, ast.GtE)):
                small, large = large, small
            elif not isinstance(part.ops[0], (ast.Lt, ast.LtE, ast.NotEq)):
                continue
            sized = _is_len(small, match)
            counted = None if isinstance(part.ops[0], ast.NotEq) else _counts(small, enclosing, store)
            if not sized and counted is None and not (isinstance(small, ast.Name) and small.id in loops):
                continue
            length, capacity = length_of(container), _number(large, owner, statement, store)
            if capacity is None and (
                not (sized or counted) or asked >= (_FIRM if sized else TRUST) or _unlimited(part, owner)
            ):
                continue
            if not sized and any(word in text(large).lower() for word in _TURNS):
                continue  # it counts to the end of the program
            if capacity is not None and length is not None and length > 2 * capacity + 16:
                continue  # the condition does not hold it back
            where = f"{os.path.basename(store.file.name)}:{enclosing.lineno}"
            reason = f"bounded by its own code: entries are added only when {text(enclosing.test)} ({where})"
            return Bound(reason, length, capacity)
    return None


def _counts(node: Any, enclosing: Any, store: Store) -> Optional[bool]:
    """Whether a condition asks a counter that is raised: True where that happens under it (`if self.n < self.size:
    self.n += 1; …`), False elsewhere in the same function, None nowhere. A loop's own condition is none: it holds until
    the program is over."""
    if not isinstance(enclosing, ast.If) or not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    wanted = text(node)
    if any(_raises(part, wanted) for statement in enclosing.body for part in ast.walk(statement)):
        return True
    near = (each for each in store.file.statements if each.function is store.statement.function)
    return False if any(_raises(each.node, wanted) for each in near) else None


def _raises(node: Any, wanted: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Add) and text(node.target) == wanted
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp):
        return False
    own = any(text(target) == wanted for target in node.targets)
    return (
        own
        and isinstance(node.value.op, ast.Add)
        and wanted in (text(node.value.left), text(node.value.right))
    )


def inner_bound(container: Any, below: List[Any], blocks: int, store: Optional[Store]) -> Optional[Bound]:
    """A container of containers that have a bound each, `{label: deque(maxlen=20), …}`. `below`: what lies between it
    and the blocks. Where there is hardly more than one block for each, it may be new ones that are added, unless the
    statement cannot do that: it appends to an entry of a plain dict."""
    node = store.statement.node if store is not None else None
    cannot = (
        type(container) is dict
        and isinstance(node, ast.Expr)
        and not any(
            last_name(call.func) == "setdefault" for call in ast.walk(node) if isinstance(call, ast.Call)
        )
    )
    number = length_of(container)
    for inner in below:
        bound = own_bound(inner)
        if bound is None or not number or not bound.capacity:
            continue
        if blocks < 2 * number and not cannot:
            return None
        return Bound(
            f"{number} containers with a bound each: {bound.reason}", blocks, number * bound.capacity
        )
    return None


def begun_anew(store: Store, holder: Holder) -> Optional[Bound]:
    """What an outer loop of the same function empties at each turn, or (`before, now = now, []`) what is handed on
    there and emptied: a sawtooth, no leak."""
    handed = _handed_on(store, holder)
    if handed is not None:
        return handed
    if len(store.statement.loops) < 2:
        return None
    match = finds(holder)
    if holder.kind == "attribute":  # the same one, as the function writes it
        own = {text(part) for part in expressions(store.statement.node) if match(part)}
        match = _written(own) if len(own) == 1 else _written(())
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
            match(single) and (_empty(value) or (single is target and holder.kind != "attribute"))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for single, value in _pairs(target, node.value)
        )
        if not emptied and not (takes(statement, match) and "clear" in text(node)):
            continue
        where = f"{os.path.basename(store.file.name)}:{statement.line}"
        return Bound(f"emptied at each turn of the outer loop ({where})", None, None)
    return None


def _written(texts: Iterable[str]) -> Matcher:
    return lambda node: isinstance(node, ast.Attribute) and text(node) in texts


def _handed_on(store: Store, holder: Holder) -> Optional[Bound]:
    """`before = now` in a loop, of a `now` that the same turn begins anew: it holds what one turn gathers."""
    here, match = store.statement, finds(holder)
    if not here.loops:
        return None
    given = [text(value) for single, value in _assigned(here.node) if match(single) and not _empty(value)]
    for statement in store.file.statements:
        if statement.function is not here.function or statement.loops != here.loops:
            continue
        if statement.tests != here.tests or statement.line < here.line:
            continue
        if any(text(single) in given and _empty(value) for single, value in _assigned(statement.node)):
            where = f"{os.path.basename(store.file.name)}:{statement.line}"
            tests = [test.test for test in here.tests if isinstance(test, ast.If)]
            if not tests:
                return Bound(f"emptied at each turn of the outer loop ({where})", None, None)
            if any(_is_len(part, lambda node: text(node) in given) for part in ast.walk(tests[-1])):
                return Bound(f"emptied every time {text(tests[-1])} ({where})", None, None)
    return None


def _assigned(node: Any) -> List[Tuple[Any, Any]]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [pair for target in targets for pair in _pairs(target, node.value)]


def emptied(
    store: Store, holder: Holder, receivers: List[str], finder: Finder, asked: int = 0
) -> Optional[Bound]:
    """An object that is told to empty itself, without condition, at each turn of a loop around the adding. `asked`: how
    often it was believed before."""
    adder = getattr(store.statement.function, "name", "")
    if store.how == "call":  # a library adds; the line is the user's call of it
        names, adder = ["reset"], ""
    else:
        names = emptying(store, holder)
    if not receivers:
        return None
    match = finds(holder)
    for place in finder.user_files:
        file = finder.files.get(place)
        for statement in file.statements:
            if not statement.loops or not all(_is_there(test, statement) for test in statement.tests):
                continue
            if statement.node is store.statement.node or statement.handlers:
                continue
            loops = statement.loops
            told = tells(statement, names, receivers, holder)
            if asked >= ONCE and (not told or any(isinstance(test, ast.If) for test in statement.tests)):
                continue
            if not told and not (store.how != "call" and empties_own(statement, match, receivers, holder)):
                # for callback in callbacks: callback.on_epoch_end()
                each = _names(getattr(loops[-1], "target", loops[-1].__class__))
                if len(loops) < 2 or not tells(statement, names, [*each], holder):
                    continue
                loops = loops[:-1]
            turn = [s for s in file.statements if s.loops[: len(loops)] == loops]
            same = any(s.node is store.statement.node for s in turn)
            if asked >= ONCE and not _is_around(statement, file.name, finder):
                continue
            if same or (adder and reaches(turn, adder, finder)):
                where = f"{os.path.basename(file.name)}:{statement.line}"
                return Bound(f"emptied at each turn of the outer loop ({where})", None, None)
    return None


def _is_around(statement: Statement, file: str, finder: Finder) -> bool:
    """Whether the statement's function called what allocated, as far as is known."""
    node = statement.function
    if not finder.stack:
        return True
    return any(
        place == file and (name == "<module>" if node is None else node.lineno <= line <= node.end_lineno)
        for place, name, line in finder.stack
    )


def holds(test: Any, statement: Statement) -> bool:
    """Whether an enclosing `if` must be true for a statement to run, and not false."""
    return any(inner is statement.node for part in test.body for inner in ast.walk(part))


def _is_there(test: Any, statement: Statement) -> bool:
    """Whether a condition is a loop's, or asks only whether there is what the statement calls: `hasattr(x, "m")`,
    `x is not None`."""
    if not isinstance(test, ast.If):
        return True
    if not holds(test, statement):
        return False
    condition = test.test
    called = [node.func for node in expressions(statement.node) if isinstance(node, ast.Call)]
    receivers = [text(part) for func in called for part in (func, getattr(func, "value", func))]
    if isinstance(condition, ast.Call) and last_name(condition.func) in ("hasattr", "callable"):
        named = [part.value for part in condition.args[1:2] if isinstance(part, ast.Constant)]
        if condition.args[1:] and not any(getattr(func, "attr", None) in named for func in called):
            return False
        return any(text(node) in receivers for node in condition.args[:1])
    if isinstance(condition, ast.Compare) and isinstance(condition.ops[0], ast.IsNot):
        other = condition.comparators[0]
        of_none = isinstance(other, ast.Constant) and other.value is None and len(condition.ops) == 1
        return of_none and text(condition.left) in receivers
    return False


def emptying(store: Store, holder: Holder) -> List[str]:
    """The methods of the holder's class that empty it, whatever happens."""
    if holder.kind != "attribute":
        return []
    match = finds(holder)
    found = []
    for statement in store.file.statements:
        function = getattr(statement.function, "name", "")
        if statement.cls not in holder.classes or statement.tests or function in ("", "__init__"):
            continue
        if empties(statement, match) and statement.function is not store.statement.function:
            found.append(function)
    return found


def empties(statement: Statement, match: Matcher) -> bool:
    """Whether a statement takes out everything: `x = []`, `x.clear()`, `del x[:]`."""
    node = statement.node
    if isinstance(node, ast.Delete):
        whole = [
            part.value for part in node.targets if _is_cut(part) and part.slice.lower is part.slice.upper
        ]
        return any(match(value) for value in whole)
    if any(match(target) and _empty(value) for target, value in _assigned(node)):
        return True
    return takes(statement, match) and ".clear(" in text(node)


def tells(statement: Statement, names: List[str], receivers: List[str], holder: Holder) -> bool:
    for node in expressions(statement.node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            receiver = text(node.func.value).rsplit(".", 1)[-1]
            if receiver in receivers and (receiver != "self" or statement.cls in holder.classes):
                return True
    return False


def empties_own(statement: Statement, match: Matcher, receivers: List[str], holder: Holder) -> bool:
    """Whether a statement empties an attribute of the object that the receivers are names of."""

    def own(node: Any) -> bool:
        if not isinstance(node, ast.Attribute) or not match(node):
            return False
        base = text(node.value).rsplit(".", 1)[-1]
        return base in receivers and (base != "self" or statement.cls in holder.classes)

    return holder.kind == "attribute" and empties(statement, own)


def reaches(statements: List[Statement], adder: str, finder: Finder) -> bool:
    """Whether the statements call the function, or one that does."""
    called = _called_names(statements)
    if adder in called:
        return True
    for place in finder.user_files:
        file = finder.files.get(place)
        for node, _ in file.functions:
            if node.name in called and adder in _called_names(
                [s for s in file.statements if s.function is node]
            ):
                return True
    return False


def _called_names(statements: List[Statement]) -> Dict[str, None]:
    names: Dict[str, None] = {}
    for statement in statements:
        for node in expressions(statement.node):
            if isinstance(node, ast.Call):
                names[last_name(node.func)] = None
    return names


def takes(statement: Statement, match: Matcher) -> bool:
    node = statement.node
    if isinstance(node, ast.Delete):
        return any(
            match(stripped(target)[0]) and target is not stripped(target)[0] for target in node.targets
        )
    for target, value in _assigned(node):
        if match(stripped(target)[0]) and _is_cut(value) and match(stripped(value)[0]):
            return True  # x = x[-100:]
        if match(target) and not any(match(part) for part in ast.walk(value)):
            return bool(statement.tests)  # if len(x) > n: x = []
    for part in expressions(node):
        if not isinstance(part, ast.Call):
            continue
        if (
            isinstance(part.func, ast.Attribute)
            and part.func.attr in _TAKERS
            and match(stripped(part.func.value)[0])
        ):
            return True
        if last_name(part.func) in _TAKING and part.args and match(stripped(part.args[0])[0]):
            return True
    return False


def _bounding_test(statement: Statement, match: Matcher, store: Store) -> Optional[_Test]:
    """The condition under which the statement takes out, if it is one about the size of the container."""
    node = statement.node
    if isinstance(node, ast.Assign) and _is_cut(node.value) and not statement.tests:
        return _Test(node.value, node.value, True, True)  # always cut to its last entries
    for enclosing in reversed(statement.tests):
        for part in ast.walk(enclosing.test):
            if not isinstance(part, ast.Compare) or not any(
                isinstance(op, (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq)) for op in part.ops
            ):
                continue
            if any(_is_len(inner, match) for inner in ast.walk(part)):
                return _Test(enclosing.test, part, True, True)
            words = text(part).lower()
            firm = _concerns(part, statement, match, store)
            if firm is not None and any(word in words for word in _WORDS):
                return _Test(enclosing.test, part, firm, False)
    return None


def _is_len(node: Any, match: Matcher) -> bool:
    return (
        isinstance(node, ast.Call)
        and text(node.func) == "len"
        and bool(node.args)
        and match(stripped(node.args[0])[0])
    )


def _concerns(part: Any, taker: Statement, match: Matcher, store: Store) -> Optional[bool]:
    """Whether a comparison is about the container: True where it, a count of it or its keys are compared, False where
    only a counter or an index is, or the memory in use; None where it is about something else."""

    def holds(node: Any) -> bool:
        return any(match(inner) for inner in ast.walk(node))

    file, calls = store.file, [inner for inner in ast.walk(part) if isinstance(inner, ast.Call)]
    if any(holds(given) for call in calls for given in call.args):
        return True
    names = {last_name(inner) for inner in ast.walk(part) if isinstance(inner, (ast.Name, ast.Attribute))}
    counted = any("memory" in text(call.func) for call in calls)
    for loop in taker.loops:
        if isinstance(loop, (ast.For, ast.AsyncFor)) and names & _names(loop.target):
            if holds(loop.iter):
                return True
            counted = True
    for statement in file.statements:
        node = statement.node
        asked = statement.function is not None and statement.function.name in names
        if asked and any(match(inner) for inner in expressions(node)):
            return True  # a method or a property that asks the container
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(match(stripped(target)[0]) for target in targets):
            continue
        own = {last_name(target) for target in targets} & names
        if own and holds(node.value):
            return True
        again = isinstance(node, ast.AugAssign) or bool(own & _names(node.value))
        near = statement.function in (taker.function, store.statement.function) or (
            statement.cls is not None and statement.cls == taker.cls
        )
        counted = counted or (bool(own) and near and (again or "memory" in text(node.value)))
    keys = [
        target.slice
        for target in (taker.node.targets if isinstance(taker.node, ast.Delete) else [])
        if isinstance(target, ast.Subscript)
    ]
    for call in expressions(taker.node):
        if isinstance(call, ast.Call) and last_name(call.func) in _TAKERS:
            keys += call.args
    return False if counted or any(names & _names(key) for key in keys) else None


def _names(node: Any) -> Set[str]:
    return {last_name(inner) for inner in ast.walk(node) if isinstance(inner, (ast.Name, ast.Attribute))}


def _measured(
    test: _Test, taker: Statement, store: Store, container: Any, owner: Any
) -> Tuple[Optional[int], Optional[int], bool]:
    """How full the container is and how full it may be, as far as known, and whether these count entries."""
    length, compare = length_of(container), test.compare
    if _is_cut(compare):
        lower = compare.slice.lower
        capacity = _number(lower.operand, owner, taker, store) if isinstance(lower, ast.UnaryOp) else None
        return length, capacity, True
    if len(compare.comparators) != 1:
        return length, None, True
    sides = [compare.left, compare.comparators[0]]
    if test.sized:
        sides = [side for side in sides if not (isinstance(side, ast.Call) and text(side.func) == "len")]
        numbers = [_number(side, owner, taker, store) for side in sides] if len(sides) == 1 else []
        return length, next(iter(numbers), None), True
    if isinstance(compare.ops[0], (ast.Lt, ast.LtE)):
        sides.reverse()
    index = {name for loop in taker.loops for name in _names(getattr(loop, "target", compare.ops[0]))}
    capacity = _number(sides[1], owner, taker, store)
    if last_name(sides[0]) in index:
        return length, capacity, True
    count = _number(sides[0], owner, taker, store) if isinstance(sides[0], ast.Attribute) else None
    return (count, capacity, False) if count and capacity else (length, None, True)


def _number(node: Any, owner: Any, taker: Statement, store: Store) -> Optional[int]:
    """A constant, an attribute of the owner that is a whole number, or a name that is bound to one constant."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Attribute) and owner is not None:
        try:
            value = object.__getattribute__(owner, "__dict__").get(node.attr)
        except Exception:
            return None
        return value if type(value) is int else None
    if not isinstance(node, ast.Name):
        return None
    bound = []
    for statement in store.file.statements:
        if statement.function not in (None, taker.function):
            continue
        if isinstance(statement.node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = getattr(statement.node, "targets", None) or [statement.node.target]
            if any(node.id == last_name(target) for target in targets if isinstance(target, ast.Name)):
                bound.append(statement.node.value)
    arguments = getattr(taker.function, "args", None)
    if arguments is not None and any(
        each.arg == node.id for each in [*arguments.args, *arguments.kwonlyargs]
    ):
        return None  # whatever is passed
    value = getattr(bound[0], "value", None) if len(bound) == 1 else None
    return value if type(value) is int else None


def _unlimited(compare: Any, owner: Any) -> bool:
    """Whether what is compared with is an attribute that says there is no limit."""
    try:
        names = object.__getattribute__(owner, "__dict__")
    except Exception:
        return False
    values = [names.get(part.attr, 0) for part in ast.walk(compare) if isinstance(part, ast.Attribute)]
    return any(value is None or (type(value) is float and value == float("inf")) for value in values)


def _is_cut(node: Any) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)


def length_of(container: Any) -> Optional[int]:
    kind = type(container)
    for base in (list, dict, set, collections.deque):
        if base in kind.__mro__:
            return base.__len__(container)  # type: ignore[attr-defined]
    return None
