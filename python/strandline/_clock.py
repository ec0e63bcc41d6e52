"""The clock's rules: which of the events that a program shows ends a step, which begins an epoch.

Must not know: torch, ctypes, how events are observed (_hooks), what is done about candidates (_explain).
Invariant: holds ids only, never an object of the user's; one event costs well under a microsecond.
"""

from typing import Any, Callable, Dict, Optional, Tuple

from ._library import BACKWARD, FORWARD, OPTIMIZER, VALIDATION

# What may end a step, weakest first.
MODULE, GRAPH, BACKWARDS, STEPPER, BY_HAND = range(5)

_PATIENCE = 50  # ticks of a weaker kind without the leader after which it is believed
_EAGER = {
    MODULE: 10,
    GRAPH: 10,
    BACKWARDS: 2,
    STEPPER: 1,
    BY_HAND: 1,
}  # … when nothing leads and no optimizer exists


_HOPEFUL = {
    MODULE: _PATIENCE,
    GRAPH: _PATIENCE,
    BACKWARDS: 10,
}  # … when an optimizer exists that does not step


class Leader:
    """Chooses one key among several that tick: an iteration ends each time the leader ticks."""

    __slots__ = ("_rivals", "hopeful", "key", "patience", "rank")

    def __init__(self) -> None:
        self.key: Any = None
        self.rank = -1
        self.patience = _PATIENCE
        self.hopeful = False  # an optimizer exists: wait longer before believing something weaker
        self._rivals: Dict[Any, int] = {}

    def leads(self, rank: int, key: Any, fresh: bool = False) -> bool:
        """Whether this tick of `key` ends an iteration. `fresh`: what ticks did not exist when the leader last did."""
        if key == self.key and rank == self.rank:
            if self._rivals:
                most = max(self._rivals.values())
                if most * 10 > self.patience:
                    self.patience = most * 10
                self._rivals.clear()
            return True
        if rank < self.rank:
            if self.rank == BY_HAND:
                return False
            needed = self.patience
        elif rank > self.rank:
            needed = _EAGER[rank] if rank >= STEPPER or not self.hopeful else _HOPEFUL[rank]
        else:
            needed = 1 if fresh and rank == STEPPER else 2
        count = self._rivals.get(key, 0) + 1
        if count < needed:
            if len(self._rivals) > 1000:  # keys that never come back (a new graph for each input)
                self._rivals.clear()
            self._rivals[key] = count
            return False
        self.key, self.rank = key, rank
        self._rivals.clear()
        return True


class Clock:
    """Turns events into `library.step/epoch/phase`. `explain` is called when candidates wait, `look` at the
    step that it asked for."""

    def __init__(self, library: Any, explain: Optional[Callable[[], None]] = None) -> None:
        self.native = library
        self.explain = explain
        self.look: Optional[Callable[[int], int]] = None  # now and then: gives the step of the next look
        self.next_look = 1 << 62
        self.steps = 0
        self.epochs = 0
        self.asleep = False  # in forked children
        self.leader = Leader()
        self.validating = False
        self._phase: Callable[[int], int] = library.phase
        self._step: Callable[[], int] = library.step
        self._epoch_at = 0  # steps when the last epoch was counted
        self._by_hand = False  # epochs are told
        self._pending = False  # eval() was seen after a step
        self._sources = {"loader": 0, "toggle": 0, "renewal": 0}
        self._short: Dict[str, int] = {}
        self._loaders = Leader()
        self._trains: Dict[int, None] = {}
        self._loader: Optional[Tuple[int, int, Optional[int]]] = None  # key, steps then, length
        self._renewed: Dict[int, int] = {}  # first parameter -> optimizer
        self.parameters: Dict[int, None] = {}  # first parameters of the optimizers that step

    # steps
    def tick(self, rank: int, key: Any) -> None:
        if not self.asleep and self.leader.leads(rank, key):
            self.step()

    def step(self) -> None:
        self.steps += 1
        if self._step() > 0 and self.explain is not None:
            self.explain()
        if self.steps >= self.next_look and self.look is not None:
            self.next_look = self.look(self.steps)

    def optimizer_begins(self, key: int, optimizer: int) -> None:
        if self.asleep:
            return
        if self.validating:
            self.validation_ends()
        if self._renewed.get(key) != optimizer:
            if key in self._renewed:
                self._source("renewal")
            elif len(self._renewed) > 1000:
                self._renewed.clear()
                self.parameters.clear()
            self._renewed[key] = optimizer
            self.parameters[key] = None
        self._phase(OPTIMIZER)

    def optimizer_ends(self, key: int, made: int = -1) -> None:
        """`made`: the step in which the optimizer was made, if that is known."""
        if self.asleep:
            return
        if self.leader.leads(STEPPER, key, fresh=made >= self.steps > 0):
            self.step()
        self._phase(FORWARD)

    # phases
    def backward_begins(self) -> None:
        if not self.asleep:
            if self.validating:
                self.validation_ends()
            self._phase(BACKWARD)

    def backward_ends(self) -> None:
        if not self.asleep:
            self._phase(FORWARD)
            if self.leader.rank < STEPPER:
                self.tick(BACKWARDS, 0)

    def validation_begins(self) -> None:
        if self.asleep:
            return
        if self.steps > self._epoch_at:
            self._pending = True
        self.validating = True
        self._phase(VALIDATION)

    def validation_ends(self) -> None:
        if self.asleep or not self.validating:
            return
        self.validating = False
        self._phase(FORWARD)
        if self._pending:
            self._pending = False
            self._source("toggle")

    # epochs
    def loader_begins(self, key: int, length: Optional[int]) -> None:
        """A new iterator of the loader over the data `key`, which has `length` batches if known."""
        if self.asleep or self.validating:
            return
        if self._loader is not None and self.steps > self._loader[1]:
            if len(self._trains) > 1000:
                self._trains.clear()
            self._trains[self._loader[0]] = None
        self._loader = (key, self.steps, length)
        if key in self._trains and self._loaders.leads(STEPPER, key):
            self._source("loader")

    def epoch(self) -> None:
        self.epochs += 1
        self._epoch_at = self.steps
        self._pending = False
        self.native.epoch()

    def _source(self, name: str) -> None:
        """An epoch as seen by one source. A stronger source that has counted silences the weaker ones."""
        since = self.steps - self._epoch_at
        if since <= 0 or self._by_hand or self._short.get(name, 0) > 2:
            return
        if name != "loader":
            if self._sources["loader"] or (name == "renewal" and self._sources["toggle"]):
                return
            if (
                self._loader is not None
                and self._loader[2] is not None
                and self.steps - self._loader[1] < self._loader[2]
            ):
                return  # in the middle of a pass over the training data
        self._short[name] = self._short.get(name, 0) + 1 if since == 1 else 0  # at every step: no epoch
        self._sources[name] += 1
        self.epoch()

    # by hand
    def step_by_hand(self) -> None:
        self.tick(BY_HAND, 0)

    def request_begins(self) -> int:
        """Its end will be told, with the number that this returns: no step is guessed from now on."""
        if self.asleep:
            return -1
        self.leader.leads(BY_HAND, 0)
        return int(self.native.request_opens())

    def request_ends(self, number: int) -> None:
        if not self.asleep:
            self.native.request_closes(number)
            self.step_by_hand()

    def epoch_by_hand(self) -> None:
        if not self.asleep:
            self._by_hand = True
            self.epoch()
