"""Composes the answer for one candidate from the paths to its blocks: holder, kept line, fix, bound, group.

Must not know: how paths are found.
Invariant: the answer is plain JSON; nothing of the user's is kept.
"""

import os
from typing import Any, Dict, List, Optional, Tuple

from . import _again, _anew, _fixes, _growth, _keys, _limits, _turnover, _use
from ._advice import Advice, Evidence, Kept, class_name, is_a, told
from ._code import Files
from ._holders import Climb, is_container, isinstance_plain
from ._intervals import at_intervals
from ._linked import Linked, linked
from ._linked import text as linked_text
from ._machine import memory, profiling
from ._named import attribute_holder, behind_loop, holder_of, methods_of, surviving
from ._path import _LRU, Path, Step, type_name
from ._roles import module_path
from ._roots import Roots, is_user_file
from ._source import Finder, Holder, Store, context_line, decorator_line
from ._special import special

_ROOTED = ("global", "local", "class")
_SENSIBLE = 30 * 86_400.0  # seconds in which a bound is reached, or it is none
_SHARE = 0.5  # of a device's memory that a full container may take
_REASONS = {"emptied": "emptied", "made late": "in-use", "made anew": "largest-input"}


def unknown(path: str = "", kind: str = "") -> Dict[str, Any]:
    return {
        "held_by": {"path": path, "kind": kind} if path else None,
        "kept_at": None,
        "fix": "",
        "released_by": "unknown",
        "used": None,
        "not_a_leak": None,
        "bounded": None,
        "group": path,
        "seconds": 0.0,
    }


def compose(evidence: Evidence, climb: Climb, roots: Roots, files: Files) -> Dict[str, Any]:
    if evidence.role:
        answer = unknown(evidence.role, "training")
        answer.update(not_a_leak=evidence.role, released_by="nothing", group="role")
        answer["reason"] = (
            "gradients"
            if evidence.role.startswith("the gradient")
            else "optimizer-state"
            if evidence.role.startswith("optimizer state")
            else "training-state"
        )
        return answer
    if not evidence.paths:
        if not evidence.complete:
            answer = unknown()
            answer["fix"] = _fixes.unfinished()
            return answer
        if not evidence.sought:
            return unknown()
        path = "held by the active profiler" if profiling() else "held by C++"
        answer = unknown(path, "c++")
        answer["fix"] = "stop the profiler, or give it a schedule" if profiling() else _fixes.outside()
        answer["group"] = path + ": " + str(evidence.candidate.get("allocated_at"))
        return answer
    answer = _Composer(evidence, climb, roots, files).answer()
    if int(evidence.candidate.get("device", -1)) < 0:
        answer["fix"] = _fixes.on_host(answer["fix"])
    return answer


class _Composer:
    def __init__(self, evidence: Evidence, climb: Climb, roots: Roots, files: Files) -> None:
        self.evidence, self.climb, self.roots, self.files = evidence, climb, roots, files
        self.group = _growth.largest(evidence.paths)
        self.path = self.group[0][1]
        # What regrows lies in one place for each: the same blocks, larger, and no container gets one more.
        self.regrows = evidence.candidate.get("shape") == "regrow"
        self.growth = self._in_growth()
        stack = [
            (str(frame.get("file", "")), str(frame.get("function", "")), int(frame.get("line", 0)))
            for frame in evidence.candidate.get("stack", [])
            if isinstance(frame, dict)
        ]
        self.finder = Finder(files, _user_files(stack, files), stack)
        self.row: Optional[Linked] = None
        behind = behind_loop(self.path, climb, roots, self.finder)
        if behind is not None:
            same = [item for item in self.group if item[1].steps[0].value is self.path.steps[0].value]
            self.group = [(born, behind.followed_by(path)) for born, path in same]
            self.path, self.growth = self.group[0][1], self._in_growth()
        found = linked([path for _, path in self.group])
        if found is not None:
            (self.path, self.row), self.growth = found, None
        elif len(self.path.steps) == 1 and self.path.steps[0].kind == "name":
            shape = str(evidence.candidate.get("shape", ""))
            other = surviving(self.path, climb, roots, self.finder, shape, evidence.others)
            if other is not None:
                self.path, self.growth = other, None
                self.group = [(born, other) for born, _ in self.group]
        self.advice = Advice(evidence, self.path, self.growth, self.row)

    def answer(self) -> Dict[str, Any]:
        path = self.path
        container = path.steps[self.growth].parent if self.growth is not None else None
        word = special(path, container, self.roots, self.finder)
        if word is not None:
            answer = unknown(word.path, word.kind)
            answer.update(fix=word.fix, released_by=word.released)
            if word.kept is not None:
                file, line = word.kept
                answer["kept_at"] = {"file": file.name, "line": line, "code": file.code(line)}
                answer["group"] = f"{file.name}:{line}"
            return answer
        kept = self._kept()
        shape = self.evidence.candidate.get("shape", "")
        bound = self._bound(kept, self._within() if shape == "burst" else container)
        answer = unknown()
        words = path.text() if self.row is None else linked_text(path, self.row)
        answer["held_by"] = {"path": words + self._about(container), "kind": self._kind(container)}
        answer["kept_at"] = {"file": kept.file, "line": kept.line, "code": kept.code} if kept else None
        answer["released_by"] = (
            "gc" if path.root == "cycle" else "nothing" if path.root in _ROOTED else "unknown"
        )
        used = self._used(kept, container)
        again = (
            f"{os.path.basename(used.file.name)}:{used.where.line}"
            if used is not None
            and used.how == _use.AGAIN
            and used.where is not None
            and used.file is not None
            else ""
        )
        keyed = isinstance_plain(container, dict)
        whole = kept is not None and kept.holder is not None and _use.whole(used, kept.holder, keyed)
        itself = (
            self.regrows
            and kept is not None
            and kept.store is not None
            and kept.holder is not None
            and kept.store.how != "add"
            and _anew.of_itself(kept.store, kept.holder, self.finder)
        )
        answer["fix"] = self.advice.fix(kept, container, again if whole else "", itself)
        answer["group"] = (
            _circle(path) if path.around else f"{kept.file}:{kept.line}" if kept else self.advice.stem()
        )
        if any(step.name == "__traceback__" for step in path.steps):
            answer["used"] = _use.NEVER  # nobody reads the locals of a frame that failed
        elif kept is not None and kept.store is not None and kept.holder is not None:
            bound = self._by_use(answer, kept, kept.store, kept.holder, shape, used, again) or bound
        if isinstance_plain(container, dict) and kept is not None and kept.holder is not None:
            # Without look-ups it is no cache, and no key comes again.
            answer["keyless"] = not kept.stored_in and not _again.looked_for(kept.holder, self.finder)
        if bound is None and shape == "burst" and len(path.steps) == 1 and path.root in ("global", "local"):
            name = holder_of(path.steps[0], path, ())
            bound = None if name is None else _turnover.comes_round(name, self.finder)
        if bound is None and shape == "burst" and kept is not None and kept.store is not None:
            first = int(self.evidence.candidate.get("asked", 0)) == 0
            more = _again.more_to_come(kept.store, self.finder) if first else ""
            if more:
                answer["not_a_leak"] = f"it came once so far, and its line runs again and again ({more})"
                answer["reason"] = "more-to-come"
                return answer
        if bound is not None:
            if bound.length is not None and bound.capacity is not None and bound.entries:
                answer["bounded"] = {"length": bound.length, "capacity": bound.capacity}
            if self._fits(bound) and (not path.through_graph or self._nearly_full(bound)):
                answer["not_a_leak"] = bound.reason + self._when_full(bound)
                answer["reason"] = next(
                    (reason for words, reason in _REASONS.items() if bound.reason.startswith(words)),
                    "bounded",
                )
            elif not bound.entries:
                pass  # a far bound in bytes or the like: no number to show
            elif path.through_graph and bound.capacity is not None and container is not None:
                answer["fix"] = _fixes.graph_bounded(self.advice.name(kept), bound.capacity)
                answer["held_by"]["path"] += f"; at most {bound.capacity:,}{self._when_full(bound)}"
            elif bound.capacity is not None:
                full = self._when_full(bound)
                answer["fix"] = _fixes.far_bound(self.advice.name(kept), bound.capacity, full)
                answer["held_by"]["path"] += f"; at most {bound.capacity:,}{full}"
        return answer

    def _by_use(
        self,
        answer: Dict[str, Any],
        kept: Kept,
        store: Store,
        holder: Holder,
        shape: str,
        used: Optional[_use.Used],
        again: str,
    ) -> Optional[_limits.Bound]:
        """Notes what the program does with what is kept, and excuses what that excuses."""
        path = self.path
        if path.root not in _ROOTED:
            return None
        if used is None:
            answer["used"] = _use.of_object(self.finder, holder, store)
            return None
        # What is read of a value with a graph is the value: the graph it keeps is of no use for that.
        graph = path.through_graph and used.how == _use.GATHERED
        answer["used"] = _use.READ if graph else used.how
        answer["owner"] = _use.together(self.finder, holder, store) or None
        if shape == "burst" and again:
            return _limits.Bound(f"made late and in use since: {holder.name} is read at {again}", None, None)
        if shape == "regrow":
            newest = not path.through_graph and not self._grows_below(kept)
            return _anew.excuse(store, holder, self.finder, newest)
        return None

    def _in_growth(self) -> Optional[int]:
        blocks = self.evidence.candidate.get("blocks", [])
        steps = len({block.get("step") for block in blocks})
        return None if self.regrows else _growth.growth(self.group, steps)

    def _grows_below(self, kept: Kept) -> bool:
        """Whether a name leads to the block by way of an object of which an attribute is what grows."""
        steps = self.path.steps
        at = next((n for n, step in enumerate(steps) if step is kept.step), len(steps))
        holders = [holder_of(step, self.path, ()) for step in steps[at + 1 :] if step.kind == "attribute"]
        return any(_anew.grown(holder, self.finder) for holder in holders if holder is not None)

    def _used(self, kept: Optional[Kept], container: Any) -> Optional[_use.Used]:
        """What the program does with what is kept, where its own line keeps it, or a list of modules does."""
        if kept is None or kept.store is None or kept.holder is None:
            return None
        if kept.stored_in and not _growth.of_modules(container):
            return None
        return _use.use(self.finder, kept.holder, kept.store) if self.path.root in _ROOTED else None

    def _within(self) -> Any:
        """The container that a single block lies in."""
        for step in self.path.steps:
            if step.kind == "index" and is_container(step.parent):
                return step.parent
        return None

    # the line
    def _named(self) -> List[Tuple[int, Step]]:
        """The steps whose name a statement may store into, the nearest to the growth first."""
        path = self.path
        steps = path.around or path.steps
        last = (
            len(steps)
            if path.around
            else self.row.start + self.row.length
            if self.row is not None
            else self.growth + 1
            if self.growth is not None
            else len(steps)
            if self.regrows
            else _growth.common(self.group)
        )
        named: List[Tuple[int, Step]] = []
        for position, step in enumerate(steps[:last]):
            if step.name == "__traceback__" and not path.around:
                break
            if (
                step.kind in ("name", "attribute")
                or step.name == "lru_cache"
                or step.text.startswith(".<closure")
            ):
                named.append((position, step))
        named.reverse()
        if self.row is not None:
            # The statement that links an object to the one before, but for the class's own: then where one is made.
            named.sort(key=lambda item: self._links(item[0], item[1]))
            return named
        if (len(self.group) == 1 or self.regrows) and not path.around:
            named.sort(key=lambda item: item[1].weak)
        if path.around:
            named.sort(key=lambda item: not hasattr(type(item[1].parent), "_forward_cls"))
        return named

    def _links(self, position: int, step: Step) -> bool:
        row, holder = self.row, holder_of(step, self.path, ())
        inside = row is not None and position >= row.start
        return inside and (
            holder is None
            or step.kind != "attribute"
            or not any(
                is_user_file(store.file.name) and getattr(store.statement.function, "name", "") != "__init__"
                for store in self.finder.stores(holder)
            )
        )

    def _kept(self) -> Optional[Kept]:
        library: Optional[Store] = None
        fallback: Optional[Kept] = None
        own = self._as_attribute() if any(is_a(step.parent, "_local") for step in self.path.steps) else None
        if own is not None:
            return own  # of a threading.local
        for position, step in self._named():
            if step.name == "state" and id(step.parent) in self.evidence.current:
                # The state of an optimizer that steps grows with its groups.
                step = Step("attribute", ".param_groups", step.parent, step.value, name="param_groups")
            if step.name == "lru_cache":
                found = decorator_line(self.files, step.parent)
                if found is not None:
                    return Kept(found[0].name, found[1], found[0].code(found[1]), None, None, step, "")
                continue
            forward_class = (
                getattr(type(step.parent), "_forward_cls", None) if step.kind == "attribute" else None
            )
            if forward_class is not None:
                found = context_line(self.files, forward_class, step.name)
                if found is not None and is_user_file(found[0].name):
                    return Kept(found[0].name, found[1], found[0].code(found[1]), None, None, step, "")
                continue
            holders = self._holders(position, step)
            if library is not None and self.growth is not None:
                method = getattr(library.statement.function, "name", "")
                for holder in holders:
                    own = [
                        s for s in self.finder.stores(holder) if s.how == "item" and is_user_file(s.file.name)
                    ]
                    if own:  # `self.adapters[name] = …` of a ModuleDict
                        return self._made(own[0], holder, step, "")
                    calls = self.finder.calls(holder, method, not is_a(step.value, "Module"))
                    if calls and is_user_file(calls[0].file.name):
                        return self._made(
                            calls[0], holder, step, f"{os.path.basename(library.file.name)}:{library.line}"
                        )
            stores = sorted(
                (store for holder in holders for store in self.finder.stores(holder)),
                key=lambda store: -store.score,
            )
            if self.regrows and step is self.path.steps[-1]:
                # The name is the tensor's own: `buf[a:b] = x` writes into it, and keeps nothing.
                stores = [store for store in stores if store.how != "item"] or stores
            good = [store for store in stores if is_user_file(store.file.name)]
            if good and (good[0].score > 20 or position == 0):
                best = good[0]
                if best.how in ("assign", "init") and library is not None and self._modules():
                    continue  # a module around the one that the library's line adds to
                if best.how in ("assign", "init") and self.growth is not None:
                    deeper = self._below()
                    if deeper is not None:
                        return deeper
                holder = next(h for h in holders if any(s.line == best.line for s in self.finder.stores(h)))
                return self._made(best, holder, step, "")
            if good and fallback is None:
                fallback = self._made(good[0], holders[0], step, "")
            if stores and not good and self.growth is not None:
                call = self._call_around(stores, step)
                if call is not None:
                    return call
            closer = bool(stores) and stores[0].how == "item" and self._modules()
            if stores and not good and (library is None or closer):
                library = stores[0]
        if fallback is None:
            fallback = self._as_attribute()
        if fallback is None and library is not None:
            return self._made(library, None, None, "")
        return fallback

    def _modules(self) -> bool:
        """Whether what grows is torch's list or dict of modules."""
        return self.growth is not None and _growth.of_modules(self.path.steps[self.growth].parent)

    def _call_around(self, stores: List[Store], step: Step) -> Optional[Kept]:
        """The user's call in which a library's statement both makes the block and stores it
        (`model.add_adapter(name)`)."""
        stack = self.finder.stack
        for store in stores:
            last = getattr(store.statement.node, "end_lineno", None) or store.line
            inner = next(
                (
                    n
                    for n, (file, _, line) in enumerate(stack)
                    if file == store.file.name and store.line <= line <= last
                ),
                None,
            )
            outer = stack[inner:] if inner is not None and store.how == "item" else []
            for name, _, line in outer:
                if is_user_file(name):
                    file, where = self.files.get(name), f"{os.path.basename(store.file.name)}:{store.line}"
                    return Kept(file.name, line, file.code(line), None, None, step, where)
        return None

    def _as_attribute(self) -> Optional[Kept]:
        """The container lies in a dict that instances use as theirs (`self.__dict__ = Shared.state`): its key is the
        name of an attribute."""
        if self.growth is None or not self.growth:
            return None
        step = self.path.steps[self.growth - 1]
        if step.kind != "index" or not step.name[1:-1].isidentifier():
            return None
        holder = Holder("attribute", step.name[1:-1])
        stores = [s for s in self.finder.stores(holder) if is_user_file(s.file.name) and s.score >= 60]
        return self._made(stores[0], holder, step, "") if stores else None

    def _below(self) -> Optional[Kept]:
        """The container is not grown by any statement: its entries may be what gets something new."""
        for position, step in enumerate(self.path.steps):
            if position <= (self.growth or 0) or step.kind != "attribute" or step.weak:
                continue
            holder = holder_of(step, self.path, ())
            stores = (
                [s for s in self.finder.stores(holder) if is_user_file(s.file.name) and s.score >= 50]
                if holder
                else []
            )
            if stores:
                return self._made(stores[0], holder, step, "")
        return None

    @staticmethod
    def _made(store: Store, holder: Optional[Holder], step: Optional[Step], stored_in: str) -> Kept:
        return Kept(store.file.name, store.line, store.file.code(store.line), store, holder, step, stored_in)

    def _holders(self, position: int, step: Step) -> List[Holder]:
        """The name itself, and other names of the container that grows."""
        steps = self.path.around or self.path.steps
        keys = (
            tuple(s.text for s in steps[position + 1 : self.growth] if s.kind == "index")
            if self.growth is not None and not self.path.around
            else ()
        )
        found = []
        own = holder_of(step, self.path, keys)
        if own is not None:
            found.append(own)
        if not self.path.around and is_container(step.value):
            for place in self.roots.local(step.value):
                if place != step.where:
                    found.append(
                        Holder("local", place.name, place.file, place.function, place.first_line, keys=keys)
                    )
            found += methods_of(step.value, keys, self.files)
            for owner, name in self.climb.attributes(step.value):
                other = attribute_holder(owner, name, keys)
                if other not in found:
                    found.append(other)
        return found

    # the bound
    def _bound(self, kept: Optional[Kept], container: Any) -> Optional[_limits.Bound]:
        if container is None:
            return None
        own = _limits.own_bound(container) or self._inner_bound(kept, container)
        # What is said to be emptied and grew manifold since is not believed for ever.
        asked = int(self.evidence.candidate.get("asked", 0))
        trusted = asked < _limits.TRUST
        if own is None and type(container) is _LRU and trusted:
            own = _keys.per_call(container, self.finder)
        if own is not None or kept is None or kept.store is None or kept.holder is None:
            return own
        is_told = told(kept, "add") is not None
        if kept.stored_in or is_told:
            store = kept.store._replace(how="call") if is_told else kept.store
            emptied = (
                _limits.emptied(store, kept.holder, [kept.holder.name], self.finder, asked)
                if trusted
                else None
            )
            if kept.stored_in or emptied is not None:
                return emptied
        owner = kept.step.parent if kept.step is not None and kept.step.kind == "attribute" else None
        evicting = _limits.evicting(kept.store, kept.holder, container, owner, asked) or _limits.guarded(
            kept.store, kept.holder, container, owner, asked
        )
        if evicting is not None or not trusted:
            return evicting
        return (
            self._replaced(kept.store, kept.holder, container, owner)
            or self._owners_go()
            or _limits.begun_anew(kept.store, kept.holder)
            or _limits.emptied(kept.store, kept.holder, self._receivers(kept), self.finder, asked)
            or at_intervals(kept.store, kept.holder, self._receivers(kept), self.finder, asked)
            or (
                None
                if self.evidence.candidate.get("shape") == "burst"
                else _keys.per_sample(kept.store, kept.holder, container, owner, self.finder, asked)
            )
        )

    def _replaced(self, store: Store, holder: Holder, container: Any, owner: Any) -> Optional[_limits.Bound]:
        """The block itself is the entry, and carries no graph of those before it."""
        below = self.path.steps[self.growth + 1 :] if self.growth is not None else []
        grows = self.evidence.candidate.get("shape") == "regrow" or any(s.kind == "index" for s in below)
        if self.path.through_graph or grows:
            return None
        return _turnover.replaced(self.finder.stores(holder), store, holder, container, owner, self.finder)

    def _owners_go(self) -> Optional[_limits.Bound]:
        """The container belongs to an entry of another one, and the program takes entries out of that."""
        if self.growth is None or self.path.around:
            return None
        for position, step in enumerate(self.path.steps[: self.growth]):
            outer = self.path.steps[position - 1] if position else None
            if step.kind != "index" or outer is None or outer.kind not in ("name", "attribute"):
                continue
            places = {path.steps[position].token for _, path in self.group if position < len(path.steps)}
            if len(places) < 2:
                continue  # one entry, that may stay for ever
            holder = holder_of(outer, self.path, ())
            found = None if holder is None else _turnover.taken_out(holder, self.finder)
            if found is not None:
                return found
        return None

    def _inner_bound(self, kept: Optional[Kept], container: Any) -> Optional[_limits.Bound]:
        if self.growth is None:
            return None
        below = [step.parent for step in self.path.steps[self.growth + 1 :]]
        blocks = int(self.evidence.candidate.get("live_blocks", 0))
        return _limits.inner_bound(container, below, blocks, kept.store if kept is not None else None)

    def _receivers(self, kept: Kept) -> List[str]:
        """The names under which the program knows the object whose attribute the container is."""
        if kept.step is None or kept.step.kind != "attribute":
            return []
        names = ["self"]
        for position, step in enumerate(self.path.steps[1:], 1):
            if step is kept.step:
                names.append(self.path.steps[position - 1].name)
        names += [place.name for place in self.roots.local(kept.step.parent)]
        names += [name for _, name in self.climb.attributes(kept.step.parent)]
        return names

    @staticmethod
    def _nearly_full(bound: _limits.Bound) -> bool:
        return bound.capacity is not None and bound.length is not None and bound.capacity <= 4 * bound.length

    def _when_full(self, bound: _limits.Bound) -> str:
        if not bound.length or not bound.capacity:
            return ""
        live = int(self.evidence.candidate.get("live_bytes", 0))
        return f" ({_fixes.size(live / bound.length * bound.capacity)} when full)"

    def _fits(self, bound: _limits.Bound) -> bool:
        """Whether the container will be full in a sensible time and then still fit the device, with room for others."""
        if bound.length is None or bound.capacity is None or not bound.length:
            return True
        live = int(self.evidence.candidate.get("live_bytes", 0))
        full = live / bound.length * bound.capacity
        per_step = float(self.evidence.candidate.get("bytes_per_step", 0.0))
        if per_step > 0 and (full - live) / per_step * self.evidence.pace > _SENSIBLE:
            return False
        return full < _SHARE * memory(int(self.evidence.candidate.get("device", -1)))

    # words
    def _about(self, container: Any) -> str:
        """What the path does not show: which container, how many entries, which module, how large a graph."""
        words = []
        position = self.growth or 0
        if container is not None and type(container) is not _LRU:
            owner = next(
                (step for step in reversed(self.path.steps[:position]) if step.kind != "index"), None
            )
            words.append(type_name(container) + ("" if owner is None else _owned(owner)))
            length = _limits.length_of(container)
            if length is not None:
                words.append(f"{length} entries when seen")
        for step in self.path.steps:
            if step.kind == "attribute" and not step.weak and is_a(step.parent, "Module"):
                name = module_path(self.evidence.modules, step.parent)
                if name:
                    words.append(f"module {name}")
                    break
        small, large = self.path.sizes
        if not self.path.through_graph and 0 < 4 * small <= large:
            words.append(_fixes.pins(small, large))
        if self.path.nodes:
            words.append(f"graph of {self.path.nodes:,} nodes")
        return f"  ({', '.join(words)})" if words else ""

    def _kind(self, container: Any) -> str:
        path = self.path
        if path.root == "cycle":
            return "cycle"
        if self.row is not None:
            return "linked objects"
        if any(step.name == "__traceback__" for step in path.steps):
            return "exception"
        if container is not None:
            return "lru_cache" if type(container) is _LRU else type_name(container)
        if path.through_graph:
            return "autograd graph"
        if path.root == "stack":
            return "generator" if path.suspended else "stack"
        for step in reversed(path.steps):
            if step.kind in ("attribute", "name"):
                return "attribute" if step.kind == "attribute" else path.root
        return path.root


def _owned(owner: Step) -> str:
    """Whose a container is, where the path does not begin with it."""
    if owner.text.startswith(".<default"):
        return f", the default of {owner.name} in {owner.parent.__name__}()"
    if owner.text.startswith(".<closure"):
        return f" {owner.name}"
    return f" {class_name(owner.parent)}.{owner.name}" if owner.kind == "attribute" else ""


def _circle(path: Path) -> str:
    """A name for a cycle that is the same wherever on it one begins."""
    return "cycle " + " ".join(sorted(f"{type_name(step.parent)}{step.text}" for step in path.around))


def _user_files(stack: List[Tuple[str, str, int]], files: Files) -> List[str]:
    """The user's source files: those of the allocation, then all others."""
    of_stack = [file for file, _, _ in stack if is_user_file(file)]
    return list(dict.fromkeys([*of_stack, *files.users]))[:300]
