"""Climbs from an object to what keeps it alive: the shortest chain of references up to a root.

Must not know: how a chain is written, which line of source made it, what autograd's graph holds.
Invariant: at most one pass over the collector's objects a level for all objects sought (none with an index); strandline's own objects are no
holders; bounded by a deadline, by levels and by the objects climbed at a level. With an index that is not whole no chain
is given that a whole one might not give: `Unexplained` is raised instead.
"""

import time
from collections import deque
from types import FrameType, ModuleType
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from ._index import Index
from ._near import Unexplained
from ._roots import Local, Roots, is_ours

_LEVELS = 40
_WIDE = 64  # objects climbed at a level
_CHUNK = 16  # objects sought in one pass: its cost rises with their number
_OWN = 1  # of `Climb._preference`: variables of the main program and of running functions
_NEAR = 8  # levels up to a container that others are known to lie in


class Chain(NamedTuple):
    """From a root down to the object sought: `links[-1]` is the object.

    root: "global" (links[0] is a module's dict), "class" (links[0] is a type), "local" (links[0] is the value of
    `local`), "stack" (links[0] is held by a frame's evaluation stack or by C), "cycle" (links[0] is also reached
    from itself: `loop` goes from it down to itself), "unknown" (the search ran out of time).
    """

    root: str
    links: List[Any]
    local: Optional[Local] = None
    loop: Optional[List[Any]] = None


class Climb:
    """One search. `chains()` gives a chain for each object asked for; `close()` lets go of everything."""

    def __init__(self, roots: Roots, ours: "Ours", index: Index, deadline: float) -> None:
        self._roots = roots
        self._index = index
        self._ours = ours
        self._deadline = deadline
        self._objects: Dict[int, Any] = {}
        self._parents: Dict[int, List[int]] = {}  # known holders of an object, nearest first
        self._climbed: Set[int] = set()
        self._unsure: Set[int] = set()  # climbed objects with holders that the index does not know
        self._ends: Dict[int, str] = {}  # objects that are roots themselves
        self.complete = True

    def close(self) -> None:
        self._objects.clear()
        self._parents.clear()

    def chains(self, things: List[Any]) -> List[Chain]:
        sources = [id(thing) for thing in things]
        origin: Dict[int, int] = {}
        for bit, thing in enumerate(things):
            self._objects[id(thing)] = thing
            origin[id(thing)] = origin.get(id(thing), 0) | 1 << bit
        solved = 0
        everything = (1 << len(things)) - 1
        frontier = list(dict.fromkeys(sources))
        for _ in range(_LEVELS):
            for identity in frontier:
                if self._is_end(identity):
                    solved |= origin[identity]
            frontier = [
                identity for identity in frontier if not self._is_end(identity) and origin[identity] & ~solved
            ]
            if solved == everything or not frontier:
                break
            if time.thread_time() > self._deadline:
                self.complete = False
                break
            frontier = self._level(frontier, origin)
        return [self._chain(identity) for identity in sources]

    def attributes(self, thing: Any) -> List[Tuple[Any, str]]:
        """The attributes under which instances met in the climb hold `thing`."""
        self._sure_of(id(thing))
        found: List[Tuple[Any, str]] = []
        for parent in self._parents.get(id(thing), []):
            holder = self._objects[parent]
            owners = (
                [self._objects[above] for above in self._parents.get(parent, [])]
                if type(holder) is dict
                else [holder]
            )
            for owner in owners:
                try:
                    names = object.__getattribute__(owner, "__dict__")
                except Exception:
                    continue
                if type(names) is dict and (names is holder or owner is holder):
                    found.extend(
                        (owner, name)
                        for name, value in names.items()
                        if value is thing and isinstance(name, str)
                    )
        return found

    def others(self, thing: Any) -> List[Chain]:
        """The chains to `thing` through those that hold it and are no roots themselves, for what has a shorter one."""
        if id(thing) not in self._climbed:  # a variable's value: there was no need to climb
            self._objects[id(thing)] = thing
            self._level([id(thing)], {id(thing): 1})
        self._sure_of(id(thing))
        parents = [
            self._objects[parent] for parent in self._parents.get(id(thing), []) if not self._is_end(parent)
        ][:_CHUNK]
        self._ours.add(parents)
        found = []
        for chain in self.chains(parents) if parents else []:
            if chain.root in ("global", "local", "class"):
                links = [*chain.links, thing]
                self._ours.add(links)
                found.append(chain._replace(links=links))
        return found

    def joined(self, thing: Any, known: Dict[int, Tuple[Chain, int]], until: float) -> Optional[Chain]:
        """A chain to `thing` through one of the objects that are known to have a chain (and where in it they stand).
        That there was no time for it says nothing of the search."""
        complete = self.complete
        self._objects[id(thing)] = thing
        came: Dict[int, int] = {id(thing): 0}
        level = [id(thing)]
        for _ in range(_NEAR):
            self._level(level, dict.fromkeys(level, 1))
            following: List[int] = []
            for identity in level:
                for parent in self._parents.get(identity, []):
                    if parent in came:
                        continue
                    came[parent] = identity
                    if parent in known:
                        chain, at = known[parent]
                        links = [*chain.links[: at + 1], *self._down(identity, came)]
                        self._ours.add(links)
                        self.complete = complete
                        return chain._replace(links=links)
                    if not self._is_end(parent) or self._ends[parent] == "local":
                        following.append(parent)
            level = following[:_WIDE]
            if not level or time.thread_time() > until:
                break
        self.complete = complete
        self._sure_of(*came)
        return None

    def ends(self, thing: Any) -> Set[int]:
        """The ids of the objects above `thing` that nothing seen refers to: held by C++ or a running statement."""
        found: Set[int] = set()
        seen = {id(thing)}
        level = [id(thing)]
        while level:
            following = []
            for identity in level:
                parents = self._parents.get(identity, [])
                if not parents and identity in self._climbed:
                    found.add(identity)
                following.extend(parent for parent in parents if parent not in seen)
                seen.update(parents)
            level = following
        return found

    def _sure_of(self, *identities: int) -> None:
        if not self._unsure.isdisjoint(identities):
            raise Unexplained

    # one level up
    def _level(self, frontier: List[int], origin: Dict[int, int]) -> List[int]:
        above: List[int] = []
        for identity in frontier:
            if identity in self._climbed:  # from an earlier call
                for parent in self._parents.get(identity, []):
                    self._arrive(parent, origin[identity], origin, above)
        todo = [identity for identity in frontier if identity not in self._climbed]
        for start in range(0, len(todo), _CHUNK):
            chunk = todo[start : start + _CHUNK]
            things = [self._objects[identity] for identity in chunk]
            holders = self._index.holders(things)
            self._climbed.update(chunk)
            self._unsure.update(id(thing) for thing in things if not self._index.knows_all(thing))
            for holder, child in holders:
                parent = id(holder)
                if self._is_ours(holder):
                    continue
                self._objects[parent] = holder
                known = self._parents.setdefault(child, [])
                if parent not in known:
                    known.append(parent)
                self._arrive(parent, origin[child], origin, above)
            del holders, things
            if time.thread_time() > self._deadline:
                self.complete = False
                break
        above = list(dict.fromkeys(above))
        if len(above) > _WIDE:
            above.sort(key=lambda identity: not self._is_end(identity))
            del above[_WIDE:]
        return above

    @staticmethod
    def _arrive(parent: int, mask: int, origin: Dict[int, int], above: List[int]) -> None:
        before = origin.get(parent, 0)
        if mask & ~before:
            origin[parent] = before | mask
            above.append(parent)

    def _is_ours(self, holder: Any) -> bool:
        kind = type(holder)
        if kind is FrameType:
            return is_ours(holder.f_code) or id(holder) in self._roots.frames
        if kind is list or kind is dict or kind is tuple or kind is set:
            return holder is self._objects or holder is self._parents or self._ours(holder)
        return kind.__module__.startswith(__package__ or "strandline")

    def _is_end(self, identity: int) -> bool:
        kind = self._ends.get(identity)
        if kind is None:
            thing = self._objects[identity]
            if identity in self._roots.globals:
                kind = "global"
            elif isinstance_plain(thing, type):
                kind = "class"
            elif isinstance_plain(thing, ModuleType):
                kind = "module"
            elif identity in self._roots.locals:
                kind = "local"
            else:
                kind = ""
            self._ends[identity] = kind
        return bool(kind)

    # from the known holders to one chain
    def _chain(self, source: int) -> Chain:
        """Breadth first over the known holders: the nearest root, the best one of those equally near."""
        came: Dict[int, int] = {source: 0}
        level = [source]
        last = source
        stack_end: Optional[int] = None
        below: List[int] = []
        while level:
            ends = [identity for identity in level if self._is_end(identity)]
            if ends:
                best = min(ends, key=self._preference)
                if self._preference(best)[0] > _OWN:
                    self._sure_of(*below)  # else nothing that is as near would be better
                return self._rooted(best, self._down(best, came))
            self._sure_of(*below)
            below = level
            following: List[int] = []
            for identity in level:
                parents = self._parents.get(identity, [])
                if not parents and identity in self._climbed and stack_end is None:
                    stack_end = identity
                for parent in parents:
                    if parent not in came:
                        came[parent] = identity
                        following.append(parent)
            if following:
                last = following[0]
            level = following
        if not self._index.whole:
            raise Unexplained
        if not self.complete:
            return Chain("unknown", self._down(last, came))
        if stack_end is not None:
            return Chain("stack", self._down(stack_end, came))
        return self._cycle(source, came)

    def _preference(self, identity: int) -> Tuple[int, int]:
        order = {"global": 0, "local": 1, "class": 2, "module": 3}
        kind = self._ends[identity]
        if kind == "local":
            place = self._roots.local(self._objects[identity])[0]
            return (order[kind] if not place.name.startswith(".") else 5, -place.depth)
        if kind == "global":
            module = self._roots.globals[identity]
            return (0 if module is None or getattr(module, "__name__", "") == "__main__" else 4, 0)
        return (order[kind], 0)

    def _down(self, top: int, came: Dict[int, int]) -> List[Any]:
        links = []
        while top:
            links.append(self._objects[top])
            top = came[top]
        self._ours.add(links)
        return links

    def _rooted(self, end: int, links: List[Any]) -> Chain:
        kind = self._ends[end]
        if kind == "local":
            place = self._roots.local(links[0])[0]
            names = self._roots.named(links[0]) if place.name in ("self", "cls") else None
            if names is not None:  # a name of its own says more than the method that happens to run
                return Chain("global", [names, *links])
            return Chain("local", links, local=place)
        return Chain("class" if kind == "class" else "global" if kind == "global" else "stack", links)

    def _cycle(self, source: int, came: Dict[int, int]) -> Chain:
        """Nothing outside holds it: the shortest loop that hangs above it."""
        for start in came:  # nearest to the source first
            back: Dict[int, int] = {}
            level = [start]
            while level:
                following = []
                for identity in level:
                    for parent in self._parents.get(identity, []):
                        if parent == start:
                            loop = [self._objects[start]]
                            while identity != start:
                                loop.append(self._objects[identity])
                                identity = back[identity]
                            loop.append(self._objects[start])
                            links = self._down(start, came)
                            if (
                                type(loop[0]) is dict and len(loop) > 2
                            ):  # an instance's: begin at the instance
                                links.insert(0, loop[-2])
                                loop.insert(0, loop[-2])
                                loop.pop()
                            self._ours.add(loop)
                            return Chain("cycle", links, loop=loop)
                        if parent not in back and parent != start:
                            back[parent] = identity
                            following.append(parent)
                level = following
        return Chain("stack", self._down(source, came))


def isinstance_plain(thing: Any, kind: type) -> bool:
    """isinstance without asking the object (proxies answer for what they wrap)."""
    return kind in type(thing).__mro__


def is_container(thing: Any) -> bool:
    """Whether it is one of Python's containers that grow."""
    return any(isinstance_plain(thing, kind) for kind in (list, dict, set, deque))


class Ours:
    """The search's own lists: what they hold is not held by the program."""

    def __init__(self) -> None:
        self._ids: Set[int] = set()

    def add(self, *things: Any) -> None:
        self._ids.update(map(id, things))

    def __call__(self, thing: Any) -> bool:
        return id(thing) in self._ids
