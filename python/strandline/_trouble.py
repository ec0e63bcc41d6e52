"""Says strandline's own faults on stderr, each place once, and lets the user's program go on.

Must not know: what went wrong, or who asks.
Invariant: never raises.
"""

import os
import sys
import traceback
from typing import Set

_said: Set[str] = set()


def said(place: str) -> None:
    """Called in an `except` clause: reports the exception in flight, once for each `place`."""
    try:
        if place in _said:
            return
        _said.add(place)
        kind, value, where = sys.exc_info()
        sys.stderr.write(
            f"strandline: fault in {place}, left out from now on: {kind.__name__ if kind else ''}: {value}\n"
        )
        if os.environ.get("STRANDLINE_DEBUG"):
            traceback.print_exception(kind, value, where)
    except BaseException:
        pass
