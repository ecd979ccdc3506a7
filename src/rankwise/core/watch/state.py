"""What the exit watch remembers: facts that wait, and why."""

from dataclasses import dataclass, field
from enum import StrEnum

from rankwise.base.failure import ErrorRecord
from rankwise.base.units import Instant
from rankwise.core.gang.vocabulary import ProgressLooked, RanksBlamed, Stimulus
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.watch.vocabulary import HoldReason, HoldStep


@dataclass(slots=True)
class WaitingFact:
    """A fact that the gang has not got yet."""

    fact: Stimulus
    received_at: Instant
    is_judged: bool = False
    """Whether it was held back before, and is passed on next."""


@dataclass(slots=True)
class Hold:
    """Facts are held back: the first one that waits is its reason, or an exception before it."""

    reason: HoldReason
    attempt: int
    local_rank: int
    began_at: Instant
    step: HoldStep
    due: Instant
    """When this step is over, answer or not."""
    ends_by: Instant
    """When the hold is over, whatever comes."""
    error: ErrorRecord | None = None
    """Of which the rank dies; None if it has exited."""
    trouble: Trouble = Trouble.FAILED
    straggling_since: Instant | None = None
    asks_nodes: bool = True
    awaited: list[HoldStep] = field(default_factory=list)
    of_a_part: RanksBlamed | None = None
    """Which ranks are to blame if the other nodes do not know better."""
    accused: tuple[int, ...] = ()


class HangStep(StrEnum):
    """What is awaited before ranks count as hung."""

    FINDING = "finding"
    """The host looks for whom they wait."""
    ASKING_NODES = "asking-nodes"
    """The other nodes tell what their ranks do."""
    LOOKING_AGAIN = "looking-again"
    """The host looks once more when any rank made progress."""


@dataclass(slots=True)
class Hang:
    """Ranks have made no progress for too long; `looked` is the fact that says so."""

    looked: ProgressLooked
    step: HangStep
    due: Instant
