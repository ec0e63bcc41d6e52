"""Says things on stderr: strandline's own faults each place once, and lets the user's program go on.

Must not know: what went wrong, or who asks.
Invariant: never raises.
"""

import os
import sys
import traceback
from typing import Set

from . import _library

_said: Set[str] = set()


def say(text: str) -> None:
    """A line; on the real stderr, where the library is here to know which that is."""
    try:
        library = _library.find()
        if library is None or library.say(text) < 0:
            sys.stderr.write(f"strandline: {text}\n")
    except BaseException:
        pass


def said(place: str) -> None:
    """Called in an `except` clause: reports the exception in flight, once for each `place`."""
    try:
        if place in _said:
            return
        _said.add(place)
        kind, value, where = sys.exc_info()
        say(f"fault in {place}, left out from now on: {kind.__name__ if kind else ''}: {value}")
        if os.environ.get("STRANDLINE_DEBUG"):
            traceback.print_exception(kind, value, where)
    except BaseException:
        pass
