"""Finds the Python tensors whose storage is one of the blocks sought.

Must not know: who holds the tensors, what the blocks mean.
Invariant: runs no code of the user's (no __class__, __repr__, unpack hook), changes no tensor.
"""

import functools
import sys
from bisect import bisect_right
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple


class Owner(NamedTuple):
    """An object that keeps a block: a tensor itself, or a leaf tensor through its `.grad`."""

    object: Any
    via: str  # "" or ".grad"


class Blocks:
    """Finds the sought block that an address lies in."""

    def __init__(self, blocks: Iterable[Tuple[int, int]]) -> None:
        ordered = sorted(set(blocks))
        self._starts = [address for address, _ in ordered]
        self._ends = [address + max(size, 1) for address, size in ordered]
        self._exact = set(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def at(self, address: int) -> Optional[int]:
        """The start of the block that holds `address`."""
        if address in self._exact:
            return address
        at = bisect_right(self._starts, address) - 1
        return self._starts[at] if at >= 0 and address < self._ends[at] else None


class Found(NamedTuple):
    owners: Dict[int, List[Owner]]  # block -> the Python objects that keep it
    sources: List[Any]  # tensors with a graph behind them
    optimizers: List[Any]
    modules: List[Any]
    tied: List[Any]  # leaf tensors whose gradient has a graph


def storage_address(tensor: Any) -> int:
    """Where the tensor's storage begins; 0 when it has none (sparse, fake, wrapper subclasses …)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:
        return 0


def parts(tensor: Any) -> List[Any]:
    """The strided tensors that a tensor consists of: itself, or those inside a sparse one."""
    try:
        layout = str(tensor.layout)
        if layout == "torch.strided":
            return [tensor]
        if layout == "torch.sparse_coo":
            return [tensor._values(), tensor._indices()]
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    except Exception:
        return []


def classes() -> Tuple[type, ...]:
    """The classes whose instances are looked at: tensors, optimizers, modules."""
    import torch

    return torch.Tensor, torch.optim.Optimizer, torch.nn.Module


def find(instances: List[List[Any]], blocks: Blocks, is_ours: Callable[[Any], bool]) -> Found:
    """Looks at all instances of `classes()`."""
    import torch

    tensors, optimizers, modules = instances
    found = Found({}, [], optimizers, modules, [])
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if not is_ours(tensor) and not type(tensor).__module__.startswith("torch._subclasses"):
                _look(tensor, blocks, found)
    return found


def _look(tensor: Any, blocks: Blocks, found: Found) -> None:
    for part in parts(tensor):
        block = blocks.at(storage_address(part))
        if block is not None:
            found.owners.setdefault(block, []).append(Owner(tensor, ""))
    try:
        if tensor.is_leaf:
            grad = tensor.grad
            if grad is not None:
                if grad.grad_fn is not None:
                    found.tied.append(tensor)
                for part in parts(grad):
                    block = blocks.at(storage_address(part))
                    if block is not None:
                        found.owners.setdefault(block, []).insert(0, Owner(tensor, ".grad"))
        else:
            found.sources.append(tensor)
    except Exception:
        pass


@functools.lru_cache(maxsize=1)
def _holds_its_object() -> bool:
    """Whether what C++ refers to keeps Python's tensor (torch 2.11 and later), not Python's tensor it."""
    import torch

    holder, held = torch.empty(0), torch.empty(0)
    before = sys.getrefcount(held)
    holder.grad = held
    return sys.getrefcount(held) > before


def own_references(thing: Any) -> int:
    """The references to a Python tensor that torch itself has, because C++ refers to it as well."""
    import torch

    if torch.Tensor not in type(thing).__mro__ or not _holds_its_object():
        return 0
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return int(torch.Tensor._use_count(thing) > 1)  # type: ignore[attr-defined]
    except Exception:
        return 0
