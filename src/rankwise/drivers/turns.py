"""Stimuli take turns: a machine is fed one at a time, and its effects are carried out in between.

Carrying an effect out may bring the next stimulus, before the last effect of this one is done. It
then waits its turn, so that a host may answer from within an order, and a machine never sees itself
half-way through.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from rankwise.base.units import Instant
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal

S = TypeVar("S")
E = TypeVar("E")


class Turns(Generic[S, E]):
    """Feeds one machine.

    Args:
        name: what the journal calls the machine.
        handle: the machine's answer to a stimulus at an instant.
        carry_out: does what one effect orders.
        clock: tells when a stimulus has its turn.
        journal: remembers every stimulus and effect.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[S, Instant], Sequence[E]],
        carry_out: Callable[[E], None],
        clock: Clock,
        journal: Journal,
    ) -> None:
        self._name = name
        self._handle = handle
        self._carry_out = carry_out
        self._clock = clock
        self._journal = journal
        self._waiting: deque[S] = deque()
        self._is_busy = False

    def deliver(self, stimulus: S) -> None:
        """Feed it this, and what comes meanwhile; at once, or after what it is busy with."""
        self._waiting.append(stimulus)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._waiting:
                self._take_turn(self._waiting.popleft())
        finally:
            self._is_busy = False

    def _take_turn(self, stimulus: S) -> None:
        now = self._clock.now()
        self._journal.stimulus(self._name, stimulus, now)
        for effect in self._handle(stimulus, now):
            self._journal.effect(self._name, effect, now)
            self._carry_out(effect)
