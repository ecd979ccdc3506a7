"""Carries a gang's effects to a process host, and the host's stimuli to the gang.

This is all that the real and the simulated driver have in common, and it is enough for both to run
the very same machine.
"""

from collections.abc import Callable
from typing import Protocol

from rankwise.base.failure import Outcome
from rankwise.base.units import Instant
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    AnnounceRestart,
    DumpStacks,
    Effect,
    Finish,
    LookForProgress,
    SignalWorker,
    SpawnWorker,
    Started,
    Stimulus,
    Sweep,
    Ticked,
)
from rankwise.drivers.turns import Turns
from rankwise.ports.clock import Clock
from rankwise.ports.journal import Journal
from rankwise.ports.processes import ProcessHost

Announcement = AnnounceRestart | AnnounceKill

MACHINE_NAME = "gang"


class Dispatch(Protocol):
    """What turns a node's machine: a gang's, or an agent's with one gang per round."""

    @property
    def outcome(self) -> Outcome | None:
        """What became of this node's workers, once the machine has finished."""
        ...

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next."""
        ...

    @property
    def gang(self) -> Gang | None:
        """The gang of the present attempt; None between two."""
        ...

    def begin(self) -> None:
        """Let the machine begin its life."""
        ...

    def deliver(self, stimulus: Stimulus) -> None:
        """Tell it a fact of a gang."""
        ...

    def tick(self) -> None:
        """Let a deadline that has passed take effect."""
        ...


class GangDispatch:
    """Runs one gang on one process host.

    Args:
        gang: the machine; nobody else may feed it.
        host: carries out its orders.
        clock: tells when a stimulus arrived.
        journal: remembers every stimulus and effect.
        on_announcement: is told what the user should hear of.
    """

    def __init__(
        self,
        gang: Gang,
        host: ProcessHost,
        clock: Clock,
        journal: Journal,
        on_announcement: Callable[[Announcement], None],
    ) -> None:
        self._gang = gang
        self._host = host
        self._clock = clock
        self._on_announcement = on_announcement
        self._turns: Turns[Stimulus, Effect] = Turns(
            MACHINE_NAME, gang.handle, self._carry_out, clock, journal
        )

    @property
    def outcome(self) -> Outcome | None:
        """What became of the gang, once it has finished."""
        return self._gang.outcome

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next."""
        return self._gang.next_deadline

    @property
    def gang(self) -> Gang | None:
        """The gang."""
        return self._gang

    def begin(self) -> None:
        """Let the gang begin its life."""
        self.deliver(Started())

    def deliver(self, stimulus: Stimulus) -> None:
        """Tell the gang a fact and carry out its answer."""
        self._turns.deliver(stimulus)

    def tick(self) -> None:
        """Let a deadline that has passed take effect; too early, nothing happens."""
        deadline = self._gang.next_deadline
        if deadline is not None and self._clock.now() >= deadline:
            self.deliver(Ticked())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SpawnWorker():
                self._host.spawn(effect.local_rank, effect.attempt)
            case SignalWorker():
                self._host.signal(effect.local_rank, effect.attempt, effect.signal)
            case LookForProgress():
                self._host.look_for_progress(effect.attempt)
            case DumpStacks():
                self._host.dump_stacks(effect.attempt)
            case Sweep():
                self._host.sweep(effect.attempt)
            case AnnounceRestart() | AnnounceKill():
                self._on_announcement(effect)
            case Finish():
                pass  # `outcome` tells; whoever drives the gang looks at it after every step
