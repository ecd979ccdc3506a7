"""A simulated worker: its process, and the truth about it, of which its agent only gets facts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rankwise.base.units import Instant, between
from rankwise.core.rendezvous.vocabulary import World
from rankwise.drivers.virtual.worker_behaviour import Raises, WorkerProgram

if TYPE_CHECKING:
    from rankwise.drivers.virtual.cluster.node import SimulatedNode

SELF_INFLICTED_SIGNALS = (6, 13)


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A worker's process, and the whole truth about it."""

    node: "SimulatedNode"
    round: int
    local_rank: int
    rank: int
    pid: int
    program: WorkerProgram
    started_at: Instant
    """On its node's clock."""
    life: int
    """Counts the agents of its node: news of it reach the agent that it was made for."""
    is_stray: bool = False
    """Whether it is a process that a worker has left behind."""
    is_alive: bool = True
    is_rank: bool = False
    """Whether it holds a rank of its round."""
    failed_at: Instant | None = None
    """When it failed by itself, as opposed to a signal from elsewhere; true time."""
    died_by: int | None = None
    """The signal that ended it when it failed by itself."""
    is_silent: bool = False
    """Whether it failed by an exit code, and told of nothing."""
    lost_peer: bool = False
    """Whether it failed since a peer's connection had closed."""
    may_have_lost_peer: bool = False
    """Whether it failed of what may have come of that, as a wait that was over."""
    blames_peer: bool = False
    """Whether the simulation made it fail because a peer was gone, or had not come."""
    succeeded: bool = False
    must_die: bool = False
    stands_since: Instant | None = None
    """Since when it stands in a collective to which a rank has not come; true time."""
    was_signalled: bool = False
    """Whether anything but its agent told it to end."""
    ended_at: Instant | None = None
    """True time."""
    recovers: bool = False
    """Whether it runs a function that can be called again."""
    exception_held_at: Instant | None = None
    """Since when it holds the exception of its function, if it does; true time."""
    held: Raises | None = None
    """That exception."""
    is_recalled: bool = False
    called_again_as: "SimulatedWorker | None" = None
    """What the same process is in the next round."""
    news_of: int | None = None
    """The attempt that the news of its end names, if its agent has called it again meanwhile."""

    @property
    def is_violent(self) -> bool:
        """Whether it died of a signal that it did not send itself."""
        return self.died_by is not None and self.died_by not in SELF_INFLICTED_SIGNALS

    @property
    def may_be_consequence(self) -> bool:
        """Whether another worker's death may have caused its failure."""
        return self.may_have_lost_peer or self.died_by in SELF_INFLICTED_SIGNALS

    def last_progress(self, now: Instant) -> Instant:
        """When it last showed a sign of life; on its node's clock."""
        every, silent_after = self.program.progress_every, self.program.silent_after
        if every is None:
            return self.started_at
        age = between(self.started_at, now)
        if silent_after is not None:
            age = min(age, silent_after)
        return Instant(self.started_at + age // every * every)


class Witness(Protocol):
    """The checker that is told the truth as it happens."""

    def started(self, worker: SimulatedWorker) -> None:
        """A worker has come into being."""
        ...

    def ended(self, worker: SimulatedWorker) -> None:
        """A worker has ended."""
        ...

    def vanished(self, node: "SimulatedNode") -> None:
        """A node's agent was killed."""
        ...

    def began(self, node: "SimulatedNode", world: World) -> None:
        """A node's agent has begun a round."""
        ...
