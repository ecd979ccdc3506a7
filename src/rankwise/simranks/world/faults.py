"""Lets the faults of simulated ranks and nodes strike (`rankwise.sim.faults.vocabulary`)."""

import builtins
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rankwise.base.units import Duration
from rankwise.sim.faults.vocabulary import (
    FaultOfNode,
    FaultOfRank,
    Flip,
    Kill,
    KillNode,
    Late,
    Raise,
    Slow,
)

if TYPE_CHECKING:
    from rankwise.simranks.world.ranks import Rank

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


class FaultInjector:
    """Lets the faults of one run strike.

    Args:
        faults: the faults of the ranks.
        say: tells the user of each.

    Attributes:
        killed: the ranks that a fault has sent a signal to in the present attempt, and when.
        nodes: where ranks run; None while nothing happens to nodes.
        prediction: has each rank's own time on a modelled machine, if there is one.
    """

    def __init__(self, faults: Sequence[Fault], say: Callable[[str], None]) -> None:
        self._waiting: list[Fault] = list(faults)
        self._slow: dict[int, Duration] = {}
        self._say = say
        self.killed: dict[int, str] = {}
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
        return [
            f"the fault never occurred: {fault.describe()}{fault.due()}" for fault in self._waiting
        ]

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
                self._say(f"fault: {fault.describe_without_effect(when)}")
                return
        self._say(f"fault: {fault.describe()}{when and ' '}{when}")
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
        self._say(f"fault: {fault.describe()} {when}")
        match fault:
            case Kill():
                self.killed[rank.number] = when
                rank.signal(fault.signal)
                rank.take_signals()
            case Raise():
                error = getattr(builtins, fault.error)(f"fault: {fault.describe()} {when}")
                error._rankwise_is_of_a_fault = True  # noqa: SLF001 - its traceback ends at the call
                raise error
            case Late():
                self._delay(rank, fault.by, load)
            case Slow():
                self._slow[rank.number] = fault.by
            case Flip():
                if not _flipped(load, fault.element, fault.bit):
                    self._say(f"fault: the operand of rank {rank.number} has no such bit")

    def _delay(self, rank: "Rank", by: Duration, load: Any) -> None:
        rank.scheduler.sleep(by)
        if self.prediction is not None:
            self.prediction.delay(rank, by, load)


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
