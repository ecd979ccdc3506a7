"""Faults of simulated ranks and nodes: values, written on the command line or in a file.

A fault of a rank strikes when the rank comes to an operation: `collective` counts those of a group
from 1, as reports do. Without a `group` that is torch's default group, or that of
`rankwise.collectives`. A fault strikes once, also if ranks are started again; only a slow rank
stays slow. A node is killed when the first of its ranks comes to the operation, or at an instant.
"""

import builtins
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rankwise.base.failure import SIGNAL_NAMES
from rankwise.base.units import Duration, format_duration

if TYPE_CHECKING:
    from rankwise.sim.rehearsal.scheduler import Rank

SIGNALS_MAX = 64
USUAL_GROUPS = ("default", "rankwise.collectives")


class _AtOperation(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="what", forbid_unknown_fields=True
):
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


class _OfRank(_AtOperation, frozen=True, kw_only=True):
    """A fault of one rank."""

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 0:
            raise ValueError(f"rank is {self.rank}, expected 0 or more")

    def _check_operation(self, fault: str) -> None:
        if self.collective is None:
            raise ValueError(f"{fault} happens in an operation, expected @collective=N")


class Kill(_OfRank, frozen=True, kw_only=True, tag="kill"):
    """A signal to the rank."""

    signal: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.signal <= SIGNALS_MAX:
            raise ValueError(f"signal is {self.signal}, expected 1 to {SIGNALS_MAX}, or a name")

    def told(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} gets {SIGNAL_NAMES.get(self.signal, f'signal {self.signal}')}"


class Raise(_OfRank, frozen=True, kw_only=True, tag="raise"):
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

    def told(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} raises {self.error}"


class Late(_OfRank, frozen=True, kw_only=True, tag="late"):
    """The rank comes later, by so much virtual time."""

    by: Duration

    def told(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} is late by {format_duration(self.by)}"


class Slow(_OfRank, frozen=True, kw_only=True, tag="slow"):
    """The rank comes later to each operation, from the given one on."""

    by: Duration

    def told(self) -> str:
        """What happens, for people."""
        return f"rank {self.rank} is slow by {format_duration(self.by)} at each operation"


class Flip(_OfRank, frozen=True, kw_only=True, tag="flip"):
    """A bit of what the rank brings to the operation turns over, in the rank's memory."""

    bit: int
    element: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_operation("flip")

    def told(self) -> str:
        """What happens, for people."""
        return f"bit {self.bit} of element {self.element} flips in the memory of rank {self.rank}"


class KillNode(_AtOperation, frozen=True, kw_only=True, tag="kill-node"):
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

    def told(self) -> str:
        """What happens, for people."""
        return f"node {self.node} is killed"

    def told_in_vain(self, when: str) -> str:
        """That nothing happens, for people."""
        return f"node {self.node} is to be killed {when}, and is not up: nothing happens"


class LateNode(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="what",
    tag="late-node",
    forbid_unknown_fields=True,
):
    """The node starts later, by so much virtual time."""

    node: int
    by: Duration

    def told(self) -> str:
        """What happens, for people."""
        return f"node {self.node} is late by {format_duration(self.by)}"

    def due(self) -> str:
        """Nothing: it needs no operation."""
        return ""


FaultOfRank = Kill | Raise | Late | Slow | Flip
FaultOfNode = KillNode | LateNode
Fault = FaultOfRank | FaultOfNode


class Nodes(Protocol):
    """The nodes that ranks run on."""

    def node_of(self, rank: int) -> int:
        """The number of the node that a rank of the present attempt runs on."""
        ...

    def is_up(self, node: int) -> bool:
        """Whether the node of this number can die."""
        ...

    def kill(self, fault: KillNode) -> None:
        """Let a node die."""
        ...


class Faults:
    """Lets the faults of one run strike.

    Args:
        faults: the faults of the ranks.
        say: tells the user of each.

    Attributes:
        killed: the ranks that a fault has sent a signal to in the present attempt.
        nodes: where ranks run; None while nothing happens to nodes.
        prediction: has each rank's own time on a modelled machine, if there is one.
    """

    def __init__(self, faults: Sequence[Fault], say: Callable[[str], None]) -> None:
        self._waiting: list[Fault] = list(faults)
        self._slow: dict[int, Duration] = {}
        self._say = say
        self.killed: set[int] = set()
        self.nodes: Nodes | None = None
        self.prediction: Any = None

    def begin(self, rank: "Rank") -> None:
        """Strike the rank that runs, before its program begins."""
        for struck in self._of_node(rank.number):
            if struck.collective is None and struck.at is None:
                self.strike_node(struck, "as its ranks begin", rank)
        for fault in self._of(rank.number):
            if fault.collective is None:
                self._strike(fault, rank, None, "as it begins")

    def strike(self, rank: "Rank", group: str, number: int, load: Any) -> None:
        """Strike the rank that runs, which comes to an operation and brings this load.

        Raises:
            RankEnded: it is no more.
            Exception: one that a fault raises.
        """
        for struck in self._of_node(rank.number):
            if struck.fits(group, number):
                self.strike_node(struck, f"at operation #{number} of group {group}", rank)
        for fault in self._of(rank.number):
            if fault.fits(group, number):
                self._strike(fault, rank, load, f"at operation #{number} of group {group}")
        if (delay := self._slow.get(rank.number)) is not None:
            self._delay(rank, delay, load)

    def remarks(self) -> list[str]:
        """What the user should know at the end: which faults have never come."""
        return [f"the fault never came: {fault.told()}{fault.due()}" for fault in self._waiting]

    def of_nodes(self) -> list[FaultOfNode]:
        """Those that strike nodes and have not come yet."""
        return [fault for fault in self._waiting if isinstance(fault, FaultOfNode)]

    def strike_node(self, fault: FaultOfNode, when: str, rank: "Rank | None" = None) -> None:
        """Strike a node.

        Args:
            fault: what happens.
            when: in words.
            rank: the one that runs, if one does; it ends with its node.
        """
        self._waiting.remove(fault)
        if isinstance(fault, KillNode):
            assert self.nodes is not None, "a fault of a node needs nodes"
            if not self.nodes.is_up(fault.node):
                self._say(f"fault: {fault.told_in_vain(when)}")
                return
        self._say(f"fault: {fault.told()}{when and ' '}{when}")
        if isinstance(fault, KillNode) and self.nodes is not None:
            self.nodes.kill(fault)
            if rank is not None:
                rank.take_signals()

    def _of(self, rank: int) -> list[FaultOfRank]:
        return [
            fault
            for fault in self._waiting
            if isinstance(fault, FaultOfRank) and fault.rank == rank
        ]

    def _of_node(self, rank: int) -> list[KillNode]:
        if self.nodes is None:
            return []
        node = self.nodes.node_of(rank)
        return [
            fault for fault in self._waiting if isinstance(fault, KillNode) and fault.node == node
        ]

    def _strike(self, fault: FaultOfRank, rank: "Rank", load: Any, when: str) -> None:
        self._waiting.remove(fault)
        self._say(f"fault: {fault.told()} {when}")
        match fault:
            case Kill():
                self.killed.add(rank.number)
                rank.signal(fault.signal)
                rank.take_signals()
            case Raise():
                error = getattr(builtins, fault.error)(f"fault: {fault.told()} {when}")
                error._rankwise_is_of_a_fault = True  # noqa: SLF001 - its traceback ends at the call
                raise error
            case Late():
                self._delay(rank, fault.by, load)
            case Slow():
                self._slow[rank.number] = fault.by
            case Flip():
                if not _flipped(load, fault.element, fault.bit):
                    self._say(f"fault: there is no such bit in what rank {rank.number} brings")

    def _delay(self, rank: "Rank", by: Duration, load: Any) -> None:
        rank.scheduler.sleep(by)
        if self.prediction is not None:
            self.prediction.delay(rank, by, load)


def _takes_text(kind: type[Exception]) -> bool:
    """Whether such an exception can be made of a message, as `UnicodeDecodeError` cannot."""
    try:
        kind("")
    except TypeError:
        return False
    return True


def _flipped(load: Any, element: int, bit: int) -> bool:
    """Turn a bit over; whether there is one. Loads are what operations take, or end with that."""
    load = getattr(load, "load", load)  # on a modelled machine it has a clock with it
    taken = load[1] if isinstance(load, tuple) else load
    for values in taken if isinstance(taken, list) else [taken]:
        if isinstance(values, list):
            if _flipped(values, element, bit):
                return True
            continue
        count = 0 if values is None else int(values.size if _is_array(values) else values.numel())
        if element < count:
            return _flip(values, element, bit)
        element -= count
    return False


def _flip(values: Any, element: int, bit: int) -> bool:
    byte = "uint8" if _is_array(values) else sys.modules["torch"].uint8
    flat = (values if _is_array(values) else values.data).reshape(-1).view(byte)
    size = values.itemsize
    if bit >= 8 * size:
        return False
    at = element * size + bit // 8
    flat[at : at + 1] ^= 1 << bit % 8
    return True


def _is_array(values: Any) -> bool:
    return hasattr(values, "ctypes")
