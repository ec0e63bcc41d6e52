"""strandline: leak accounting for PyTorch's memory. The public Python side.

Must not know: how the clock or the explanations work; never imports torch by itself.
Invariant: without the library every function here is a harmless no-op, except `install`, which says what to do.
"""

import contextvars
from typing import Any, Dict, Optional

__version__ = "0.1.0"
__all__ = [
    "NotInstalled",
    "active",
    "epoch",
    "force_cleanup",
    "install",
    "phase",
    "report",
    "request",
    "stats",
    "step",
]

_inside: "contextvars.ContextVar[bool]" = contextvars.ContextVar("strandline_request", default=False)


class NotInstalled(ImportError):
    """The shared library was found neither in this process nor on disk."""


def install(mode: str = "auto", out: Optional[str] = None, quiet: bool = False, **options: Any) -> None:
    """Begins accounting in this process: mode "auto", "heap", "observer" or "host".

    `out` is the folder of the reports; further options are those of strandline_start in strandline.h.
    Call it before the first tensor is made on the device. A second call does nothing.
    """
    from . import _boot, _library

    library = _library.load()
    if library is None:
        raise NotInstalled(
            "strandline: libstrandline.so is not in this process. Start the program with "
            "`strandline run -- python …`, or name the file in STRANDLINE_LIB, or install the strandline wheel."
        )
    told: Dict[str, Any] = dict(options)
    if out is not None:
        told["out"] = str(out)
    if quiet:
        told["quiet"] = True
    _boot.start(mode, told)


def active() -> bool:
    """Whether strandline accounts in this process (not so in forked children)."""
    from . import _library

    library = _library.find()
    return library is not None and library.mode() > 0


def step() -> None:
    """A step ended. Once told by hand, steps are no longer guessed."""
    clock = _running()
    if clock is not None:
        clock.step_by_hand()


def epoch() -> None:
    """A new epoch began. Once told by hand, epochs are no longer guessed."""
    clock = _running()
    if clock is not None:
        clock.epoch_by_hand()


class phase:
    """`phase("validation")` enters a phase; `with phase("validation"):` also leaves it.

    Reports know the phases forward ("train" is the same), backward, optimizer, validation ("eval", "test") and
    other; a phase of any other name is shown by that name. A program may name 32; what happens in those beyond is
    counted under "other".
    """

    def __init__(self, name: str) -> None:
        from . import _library

        clock = _running()
        self._enter = clock.native.phase if clock is not None else None
        self._before = 0
        if clock is not None:
            word = str(name).strip()
            number = _library.PHASES.get(word.lower())
            self._before = clock.native.phase(clock.native.phase_of(word) if number is None else number)

    def __enter__(self) -> "phase":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._enter is not None:
            self._enter(self._before)


class request:
    """`with request():` serves one request of a server without an optimizer; its end is a step.

    Requests may overlap, in threads and in tasks of asyncio; one inside another counts as part of it.
    """

    def __enter__(self) -> "request":
        self._token = _inside.set(True) if not _inside.get() else None
        self._clock = _running() if self._token is not None else None
        self._number = self._clock.request_begins() if self._clock is not None else -1
        return self

    def __exit__(self, *_: Any) -> None:
        if self._token is not None:
            _inside.reset(self._token)
            if self._clock is not None:
                self._clock.request_ends(self._number)
            else:
                step()


def report(path: Optional[str] = None) -> bool:
    """Writes the report now into the folder `path` (None: the run's own). False when there is none to write."""
    from . import _library

    library = _library.find()
    return library is not None and library.mode() > 0 and library.report(path) == 0


def force_cleanup(quiet: bool = False) -> Any:
    """Runs gc.collect(), empties the allocator's cache, synchronizes the devices, and prints to stderr what each of
    the three released (`quiet`: nothing). Returns a list of (action, allocated, reserved, objects): bytes of tensors,
    bytes of reserved memory, and for gc the number of unreachable objects."""
    from . import _force

    return _force.force_cleanup(quiet)


def stats(device: int = -1) -> Dict[str, Any]:
    """Statistics of a device under the keys of torch.cuda.memory_stats(); device -1 is the host."""
    from . import _library

    library = _library.find()
    return library.stats(device) if library is not None and library.mode() > 0 else {}


def _running() -> Any:
    from . import _boot

    return _boot.clock()
