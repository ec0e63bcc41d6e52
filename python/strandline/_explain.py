"""Explains candidates: who holds their blocks, which line keeps them, how to mend it. The search as a whole.

Must not know: how the ledger picks candidates, how an answer is worded (_answer).
Invariant: the program's own objects are searched first, all objects only where those do not explain everything (_near);
within its deadline; the collector is off while it runs and as before afterwards, nothing is collected;
when it returns it holds nothing of the user's; every candidate gets an answer, so that none is asked for again.
"""

import gc
import os
import sys
import time
import types
from typing import Any, Dict, Iterator, List, NamedTuple, Set, Tuple

from . import _autograd, _graphs, _hooks, _trouble
from ._advice import Evidence
from ._answer import compose, unknown
from ._code import Files
from ._growth import beginning
from ._holders import Chain, Climb, Ours
from ._index import Index
from ._near import Unexplained, near
from ._path import Path, Step, write
from ._roles import in_use, roles
from ._roots import Roots
from ._tensors import Blocks, Found, Owner, classes, find, own_references

SECONDS = 2.0  # of this thread's own computing: what else the machine is busy with changes no answer
_ENTRIES = 1_000_000  # of an array that is looked through
_OTHERS = 16  # tensors whose graphs are looked through for what another's keeps
_PICKED = 6  # blocks of a candidate whose holders are sought


class Block(NamedTuple):
    address: int
    size: int
    step: int


class Explainer:
    """Answers the library's candidates when the clock says that some wait."""

    def __init__(self, library: Any, clock: Any = None) -> None:
        self._library = library
        self._clock = clock
        self._began = time.perf_counter()
        self._busy = False
        self.seconds = 0.0

    def answer_pending(self) -> None:
        if self._busy:
            return
        self._busy = True
        began = time.perf_counter()
        try:
            candidates = self._library.candidates()
            if candidates:
                steps = getattr(self._clock, "steps", 0)
                pace = (began - self._began) / steps if steps else 0.0
                answers = self._search(candidates, pace=pace)
                spent = time.perf_counter() - began
                for candidate in candidates:
                    answer = answers.get(candidate["id"]) or unknown()
                    answer["seconds"] = round(spent / len(candidates), 6)
                    self._library.explain(candidate["id"], answer)
        except Exception:
            _trouble.said("the search for holders")
        finally:
            self._busy = False
            self.seconds += time.perf_counter() - began

    @staticmethod
    def _search(
        candidates: List[Dict[str, Any]], seconds: float = SECONDS, pace: float = 0.0
    ) -> Dict[int, Dict[str, Any]]:
        collecting = gc.isenabled()
        gc.disable()
        roots = None
        try:
            current = in_use(list(_hooks.optimizers.values()))
            roots = Roots()
            files = Files(roots.files)

            def among(index: Index, patience: float) -> Dict[int, Dict[str, Any]]:
                deadline = time.thread_time() + patience
                search = Search(candidates, current, collecting, index, roots, files, deadline, pace)
                try:
                    return search.answers()
                finally:
                    search.close()
                    index.close()

            try:
                few = near(roots, classes(), own_references, seconds=seconds / 4)
                if few is not None:
                    return among(few, seconds / 4)
            except Unexplained:
                pass
            except Exception:
                _trouble.said("the search among the program's own objects")
            objects = gc.get_objects()
            _announce(len(candidates), len(objects))
            whole = Index(objects, classes(), seconds=seconds)
            del objects
            return among(whole, seconds)
        except Exception:
            _trouble.said("the search for holders")
            return {}
        finally:
            if roots is not None:
                roots.close()
            if collecting:
                gc.enable()


_MANY = 300_000  # objects among which a search may be felt


def _announce(sites: int, count: int) -> None:
    """Says that a search begins which may hold the program up for a moment."""
    if count >= _MANY and os.environ.get("STRANDLINE_QUIET", "0") in ("", "0"):
        _trouble.say(
            f"looking for what holds the blocks of {sites} sites among {count:,} objects "
            f"(at most {2 * SECONDS:.0f} s)"
        )


def picked(blocks: List[Block]) -> List[Block]:
    """The blocks to climb from: the oldest and some between; not the newest, which may still be in use."""
    ordered = sorted(blocks, key=lambda block: block.step)
    births = sorted({block.step for block in ordered})
    if len(births) > 2:
        ordered = [block for block in ordered if block.step != births[-1]]
    if len(ordered) <= _PICKED:
        return ordered
    return [ordered[round(n * (len(ordered) - 1) / (_PICKED - 1))] for n in range(_PICKED)]


class Search:
    """One search for all candidates that wait."""

    def __init__(
        self,
        candidates: List[Dict[str, Any]],
        current: Set[int],
        collecting: bool,
        index: Index,
        roots: Roots,
        files: Files,
        deadline: float,
        pace: float = 0.0,
    ) -> None:
        self._candidates = candidates
        self._current = current
        self._collecting = collecting
        self._deadline = deadline
        self._pace = pace  # seconds a step
        self._ended = True  # not for lack of time
        self._ours = Ours()
        self._roots = roots
        self._index = index
        self._ours.add(index.objects, roots.values)
        self._climb = Climb(self._roots, self._ours, self._index, deadline)
        self._files = files
        self._chosen: Dict[int, List[Block]] = {
            candidate["id"]: [
                Block(int(b["address"]), int(b["size"]), int(b.get("step", 0)))
                for b in candidate.get("blocks", [])
            ]
            for candidate in candidates
        }
        self._paths: Dict[int, Path] = {}
        self._held: Dict[int, Tuple[Chain, Owner]] = {}  # of the paths to a block's own tensor
        self._dangling: Dict[int, Chain] = {}  # chains that end inside autograd's graph
        self._others: Dict[int, List[Path]] = {}  # through the graphs of other tensors than the nearest

    def close(self) -> None:
        self._climb.close()
        self._paths.clear()
        self._held.clear()
        self._others.clear()
        self._dangling.clear()

    def answers(self) -> Dict[int, Dict[str, Any]]:
        every = [block for blocks in self._chosen.values() for block in blocks]
        blocks = Blocks((block.address, block.size) for block in every)
        instances = self._index.instances()
        self._ours.add(*instances)
        found = find(instances, blocks, self._ours)
        self._ours.add(found.sources, found.optimizers, found.modules, *found.owners.values())
        self._sure_of(found)
        excused = roles(found.optimizers, self._current, found.modules, blocks)
        sought: Dict[int, Block] = {}
        for blocks_of in self._chosen.values():
            if not _mostly(blocks_of, excused):
                sought.update(
                    (block.address, block) for block in picked(blocks_of) if block.address not in excused
                )
        self._direct(sought, found)
        for blocks_of in self._chosen.values():
            self._agree([block.address for block in picked(blocks_of) if block.address in self._held])
        self._by_graph(sought, found)
        result: Dict[int, Dict[str, Any]] = {}
        for candidate in self._candidates:
            of_it = self._chosen[candidate["id"]]
            evidence = Evidence(
                candidate=candidate,
                paths=[
                    (block.step, self._paths[block.address])
                    for block in picked(of_it)
                    if block.address in self._paths
                ],
                sought=sum(block.address in sought for block in picked(of_it)),
                role=next((excused[block.address] for block in of_it if block.address in excused), "")
                if _mostly(of_it, excused)
                else "",
                collecting=self._collecting,
                current=self._current,
                complete=self._climb.complete and self._ended,
                modules=found.modules,
                optimizers=found.optimizers,
                pace=self._pace,
                others=next((self._others[b.address] for b in of_it if b.address in self._others), []),
            )
            try:
                answer = compose(evidence, self._climb, self._roots, self._files)
            except Unexplained:
                raise
            except Exception:
                _trouble.said("the wording of an answer")
                continue
            result[candidate["id"]] = answer
            if answer["not_a_leak"] is None:
                every_path = [*(path for _, path in evidence.paths), *evidence.others]
                roots = {path.graph for path in every_path if path.graph is not None}
                _graphs.explained.update(roots)
        return result

    def _sure_of(self, found: Found) -> None:
        """What is in use for training is excused: so all of that must be known."""
        if self._index.whole:
            return
        steps = [optimizer for optimizer in found.optimizers if id(optimizer) in self._current]
        if len(steps) < len(self._current):
            raise Unexplained
        for optimizer in steps:
            for group in optimizer.param_groups:
                if not all(self._index.knows_all(parameter) for parameter in group["params"]):
                    raise Unexplained

    # blocks that a Python tensor covers
    def _direct(self, sought: Dict[int, Block], found: Found) -> None:
        things: List[Any] = []
        places: Dict[int, int] = {}
        self._ours.add(things)
        for address in sought:
            for owner in found.owners.get(address, [])[:8]:
                if id(owner.object) not in places:
                    places[id(owner.object)] = len(things)
                    things.append(owner.object)
        chains = self._climb.chains(things) if things else []
        self._ours.add(chains)
        for address in sought:
            best: Any = None
            for owner in found.owners.get(address, [])[:8]:
                chain = chains[places[id(owner.object)]]
                rank = _rank(chain)
                if best is None or rank < best[0]:
                    best = (rank, chain, owner)
            if best is not None and best[0][0] < 3:
                self._hold(address, best[1], best[2])
            elif best is not None:
                self._dangling[address] = best[1]

    def _hold(self, address: int, chain: Chain, owner: Owner) -> None:
        path = write(chain, self._roots)
        if owner.via:
            path.tail = (owner.via.lstrip("."),)
        path.sizes = _sizes(owner.object)
        self._paths[address], self._held[address] = path, (chain, owner)

    def _agree(self, addresses: List[int]) -> None:
        """What holds all blocks of a site is their holder, and not what also holds some of them for now, however near
        (the batch that was drawn from a replay buffer)."""
        groups: Dict[Any, List[int]] = {}
        for address in addresses:
            groups.setdefault(beginning(self._paths[address]), []).append(address)
        if len(groups) < 2:
            return
        links = {
            key: {id(link) for address in members for link in self._held[address][0].links[:-1]}
            for key, members in groups.items()
        }
        best: Tuple[int, int, Dict[int, Chain]] = (max(map(len, groups.values())), 0, {})
        until = time.thread_time() + (self._deadline - time.thread_time()) / 4
        for key, members in groups.items():
            shared = {link for other, of_it in links.items() if other != key for link in of_it}
            known: Dict[int, Tuple[Chain, int]] = {}
            for address in members:
                chain = self._held[address][0]
                if chain.root in ("global", "local", "class"):
                    for at, link in enumerate(chain.links[:-1]):
                        if id(link) not in shared and id(link) not in self._roots.globals:
                            known.setdefault(id(link), (chain, at))
            moved: Dict[int, Chain] = {}
            for address in addresses if known else ():
                if address not in members:
                    chain = self._climb.joined(self._held[address][1].object, known, until)
                    if chain is not None:
                        moved[address] = chain
            known.clear()
            if moved and (len(members) + len(moved), len(members)) > best[:2]:
                best = (len(members) + len(moved), len(members), moved)
        for address, chain in best[2].items():
            self._hold(address, chain, self._held[address][1])

    # blocks that only autograd's graph keeps
    def _by_graph(self, sought: Dict[int, Block], found: Found) -> None:
        dangling = self._dangling
        missing = {address: block for address, block in sought.items() if address not in self._paths}
        if not missing:
            return
        held = {id(tensor) for tensor in self._index.referenced(found.sources)}
        held.update(id(tensor) for tensor in found.sources if id(tensor) in self._roots.locals)
        islands = {id(link) for chain in dangling.values() for link in chain.links}
        sources = [tensor for tensor in found.sources if id(tensor) in held and id(tensor) not in islands]
        self._ours.add(sources)
        # What C++ holds of a dangling chain may be a ctx or a saved tensor's hook, met on the way through a graph.
        ends = {address: self._climb.ends(chain.links[-1]) for address, chain in dangling.items()}
        graphs: Dict[int, _autograd.Graph] = {}
        credited: Dict[int, List[int]] = {}
        origins: Dict[int, Any] = {}
        self._ours.add(origins)
        for turn in range(4):
            blocks = Blocks((block.address, block.size) for block in missing.values())
            walk = _autograd.walk(sources, blocks, self._deadline, None if not turn and not ends else 1 << 60)
            met = dict(walk.blocks)
            for address, identities in ends.items():
                for identity in identities:
                    if address not in met and identity in walk.contexts:
                        met[address] = walk.contexts[identity]
            chains: Dict[int, Chain] = {}
            bad = self._rooted(met, chains)
            for address, saved in list(met.items()):
                if id(saved.source) in bad and address in missing:
                    for identity in self._climb.ends(saved.source):
                        if identity in walk.contexts and id(walk.contexts[identity].source) not in bad:
                            met[address] = walk.contexts[identity]
            bad |= self._rooted(met, chains)
            for address, saved in met.items():
                if id(saved.source) in bad or address not in missing:
                    continue
                path = self._through(write(chains[id(saved.source)], self._roots), saved, graphs)
                credited.setdefault(id(saved.source), []).append(address)
                origins[id(saved.source)] = saved.source
                if address in dangling and saved.name == "ctx":
                    path.tail = (
                        *path.tail,
                        "".join(step.text for step in write(dangling[address], self._roots).steps),
                    )
                self._paths[address] = path
                del missing[address]
            self._ended = walk.complete
            walk.clear()
            sources[:] = [tensor for tensor in sources if id(tensor) not in bad]
            if not missing or not bad:
                break
            if time.thread_time() > self._deadline:
                self._ended = False
                break
        for identity, addresses in credited.items():
            self._by_other_graphs(origins[identity], addresses, sources, graphs)
        origins.clear()
        if missing and not self._index.whole:
            raise Unexplained
        self._by_arrays(missing, found)
        self._by_tied_gradients(missing, found)
        for address in missing:
            if address in dangling and self._climb.complete and self._ended:
                self._paths[address] = write(dangling[address], self._roots)

    def _through(self, path: Path, saved: _autograd.Saved, graphs: Dict[int, _autograd.Graph]) -> Path:
        """A path to a tensor, and on through its graph to what the graph keeps. `graphs`: those measured before."""
        source = saved.source
        if id(source) not in graphs:
            graphs[id(source)] = _autograd.measure(source, self._deadline)
        graph = graphs[id(source)]
        path.tail = (".grad_fn", *saved.trail, saved.name)
        path.through_graph, path.scalar = True, _scalar(source)
        path.nodes, path.graph = graph.nodes, graph.root
        return path

    def _by_other_graphs(
        self,
        source: Any,
        addresses: List[int],
        sources: List[Any],
        graphs: Dict[int, _autograd.Graph],
    ) -> None:
        """What a variable's graph keeps, another tensor may keep too: the loss is made anew in each step, from a state
        that is carried from step to step."""
        path = self._paths[addresses[0]]
        if len(path.steps) != 1 or path.steps[0].kind != "name":
            return
        rest = [other for other in sources if other is not source][:_OTHERS]
        self._ours.add(rest)
        for other, chain in zip(rest, self._climb.chains(rest) if rest else []):
            if _rank(chain)[0] >= 3 or time.thread_time() > self._deadline:
                continue
            found = write(chain, self._roots)
            named = [step for step in found.steps if step.kind not in ("part", "index")]
            if not named or named[-1].kind != "attribute":
                continue
            sought = Blocks((address, 1) for address in addresses)
            walk = _autograd.walk([other], sought, self._deadline)
            saved = walk.blocks.get(addresses[0])
            if saved is not None and len(walk.blocks) == len(addresses):
                self._through(found, saved, graphs)
                for address in addresses:
                    self._others.setdefault(address, []).append(found)
            walk.clear()

    def _rooted(self, met: Dict[int, _autograd.Saved], chains: Dict[int, Chain]) -> Set[int]:
        """Climbs from the sources of what a walk met; returns the ids of those that lead to no root."""
        origins = [
            source
            for source in {id(saved.source): saved.source for saved in met.values()}.values()
            if id(source) not in chains
        ]
        self._ours.add(origins)
        if origins:
            chains.update(zip([id(origin) for origin in origins], self._climb.chains(origins)))
        return {identity for identity, chain in chains.items() if _rank(chain)[0] >= 3}

    def _by_tied_gradients(self, missing: Dict[int, Block], found: Found) -> None:
        """backward(create_graph=True) leaves gradients with a graph that leads back to their parameters."""
        if not missing or not found.tied or time.thread_time() > self._deadline:
            return
        self._ours.add(found.tied)
        owned = {id(owner.object) for address in missing for owner in found.owners.get(address, [])}
        gradients = [tensor.grad for tensor in found.tied]
        self._ours.add(gradients)
        walk = _autograd.walk(
            gradients, Blocks((b.address, b.size) for b in missing.values()), self._deadline
        )
        tails = {address: (".grad_fn", *saved.trail, saved.name) for address, saved in walk.blocks.items()}
        for address in list(missing):
            tail = tails.get(address)
            own = any(id(owner.object) in owned for owner in found.owners.get(address, []))
            if tail is None and not own:
                continue
            path = Path("create_graph", "a gradient that carries its graph: Parameter.grad", [])
            path.tail = tail or (".grad_fn", "…", "AccumulateGrad", "the same Parameter")
            path.through_graph = True
            self._paths[address] = path
            self._dangling.pop(address, None)
            del missing[address]
        walk.clear()
        gradients.clear()

    def _by_arrays(self, missing: Dict[int, Block], found: Found) -> None:
        """NumPy arrays keep the tensor whose memory they show, and the collector does not see it."""
        tensors = {
            id(owner.object): address for address in missing for owner in found.owners.get(address, [])
        }
        if "numpy" not in sys.modules or not tensors or time.thread_time() > self._deadline:
            return
        import numpy

        array_type = numpy.ndarray
        self._by_object_arrays(missing, array_type)
        found_arrays: Dict[int, Tuple[Any, Any]] = {}
        self._ours.add(tensors)
        for holder in self._index.objects:
            if not gc.is_tracked(holder) or self._ours(holder):
                continue
            for thing in gc.get_referents(holder):
                if type(thing) is array_type:
                    base, depth = thing.base, 0
                    while type(base) is array_type and depth < 8:
                        base, depth = base.base, depth + 1
                    address = tensors.get(id(base))
                    if address is not None:
                        found_arrays.setdefault(address, (holder, thing))
            if len(found_arrays) == len(missing):
                break
        for address, (holder, array) in found_arrays.items():
            (chain,) = self._climb.chains([holder])
            if _rank(chain)[0] < 3:
                chain.links.append(array)
                self._paths[address] = write(chain, self._roots)
                self._paths[address].tail = ("its memory",)
                del missing[address]

    def _by_object_arrays(self, missing: Dict[int, Block], array_type: Any) -> None:
        """Arrays of Python objects hold them, and the collector does not see that either."""
        heads = {
            id(self._dangling[address].links[0]): address for address in missing if address in self._dangling
        }
        looked: Set[int] = set()

        def arrays() -> Iterator[Tuple[Any, Any]]:
            for value in self._roots.values:
                if type(value) is array_type:
                    yield None, value
            for holder in self._index.objects:
                if gc.is_tracked(holder) and not self._ours(holder):
                    for thing in gc.get_referents(holder):
                        if type(thing) is array_type:
                            yield holder, thing

        for holder, array in arrays():
            if not array.dtype.hasobject or array.dtype.names or id(array) in looked or array.size > _ENTRIES:
                continue
            looked.add(id(array))
            flat = array.ravel()
            met = [(at, heads[id(item)]) for at, item in enumerate(flat.tolist()) if id(item) in heads]
            if not met:
                continue
            if holder is None:
                (chain,) = self._climb.chains([array])
            else:
                (chain,) = self._climb.chains([holder])
                chain.links.append(array)
            if _rank(chain)[0] >= 3:
                continue
            for at, address in met:
                if address in missing:
                    path, inner = write(chain, self._roots), write(self._dangling[address], self._roots)
                    index = Step("index", f"[{at}]", array, self._dangling[address].links[0], name=str(at))
                    path.steps += [index, *inner.steps]
                    self._paths[address] = path
                    del missing[address]


def _rank(chain: Chain) -> Tuple[int, int]:
    """How good a chain is as an explanation: rooted, then garbage in a cycle, then held by a stack, then unknown."""
    if chain.root in ("global", "local", "class"):
        return (0, len(chain.links))
    if chain.root == "cycle":
        return (2, len(chain.links))
    if type(chain.links[0]) in (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType):
        return (1, len(chain.links))
    return (3, len(chain.links))


def _mostly(blocks: List[Block], excused: Dict[int, str]) -> bool:
    return bool(blocks) and 2 * sum(block.address in excused for block in blocks) > len(blocks)


def _sizes(tensor: Any) -> Tuple[int, int]:
    try:
        return tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    except Exception:
        return 0, 0


def _scalar(tensor: Any) -> bool:
    try:
        return tensor.numel() == 1
    except Exception:
        return False
