"""Writes a chain of references as an expression that a person recognises.

Must not know: how the chain was found, source code.
Invariant: runs none of the user's code: no __repr__, __getattr__ or property is called, keys are shown only when they
are plain values.
"""

import collections
import contextvars
import functools
import os
import types
from typing import Any, Dict, List, Optional, Tuple

from ._holders import Chain, isinstance_plain
from ._roots import Local, Roots, locals_of

_LRU = type(functools.lru_cache(maxsize=1)(len))
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


class Step:
    """One step down a path.

    kind: "name" (a variable: global, local, closure, frame), "attribute", "index" (a place in a container that can
    grow), "part" (a place in something fixed: tuple, partial, exception …), "opaque".
    """

    __slots__ = ("kind", "name", "parent", "text", "token", "value", "weak", "where")

    def __init__(
        self, kind: str, text: str, parent: Any, value: Any, name: str = "", where: Optional[Local] = None
    ) -> None:
        self.kind, self.text, self.parent, self.value, self.name, self.where = (
            kind,
            text,
            parent,
            value,
            name,
            where,
        )
        self.token = text  # tells this place from others that are written alike
        self.weak = False  # a module's parameter or submodule: seldom what was meant


class Path:
    """A whole path: where it begins, its steps, and what autograd adds behind them."""

    def __init__(self, root: str, prefix: str, steps: List[Step], file: str = "") -> None:
        self.root, self.prefix, self.steps, self.file = root, prefix, steps, file
        self.tail: Tuple[str, ...] = ()
        self.through_graph = False
        self.nodes = 0  # of the graph behind the tensor at the end of the steps
        self.graph: Optional[int] = None  # what tells this graph from others
        self.scalar = False  # the tensor at the end of the steps is a single number
        self.sizes = (0, 0)  # bytes of the tensor, bytes of its storage
        self.suspended = False  # it begins at a generator or a coroutine
        self.around: List[Step] = []  # of a cycle: the steps once around it

    def ending_as(self, other: "Path") -> "Path":
        """This path, to the same tensor as `other`, with what `other` says of it."""
        self.tail, self.through_graph, self.nodes = other.tail, other.through_graph, other.nodes
        self.graph, self.scalar, self.sizes = other.graph, other.scalar, other.sizes
        return self

    def followed_by(self, other: "Path") -> "Path":
        """This path, to what the first step of `other` leads to, and on as `other` goes."""
        whole = Path(self.root, self.prefix, [*self.steps, *other.steps[1:]], self.file)
        whole.suspended = self.suspended
        return whole.ending_as(other)

    def text(self) -> str:
        words = self.prefix + "".join(step.text for step in self.steps)
        return " > ".join([words, *self.tail])

    def keys(self) -> List[str]:
        return [step.token for step in self.steps]


def plain(value: Any) -> Optional[str]:
    """A key as text, if showing it runs nobody's code and helps anybody."""
    kind = type(value)
    if kind in (int, float, bool, type(None), str, bytes):
        text = repr(value)
        return text if len(text) <= 48 else text[:40] + "…" + text[-1]
    if kind is tuple and len(value) <= 6:
        inner = [plain(item) for item in value]
        if all(item is not None for item in inner):
            text = "(" + ", ".join(str(item) for item in inner) + ("," if len(inner) == 1 else "") + ")"
            return text if len(text) <= 60 else text[:56] + "…)"
    return None


def instance_dict(thing: Any) -> Optional[Dict[str, Any]]:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except Exception:
        return None
    return found if isinstance_plain(found, dict) else None


def write(chain: Chain, roots: Roots) -> Path:
    """The chain as a path."""
    links = chain.links
    if chain.root == "cycle" and chain.loop is not None:
        return _cycle(chain)
    if chain.root == "global":
        module = roots.globals.get(id(links[0]))
        names = links[0]
        file = roots.module_file(names)
        name, _at = _key_of(names, links[1]) if len(links) > 1 else (None, "value")
        step = Step("name", str(name), names, links[1] if len(links) > 1 else None, name=str(name))
        label = os.path.basename(file)
        if module is not None and module.__name__ != "__main__" and not label.endswith(".py"):
            label = module.__name__
        if label == "sys":
            return Path("global", "sys.", [step, *_steps(links[1:])], file)
        return Path("global", f"{label}: global ", [step, *_steps(links[1:])], file)
    if chain.root == "local" and chain.local is not None:
        place = chain.local
        step = Step("name", place.name, None, links[0], name=place.name, where=place)
        return Path(
            "local",
            f"{os.path.basename(place.file)}: local of {place.function}(): ",
            [step, *_steps(links)],
            place.file,
        )
    if chain.root == "class":
        kind = links[0]
        steps = _steps(links)
        return Path("class", f"class {kind.__qualname__}", steps, "")
    head = links[0]
    described = describe(head)
    path = Path(chain.root, described, _steps(links), "")
    path.suspended = type(head) in _GENERATORS
    return path


def _cycle(chain: Chain) -> Path:
    loop = chain.loop or []
    around = _steps(loop)
    name = type_name(loop[0]) if loop else "?"
    prefix = f"reference cycle {name}" + "".join(step.text for step in around) + f" (the same {name})"
    path = Path("cycle", prefix, _steps(chain.links), "")
    if path.steps:
        path.prefix += f" > {name}"
    path.around = around
    return path


def type_name(thing: Any) -> str:
    kind = type(thing)
    return kind.__name__


def describe(thing: Any) -> str:
    """A word for the object at the top of a chain that begins at no name."""
    if type(thing) is _LRU:
        return f"functools.lru_cache of {_function_name(thing)}()"
    for kind in _GENERATORS:
        if type(thing) is kind:
            return f"{kind.__name__} {thing.__name__}()"
    if type(thing) is contextvars.Context:
        return "the context of a thread or task: "
    if isinstance_plain(thing, types.ModuleType):
        return f"module {thing.__name__}"
    if type(thing) is types.FunctionType:
        return f"function {thing.__qualname__}()"
    return f"{type_name(thing)} held by C++ or a running statement"


def _function_name(thing: Any) -> str:
    inner = getattr(thing, "__wrapped__", None)
    return getattr(inner, "__qualname__", None) or type_name(thing)


def _key_of(names: Any, value: Any) -> Tuple[Any, str]:
    """The key under which a dict holds `value`, or "key" if it is itself one."""
    for key, held in dict.items(names):
        if held is value:
            return key, "value"
    for key in dict.keys(names):
        if key is value:
            return key, "key"
    return None, "none"


def _steps(links: List[Any]) -> List[Step]:
    steps: List[Step] = []
    at = 0
    while at + 1 < len(links):
        parent, child = links[at], links[at + 1]
        rest = links[at + 2 :]
        try:
            used, made = _step(parent, child, rest)
        except Exception:
            used, made = 1, [Step("opaque", f".<{type_name(child)} in {type_name(parent)}>", parent, child)]
        steps.extend(made)
        at += used
    return steps


def _alike(kind: str, text: str, parent: Any, value: Any, name: str = "") -> Step:
    """A step that is written like others of its container."""
    step = Step(kind, text, parent, value, name=name)
    step.token = f"{text}#{id(value)}"
    return step


def _attribute(parent: Any, name: Any, value: Any) -> Step:
    return Step("attribute", f".{name}", parent, value, name=str(name))


def _step(parent: Any, child: Any, rest: List[Any]) -> Tuple[int, List[Step]]:
    """How `parent` refers to `child`: the number of links used up, and the steps."""
    kind = type(parent)
    bases = kind.__mro__
    if dict in bases:
        own = instance_dict(parent)
        if own is not None and own is child and rest:
            return 2, [_attribute(parent, _key_of(own, rest[0])[0], rest[0])]
        key, side = _key_of(parent, child)
        if side == "none":
            return 1, [Step("opaque", f".<{type_name(child)}>", parent, child)]
        shown = plain(key)
        if shown is not None:
            return 1, [
                Step(
                    "index", f"[{shown}]" if side == "value" else f".<key {shown}>", parent, child, name=shown
                )
            ]
        shown = f"<{type_name(key)}>"
        return 1, [
            _alike("index", f"[{shown}]" if side == "value" else f".<key {shown}>", parent, child, shown)
        ]
    if tuple in bases:
        position = _position(tuple.__iter__(parent), child)
        fields = kind.__dict__.get("_fields")
        if isinstance(fields, tuple) and position < len(fields):
            return 1, [Step("part", f".{fields[position]}", parent, child)]
        return 1, [Step("part", f"[{position}]", parent, child)]
    if list in bases:
        position = _position(list.__iter__(parent), child)
        if position < 0:
            return _of_instance(parent, child, rest)
        return 1, [Step("index", f"[{position}]", parent, child, name=str(position))]
    if collections.deque in bases:
        position = _position(collections.deque.__iter__(parent), child)
        if position < 0:
            return _of_instance(parent, child, rest)
        return 1, [Step("index", f"[{position}]", parent, child, name=str(position))]
    if set in bases or frozenset in bases:
        return 1, [_alike("index", f"{{…{type_name(child)}…}}", parent, child)]
    if kind is types.CellType:
        return 1, [Step("part", ".cell_contents", parent, child)]
    if kind is types.FunctionType:
        return _of_function(parent, child, rest)
    if kind is types.MethodType:
        return 1, [Step("part", ".__self__" if parent.__self__ is child else ".__func__", parent, child)]
    if kind is _LRU:
        return _of_cache(parent, child, rest)
    if kind is contextvars.Context:
        return _of_context(parent, child, rest)
    if kind is functools.partial:
        name = (
            "keywords"
            if parent.keywords is child
            else "args"
            if parent.args is child
            else "func"
            if parent.func is child
            else ""
        )
        if name:
            if name == "keywords" and rest:
                return 2, [
                    Step(
                        "part",
                        f".keywords[{plain(_key_of(child, rest[0])[0])}]",
                        parent,
                        rest[0],
                        name="keywords",
                    )
                ]
            return 1, [Step("part", f".{name}", parent, child, name=name)]
        return _of_instance(parent, child, rest)
    if BaseException in bases:
        for name in ("__traceback__", "__cause__", "__context__", "args"):
            if getattr(BaseException, name).__get__(parent) is child:
                return 1, [Step("part", f".{name}", parent, child, name=name)]
        return _of_instance(parent, child, rest)
    if kind is types.TracebackType:
        if child is parent.tb_next:
            return 1, []
        return 1, [Step("part", f" > frame of {parent.tb_frame.f_code.co_name}()", parent, child)]
    if kind is types.FrameType:
        return _of_frame(parent, child, rest)
    if kind in _GENERATORS:
        frame = (
            getattr(parent, "gi_frame", None)
            or getattr(parent, "cr_frame", None)
            or getattr(parent, "ag_frame", None)
        )
        if frame is child or frame is None:
            return 1, [Step("opaque", "", parent, child)]
        return 1, [_local_step(frame, child, f" > {kind.__name__} {parent.__name__}()")]
    if type in bases:
        return _of_class(parent, child, rest)
    return _of_instance(parent, child, rest)


def _position(items: Any, child: Any) -> int:
    for position, item in enumerate(items):
        if item is child:
            return position
    return -1


def _local_step(frame: Any, child: Any, before: str = "") -> Step:
    for name, value in locals_of(frame).items():
        if value is child:
            code = frame.f_code
            where = Local(code.co_filename, code.co_name, code.co_firstlineno, name, -1, False)
            return Step("name", f"{before} > local {name}", frame, child, name=name, where=where)
    return Step("opaque", f"{before} > a value in the frame", frame, child)


def _of_frame(frame: Any, child: Any, rest: List[Any]) -> Tuple[int, List[Step]]:
    if frame.f_back is child:
        return 1, [Step("part", f" > caller {child.f_code.co_name}()", frame, child)]
    if type(child) is types.CellType and rest:
        return 2, [_local_step(frame, rest[0])]
    return 1, [_local_step(frame, child)]


def _of_function(function: Any, child: Any, rest: List[Any]) -> Tuple[int, List[Step]]:
    if function.__closure__ is child and rest:
        cell = rest[0]
        position = _position(iter(child), cell)
        name = function.__code__.co_freevars[position] if position >= 0 else "?"
        value = rest[1] if len(rest) > 1 else None
        step = Step("part", f".<closure {name}>", function, value, name=name)
        return (3 if len(rest) > 1 else 2), [step]
    if function.__defaults__ is child:
        code = function.__code__
        if rest:
            position = _position(iter(child), rest[0])
            names = code.co_varnames[: code.co_argcount]
            name = names[len(names) - len(child) + position]
            return 2, [Step("attribute", f".<default of {name}>", function, rest[0], name=name)]
        return 1, [Step("part", ".__defaults__", function, child)]
    if function.__kwdefaults__ is child:
        return 1, [Step("part", ".__kwdefaults__", function, child)]
    return _of_instance(function, child, rest)


def _of_context(context: Any, child: Any, rest: List[Any]) -> Tuple[int, List[Step]]:
    """The variable's name instead of the tree in which a context keeps the values."""
    values = {id(value): variable for variable, value in contextvars.Context.items(context)}
    for at, link in enumerate([child, *rest]):
        variable = values.get(id(link))
        if variable is not None:
            step = Step("part", f"ContextVar {variable.name!r}", context, link, name=variable.name)
            return at + 1, [step]
    return 1, [Step("opaque", f".<{type_name(child)}>", context, child)]


def _of_cache(cache: Any, child: Any, rest: List[Any]) -> Tuple[int, List[Step]]:
    facts = cache.cache_info()
    about = f"(hits {facts.hits}, size {facts.currsize}, maxsize {facts.maxsize})"
    used = 1
    if type(child) is dict:  # an unbounded cache keeps a dict, a bounded one a linked list
        if instance_dict(cache) is child:
            return _of_instance(cache, child, rest)
        used = 2 if rest else 1
    text = f" > functools.lru_cache of {_function_name(cache)}() {about}"
    return used, [_alike("index", text, cache, rest[0] if used == 2 else child, "lru_cache")]


def _of_class(kind: Any, child: Any, rest: List[Any]) -> Tuple[int, List[Step]]:
    names = type.__dict__["__dict__"].__get__(kind)
    if type(child) is dict and rest:
        for name, value in names.items():
            if value is rest[0]:
                return 2, [_attribute(kind, name, rest[0])]
    for name, value in names.items():
        if value is child:
            return 1, [_attribute(kind, name, child)]
    return 1, [Step("opaque", f".<{type_name(child)}>", kind, child)]


def _of_instance(parent: Any, child: Any, rest: List[Any]) -> Tuple[int, List[Step]]:
    own = instance_dict(parent)
    if own is not None:
        if own is child:
            if not rest:
                return 1, [Step("part", ".__dict__", parent, child)]
            name, _ = _key_of(own, rest[0])
            return _named(parent, name, rest[0], rest[1:], 2)
        name, side = _key_of(own, child)
        if side == "value":
            return _named(parent, name, child, rest, 1)
    for base in type(parent).__mro__:
        for name, member in list(base.__dict__.items()):
            if type(member) is types.MemberDescriptorType:
                try:
                    if member.__get__(parent) is child:
                        return 1, [_attribute(parent, name, child)]
                except AttributeError:
                    continue
    if hasattr(type(parent), "_backward_hooks"):  # a tensor's own hooks lie in C++
        for name in _TENSOR_HOOKS:
            if getattr(parent, name, None) is child:
                return 1, [_attribute(parent, name, child)]
    if hasattr(type(child), "_forward_cls") or type(child).__name__.endswith(("Backward", "Backward0")):
        return 1, [Step("part", ".grad_fn", parent, child, name="grad_fn")]
    return 1, [Step("opaque", f".<{type_name(child)}>", parent, child)]


def _named(parent: Any, name: Any, value: Any, rest: List[Any], used: int) -> Tuple[int, List[Step]]:
    """An attribute; a module's parameters, buffers and submodules are written as attributes too."""
    if name in _MODULE_DICTS and rest and isinstance_plain(value, dict):
        inner, side = _key_of(value, rest[0])
        if side == "value":
            text = f".{inner}" if isinstance(inner, str) and inner.isidentifier() else f"[{inner}]"
            step = Step("attribute", text, parent, rest[0], name=str(inner))
            step.weak = name != "_buffers"
            return used + 1, [step]
    return used, [_attribute(parent, name, value)]
