"""`ctx.distributed`: the collectives, under torch's names.

A call takes the rank's place in a meeting with the other ranks of its group (`meetings`). Calls
that do not return before the collective is complete are *pending* while it runs; those with
`async_op=True` return at once, and run while the ranks go on.

Ranks of a group must call the same collectives in the same order. `send` and `recv` meet each
other, pair by pair and in order.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from greenlet import getcurrent

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.ccl.reductions import ReduceOp, check_reduction
from rankwise.sim.kernel import Rank
from rankwise.sim.runtime.meetings import Call, Meeting, Signature, Work
from rankwise.sim.runtime.tensor import Tensor, element_type

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext

Tensors = Tensor | Sequence[Tensor]


class ProcessGroup:
    """Some ranks that hold collectives among themselves.

    Attributes:
        ranks: its members in their order in the group.
        name: how messages call it.
    """

    def __init__(self, distributed: "Distributed", ranks: tuple[int, ...], name: str) -> None:
        # Weak, because whoever remembers a group must not keep its context alive.
        self._distributed = weakref.ref(distributed)
        self.ranks = ranks
        self.name = name

    def rank(self) -> int:
        """The place in the group of the rank that is running; -1 if it is no member."""
        distributed = self._distributed()
        assert distributed is not None, "a group is asked while its context is there"
        return distributed.get_rank(self)

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name} of ranks {list(self.ranks)}>"


class Distributed:
    """Collectives between the ranks of a context.

    Attributes:
        generation: counts the worlds of ranks that there have been: groups are of one of them.
    """

    def __init__(self, context: "RuntimeContext") -> None:
        # Weak, so that a context is gone as soon as nobody has it, and not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self.ReduceOp = ReduceOp
        self.generation = 0
        self._rank_by_greenlet: dict[Any, int] = {}
        self._world: ProcessGroup | None = None
        self._is_initialized: set[int] = set()
        self._groups: list[ProcessGroup] = []
        self._groups_made: dict[int, int] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._waiting: dict[int, Call] = {}
        self._last: dict[int, Call] = {}

    def begin_ranks(self, ranks: Sequence[Rank]) -> None:
        """Bind greenlets to their ranks."""
        self._reset()
        self.generation += 1
        self._rank_by_greenlet.update({rank: rank.rank for rank in ranks})

    def end_ranks(self) -> None:
        """Forget the ranks, and what they were in."""
        self._reset()

    def _reset(self) -> None:
        self._rank_by_greenlet.clear()
        self._world = None
        for each in (self._is_initialized, self._groups, self._groups_made, self._numbers,
                     self._meetings, self._waiting, self._last):  # fmt: skip
            cast("dict[Any, Any]", each).clear()

    def call_of(self, rank: int) -> Call | None:
        """The collective that a rank is in."""
        return self._waiting.get(rank)

    def last_call_of(self, rank: int) -> Call | None:
        """The latest collective that a rank called."""
        return self._last.get(rank)

    def hopeless(self, alive: set[int]) -> str | None:
        """Why a meeting can never take place, if there is such a one."""
        for meeting in self._meetings.values():
            if meeting.disagrees:
                return "ranks called different collectives"
            gone = [rank for rank in meeting.missing() if rank not in alive]
            if gone and any(
                self._waiting.get(rank) is call for rank, call in meeting.calls.items()
            ):
                return f"rank {gone[0]} has left, and others wait for it"
        return None

    def are_all_waiting(self, alive: set[int]) -> bool:
        """Whether every live rank waits for a meeting that has not taken place."""
        return all(rank in self._waiting and self._waiting[rank].handle is None for rank in alive)

    def init_process_group(
        self, backend: str | None = None, *, world_size: int = -1, rank: int = -1, **_options: Any
    ) -> None:
        """Accepted for torch's sake: the ranks of `spawn` are a group already.

        A world size or rank that is given must be the actual one.
        """
        del backend
        for name, given, actual in (
            ("world_size", world_size, self.get_world_size()),
            ("rank", rank, self.get_rank()),
        ):
            if given not in {-1, actual}:
                raise LocalProtocolError(
                    f"init_process_group got {name}={given}, but it is {actual}"
                )
        self._is_initialized.add(self.get_rank())

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        """Leave the group; accepted for torch's sake."""
        if group is None:
            self._is_initialized.discard(self.get_rank())

    def is_initialized(self) -> bool:
        """Whether this rank has called `init_process_group`."""
        return self.get_rank() in self._is_initialized

    def is_available(self) -> bool:
        """Whether there are collectives; always."""
        return True

    def get_backend(self, group: ProcessGroup | None = None) -> str:
        """What carries the collectives out."""
        del group
        return "rankwise"

    def get_rank(self, group: ProcessGroup | None = None) -> int:
        """The rank that is running, counted in the group; 0 outside of ranks, -1 if no member."""
        rank = self._rank_by_greenlet.get(getcurrent(), 0)
        if group is None:
            return rank
        return group.ranks.index(rank) if rank in group.ranks else -1

    def get_world_size(self, group: ProcessGroup | None = None) -> int:
        """How many ranks there are, in the group or in all."""
        return self._context.world_size if group is None else group.size()

    @property
    def world(self) -> ProcessGroup:
        """The group of all ranks."""
        size = self._context.world_size
        if self._world is None or self._world.size() != size:
            self._world = ProcessGroup(self, tuple(range(size)), "world")
        return self._world

    def new_group(self, ranks: Sequence[int] | None = None, **_options: Any) -> ProcessGroup:
        """Make a group. As in torch, every rank makes all groups, in the same order."""
        members = tuple(range(self.get_world_size())) if ranks is None else tuple(ranks)
        for rank in members:
            if not 0 <= rank < self.get_world_size():
                raise LocalProtocolError(
                    f"new_group got rank {rank}; ranks are 0 to {self.get_world_size() - 1}"
                )
        if not members or len(set(members)) < len(members):
            raise LocalProtocolError(f"new_group got {list(members)}: no rank, or one twice")
        number = self._groups_made.get(self.get_rank(), 0)
        self._groups_made[self.get_rank()] = number + 1
        if number == len(self._groups):
            self._groups.append(ProcessGroup(self, members, f"group {number}"))
        group = self._groups[number]
        if group.ranks != members:
            raise LocalProtocolError(
                f"rank {self.get_rank()} makes group {number} of ranks {list(members)}, another"
                f" rank made it of {list(group.ranks)}",
                hint="every rank has to make all groups, in the same order",
            )
        return group

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Combine the tensors of all ranks, in place; everyone has the result.

        `algorithm` names one of the configuration, instead of the one it has for this collective.
        """
        return self._collective(
            "all_reduce", [tensor], [tensor], group, async_op, op=op, algorithm=algorithm
        )

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Combine the tensors of all ranks; rank `dst` has the result, the others keep theirs."""
        is_root = self.get_rank() == dst
        return self._collective(
            "reduce", [tensor], [tensor] if is_root else [], group, async_op,
            op=op, root=dst, algorithm=algorithm,
        )  # fmt: skip

    def broadcast(
        self,
        tensor: Tensor,
        src: int = 0,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Give the tensor of rank `src` to all."""
        is_root = self.get_rank() == src
        return self._collective(
            "broadcast", [tensor], [] if is_root else [tensor], group, async_op,
            root=src, algorithm=algorithm,
        )  # fmt: skip

    def all_gather(
        self,
        tensor_list: Tensors,
        tensor: Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Collect the tensors of all ranks, in their order, in a list of tensors or in one."""
        return self._collective(
            "all_gather", [tensor], tensor_list, group, async_op, algorithm=algorithm
        )

    def all_gather_into_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Collect the tensors of all ranks, one after the other, in one tensor."""
        return self.all_gather(output_tensor, input_tensor, group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Tensors,
        op: ReduceOp = ReduceOp.SUM,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Combine the blocks of all ranks; rank r has the result of block r."""
        return self._collective(
            "reduce_scatter", input_list, [output], group, async_op, op=op, algorithm=algorithm
        )

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        op: ReduceOp = ReduceOp.SUM,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Combine the blocks of one tensor; rank r has the result of block r."""
        return self.reduce_scatter(output, input, op, group, async_op)

    def all_to_all(
        self,
        output_tensor_list: Tensors,
        input_tensor_list: Tensors,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Give block r to rank r; get a block from everyone, in the order of the ranks."""
        return self._collective(
            "all_to_all", input_tensor_list, output_tensor_list, group, async_op,
            algorithm=algorithm,
        )  # fmt: skip

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 (torch's name)
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """`all_to_all` with the blocks in one tensor each way."""
        return self.all_to_all(output, input, group, async_op)

    def barrier(
        self, group: ProcessGroup | None = None, async_op: bool = False, **_options: Any
    ) -> Work | None:
        """Wait until all ranks have come."""
        return self._collective("barrier", [], [], group, async_op)

    def send(self, tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> None:
        """Send a tensor to a rank; returns when it has been handed over."""
        self._message(tensor, self.get_rank(), dst, group, is_async=False)

    def recv(
        self, tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None
    ) -> int:
        """Receive a tensor from a rank, which has to be named; returns that rank."""
        if src is None:
            raise LocalProtocolError("recv needs src: receiving from anybody has no fixed order")
        self._message(tensor, src, self.get_rank(), group, is_async=False)
        return src

    def isend(self, tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> Work:
        """Begin to send a tensor."""
        work = self._message(tensor, self.get_rank(), dst, group, is_async=True)
        assert work is not None, "an asynchronous call gives something to wait for"
        return work

    def irecv(self, tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Work:
        """Begin to receive a tensor."""
        work = self._message(tensor, src, self.get_rank(), group, is_async=True)
        assert work is not None, "an asynchronous call gives something to wait for"
        return work

    def _collective(
        self,
        collective: str,
        operands: Tensors,
        results: Tensors,
        group: ProcessGroup | None,
        is_async: bool,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int | None = None,
        algorithm: str | None = None,
    ) -> Work | None:
        group = group or self.world
        rank = self.get_rank()
        if rank not in group.ranks:
            raise LocalProtocolError(
                f"rank {rank} called {collective} of {group}, but is no member"
            )
        if root is not None and root not in group.ranks:
            raise LocalProtocolError(f"{collective}: root {root} is no member of {group}")
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
        # A root broadcasts what it has, and nobody else's values count.
        if collective == "broadcast" and rank != root:
            taken = []
        number = self._next_number(group.name, rank)
        call = Call(
            signature,
            number,
            rank,
            operands=taken,
            results=given,
            stream=self._context.current_stream(),
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
        first = (taken or given)[0] if taken or given else None
        kind = element_type("i8") if first is None else first.kind
        for tensor in (*taken, *given):
            if not isinstance(tensor, Tensor):
                raise LocalProtocolError(f"{collective} takes tensors, not {tensor!r}")
            if tensor.kind != kind:
                raise LocalProtocolError(
                    f"{collective}: {tensor.name} is {tensor.dtype}, {first.name} is {first.dtype}"  # type: ignore[union-attr]
                )
        if collective in {"all_reduce", "reduce", "reduce_scatter"}:
            check_reduction(op, kind)
        if collective != "barrier":
            _check_lengths(collective, taken, given, size)
        total = sum(tensor.numel() for tensor in taken)
        in_blocks = collective in {"reduce_scatter", "all_to_all"}
        elements = 1 if first is None else total // size if in_blocks else total
        shape = first.shape if first is not None else ()
        # Early, so that a mistake in the configuration is told where the call is.
        self._context.ccl.algorithm(collective, algorithm)
        return Signature(collective, collective, shape, kind, elements, op, root, algorithm)

    def _message(
        self,
        tensor: Tensor,
        source: int,
        target: int,
        group: ProcessGroup | None,
        *,
        is_async: bool,
    ) -> Work | None:
        rank, peer = self.get_rank(), target if self.get_rank() == source else source
        members = (group or self.world).ranks
        if peer not in members or peer == rank:
            raise LocalProtocolError(f"rank {rank} cannot exchange messages with rank {peer}")
        is_sender = rank == source
        way = f"{source} to {target} of {(group or self.world).name}"
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
            operands=sent,
            results=received,
            stream=self._context.current_stream(),
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
        self._last[call.rank] = call
        call.is_awaited = not is_async
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
    if collective in {"reduce_scatter", "all_to_all"} and operand % size:
        raise LocalProtocolError(
            f"{collective} between {size} ranks: {operand} elements are no {size} equal blocks"
        )
    expected = {"all_gather": operand * size, "reduce_scatter": operand // size}.get(
        collective, operand
    )
    if result is not None and result != expected:
        raise LocalProtocolError(
            f"{collective} between {size} ranks: the result of {operand} elements has {expected},"
            f" but there is room for {result}"
        )
