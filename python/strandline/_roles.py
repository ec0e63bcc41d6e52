"""Blocks that belong to training itself: parameters, their gradients, the state of the optimizers in use, buffers.

Must not know: holders, source lines.
Invariant: an optimizer that no longer steps excuses nothing: its state and its parameters may well be the leak.
"""

from typing import Any, Dict, List, Set

from ._tensors import Blocks, parts, storage_address

_RESTS = 40  # steps in which an optimizer may rest before it is taken for an old one, at least


def in_use(known: List[Any]) -> Set[int]:
    """Ids of the optimizers that still step: not those that one made later has replaced, one like them at once, any
    other when they rest for longer than they ever worked. `known`: records with `optimizer` (weak), and in steps
    `made`, `first` and `last`. Those that were all made beforehand (an ensemble, a GAN) replace each other never."""
    alive = [(record, record.optimizer()) for record in known]
    alive = [(record, optimizer) for record, optimizer in alive if optimizer is not None]
    now = max((record.last for record, _ in alive), default=0)
    newest: Dict[Any, int] = {}
    kinds: Dict[int, Any] = {}
    for record, optimizer in alive:
        kind = kinds[id(optimizer)] = _alike(optimizer)
        newest[kind] = max(newest.get(kind, 0), record.made)
    youngest = max(newest.values(), default=0)
    return {
        id(optimizer)
        for record, optimizer in alive
        if newest[kinds[id(optimizer)]] <= record.last
        and (
            youngest <= record.last or now - record.last <= max(_RESTS, 3 * (record.last - record.first + 1))
        )
    }


def _alike(optimizer: Any) -> Any:
    """What two optimizers share that are made by one line: their class and the sizes of what they train."""
    try:
        sizes = tuple(p.numel() for group in optimizer.param_groups for p in group["params"])
    except Exception:
        sizes = ()
    return type(optimizer), sizes


def _inside(modules: List[Any]) -> Set[int]:
    """The modules that lie in another one."""
    inside: Set[int] = set()
    for module in modules:
        try:
            inside.update(id(child) for child in module.__dict__["_modules"].values())
        except Exception:
            continue
    return inside


def module_path(modules: List[Any], wanted: Any) -> str:
    """The dotted name of a submodule inside the outermost module that holds it, "" if there is none."""
    inside = _inside(modules)
    if id(wanted) not in inside:
        return ""
    for module in modules:
        if id(module) in inside:
            continue
        try:
            for name, child in module.named_modules():
                if child is wanted:
                    return f"{type(module).__name__}.{name}"
        except Exception:
            continue
    return ""


def roles(optimizers: List[Any], current: Set[int], modules: List[Any], blocks: Blocks) -> Dict[int, str]:
    """For each excused block the reason why it is no leak. `current`: ids of the optimizers that step."""
    found: Dict[int, str] = {}
    names: Dict[int, str] = {}
    trained: Set[int] = set()

    def note(tensor: Any, what: str, parameter: Any) -> None:
        for part in parts(tensor):
            block = blocks.at(storage_address(part))
            if block is not None:
                if not names:
                    names.update(_names(modules) or {0: ""})
                name = names.get(id(parameter))
                of = f"of {name}" if name else "of a parameter"
                found.setdefault(
                    block, f"{what} {of}" if what else f"{name or 'a parameter'}, which is trained"
                )

    for optimizer in optimizers:
        if id(optimizer) not in current:
            continue
        kind = type(optimizer).__name__
        try:
            groups = [list(group["params"]) for group in optimizer.param_groups]
            state = optimizer.state
        except Exception:
            continue
        every = [parameter for group in groups for parameter in group]
        part = _taking_part(every, modules)
        for parameter in every:
            if id(parameter) not in part:
                continue  # of a group that was added and is trained no longer
            trained.add(id(parameter))
            note(parameter, "", parameter)
            try:
                if parameter.is_leaf and parameter.grad is not None:
                    note(parameter.grad, "the gradient", parameter)
                kept = state.get(parameter, {}) if hasattr(state, "get") else {}
                for name, value in list(kept.items()):
                    for tensor in (
                        value if isinstance(value, (list, tuple)) and len(value) <= 256 else [value]
                    ):
                        if hasattr(tensor, "untyped_storage"):
                            note(tensor, f"optimizer state {name} ({kind})", parameter)
            except Exception:
                continue
    for module in modules:
        try:
            own = module.__dict__
            if any(id(parameter) in trained for parameter in own["_parameters"].values()):
                for name, buffer in own["_buffers"].items():
                    if buffer is not None and buffer.grad_fn is None:
                        note(buffer, f"buffer {name}", None)
        except Exception:
            continue
    return found


def _taking_part(parameters: List[Any], modules: List[Any]) -> Set[int]:
    """Ids of an optimizer's parameters that the newest step trained, or that lie in one model with such; all of them
    where the step left no gradient behind."""
    every = {id(parameter) for parameter in parameters}
    found: Set[int] = set()
    for parameter in parameters:
        try:
            if parameter.is_leaf and parameter.grad is not None:
                found.add(id(parameter))
        except Exception:
            return every
    if not found or len(found) == len(every):
        return every
    inside = _inside(modules)
    for module in modules:
        if id(module) in inside:
            continue
        try:
            own = {id(parameter) for parameter in module.parameters()}
        except Exception:
            continue
        if own & found:
            found |= own & every
    return found


def _names(modules: List[Any]) -> Dict[int, str]:
    """Qualified names of parameters; the longest wins, it is that of the outermost module."""
    names: Dict[int, str] = {}
    inside = _inside(modules)
    for module in modules:
        if id(module) in inside:
            continue
        try:
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name)
        except Exception:
            continue
    return names
