"""Faults: one list of values for all simulations, as files, options and tests name them.

A fault strikes one of these, and each simulation takes some of them (`reading.py`):

- a **rank**, when it comes to an operation: `collective` counts those of a group from 1, as reports
  do. Without a `group` that is torch's default group, or that of `rankwise.collectives`. It strikes
  once, also if ranks are started again; only a slow rank stays slow;
- a **node**, when the first of its ranks comes to the operation, or at an instant;
- a **chip**, or a link between chips, from the beginning or from an instant on;
- a **cluster**: its agents, its workers, its network and its store, at an instant.
"""

import builtins
from collections.abc import Mapping
from enum import StrEnum
from typing import get_args

import msgspec

from rankwise.base.failure import SIGNAL_NAMES
from rankwise.base.units import SECOND, ZERO, Duration, Instant, format_duration
from rankwise.core.agent.state import AgentPhase

SIGNALS_MAX = 64
USUAL_GROUPS = ("default", "rankwise.collectives")


class _AtOperation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that strikes when a rank comes to an operation; when it begins without one."""

    collective: int | None = None
    group: str = ""

    def __post_init__(self) -> None:
        if self.collective is not None and self.collective < 1:
            raise ValueError(f"collective is {self.collective}, expected 1 or more")
        if self.group and self.collective is None:
            raise ValueError(f"group is {self.group!r}, expected @collective=N of that group too")

    def fits(self, group: str, number: int) -> bool:
        """Whether it strikes at this operation."""
        is_group = group == self.group if self.group else group in USUAL_GROUPS
        return is_group and number == self.collective

    def due(self) -> str:
        """At which operation it was to strike, for people."""
        if self.collective is None:
            return ""
        of_group = f" of group {self.group}" if self.group else ""
        return f" at operation #{self.collective}{of_group}"


class _RankFault(_AtOperation, frozen=True, kw_only=True):
    """A fault of one rank."""

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 0:
            raise ValueError(f"rank is {self.rank}, expected 0 or more")

    def _check_operation(self, fault: str) -> None:
        if self.collective is None:
            raise ValueError(f"{fault} happens in an operation, expected @collective=N")


class Kill(_RankFault, frozen=True, kw_only=True):
    """A signal to the rank."""

    signal: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.signal <= SIGNALS_MAX:
            raise ValueError(f"signal is {self.signal}, expected 1 to {SIGNALS_MAX}, or a name")

    def describe(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} gets {SIGNAL_NAMES.get(self.signal, f'signal {self.signal}')}"


class Raise(_RankFault, frozen=True, kw_only=True):
    """The operation raises an exception of Python's own in this rank."""

    error: str = "RuntimeError"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_operation("raise")
        kind = getattr(builtins, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception) and _takes_text(kind)):
            raise ValueError(  # which msgspec turns into its own
                f"error is {self.error!r}, expected an exception such as OSError"
            )

    def describe(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} raises {self.error}"


class Late(_RankFault, frozen=True, kw_only=True):
    """The rank comes later, by so much virtual time."""

    by: Duration

    def describe(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} is late by {format_duration(self.by)}"


class Slow(_RankFault, frozen=True, kw_only=True):
    """The rank comes later to each operation, from the given one on."""

    by: Duration

    def describe(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} is slow by {format_duration(self.by)} at each operation"


class Flip(_RankFault, frozen=True, kw_only=True):
    """A bit of what the rank brings to the operation turns over, in the rank's memory."""

    bit: int
    element: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_operation("flip")
        for name, value in (("bit", self.bit), ("element", self.element)):
            if value < 0:
                raise ValueError(f"{name} is {value}, expected 0 or more")

    def describe(self) -> str:
        """What happens, for people."""
        return f"bit {self.bit} of element {self.element} flips in the memory of rank {self.rank}"


class KillNode(_AtOperation, frozen=True, kw_only=True):
    """A power cut: the node's agent and all its ranks are gone at once.

    Attributes:
        node: its number.
        at: when it happens, in virtual time, if no operation decides.
        back_after: how much later the node starts again; None for never.
    """

    node: int
    at: Duration | None = None
    back_after: Duration | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at is not None and self.collective is not None:
            raise ValueError("at and collective exclude each other: each says when")

    def describe(self) -> str:
        """What happens, for people."""
        return f"node {self.node} is killed"

    def describe_without_effect(self, when: str) -> str:
        """That nothing happens, for people."""
        return f"node {self.node} is to be killed {when}, and is not up: nothing happens"


class LateNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node starts later, by so much virtual time."""

    node: int
    by: Duration

    def describe(self) -> str:
        """What happens, for people."""
        return f"node {self.node} is late by {format_duration(self.by)}"

    def due(self) -> str:
        """Nothing: it needs no operation."""
        return ""


class SlowPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link or a PE takes so many times as long."""

    times: float
    link: str = ""
    pe: str = ""

    def __post_init__(self) -> None:
        if bool(self.link) == bool(self.pe):
            raise ValueError("slow needs link=… or pe=…, one of them")
        if not 1 <= self.times <= 1e6:
            raise ValueError(f"times is {self.times:g}, expected 1 to 1,000,000")


class Jitter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every PE and every wire is slower by a share of its own, up to so many percent."""

    percent: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.percent <= 1e4:
            raise ValueError(f"percent is {self.percent:g}, expected 0 to 10,000")


class KillLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link between SIPs dies."""

    link: str
    at: Duration = ZERO


class _OfCluster(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="what", forbid_unknown_fields=True
):
    """A fault of a simulated cluster, at an instant."""

    at: Instant


class KillAgent(_OfCluster, frozen=True, kw_only=True, tag="kill-agent"):
    """SIGKILL to the agent, or a power cut; another agent starts there later, or never."""

    node: int
    back_after: Duration | None = None


class FailWorker(_OfCluster, frozen=True, kw_only=True, tag="fail-worker"):
    """A worker ends by itself: with an exit code, or (negative) by a signal; or it raises."""

    node: int
    local_rank: int = 0
    code: int = 1
    raises: str = ""
    """The name of an exception; empty for none."""


class RefuseWorkers(_OfCluster, frozen=True, kw_only=True, tag="refuse-workers"):
    """The node can start no worker for a while: its disk is broken."""

    node: int
    lasts: Duration


class LoseGuardian(_OfCluster, frozen=True, kw_only=True, tag="lose-guardian"):
    """The guardian of the node's workers is killed, and its workers with it."""

    node: int = 0


class BlameWorker(_OfCluster, frozen=True, kw_only=True, tag="blame-worker"):
    """A worker is found to keep the others waiting in a collective."""

    node: int = 0
    local_rank: int = 0


class MissCall(_OfCluster, frozen=True, kw_only=True, tag="miss-call"):
    """A worker does not come to a collective, in which all others of its round stand from then on.

    It does whatever it would do otherwise. The others raise a time-out after `patience`.
    """

    node: int
    local_rank: int = 0
    patience: Duration = Duration(5 * SECOND)


class Preempt(_OfCluster, frozen=True, kw_only=True, tag="preempt"):
    """SIGTERM to the agent; a second one follows when `again_after` is given.

    Without a `signal` it is the program that asks for the end.

    With a `phase` it comes when the agent is in that phase for the first time since `at`. With
    `ranks_before` the node's ranks get it, too, so much earlier, as of a scheduler that signals
    every process.
    """

    node: int
    signal: int | None = 15
    phase: AgentPhase | None = None
    again_after: Duration | None = None
    ranks_before: Duration | None = None


class Leave(_OfCluster, frozen=True, kw_only=True, tag="leave"):
    """The node is asked to leave; the others go on."""

    node: int


class Partition(_OfCluster, frozen=True, kw_only=True, tag="partition"):
    """Some nodes cannot reach the store for a while; their workers run on."""

    nodes: tuple[int, ...]
    lasts: Duration


class CrashStore(_OfCluster, frozen=True, kw_only=True, tag="crash-store"):
    """The store is away for a while; it comes back with all that it knew, or with nothing."""

    lasts: Duration
    forgets: bool = False


class LoseStore(_OfCluster, frozen=True, kw_only=True, tag="lose-store"):
    """The machine of the node that serves the store is lost, and the store with it, for good."""

    node: int


class SlowDisk(_OfCluster, frozen=True, kw_only=True, tag="slow-disk"):
    """Each transaction of the store takes so long for a while, one after the other."""

    lasts: Duration
    takes: Duration


class StartAgents(_OfCluster, frozen=True, kw_only=True, tag="start-agents"):
    """Agents start on these nodes wherever none lives, as when a user begins the job again.

    With a `restarts_max` they want another budget than the plan's, and so another charter; with a
    `program` they bring another program.
    """

    nodes: tuple[int, ...]
    restarts_max: int | None = None
    program: str = ""


class CompactStore(_OfCluster, frozen=True, kw_only=True, tag="compact-store"):
    """The store forgets its history: watches that lag behind are lost."""


FaultOfCluster = (
    KillAgent
    | FailWorker
    | RefuseWorkers
    | LoseGuardian
    | BlameWorker
    | MissCall
    | Preempt
    | Leave
    | Partition
    | CrashStore
    | LoseStore
    | SlowDisk
    | CompactStore
    | StartAgents
)

AmongOthers = MissCall | Leave | Partition | CrashStore | LoseStore | SlowDisk | CompactStore

FaultOfRank = Kill | Raise | Late | Slow | Flip
FaultOfNode = KillNode | LateNode
FaultOfChip = SlowPart | Jitter | KillLink
Fault = FaultOfRank | FaultOfNode | FaultOfChip | FaultOfCluster


class Target(StrEnum):
    """What a fault strikes."""

    RANK = "rank"
    NODE = "node"
    CHIP = "chip"
    CLUSTER = "simulated cluster"


FAULTS: Mapping[Target, Mapping[str, type[Fault]]] = {
    Target.RANK: {"kill": Kill, "raise": Raise, "late": Late, "slow": Slow, "flip": Flip},
    Target.NODE: {"kill": KillNode, "late": LateNode},
    Target.CHIP: {"slow": SlowPart, "jitter": Jitter, "kill": KillLink},
    Target.CLUSTER: {
        "kill": KillAgent,
        "late": LateNode,
        **{str(each.__struct_config__.tag): each for each in get_args(FaultOfCluster)},
    },
}
"""Each fault by what it strikes and by the word for it."""


def word_for(fault: FaultOfCluster) -> str:
    """What users call it."""
    return str(fault.__struct_config__.tag)


def _takes_text(kind: type[Exception]) -> bool:
    """Whether such an exception can be made of a message, as `UnicodeDecodeError` cannot."""
    try:
        kind("")
    except TypeError:
        return False
    return True
