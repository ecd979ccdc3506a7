"""The calls of all ranks of the simulated machine, from the first to the one that it waits in.

Which calls meet, `core.matching` decides; the messages of a pair are a group of their own. This is
the transport: a rank that waits gives way until all have come, and then until its part is complete.
A collective that can never take place is found here, and reported by the scheduler.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from greenlet import getcurrent

from rankwise.base.errors import LocalProtocolError
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.core.collectives.workspace import BLOCKS_IN, REDUCING
from rankwise.core.ledger import (
    Blame,
    CallRecord,
    Fate,
    Group,
    Stage,
    find_blame,
    find_disagreement,
)
from rankwise.core.ledger import Call as Entry
from rankwise.core.matching import Match, Matcher
from rankwise.sim.ccl.rounded_reductions import check_reduction
from rankwise.sim.runtime.collective_calls import (
    Collective,
    RankContribution,
    Request,
    Work,
    collective_in_words,
)
from rankwise.sim.runtime.process_groups import ProcessGroup
from rankwise.sim.runtime.tensor import Tensor, element_type

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext

Tensors = Tensor | Sequence[Tensor]


class PendingCollectives:
    """The calls of all ranks of a context."""

    def __init__(self, context: "RuntimeContext") -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self._matcher: Matcher[RankContribution] = Matcher()
        self._waiting: dict[int, RankContribution] = {}
        self._last: dict[int, RankContribution] = {}
        self.has_async_calls = False
        """Whether a rank has called a collective that it does not wait for at once."""

    def clear(self) -> None:
        """Forget all calls: the ranks have gone."""
        self._matcher.clear()
        self._waiting.clear()
        self._last.clear()
        self.has_async_calls = False

    def call_of(self, rank: int) -> RankContribution | None:
        """The collective that a rank is in."""
        return self._waiting.get(rank)

    def last_call_of(self, rank: int) -> RankContribution | None:
        """The latest collective that a rank called."""
        return self._last.get(rank)

    def deadlock(self, alive: set[int], *, is_stuck: bool) -> Blame | None:
        """Why a collective can never begin, and who is to blame; the ledger knows.

        Args:
            alive: the ranks that may yet call something.
            is_stuck: whether nothing else is under way.
        """
        matches = self._matcher.open.values()
        broken = next((match for match in matches if not match.is_agreed), None)
        if broken is not None:
            records = self._call_records(alive)
            rank, call = next(iter(broken.entries.items()))
            blame = find_disagreement(records, rank, self._entered(call, broken))
            assert blame is not None, "its calls disagree"
            return blame
        if is_stuck and not self._are_all_waiting(alive):
            return None
        if not is_stuck and len(alive) == self._context.world_size:
            return None
        if not is_stuck and all(alive.issuperset(match.missing()) for match in matches):
            return None
        blame = find_blame(self._call_records(alive), patience_is_over=is_stuck)
        if blame is None and is_stuck:
            return Blame(blamed=(), text="every rank waits for another one", is_certain=True)
        return blame

    def _call_records(self, alive: set[int]) -> list[CallRecord]:
        return [self._call_record(rank, alive) for rank in range(self._context.world_size)]

    def _call_record(self, rank: int, alive: set[int]) -> CallRecord:
        """What a rank has called: what has not taken place, and the latest."""
        matches = self._matcher.open.values()
        entered: list[tuple[RankContribution, Match[RankContribution] | None]] = [
            (match.entries[rank], match) for match in matches if rank in match.entries
        ]
        last = self._last.get(rank)
        if last is not None and all(last is not call for call, _ in entered):
            entered.append((last, None))
        groups = {
            match.key: Group(
                label=call.group.label,
                size=len(match.members),
                members=match.members,
            )
            for match in matches
            if rank in match.members
            for call in list(match.entries.values())[:1]
        }
        return CallRecord(
            rank=rank,
            groups=groups,
            counts={series: self._matcher.groups[series].begun_by(rank) for series in groups},
            calls=tuple(self._entered(call, match) for call, match in entered),
            fate=Fate.LIVES if rank in alive else Fate.LEFT,
        )

    def _entered(self, call: RankContribution, match: Match[RankContribution] | None) -> Entry:
        if match is None:
            stage = Stage.DONE
        else:
            stage = Stage.WAITING if self._waiting.get(call.rank) is call else Stage.ISSUED
        line = call.line
        return Entry(
            group=call.series,
            number=call.number,
            signature=call.called,
            match=call.signature.checksum,
            place="" if line is None else f"{line.file.rpartition('/')[2]}:{line.number}",
            stage=stage,
        )

    def abandoned(self) -> Blame | None:
        """The call that is incomplete, when all ranks have returned without a wait for it."""
        for match in self._matcher.open.values():
            rank, call = next(iter(match.entries.items()))
            missing = tuple(match.missing())
            text = f"{call} of rank {rank} never took place: rank {missing[0]} did not call it"
            return Blame(blamed=missing, text=text, is_certain=True)
        return None

    def open_in_words(self) -> list[str]:
        """What some ranks have come to and what has not taken place, the first first."""
        return [collective_in_words(match) for match in self._matcher.open.values()]

    def awaited_by(self, call: RankContribution) -> list[int]:
        """The ranks that have not joined the collective of a call."""
        match = self._matcher.open.get((call.series, call.number))
        return [] if match is None else sorted(match.missing())

    def _are_all_waiting(self, alive: set[int]) -> bool:
        """Whether every live rank waits for a collective that has not begun."""
        return all(rank in self._waiting and self._waiting[rank].handle is None for rank in alive)

    def collective(
        self,
        collective: str,
        operands: Tensors,
        results: Tensors,
        group: ProcessGroup,
        is_async: bool,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int | None = None,
        algorithm: str | None = None,
    ) -> Work | None:
        """Let the rank that is running take part in a collective; `root` is one of all ranks.

        Raises:
            LocalProtocolError: the rank or the root is not a member, or the tensors do not fit.
        """
        rank = self._context.rank
        if rank not in group.ranks:
            raise LocalProtocolError(
                f"rank {rank} called {collective} of {group}, but is not a member"
            )
        if root is not None and root not in group.ranks:
            raise LocalProtocolError(f"{collective}: root {root} is not a member of {group}")
        taken = [operands] if isinstance(operands, Tensor) else list(operands)
        given = [results] if isinstance(results, Tensor) else list(results)
        root_place = group.ranks.index(root) if root is not None else 0
        request = self._request(
            collective,
            taken=taken,
            given=given,
            size=group.size(),
            op=op,
            root=root_place,
            algorithm=algorithm,
        )
        # A root broadcasts what it has; the values of other ranks do not count.
        if collective == "broadcast" and rank != root:
            taken = []
        number = self._matcher.group(group.name, group.ranks).begin(rank)
        call = RankContribution(
            request,
            number,
            rank,
            group=group,
            operands=taken,
            results=given,
            after=self._context.current_stream().tail(),
        )
        return self._take_part(group.name, call, is_async)

    def _request(
        self,
        collective: str,
        *,
        taken: list[Tensor],
        given: list[Tensor],
        size: int,
        op: ReduceOp,
        root: int,
        algorithm: str | None,
    ) -> Request:
        for tensor in (*taken, *given):
            if not isinstance(tensor, Tensor):
                raise LocalProtocolError(f"{collective} takes tensors, not {tensor!r}")
            tensor.check_usable(self._context)
        # Of a scatter, what all ranks have is the result.
        known = given if collective == "scatter" else taken or given
        first = known[0] if known else None
        kind = element_type("i8") if first is None else first.kind
        for tensor in (*taken, *given):
            if tensor.kind != kind:
                raise LocalProtocolError(
                    f"{collective}: {tensor.name} is {tensor.dtype}, {first.name} is {first.dtype}"  # type: ignore[union-attr]
                )
        if collective in REDUCING:
            check_reduction(op, kind)
        if collective != "barrier":
            _check_lengths(collective, taken, given, size)
        total = sum(tensor.numel() for tensor in (known if collective == "scatter" else taken))
        in_blocks = collective in {"reduce_scatter", "all_to_all"}
        elements = 1 if first is None else total // size if in_blocks else total
        shape = first.shape if first is not None else ()
        # Early, so that a mistake in the configuration is told where the call is.
        self._context.ccl.algorithm(collective, algorithm)
        return Request(collective, collective, shape, kind, elements, op, root, algorithm)

    def message(
        self, tensor: Tensor, source: int, target: int, group: ProcessGroup, *, is_async: bool
    ) -> Work | None:
        """Let the rank that is running send a tensor, or receive one.

        Raises:
            LocalProtocolError: the other rank is no other member.
        """
        rank = self._context.rank
        if not isinstance(tensor, Tensor):
            raise LocalProtocolError(f"messages take tensors, not {tensor!r}")
        tensor.check_usable(self._context)
        peer = target if rank == source else source
        if peer not in group.ranks or peer == rank:
            raise LocalProtocolError(f"rank {rank} cannot exchange messages with rank {peer}")
        is_sender = rank == source
        way = f"{source} to {target} of {group.name}"
        number = self._matcher.group(way, (source, target)).begin(rank)
        request = Request(
            f"message from rank {source} to rank {target}", "send_receive", tensor.shape,
            tensor.kind, tensor.numel(), ReduceOp.SUM, 0, None,
        )  # fmt: skip
        sent, received = ([tensor], []) if is_sender else ([], [tensor])
        call = RankContribution(
            request,
            number,
            rank,
            group=group,
            operands=sent,
            results=received,
            after=self._context.current_stream().tail(),
            way=(source, target),
        )
        return self._take_part(way, call, is_async)

    def _take_part(self, series: str, call: RankContribution, is_async: bool) -> Work | None:
        call.series = series
        self._last[call.rank] = call
        call.is_awaited = not is_async
        self.has_async_calls = self.has_async_calls or (is_async and call.way is None)
        group = self._matcher.groups[series]
        match = group.join(call.rank, call.number, call)
        # A disagreement stays open: it is told when the scheduler looks at the ranks.
        if match.have_all_come and match.is_agreed:
            calls = [match.entries[rank] for rank in match.members]
            Collective(self._context, calls).submit(series)
            group.close(match)
        if is_async:
            return Work(lambda: self._wait_for(call), call)
        self._wait_for(call)
        return None

    def _wait_for(self, call: RankContribution) -> None:
        """Wait until all have come, and then until this rank's part is complete."""
        context = self._context
        self._waiting[call.rank] = call
        try:
            while call.handle is None:
                if getcurrent().parent is None:
                    raise LocalProtocolError(
                        f"{call} waits for other ranks, but was called outside of ranks"
                    )
                context.give_way()
            if getcurrent().parent is not None:
                while call.handle in context._pending_collective_waits:  # noqa: SLF001 (one part in files)
                    context.give_way()
            context.wait(call.handle)
        finally:
            self._waiting.pop(call.rank, None)


def _check_lengths(collective: str, taken: list[Tensor], given: list[Tensor], size: int) -> None:
    """Refuse tensors whose numbers of elements do not fit each other."""
    operand = sum(tensor.numel() for tensor in taken)
    result = sum(tensor.numel() for tensor in given) if given else None
    if collective in BLOCKS_IN and operand % size:
        raise LocalProtocolError(
            f"{collective} between {size} ranks: {operand} elements are no {size} equal blocks"
        )
    if collective == "scatter" and not taken:
        return  # the root alone has blocks
    expected = {
        "all_gather": operand * size,
        "gather": operand * size,
        "reduce_scatter": operand // size,
        "scatter": operand // size,
    }.get(collective, operand)
    if result is not None and result != expected:
        raise LocalProtocolError(
            f"{collective} between {size} ranks: the result of {operand} elements has {expected},"
            f" but there is room for {result}"
        )
