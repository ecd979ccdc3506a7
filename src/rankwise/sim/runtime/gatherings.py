"""Who is in which meeting: every rank's calls, from the first to the one that it waits in.

A group's collectives are numbered per rank, and the messages of a pair, too; calls with one number
are for one meeting (`meetings`). A rank that waits gives way until all have come, and then until
its part is complete; what can never take place is found here, and told by the scheduler.
"""

import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from greenlet import getcurrent

from rankwise.base.errors import LocalProtocolError
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.core.collectives.workspace import BLOCKS_IN, REDUCING
from rankwise.core.ledger import Blame, Book, Fate, Group, Stage, find_blame, find_disagreement
from rankwise.core.ledger import Call as Entry
from rankwise.sim.ccl.reductions import check_reduction
from rankwise.sim.runtime.meetings import Call, Meeting, Signature, Work
from rankwise.sim.runtime.process_groups import ProcessGroup
from rankwise.sim.runtime.tensor import Tensor, element_type

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext

Tensors = Tensor | Sequence[Tensor]


class Gatherings:
    """The calls of all ranks of a context."""

    def __init__(self, context: "RuntimeContext") -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self._numbers: dict[tuple[str, int], int] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._waiting: dict[int, Call] = {}
        self._last: dict[int, Call] = {}
        self.has_async_calls = False
        """Whether a rank has called a collective that it does not wait for at once."""

    def clear(self) -> None:
        """Forget all calls: the ranks have gone."""
        for each in (self._numbers, self._meetings, self._waiting, self._last):
            each.clear()
        self.has_async_calls = False

    def call_of(self, rank: int) -> Call | None:
        """The collective that a rank is in."""
        return self._waiting.get(rank)

    def last_call_of(self, rank: int) -> Call | None:
        """The latest collective that a rank called."""
        return self._last.get(rank)

    def deadlock(self, alive: set[int], *, is_stuck: bool) -> Blame | None:
        """Why a meeting can never take place, and who is to blame; the ledger knows.

        Args:
            alive: the ranks that may yet call something.
            is_stuck: whether nothing else is under way.
        """
        meetings = self._meetings.values()
        broken = next((meeting for meeting in meetings if meeting.disagrees), None)
        if broken is not None:
            books = self._books(alive)
            rank, call = next(iter(broken.calls.items()))
            blame = find_disagreement(books, rank, self._entered(call, broken))
            assert blame is not None, "its calls disagree"
            return blame
        if is_stuck and not self._are_all_waiting(alive):
            return None
        if not is_stuck and len(alive) == self._context.world_size:
            return None
        if not is_stuck and all(alive.issuperset(meeting.missing()) for meeting in meetings):
            return None
        blame = find_blame(self._books(alive), patience_is_over=is_stuck)
        if blame is None and is_stuck:
            return Blame(blamed=(), text="every rank waits for another one", is_certain=True)
        return blame

    def _books(self, alive: set[int]) -> list[Book]:
        return [self._book(rank, alive) for rank in range(self._context.world_size)]

    def _book(self, rank: int, alive: set[int]) -> Book:
        """What a rank has called: what has not taken place, and the latest."""
        entered: list[tuple[Call, Meeting | None]] = [
            (meeting.calls[rank], meeting)
            for meeting in self._meetings.values()
            if rank in meeting.calls
        ]
        last = self._last.get(rank)
        if last is not None and all(last is not call for call, _ in entered):
            entered.append((last, None))
        groups = {
            meeting.series: Group(
                label="" if call.group.is_world else str(call.group).removeprefix("group "),
                size=len(meeting.ranks),
                members=meeting.ranks,
            )
            for meeting in self._meetings.values()
            if rank in meeting.ranks
            for call in list(meeting.calls.values())[:1]
        }
        return Book(
            rank=rank,
            groups=groups,
            counts={series: self._numbers.get((series, rank), 0) for series in groups},
            calls=tuple(self._entered(call, meeting) for call, meeting in entered),
            fate=Fate.LIVES if rank in alive else Fate.LEFT,
        )

    def _entered(self, call: Call, meeting: Meeting | None) -> Entry:
        if meeting is None:
            stage = Stage.DONE
        else:
            stage = Stage.WAITING if self._waiting.get(call.rank) is call else Stage.ISSUED
        line = call.line
        return Entry(
            group=call.series,
            number=call.number,
            text=call.text,
            match=zlib.crc32(repr(call.signature).encode()),
            place="" if line is None else f"{line.file.rpartition('/')[2]}:{line.number}",
            stage=stage,
        )

    def abandoned(self) -> Blame | None:
        """The call that is incomplete, when all ranks have returned without a wait for it."""
        for meeting in self._meetings.values():
            rank, call = next(iter(meeting.calls.items()))
            missing = tuple(meeting.missing())
            text = f"{call} of rank {rank} never took place: rank {missing[0]} did not call it"
            return Blame(blamed=missing, text=text, is_certain=True)
        return None

    def open(self) -> list[Meeting]:
        """The meetings that somebody has come to and that have not taken place, the first first."""
        return list(self._meetings.values())

    def awaited_by(self, call: Call) -> list[int]:
        """Who has not come to the meeting of a call."""
        for meeting in self._meetings.values():
            if meeting.calls.get(call.rank) is call:
                return sorted(meeting.missing())
        return []

    def _are_all_waiting(self, alive: set[int]) -> bool:
        """Whether every live rank waits for a meeting that has not taken place."""
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
        signature = self._signature(
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
        number = self._next_number(group.name, rank)
        call = Call(
            signature,
            number,
            rank,
            group=group,
            operands=taken,
            results=given,
            after=self._context.current_stream().tail(),
        )
        return self._take_part((group.name, number), group.ranks, call, is_async)

    def _signature(
        self,
        collective: str,
        *,
        taken: list[Tensor],
        given: list[Tensor],
        size: int,
        op: ReduceOp,
        root: int,
        algorithm: str | None,
    ) -> Signature:
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
        return Signature(collective, collective, shape, kind, elements, op, root, algorithm)

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
        number = self._next_number(way, rank)
        signature = Signature(
            f"message from rank {source} to rank {target}", "send_receive", tensor.shape,
            tensor.kind, tensor.numel(), ReduceOp.SUM, 0, None,
        )  # fmt: skip
        sent, received = ([tensor], []) if is_sender else ([], [tensor])
        call = Call(
            signature,
            number,
            rank,
            group=group,
            operands=sent,
            results=received,
            after=self._context.current_stream().tail(),
            way=(source, target),
        )
        return self._take_part((way, number), (source, target), call, is_async)

    def _next_number(self, series: str, rank: int) -> int:
        number = self._numbers.get((series, rank), 0) + 1
        self._numbers[series, rank] = number
        return number

    def _take_part(
        self, key: tuple[str, int], ranks: tuple[int, ...], call: Call, is_async: bool
    ) -> Work | None:
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(self._context, key[0], ranks)
        call.series = key[0]
        self._last[call.rank] = call
        call.is_awaited = not is_async
        self.has_async_calls = self.has_async_calls or (is_async and call.way is None)
        meeting.join(call)
        if meeting.is_complete and not meeting.disagrees:
            del self._meetings[key]
        if is_async:
            return Work(lambda: self._wait_for(call), call)
        self._wait_for(call)
        return None

    def _wait_for(self, call: Call) -> None:
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
                while call.handle in context._pending_collectives:  # noqa: SLF001 (one part in files)
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
