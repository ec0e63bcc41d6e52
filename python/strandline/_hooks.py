"""Observes torch without changes to the user's code and tells the clock what it sees.

Must not know: which event ends a step or begins an epoch (_clock decides).
Invariant: nothing here raises into the user's code, keeps an object of the user's, is traced by dynamo, or lies as
a frame between the user's code and torch.
"""

import functools
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional

from . import _trouble
from ._around import around
from ._clock import GRAPH, MODULE, STEPPER, Clock


class Stepping:
    """An optimizer that has stepped: a weak reference, the step in which it was made, and the first and the newest
    in which it stepped."""

    __slots__ = ("first", "last", "made", "optimizer")

    def __init__(self, optimizer: Any, step: int, made: int = 0) -> None:
        self.optimizer, self.first, self.last, self.made = optimizer, step, step, made


optimizers: Dict[int, Stepping] = {}  # by the id of the first parameter: the one that steps it now


def install(clock: Clock) -> None:
    """Puts every hook in place; one that does not fit this torch is said on stderr and left out."""
    for part in (_optimizer, _births, _backward, _modes, _loaders, _workers, _graphs, _servers):
        try:
            part(clock)
        except Exception:
            _trouble.said(f"hooks: {part.__name__.strip('_')}")


def _compiling() -> Callable[[], bool]:
    """A test that dynamo folds into True when it traces one of our hooks, so that it sees an empty function."""
    try:
        from torch.compiler import is_dynamo_compiling

        return is_dynamo_compiling
    except ImportError:
        return lambda: False


def _hide(*functions: Any) -> None:
    """Tells dynamo to leave these functions to the interpreter."""
    try:
        from torch._C._dynamo.eval_frame import skip_code
    except ImportError:
        return
    for function in functions:
        skip_code(function.__code__)


def _key(optimizer: Any) -> int:
    """What an optimizer goes by: its first parameter, which a second optimizer of the same model shares."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return id(parameter)
    return id(optimizer)


def _optimizer(clock: Clock) -> None:
    import importlib

    module = importlib.import_module("torch.optim.optimizer")
    compiling = _compiling()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiling():
            return
        try:
            key = _key(optimizer)
            clock.optimizer_begins(key, id(optimizer))
            known = optimizers.get(key)
            if known is not None and known.optimizer() is optimizer:
                known.last = clock.steps
            else:
                if len(optimizers) > 1000:
                    optimizers.clear()
                optimizers[key] = Stepping(weakref.ref(optimizer), clock.steps, _made.get(id(optimizer), 0))
        except Exception:
            _trouble.said("the optimizer's pre-step hook")

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if compiling():
            return
        try:
            if not _capturing:
                clock.optimizer_ends(_key(optimizer), _made.get(id(optimizer), -1))
            elif _capturing[-1] is None:
                _capturing[-1] = True
        except Exception:
            _trouble.said("the optimizer's post-step hook")

    _hide(_key, before, after, Clock.optimizer_begins, Clock.optimizer_ends, Clock.step)
    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


_made: Dict[
    int, int
] = {}  # id of an optimizer -> the step in which it was made; an id that is used again is set anew


def _births(clock: Clock) -> None:
    """Notes when optimizers are made: one that is made after another's last step may have taken its place."""
    from torch.optim import Optimizer

    def before(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if len(_made) > 10000:
            _made.clear()
        _made[id(optimizer)] = clock.steps

    _hide(before)
    Optimizer.__init__ = around(Optimizer.__init__, before)


class _Pass:
    """A backward pass under way."""

    __slots__ = ("__weakref__",)


def _backward(clock: Clock) -> None:
    import torch.autograd

    # The pass under way, if one is. Whoever calls us keeps its token for as long: where an interrupt comes between
    # two of our lines, nothing has to be put back.
    current: List[Any] = [None]

    def before(*args: Any, **kwargs: Any) -> Optional[_Pass]:
        known = current[0]
        if (known is not None and known() is not None) or clock.asleep:
            return None
        token = _Pass()
        try:
            if _server_handles:
                _retire()
            clock.backward_begins()
        except Exception:
            _trouble.said("before backward()")
        current[0] = weakref.ref(token)
        return token

    def after(token: Any, result: Any, failed: bool) -> None:
        if token is not None:
            current[0] = None
            clock.backward_ends()

    _hide(before, after)
    torch.autograd.backward = around(torch.autograd.backward, before, after)


def _modes(clock: Clock) -> None:
    from torch.nn import Module

    original = Module.train
    compiling = _compiling()
    busy = [False]

    def train(self: Any, mode: bool = True) -> Any:
        if busy[0] or compiling():
            return original(self, mode)
        busy[0] = True
        try:
            return original(self, mode)
        finally:
            busy[0] = False
            _switched(clock, self, mode)

    _hide(train, _switched)
    Module.train = functools.wraps(original)(train)


def _switched(clock: Clock, module: Any, mode: bool) -> None:
    """The user called train() or eval() on `module`: matters if it is the model that is being trained."""
    try:
        if clock.asleep or not clock.parameters or bool(mode) != clock.validating:
            return
        trained = clock.parameters
        if any(id(parameter) in trained for parameter in module.parameters()):
            if mode:
                clock.validation_ends()
            else:
                clock.validation_begins()
    except Exception:
        _trouble.said("Module.train")


def _length(loader: Any) -> Any:
    """Batches of a pass, where asking changes nothing: a loader over an IterableDataset that was asked once
    warns of every sample beyond."""
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except Exception:  # no length, or the user's __len__ fails: his own call will say so
        return None


def _loaders(clock: Clock) -> None:
    import torch
    from torch.utils.data import DataLoader

    grad_enabled = torch.is_grad_enabled

    def before(loader: Any, *args: Any, **kwargs: Any) -> None:
        try:
            if not clock.asleep and grad_enabled():
                clock.loader_begins(id(loader.dataset), _length(loader))
        except Exception:
            _trouble.said("DataLoader.__iter__")

    _hide(before)
    DataLoader.__iter__ = around(DataLoader.__iter__, before)


def _workers(clock: Clock) -> None:
    from . import _workers as workers

    workers.watch(workers.Workers(clock.native))


_capturing: List[Any] = []  # one entry for each capture under way: True once an optimizer has stepped in it


def _graphs(clock: Clock) -> None:
    """CUDA graphs: a replay stands for the steps captured in it."""
    import torch

    graph_type = torch.cuda.CUDAGraph
    stepping: Dict[int, bool] = {}  # by id; a dead graph's entry is overwritten at the next capture

    def known(graph: Any, *args: Any, **kwargs: Any) -> int:
        return id(graph)

    def begun(graph: int, result: Any, failed: bool) -> None:
        if not failed:
            _capturing.append(None)

    def ends(graph: Any, *args: Any, **kwargs: Any) -> None:
        if _capturing:
            if len(stepping) > 10000:
                stepping.clear()
            stepping[id(graph)] = bool(_capturing.pop())

    def replayed(graph: int, result: Any, failed: bool) -> None:
        try:
            if not failed:
                clock.tick(STEPPER if stepping.get(graph) else GRAPH, ("graph", graph))
        except Exception:
            _trouble.said("CUDAGraph.replay")

    _hide(known, begun, ends, replayed)
    graph_type.capture_begin = around(graph_type.capture_begin, known, begun)
    graph_type.capture_end = around(graph_type.capture_end, ends)
    graph_type.replay = around(graph_type.replay, known, replayed)


_server_handles: List[Any] = []


def _retire() -> None:
    """The program trains: the hooks for servers go, calls of modules cost what they cost before."""
    while _server_handles:
        _server_handles.pop().remove()


def _servers(clock: Clock) -> None:
    """Programs without an optimizer: calls of a root module. Gone with the first optimizer or backward pass."""
    from torch.nn.modules import module as modules
    from torch.optim import Optimizer

    compiling = _compiling()
    here = threading.local()

    def before(module: Any, args: Any) -> None:
        if compiling():
            return
        try:
            depth = getattr(here, "depth", 0)
            here.depth = depth + 1
            if depth == 0:
                clock.tick(MODULE, ("module", id(module)))
        except Exception:
            _trouble.said("the forward pre-hook")

    def after(module: Any, args: Any, result: Any) -> None:
        if not compiling():
            here.depth = max(0, getattr(here, "depth", 1) - 1)

    _hide(before, after)
    handles = _server_handles
    handles.append(modules.register_module_forward_pre_hook(before))
    try:
        handles.append(modules.register_module_forward_hook(after, always_call=True))
    except TypeError:  # before torch 2.1
        handles.append(modules.register_module_forward_hook(after))
    original = Optimizer.__init__

    def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if Optimizer.__dict__.get("__init__") is watched:
            Optimizer.__init__ = original
        clock.leader.hopeful = True
        _retire()

    _hide(made)
    watched = around(original, made)
    Optimizer.__init__ = watched
    _compiled_servers(clock)


def _compiled_servers(clock: Clock) -> None:
    """Compiled modules warn of hooks on all modules at every call: with the first of them those hooks go, and
    calls of compiled modules are seen instead."""
    import torch

    original = getattr(torch, "compile", None)
    if original is None:
        return

    def before(*args: Any, **kwargs: Any) -> bool:
        return True

    def after(token: Any, result: Any, failed: bool) -> None:
        try:
            if not failed and _server_handles and torch.compile is compile:
                torch.compile = original
                _retire()
                _watch_compiled(clock)
        except Exception:
            _trouble.said("torch.compile")

    _hide(before, after)
    compile = around(original, before, after)
    torch.compile = compile


def _watch_compiled(clock: Clock) -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    compiling = _compiling()
    here = threading.local()

    def before(module: Any, *args: Any, **kwargs: Any) -> Optional[bool]:
        if compiling() or clock.leader.hopeful or getattr(here, "inside", False):
            return None
        try:
            clock.tick(MODULE, ("module", id(module)))
        except Exception:
            _trouble.said("a call of a compiled module")
        here.inside = True
        return True

    def after(token: Any, result: Any, failed: bool) -> None:
        if token is not None:
            here.inside = False

    _hide(before, after)
    OptimizedModule.__call__ = around(OptimizedModule.__call__, before, after)
