"""A transport between simulated ranks: they meet, and the last one to come moves all data.

The arithmetic is that of every transport (`reductions`), so results are those of real processes to
the bit. Patience is virtual, and only that of a caller counts: without it no rank waits for 300 s
for nothing, since a deadlock of the simulated world is reported at once.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rankwise.base.errors import CollectiveError, CollectiveTimeout
from rankwise.base.units import Duration, format_duration
from rankwise.collectives.calls import AgreedCall, describe
from rankwise.collectives.communicator import Communicator
from rankwise.collectives.ordered_reductions import Reduction, fold
from rankwise.collectives.recorded import recorded
from rankwise.collectives.transport import Flat
from rankwise.simranks.world.collective_groups import CarryOut, CollectiveGroup
from rankwise.simranks.world.world import (
    SimulatedWorld,
    present_world,
    refuse_threads,
    running_rank,
)

GROUP = "rankwise.collectives"
_KEY = "rankwise.collectives"


def simulated_communicator(timeout: Duration) -> Communicator | None:
    """The communicator of the simulated rank that calls this; None where there is none."""
    rank = running_rank()
    if rank is None:
        refuse_threads("an operation of rankwise.collectives")
        return None
    communicator: Communicator | None = rank.own_state.get(_KEY)
    if communicator is None:
        transport = recorded(RehearsedTransport(present_world(), rank.number, timeout))
        communicator = rank.own_state[_KEY] = Communicator(transport, timeout=timeout)
    return communicator


def forget_simulated() -> None:
    """Let the next call of the rank that runs make another one: its world is new."""
    rank = running_rank()
    if rank is not None:
        rank.own_state.pop(_KEY, None)


class RehearsedTransport:
    """Carries out operations between all ranks of a simulated world; a `Transport`."""

    def __init__(self, world: SimulatedWorld, rank: int, usual_patience: Duration) -> None:
        ranks = tuple(range(world.size))
        self.rank = rank
        self.size = len(ranks)
        self._world = world
        self._group: CollectiveGroup = world.group(GROUP, ranks)
        self._group.label = ""
        self._group.gives_up = True  # as real ranks, which are told of each other's ends
        self._usual_patience = usual_patience
        self._node = os.environ.get("GROUP_RANK", "0")
        prediction = world.prediction
        self._clock: Any = (
            None if prediction is None else prediction.clock_of(world.scheduler.ranks[rank])
        )
        self._call = describe("barrier")
        self._patience: Duration | None = None

    @property
    def begun(self) -> int:
        """How many operations this rank has begun."""
        return self._group.begun_by(self.rank)

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Remember what is called; it is compared when the ranks meet."""
        self._call = call
        self._patience = None if patience == self._usual_patience else patience

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources; every rank gets the whole."""

        def carry_out(loads: Sequence[tuple[Flat, Flat, str]]) -> None:
            whole = _folded(loads, reduction)
            for destination, _, _ in loads:
                np.copyto(destination, whole)

        self._meet("all_reduce", (result, source, self._node), carry_out)

    def reduce_scatter(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources; rank r gets the r-th of `size` equal parts."""

        def carry_out(loads: Sequence[tuple[Flat, Flat, str]]) -> None:
            parts = _folded(loads, reduction).reshape(self.size, -1)
            for part, (destination, _, _) in zip(parts, loads, strict=True):
                np.copyto(destination, part)

        self._meet("reduce_scatter", (result, source, self._node), carry_out)

    def all_gather(self, source: Flat, result: Flat) -> None:
        """Put all sources one after the other."""

        def carry_out(loads: Sequence[tuple[Flat, Flat]]) -> None:
            whole = np.concatenate([each for _, each in loads])
            for destination, _ in loads:
                np.copyto(destination, whole)

        self._meet("all_gather", (result, source), carry_out)

    def all_to_all(self, source: Flat, result: Flat) -> None:
        """Give the r-th part of each source to rank r."""

        def carry_out(loads: Sequence[tuple[Flat, Flat]]) -> None:
            whole = np.stack([each.reshape(self.size, -1) for _, each in loads])
            for rank, (destination, _) in enumerate(loads):
                np.copyto(destination, whole[:, rank].reshape(-1))

        self._meet("all_to_all", (result, source), carry_out)

    def broadcast(self, source: Flat, result: Flat, root: int) -> None:
        """Give the source of `root` to all."""

        def carry_out(loads: Sequence[tuple[Flat, Flat]]) -> None:
            whole = loads[root][1].copy()
            for destination, _ in loads:
                np.copyto(destination, whole)

        self._meet("broadcast", (result, source), carry_out, root)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._meet("barrier", None, _nothing)

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Tell the peers that this rank gave up in an operation; a killed one tells nothing."""
        del lost_peer  # a rank that dies here is known to all at once
        if not self._world.scheduler.ranks[self.rank].is_to_end:
            self._group.lose(self.rank, CollectiveError(f"rank {self.rank} gave up: {reason}"))

    def close(self) -> None:
        """Nothing is held."""

    def _meet(self, kind: str, load: Any, carry_out: CarryOut, root: int = 0) -> None:
        passage = None
        if self._clock is not None:
            size = 0 if load is None else load[1].nbytes
            load = passage = self._clock.come(load, size)
            carry_out = partial(self._clock.carry_out, self._group, kind, root, carry_out)
        pending = self._group.meet(self.rank, self._call.signature, load, carry_out)
        if not self._group.wait(pending, self._patience):
            patience = format_duration(self._patience or Duration(0))
            raise CollectiveTimeout(
                f"rank {self.rank} has waited {patience} of virtual time for {pending.describe()}"
            )
        if passage is not None:
            self._clock.wait(passage)


def _folded(loads: Sequence[tuple[Flat, Flat, str]], reduction: Reduction) -> Flat:
    """Fold each node's ranks, then the nodes, as real ones do (`rankwise.collectives.nodes`)."""
    by_node: dict[str, list[Flat]] = {}
    for _, source, node in loads:
        by_node.setdefault(node, []).append(source)
    undivided = msgspec.structs.replace(reduction, divides=False)
    sums = [np.empty_like(loads[0][1]) for _ in by_node]
    for pieces, total in zip(by_node.values(), sums, strict=True):
        fold(undivided, pieces, total)
    fold(undivided, sums, sums[0])
    if reduction.divides:
        np.divide(sums[0], len(loads), out=sums[0])
    return sums[0]


def _nothing(_loads: Sequence[Any]) -> None:
    """Move no data."""
