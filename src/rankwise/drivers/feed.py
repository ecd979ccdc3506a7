"""The one door to every machine: nothing else calls `handle` or `tick`.

A `Door` tells one machine facts and lets its deadlines take effect. Its journal has each stimulus,
numbered, and each effect with the number of the stimulus that caused it. A machine whose steps are
shorter than an entry (a task of a chip worker takes 13 us) has a door without a journal, unless the
caller gives one: then `tell` and `wake` are the machine's own methods, and cost nothing.

A `Feeder` is for drivers whose orders may be answered while they are being carried out.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rankwise.base.machine import Machine, Ticked
from rankwise.base.units import Instant
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal

S = TypeVar("S")
E = TypeVar("E")


class Door(Generic[S, E]):
    """The way into one machine.

    Args:
        name: what the journal calls the machine.
        machine: has no other feeder.
        journal: remembers every stimulus and effect; None for nowhere.

    Attributes:
        tell: tells the machine a fact at an instant; its answer is to be carried out in order.
        wake: the same for a deadline that has come.
    """

    tell: Callable[[S, Instant], Sequence[E]]
    wake: Callable[[Instant], Sequence[E]]

    def __init__(self, name: str, machine: Machine[S, E], journal: Journal | None) -> None:
        if journal is None:
            self.tell, self.wake = machine.handle, machine.tick
            return
        self._name = name
        self._machine = machine
        self._journal = journal
        self._count = 0
        self.tell, self.wake = self._tell, self._wake

    def _tell(self, stimulus: S, now: Instant) -> Sequence[E]:
        self._note(stimulus, now)
        return self._noted(self._machine.handle(stimulus, now), now)

    def _wake(self, now: Instant) -> Sequence[E]:
        self._note(Ticked(), now)
        return self._noted(self._machine.tick(now), now)

    def _note(self, stimulus: object, now: Instant) -> None:
        self._count += 1
        self._journal.stimulus(self._name, self._count, stimulus, now)

    def _noted(self, effects: Sequence[E], now: Instant) -> Sequence[E]:
        for effect in effects:
            self._journal.effect(self._name, self._count, effect, now)
        return effects


class Feeder(Generic[S, E]):
    """Feeds one machine a stimulus at a time, and has its effects carried out in between.

    Carrying an effect out may bring the next stimulus, before the last effect of this one is done.
    It then waits, so that a host may answer from within an order, and a machine never sees itself
    half-way through.

    Args:
        name, machine, journal: see `Door`.
        carry_out: does what one effect orders.
        clock: tells when a stimulus is delivered.
    """

    def __init__(
        self,
        name: str,
        machine: Machine[S, E],
        carry_out: Callable[[E], None],
        clock: Clock,
        journal: Journal | None,
    ) -> None:
        self._machine = machine
        self._door = Door(name, machine, journal)
        self._carry_out = carry_out
        self._clock = clock
        self._waiting: deque[Any] = deque()
        self._is_busy = False

    @property
    def next_deadline(self) -> Instant | None:
        """When `wake` wants to be called next."""
        return self._machine.next_deadline

    def deliver(self, stimulus: S) -> None:
        """Feed it this, and what comes meanwhile; at once, or after what it is busy with."""
        self._feed(stimulus)

    def wake(self) -> None:
        """Let a deadline that has passed take effect; too early, nothing happens."""
        deadline = self._machine.next_deadline
        if deadline is not None and self._clock.now() >= deadline:
            self._feed(_DEADLINE)

    def _feed(self, stimulus: Any) -> None:
        self._waiting.append(stimulus)
        if self._is_busy:
            return
        self._is_busy = True
        door, now_of = self._door, self._clock.now
        try:
            while self._waiting:
                stimulus = self._waiting.popleft()
                is_deadline = stimulus is _DEADLINE
                answer = door.wake(now_of()) if is_deadline else door.tell(stimulus, now_of())
                for effect in answer:
                    self._carry_out(effect)
        finally:
            self._is_busy = False


_DEADLINE = Ticked()
