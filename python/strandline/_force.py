"""`strandline.force_cleanup()`: collect, release the cache, synchronize; and what each of the three released.

Must not know: the ledger, the clock.
Invariant: works without the library (then with torch's own numbers), and without a GPU; never raises.
"""

import gc
import sys
from typing import Any, Dict, List, NamedTuple, Optional

from . import _library


class Level(NamedTuple):
    """Bytes over all devices."""

    allocated: int
    reserved: int


class Released(NamedTuple):
    """What one of the three released."""

    action: str
    allocated: int  # bytes of tensors
    reserved: int  # bytes given back to the device or the system
    objects: Optional[int]  # objects that gc found unreachable


def force_cleanup(quiet: bool = False) -> List[Released]:
    """Runs gc.collect(), releases the allocator's cache, and waits for the devices. Prints and returns what each did."""
    steps = [("gc.collect()", gc.collect), ("empty the cache", _empty), ("synchronize", _synchronize)]
    done: List[Released] = []
    before = _level()
    for action, run in steps:
        try:
            result = run()
        except Exception as error:
            sys.stderr.write(f"strandline: {action}: {type(error).__name__}: {error}\n")
            result = None
        if action == "synchronize":
            _empty()  # what was waiting for another stream is free only now
        after = _level()
        done.append(
            Released(
                action,
                before.allocated - after.allocated,
                before.reserved - after.reserved,
                result if action == "gc.collect()" else None,
            )
        )
        before = after
    if not quiet:
        sys.stderr.write(_text(done, before))
    return done


def _text(done: List[Released], left: Level) -> str:
    rows = ["strandline: force_cleanup\n"]
    for each in done:
        objects = f"  ({each.objects:,} unreachable objects)" if each.objects else ""
        rows.append(
            f"  {each.action:<18}tensors {_size(each.allocated):>11}   reserved {_size(each.reserved):>11}{objects}\n"
        )
    rows.append(f"  {'left':<18}tensors {_size(left.allocated):>11}   reserved {_size(left.reserved):>11}\n")
    return "".join(rows)


def _size(count: int) -> str:
    from ._fixes import size

    return f"-{size(-count)}" if count < 0 else size(count)


def _devices() -> List[int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return list(range(torch.cuda.device_count()))


def _level() -> Level:
    torch: Any = sys.modules.get("torch")
    library = _library.find()
    allocated = reserved = 0
    for device in _devices():
        allocated += torch.cuda.memory_allocated(device)
        reserved += torch.cuda.memory_reserved(device)
    if library is not None and library.mode() == _library.MODES["host"]:
        stats: Dict[str, Any] = library.stats(-1)
        allocated += int(stats.get("allocated_bytes.all.current", 0))
        reserved += int(stats.get("reserved_bytes.all.current", 0))
    return Level(allocated, reserved)


def _empty() -> None:
    torch: Any = sys.modules.get("torch")
    if _devices():
        torch.cuda.empty_cache()
    library = _library.find()
    if library is not None and library.mode() == _library.MODES["host"]:
        library.trim()


def _synchronize() -> None:
    torch: Any = sys.modules.get("torch")
    for device in _devices():
        torch.cuda.synchronize(device)
