"""Observes torch without changes to the user's code and tells the clock what it sees.

Must not know: which event ends a step or begins an epoch (_clock decides).
Invariant: nothing here raises into the user's code, keeps an object of the user's, or is traced by dynamo.
"""

import functools
import threading
import types
from typing import Any, Callable, Dict, List

from . import _trouble
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
    import weakref

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

    original = Optimizer.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(_made) > 10000:
            _made.clear()
        _made[id(self)] = clock.steps
        original(self, *args, **kwargs)

    _hide(__init__)
    Optimizer.__init__ = __init__


def _backward(clock: Clock) -> None:
    import torch.autograd

    original = torch.autograd.backward
    depth = [0]

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if depth[0] or clock.asleep:
            return original(*args, **kwargs)
        depth[0] = 1
        if _server_handles:
            _retire()
        clock.backward_begins()
        try:
            return original(*args, **kwargs)
        finally:
            depth[0] = 0
            clock.backward_ends()

    _hide(backward)
    torch.autograd.backward = backward


def _modes(clock: Clock) -> None:
    from torch.nn import Module

    original = Module.train
    compiling = _compiling()
    busy = [False]

    @functools.wraps(original)
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
    Module.train = train


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

    original = DataLoader.__iter__
    grad_enabled = torch.is_grad_enabled

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        try:
            if not clock.asleep and grad_enabled():
                clock.loader_begins(id(self.dataset), _length(self))
        except Exception:
            _trouble.said("DataLoader.__iter__")
        return original(self)

    _hide(__iter__)
    DataLoader.__iter__ = __iter__


def _workers(clock: Clock) -> None:
    from . import _workers as workers

    workers.watch(workers.Workers(clock.library))


_capturing: List[Any] = []  # one entry for each capture under way: True once an optimizer has stepped in it


def _graphs(clock: Clock) -> None:
    """CUDA graphs: a replay stands for the steps captured in it."""
    import torch

    graph_type = torch.cuda.CUDAGraph
    replay, begin, end = graph_type.replay, graph_type.capture_begin, graph_type.capture_end
    stepping: Dict[int, bool] = {}  # by id; a dead graph's entry is overwritten at the next capture

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = begin(self, *args, **kwargs)
        _capturing.append(None)
        return result

    @functools.wraps(end)
    def capture_end(self: Any) -> Any:
        if _capturing:
            stepping[id(self)] = bool(_capturing.pop())
            if len(stepping) > 10000:
                stepping.clear()
        return end(self)

    @functools.wraps(replay)
    def replayed(self: Any) -> Any:
        result = replay(self)
        try:
            clock.tick(STEPPER if stepping.get(id(self)) else GRAPH, ("graph", id(self)))
        except Exception:
            _trouble.said("CUDAGraph.replay")
        return result

    _hide(capture_begin, capture_end, replayed)
    graph_type.capture_begin, graph_type.capture_end, graph_type.replay = capture_begin, capture_end, replayed


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

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if (
            isinstance(Optimizer.__dict__.get("__init__"), types.FunctionType)
            and Optimizer.__init__ is __init__
        ):
            Optimizer.__init__ = original
        clock.leader.hopeful = True
        _retire()
        original(self, *args, **kwargs)

    _hide(__init__)
    Optimizer.__init__ = __init__
    _compiled_servers(clock)


def _compiled_servers(clock: Clock) -> None:
    """Compiled modules warn of hooks on all modules at every call: with the first of them those hooks go, and
    calls of compiled modules are seen instead."""
    import torch

    original = getattr(torch, "compile", None)
    if original is None:
        return

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        try:
            if _server_handles and torch.compile is compile:
                torch.compile = original
                _retire()
                _watch_compiled(clock)
        except Exception:
            _trouble.said("torch.compile")
        return made

    _hide(compile)
    torch.compile = compile


def _watch_compiled(clock: Clock) -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    original, compiling = OptimizedModule.__call__, _compiling()
    here = threading.local()

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling() or clock.leader.hopeful or getattr(here, "inside", False):
            return original(self, *args, **kwargs)
        here.inside = True
        try:
            clock.tick(MODULE, ("module", id(self)))
            return original(self, *args, **kwargs)
        finally:
            here.inside = False

    _hide(__call__)
    OptimizedModule.__call__ = __call__
