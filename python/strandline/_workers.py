"""DataLoader workers: CUDA begun inside one, CUDA tensors that they return, workers left over, pinned memory.

Must not know: the ledger, how remarks are shown.
Invariant: watches the parent process only; looks at a worker's memory through the file system and NVML's words, never
talks to it; changes no batch; a look costs microseconds a batch.
"""

import os
import sys
from typing import Any, Dict, List, Optional, Tuple

from . import _trouble
from ._around import around

_LEFT_OVER = 1  # loaders of one data set whose workers still live, beyond the one in use


class Workers:
    """What is known of the loaders' worker processes."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._pids: Dict[int, Tuple[int, ...]] = {}  # id of an iterator -> its workers
        self._said: Dict[str, None] = {}
        self._batches = 0

    # told by the hooks
    def began(self, iterator: Any) -> None:
        """A loader with workers made an iterator."""
        workers = getattr(iterator, "_workers", None)
        if not workers:
            return
        pids = tuple(process.pid for process in workers if process.pid)
        alive = {number: tuple(p for p in known if _lives(p)) for number, known in self._pids.items()}
        self._pids = {number: known for number, known in alive.items() if known}
        left = sorted({p for known in self._pids.values() for p in known} - set(pids))
        self._pids[id(iterator)] = pids
        if len(self._pids) > _LEFT_OVER + 1 and left:
            self._remark(
                "left-over-workers",
                f"{len(left)} DataLoader workers of earlier iterators still run (process {_some(left)})",
                "each keeps its copy of the data set, and a CUDA context if it touched the GPU",
                "let the old iterator go (del it), or make one loader with persistent_workers=True and reuse it",
            )

    def batch(self, data: Any) -> None:
        """A loader with workers handed out a batch; looks at the first ones and now and then at another."""
        self._batches += 1
        if self._batches > 3 and self._batches % 100:
            return
        where = cuda_in(data)
        if where is not None:
            self._remark(
                "cuda-from-workers",
                f"a DataLoader worker returns CUDA tensors ({where})",
                "each worker then has a CUDA context of its own (hundreds of MB), and what it sends stays allocated "
                "until the receiver has let go of it",
                "return CPU tensors from __getitem__ and collate_fn, and move the batch in the training loop "
                "(pin_memory=True, .to(device, non_blocking=True))",
            )
        holders = [pid for known in self._pids.values() for pid in known if has_cuda(pid)]
        if holders:
            self._remark(
                "cuda-in-workers",
                f"{len(holders)} DataLoader workers have opened the GPU (process {_some(holders)})",
                "CUDA was initialised inside the worker: each has a context of its own, memory that torch's numbers in "
                "this process do not show",
                "keep .cuda() and .to('cuda') out of the data set, collate_fn and worker_init_fn",
            )

    def _remark(self, kind: str, what: str, because: str, fix: str) -> None:
        if kind not in self._said:
            self._said[kind] = None
            self._library.remark({"kind": kind, "what": what, "because": because, "fix": fix})


class Pinned:
    """Pinned host memory over time, from torch's own statistics of it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._levels: List[int] = []
        self._said = False

    def look(self, level: Optional[int]) -> None:
        """`level`: bytes of pinned memory in use now, None where torch cannot say."""
        if level is None or self._said:
            return
        self._levels.append(level)
        recent = self._levels[-8:]
        if len(recent) < 8 or any(b <= a for a, b in zip(recent, recent[1:])):
            return
        self._said = True
        self._library.remark(
            {
                "kind": "pinned-memory",
                "what": f"pinned host memory grew at each of the last 8 looks, from {recent[0] >> 20} to {recent[-1] >> 20} MiB",
                "because": "pinned pages cannot be swapped out and are cached by torch; batches that are kept keep theirs",
                "fix": "drop pinned batches after they were copied; pin a few buffers once and reuse them",
            }
        )


def pinned_bytes() -> Optional[int]:
    """Bytes of pinned memory that torch has handed out; None before torch 2.8 or without CUDA."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        stats = torch.cuda.memory.host_memory_stats()
        return int(stats.get("allocated_bytes.current", stats.get("active_bytes.current", 0)))
    except Exception:
        return None


def cuda_in(data: Any, depth: int = 0) -> Optional[str]:
    """Where in a batch a CUDA tensor lies, None where there is none."""
    if getattr(data, "is_cuda", False) is True:
        return "the batch itself" if not depth else ""
    if depth < 4:
        pairs = (
            list(data.items())[:64]
            if type(data) is dict
            else list(enumerate(data))[:64]
            if isinstance(data, (list, tuple))
            else []
        )
        for key, value in pairs:
            inner = cuda_in(value, depth + 1)
            if inner is not None:
                return f"[{key!r}]{inner}" if isinstance(key, (str, int)) else f"[…]{inner}"
    return None


def has_cuda(pid: int, root: str = "/proc") -> bool:
    """Whether a process has the GPU's device file open."""
    folder = os.path.join(root, str(pid), "fd")
    try:
        for name in os.listdir(folder):
            target = os.readlink(os.path.join(folder, name))
            if target.startswith("/dev/nvidia") and target[11:12].isdigit():
                return True
    except OSError:
        pass
    return False


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[-1].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _some(pids: List[int]) -> str:
    shown = ", ".join(map(str, pids[:4]))
    return shown + (" …" if len(pids) > 4 else "")


def watch(workers: Workers) -> None:
    """Puts the hook into the iterators of loaders that have workers."""
    from torch.utils.data import dataloader

    kind = dataloader._MultiProcessingDataLoaderIter

    def known(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        return iterator

    def began(iterator: Any, result: Any, failed: bool) -> None:
        try:
            if not failed:
                workers.began(iterator)
        except Exception:
            _trouble.said("DataLoader workers")

    def handed_out(iterator: Any, data: Any, failed: bool) -> None:
        try:
            if not failed:
                workers.batch(data)
        except Exception:
            _trouble.said("DataLoader workers")

    kind.__init__ = around(kind.__init__, known, began)
    kind._next_data = around(kind._next_data, known, handed_out)
