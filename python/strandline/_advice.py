"""Chooses the fix for what was found: which of the sentences of _fixes says what to change here.

Must not know: how paths and lines are found.
Invariant: says of a thing only what its path, its line and its container show.
"""

import ast
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import _fixes, _growth, _keys, _standard
from ._code import last_name, text
from ._holders import is_container, isinstance_plain
from ._linked import Linked, link
from ._path import _LRU, _TENSOR_HOOKS, Path, Step, type_name
from ._source import HOOKS, Holder, Store, _pairs, stripped

_SUSPENDED = (" > generator ", " > coroutine ", " > async_generator ")


class Evidence(NamedTuple):
    candidate: Dict[str, Any]
    paths: List[Tuple[int, Path]]  # the step of birth, the path
    sought: int
    role: str
    collecting: bool
    current: Set[int]
    complete: bool
    modules: List[Any]  # every module of the program
    optimizers: List[Any]  # every optimizer
    pace: float = 0.0  # seconds a step
    others: Sequence[Path] = ()  # to the same blocks, through the graphs of other tensors


class Kept(NamedTuple):
    file: str
    line: int
    code: str
    store: Optional[Store]
    holder: Optional[Holder]
    step: Optional[Step]
    stored_in: str  # where a library's own line stores it, when the line named is the user's call


class Advice:
    """For one path. `growth`: the step of it whose container grows; `row`: the linked objects on it."""

    def __init__(self, evidence: Evidence, path: Path, growth: Optional[int], row: Optional[Linked]) -> None:
        self.evidence, self.path, self.growth, self.row = evidence, path, growth, row

    def stem(self) -> str:
        steps = self.path.steps[: self.growth] if self.growth is not None else self.path.steps
        return self.path.prefix + "".join(step.text for step in steps if step.kind != "index")

    @staticmethod
    def _parts(kept: Optional[Kept]) -> bool:
        """Whether what is kept is a tuple or a list of tensors, as an LSTM's state is."""
        return kept is not None and kept.step is not None and type(kept.step.value) in (tuple, list)

    def fix(self, kept: Optional[Kept], container: Any, again: str, itself: bool = False) -> str:
        """`again`: where it is read again and again, if it is; `itself`: what is stored is made of what was there."""
        path = self.path
        node = kept.store.statement.node if kept and kept.store else None
        name = self.name(kept)
        around = path.around
        if kept and kept.step is not None and hasattr(type(kept.step.parent), "_forward_cls"):
            return _fixes.context(kept.step.name)
        if path.root == "cycle" and any(
            step.name in _TENSOR_HOOKS and hasattr(step.parent, "grad_fn") for step in around
        ):
            return _fixes.own_hook(next((step.name for step in reversed(around) if step.name), "itself"))
        if path.root == "cycle":
            return _fixes.cycle(
                f"{type_name(around[0].parent)}{around[0].text}"
                if around
                else "an object that refers to itself",
                self.evidence.collecting,
            )
        steps = path.steps
        if any(is_a(step.parent, "Optimizer") for step in steps) and (
            kept is not None and kept.step is not None and kept.step.name == "param_groups"
        ):
            return _fixes.added_groups()
        if container is not None and type(container) is _LRU:
            return _fixes.cache(
                getattr(container, "__name__", "the function"), container.cache_info().maxsize
            )
        if any(step.name == "__traceback__" for step in steps):
            return _fixes.traceback(node, name)
        if self.row is not None:
            return self._linked(name, self.row)
        below = steps[self.growth + 1 :] if self.growth is not None else []
        if any(type(step.parent).__module__ in ("queue", "_queue") for step in steps):
            return _fixes.queue(next((s.name for s in steps if s.kind in ("name", "attribute")), "it"))
        if kept and _growth.of_modules(container) and kept.store is not None:  # a ParameterList, a ModuleDict
            if again:
                return _fixes.grows_in_use(name, "modules", again)
            return _fixes.container(
                name, "dict" if "Dict" in type_name(container) else "list", _fixes.stored_value(node)
            )
        standard = (
            None
            if path.through_graph
            else _standard.fix(steps, next((s.name for s in steps if s.name), "it"))
        )
        if standard is not None:
            return standard
        if kept and kept.stored_in:
            if kept.store is None:
                return _fixes.adds_by_library(kept.code)
            method = self._told(kept)
            emptied = f"{name}.{method}()" if method else ""
            return _fixes.call_of_library(kept.code, kept.stored_in, path.through_graph, emptied)
        if kept and kept.step is not None and kept.step.name in HOOKS:
            of_tensor = kept.step.name == "_backward_hooks" and hasattr(kept.step.parent, "grad_fn")
            return _fixes.hooks(name, "register_hook" if of_tensor else HOOKS[kept.step.name])
        above = steps[: self.growth] if self.growth is not None else []
        again_and_again = next((step for step in above if step.name in HOOKS and _alike(step.value)), None)
        if again_and_again is not None:
            return _fixes.hooks(name, HOOKS[again_and_again.name])
        if above and above[-1].text.startswith(".<default") and not path.through_graph:
            return _fixes.default_argument(above[-1].name, above[-1].parent.__name__)
        if any(step.text.startswith(_SUSPENDED) for step in below):
            return _fixes.generators(name)
        for step in below:
            if step.text.startswith(".<closure"):
                return _fixes.captured(name, "function", step.name, path.through_graph)
            if step.name == "keywords" or (step.name == "args" and type_name(step.parent) == "partial"):
                argument = step.text.split("'")[1] if "'" in step.text else self._argument(step)
                return _fixes.captured(name, "partial", argument, path.through_graph)
        for step in steps:
            if is_a(step.parent, "Optimizer") and id(step.parent) not in self.evidence.current:
                return _fixes.old_optimizer(name, self._second(step.parent))
            if is_a(step.parent, "Future"):
                return _fixes.future(name)
        if path.through_graph:
            value = kept.step.value if kept and kept.step is not None else None
            store = kept.store if kept else None
            added = is_container(value) and store is not None and store.how in ("add", "item")
            return (
                _fixes.graph_stored(node, name, path.scalar, any(step.kind == "index" for step in below))
                if container is not None or added
                else _fixes.graph_accumulated(node, name, path.scalar, self._parts(kept))
            )
        if container is not None and any(step.weak for step in below):
            return _fixes.old_model(name)
        if any(type_name(step.parent) in ("WeakKeyDictionary", "WeakValueDictionary") for step in steps):
            return _fixes.weak(name)
        small, large = path.sizes
        if container is not None and 0 < 4 * small <= large:
            return _fixes.view(name, small, large)
        if container is not None and kept and kept.step is not None and is_a(kept.step.parent, "Dataset"):
            return _fixes.dataset(name)
        if self.growth is not None and steps[self.growth].kind != "index" and not steps[self.growth].weak:
            return _fixes.attributes(
                "globals()" if self.growth == 0 else self.stem().split(": ")[-1].replace("global ", "")
            )
        if container is not None:
            kind = "dict" if isinstance_plain(container, dict) else "list"
            if _fixes.stored_value(node) == "self" and below:
                return _fixes.registered(name, type_name(below[0].parent))
            new = self._new_keys(kept, container)
            if new:
                return _fixes.new_keys(name, new)
            emptied = self._told(kept)
            if emptied:
                return _fixes.told(name, emptied)
            if again:
                return _fixes.grows_in_use(name, kind, again)
            return _fixes.container(name, kind, _fixes.stored_value(node))
        if path.root == "stack":
            return _fixes.generator(name) if path.suspended else _fixes.outside()
        store = kept.store if kept else None
        regrows = self.evidence.candidate.get("shape") == "regrow" and store is not None
        if regrows or (store is not None and store.how in ("again", "augment")):
            value = kept.step.value if kept and kept.step is not None else None
            if not regrows and isinstance_plain(value, tuple):
                return _fixes.tuple_grown(name)
            return _fixes.regrown(name, itself or not regrows)
        return _fixes.retained(name)

    @staticmethod
    def _new_keys(kept: Optional[Kept], container: Any) -> str:
        if kept is None or kept.store is None or kept.holder is None:
            return ""
        store = kept.store
        key = _keys.key_of(store, kept.holder)
        return (
            "" if key is None else _standard.new_keys(container, key, store.statement, store.file.statements)
        )

    @staticmethod
    def _told(kept: Optional[Kept]) -> str:
        """The method that empties what the line tells to add something."""
        value = None if kept is None else told(kept, "add", "call")
        return "" if value is None else _standard.resets(value)

    def _argument(self, step: Step) -> str:
        """The name that the function of a partial has for the argument on the path."""
        names = getattr(getattr(step.parent.func, "__code__", None), "co_varnames", ())
        after = self.path.steps[self.path.steps.index(step) + 1 :]
        place = after[0].text[1:-1] if after else ""
        return names[int(place)] if place.isdigit() and int(place) < len(names) else "that it is given"

    def _second(self, optimizer: Any) -> bool:
        """Whether an optimizer in use trains a parameter of this old one."""
        own = _parameters(optimizer)
        return any(
            id(other) in self.evidence.current and own & _parameters(other)
            for other in self.evidence.optimizers
        )

    def _linked(self, name: str, row: Linked) -> str:
        step = self.path.steps[row.start]
        if step.text.startswith(".<closure"):
            return _fixes.wrapped(name, step.name)
        how = link(self.path, row)
        if type_name(step.parent) == "partial":
            return _fixes.wrapped(name, how)
        return _fixes.linked(type_name(step.parent), how, step.kind in ("part", "opaque"))

    def name(self, kept: Optional[Kept]) -> str:
        step = kept.step if kept else None
        if step is None:
            return self.stem().split(": ")[-1].replace("global ", "") or "it"
        if step.text.startswith(".<default"):
            return step.name
        if self.evidence.candidate.get("shape") == "regrow" and kept is not None:
            entry = _entry(kept, step.name)
            if entry:
                return entry
        holder = kept.holder if kept and step.kind == "index" else None
        if step.kind == "attribute" or (holder is not None and holder.kind == "attribute"):
            own = step.name if holder is None else holder.name
            node = kept.store.statement.node if kept and kept.store else None
            for part in [] if node is None else ast.walk(node):
                if getattr(part, "attr", None) == own:
                    return text(part)
            return f"{class_name(step.parent)}.{own}" if holder is None else own
        return step.name if holder is None else holder.name


def told(kept: Kept, *hows: str) -> Any:
    """The object of a library, no container, that the line tells to add something (`metric.update(p, y)`); None if it
    tells none. `hows`: the ways of adding that count."""
    value = kept.step.value if kept.step is not None else None
    adds = kept.store is not None and kept.store.how in hows
    return value if adds and value is not None and not is_container(value) else None


def _entry(kept: Kept, name: str) -> str:
    """The entry that a statement stores into, as it writes it: `bank[name]`. "" if it is none of that name."""
    node = kept.store.statement.node if kept.store is not None else None
    for target in node.targets if isinstance(node, ast.Assign) else []:
        for single, _ in _pairs(target, node.value):
            if isinstance(single, ast.Subscript) and last_name(stripped(single)[0]) == name:
                return text(single)
    return ""


def _alike(hooks: Any) -> bool:
    """Whether one statement has registered several of these hooks."""
    codes = [
        getattr(hook, "__code__", None) for hook in (hooks.values() if isinstance_plain(hooks, dict) else ())
    ]
    return any(code is not None and codes.count(code) > 1 for code in codes)


def _parameters(optimizer: Any) -> Set[int]:
    try:
        return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    except Exception:  # not an optimizer of torch's after all
        return set()


def class_name(owner: Any) -> str:
    return owner.__name__ if isinstance_plain(owner, type) else type_name(owner)


def is_a(thing: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(thing).__mro__)
