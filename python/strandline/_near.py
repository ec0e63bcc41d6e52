"""An index of what the program's own names lead to: its modules' globals, and the variables of running functions.

What a leak hangs on is nearly always among that, a few thousand objects of the hundreds of thousands that libraries
bring along. Of each object the references are counted: so it is known whether all that refers to it is in the index.
Must not know: what is searched, what a holder means.
Invariant: claims to know all that refers to an object only where the numbers agree; whoever needs more (`Unexplained`)
asks the whole index.
"""

import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import _library
from ._index import Index
from ._roots import Roots

_MOST = 1 << 16  # objects: where the program has more, the whole index is no worse


class Unexplained(Exception):
    """Something refers to an object on the way that the program's own names do not lead to."""


class Near(Index):
    whole = False

    def __init__(
        self,
        objects: List[Any],
        missing: Dict[int, int],
        slots: Dict[int, int],
        own_references: Callable[[Any], int],
        classes: Tuple[type, ...],
        library: Any,
        seconds: float,
    ) -> None:
        super().__init__(objects, classes, library, seconds)
        self._missing = missing  # id -> references that are not in the index
        self._slots = slots  # id -> references that are variables
        self._own_references = own_references

    def knows_all(self, thing: Any) -> bool:
        missing = self._missing.get(id(thing), 255)
        if missing == 255:
            return False
        missing -= self._slots.get(id(thing), 0)
        return missing <= 0 or missing <= self._own_references(thing)


def near(
    roots: Roots,
    classes: Tuple[type, ...],
    own_references: Callable[[Any], int],
    library: Any = None,
    seconds: float = 60.0,
) -> Optional[Near]:
    """None where the library cannot tell, or the program has too much. `own_references`: to an object, from its own
    implementation."""
    library = library if library is not None else _library.find()
    if library is None:
        return None
    own = {id(names) for names in roots.values}
    closed = [identity for identity in roots.globals if identity not in own]
    closed.append(id(sys.modules))
    reached = library.python_reach(roots.values, _types(roots), closed, _MOST)
    if reached is None:
        return None
    objects, missing = reached
    index = Near(
        objects,
        dict(zip(map(id, objects), missing)),
        roots.slots,
        own_references,
        classes,
        library,
        seconds,
    )
    if not index.is_quick:
        index.close()
        return None
    return index


def _types(roots: Roots) -> List[type]:
    """The classes that the user's modules define."""
    found = []
    for names in roots.values:
        if id(names) in roots.globals:
            own = names.get("__name__")
            kinds = [value for value in list(names.values()) if type in type(value).__mro__]
            found += [kind for kind in kinds if _dict_of(kind).get("__module__") == own]
    return found


_dict_of = type.__dict__["__dict__"].__get__  # not by a metaclass of the user's
