"""Starts strandline's Python side in a process: the library's mode, the clock, the hooks into torch.

Must not know: the hooks' and the clock's rules.
Invariant: `start` may be called at any time, more than once, with or without torch, and never raises.
"""

import os
import sys
from typing import Any, Dict, Optional, Union

from . import _library, _trouble
from ._clock import Clock

_clock: Optional[Clock] = None
_library_in_use: Any = None
_hooked = False


def start(mode: Union[str, int] = "auto", options: Optional[Dict[str, Any]] = None, library: Any = None) -> bool:
    """Called when `import torch` has finished, or by `install`. `library` replaces the real one in tests.

    A mode that the library already is in is left alone ("auto" then changes nothing). Returns whether
    accounting is on.
    """
    global _clock, _library_in_use
    try:
        library = library or _library.load()
        if library is None:
            return False
        if library.mode() <= 0:
            code = library.start(_mode(mode), options)
            if code < 0:
                sys.stderr.write(f"strandline: cannot start in mode {mode}: error {code}\n")
                return False
        if _clock is None:
            from ._explain import Explainer

            _library_in_use = library
            clock = Clock(library)
            clock.explain = Explainer(library, clock).answer_pending
            _clock = clock
            os.register_at_fork(after_in_child=_sleep)
        hook()
        return True
    except Exception:
        _trouble.said("start")
        return False


def hook() -> None:
    """Puts the hooks into torch, if torch has been imported; else they wait for the next `start`."""
    global _hooked
    if _hooked or _clock is None or "torch" not in sys.modules:
        return
    _hooked = True
    from . import _hooks

    _hooks.install(_clock)


def clock() -> Optional[Clock]:
    """The clock in force, None before `start` and in forked children."""
    return None if _clock is None or _clock.asleep else _clock


def finish() -> None:
    """At the end of a run: explains what still waits. Called by the library before the last report."""
    try:
        if clock() is not None and _clock is not None and _clock.explain is not None:
            _clock.explain()
    except Exception:
        _trouble.said("finish")


def _mode(mode: Union[str, int]) -> int:
    if isinstance(mode, int):
        return mode
    if mode != "auto":
        return _library.MODES[mode]
    torch = sys.modules.get("torch")
    try:
        return _library.MODES["heap"] if torch is not None and torch.cuda.is_available() else _library.MODES["host"]
    except Exception:
        return _library.MODES["host"]


def _sleep() -> None:
    if _clock is not None:
        _clock.asleep = True
