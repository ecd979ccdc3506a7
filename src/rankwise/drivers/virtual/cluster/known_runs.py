"""What the checkers record of a cluster: what is known about its runs and their rounds."""

from dataclasses import dataclass, field

from rankwise.base.units import Instant
from rankwise.core.rendezvous.records import Charter, Round, RoundPhase
from rankwise.drivers.virtual.cluster.simulated_worker import SimulatedWorker


@dataclass(slots=True)
class RoundRecords:
    """What is known about one round."""

    record: Round
    running_at: Instant
    members: frozenset[str]
    began: dict[str, Instant] = field(default_factory=dict)
    """When each member's agent had its ranks, by node id."""
    workers: list[SimulatedWorker] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    """Members that have told that their workers had all succeeded."""
    member_vanished: bool = False
    """Whether the record of a member that was not done vanished before the next round began."""
    has_leaver: bool = False
    """Whether a member has told that it leaves, or that its workers are gone."""
    had_newcomer: bool = False
    """Whether a node that is no member was there while it ran."""
    dissolved_at: Instant | None = None
    ended_because: str = ""

    @property
    def all_began_at(self) -> Instant | None:
        """When the last member had its ranks; None if not all of them ever had."""
        if len(self.began) < len(self.record.members):
            return None
        return max(self.began.values())


@dataclass(slots=True)
class RunRecords:
    """What is known about one run: from one founder's charter to the next one's."""

    number: int
    charter: Charter
    round: Round | None = None
    """The round that lies in the store, or lay there last."""
    rounds: dict[int, RoundRecords] = field(default_factory=dict)
    is_shown: bool = False
    """Whether an agent has shown its verdict."""

    @property
    def is_closed(self) -> bool:
        """Whether it is over."""
        return self.round is not None and self.round.phase is RoundPhase.CLOSED
