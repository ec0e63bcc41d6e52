"""Who refers to whom: the library's index of the collector's objects, or the collector itself where there is none.

Must not know: what is searched, what a holder means.
Invariant: while an index lives, `objects` is kept alive, so that no address of it is given away again.
"""

import gc
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import _library


class Index:
    """Holders of objects and instances of classes, as of the moment when it was made. `objects` are the collector's."""

    whole = True  # all that refers to an object is in it

    def __init__(
        self, objects: List[Any], classes: Tuple[type, ...], library: Any = None, seconds: float = 60.0
    ) -> None:
        self.objects = objects
        self._classes = classes
        self._library = library if library is not None else _library.find()
        self._index: Optional[int] = None
        if self._library is not None:
            self._index = self._library.python_index(objects, classes, seconds)

    def close(self) -> None:
        if self._index is not None:
            self._library.python_forget(self._index)
        self._index = None
        self.objects = []

    @property
    def is_quick(self) -> bool:
        return self._index is not None

    def knows_all(self, thing: Any) -> bool:
        """Whether all that refers to an object is in the index."""
        return True

    def instances(self) -> List[List[Any]]:
        """For each class asked for its instances."""
        if self._index is not None:
            return [
                [self.objects[at] for at in self._library.python_instances(self._index, number)]
                for number in range(len(self._classes))
            ]
        kinds: Dict[type, Sequence[int]] = {}
        found: List[List[Any]] = [[] for _ in self._classes]
        for candidate in self.objects:
            kind = type(candidate)
            numbers = kinds.get(kind)
            if numbers is None:
                bases = kind.__mro__
                numbers = kinds[kind] = [
                    number for number, wanted in enumerate(self._classes) if wanted in bases
                ]
            for number in numbers:
                found[number].append(candidate)
        return found

    def holders(self, things: List[Any]) -> List[Tuple[Any, int]]:
        """Pairs of an object and the id of one of `things` that it refers to."""
        if self._index is not None:
            return [
                (self.objects[at], id(thing))
                for thing in things
                for at in dict.fromkeys(self._library.python_holders(self._index, id(thing)) or ())
            ]
        wanted = set(map(id, things))
        return [
            (holder, child)
            for holder in gc.get_referrers(*things)
            if holder is not things
            for child in wanted.intersection(map(id, gc.get_referents(holder)))
        ]

    def referenced(self, things: List[Any]) -> List[Any]:
        """Those of `things` that some object refers to; the others live inside C++ only."""
        if self._index is not None:
            return [thing for thing in things if self._library.python_holders(self._index, id(thing))]
        wanted = {id(thing) for thing in things}
        seen = set()
        for start in range(0, len(self.objects), 4096):
            seen |= wanted.intersection(map(id, gc.get_referents(*self.objects[start : start + 4096])))
        return [thing for thing in things if id(thing) in seen]
