"""`ctx.distributed`: the collectives, under torch's names.

A call takes the place of the rank in a collective of its group (`collective_calls`). Calls
that do not return before the collective is complete are *pending* while it runs; those with
`async_op=True` return at once, and run while the ranks go on.

Ranks of a group must call the same collectives in the same order. `send` and `recv` meet each
other, pair by pair and in order.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import LocalProtocolError
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim.ccl.fidelity import Ring
from rankwise.sim.hardware.routing import sip_route
from rankwise.sim.kernel import RankGreenlet
from rankwise.sim.runtime.collective_calls import Work
from rankwise.sim.runtime.pending_collectives import PendingCollectives, Tensors
from rankwise.sim.runtime.process_groups import GroupRegistry, ProcessGroup
from rankwise.sim.runtime.symmetric_memory import SymmetricMemoryModule, SymmetricMemoryOperations
from rankwise.sim.runtime.tensor import Tensor

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext


class Distributed:
    """Collectives between the ranks of a context.

    Attributes:
        generation: counts the worlds of ranks that there have been: groups are of one of them.
        pending_collectives: which rank is in which collective.
    """

    def __init__(self, context: "RuntimeContext") -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self._rank_by_greenlet = context.rank_by_greenlet
        self.ReduceOp = ReduceOp
        self.generation = 0
        self._is_initialized: set[int] = set()
        self._groups = GroupRegistry(self)
        self.pending_collectives = PendingCollectives(context)
        self._symmetric_memory = SymmetricMemoryModule(context)
        self.symmetric_operations = SymmetricMemoryOperations(context, self._symmetric_memory)

    def begin_ranks(self, ranks: Sequence[RankGreenlet]) -> None:
        """Bind greenlets to their ranks."""
        self._reset()
        self.generation += 1
        self._rank_by_greenlet.update({rank: rank.rank for rank in ranks})

    def end_ranks(self) -> None:
        """Forget the ranks, and what they were in."""
        self._reset()

    def _reset(self) -> None:
        self._rank_by_greenlet.clear()
        self._is_initialized.clear()
        self._groups.clear()
        self._symmetric_memory.clear()
        self.pending_collectives.clear()

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
        rank = self._context.rank
        if group is None:
            return rank
        return group.ranks.index(rank) if rank in group.ranks else -1

    def get_world_size(self, group: ProcessGroup | None = None) -> int:
        """How many ranks there are, in the group or in all."""
        return self._context.world_size if group is None else group.size()

    @property
    def world(self) -> ProcessGroup:
        """The group of all ranks."""
        return self._groups.world(self._context.world_size)

    def group_named(self, name: str) -> ProcessGroup | None:
        """A group by its name; that of all ranks is `world`, and `0` in torch."""
        return self.world if name in {self.world.name, "0"} else self._groups.of_name(name)

    def new_group(self, ranks: Sequence[int] | None = None, **_options: Any) -> ProcessGroup:
        """Make a group. As in torch, every rank makes all groups, in the same order."""
        size = self.get_world_size()
        return self._groups.make(self.get_rank(), range(size) if ranks is None else ranks, size)

    def groups_beside(self, group: ProcessGroup) -> list[ProcessGroup]:
        """The other groups whose collectives could be under way at the same time as one of a group.

        Groups that share a rank follow each other, unless there are calls that ranks do not wait
        for. The group of all ranks counts once it has had more than barriers and scalars.
        """
        return [
            other
            for other in self._groups.all_of(self._context.world_size)
            if other is not group
            and other.size() > 1
            and (other.is_in_use or not other.is_world)
            and (
                self.pending_collectives.has_async_calls or not set(group.ranks) & set(other.ranks)
            )
        ]

    def groups_on_a_device(self, group: ProcessGroup) -> int:
        """Of a group and those beside it, how many have ranks on one device of the group's."""
        counts = Counter(
            sip
            for each in (group, *self.groups_beside(group))
            for sip in {self._context.device_of(rank).sip for rank in each.ranks}
        )
        return max(counts[self._context.device_of(rank).sip] for rank in group.ranks)

    def wires_of(self, ranks: Sequence[int]) -> Ring:
        """The wires of each way round a ring of ranks: the devices at the ends of each."""
        sips = self._context.engine.topology.machine.system.sips
        homes = [self._context.device_of(rank).sip for rank in ranks]
        ways = zip(homes, [*homes[1:], homes[0]], strict=True)
        return [
            set(pairwise([one, *sip_route(sips, one, other)]))
            for one, other in ways
            if one != other
        ]

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
        return self.pending_collectives.collective(
            "all_reduce",
            [tensor],
            [tensor],
            group or self.world,
            async_op,
            op=op,
            algorithm=algorithm,
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
        return self.pending_collectives.collective(
            "reduce", [tensor], [tensor] if is_root else [], group or self.world, async_op,
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
        return self.pending_collectives.collective(
            "broadcast", [tensor], [] if is_root else [tensor], group or self.world, async_op,
            root=src, algorithm=algorithm,
        )  # fmt: skip

    def gather(
        self,
        tensor: Tensor,
        gather_list: Tensors | None = None,
        dst: int = 0,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Collect the tensors of all ranks at rank `dst`, which alone gives a `gather_list`."""
        blocks = self._blocks("gather", "gather_list", gather_list, dst)
        return self.pending_collectives.collective(
            "gather", [tensor], blocks, group or self.world, async_op,
            root=dst, algorithm=algorithm,
        )  # fmt: skip

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Tensors | None = None,
        src: int = 0,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        *,
        algorithm: str | None = None,
    ) -> Work | None:
        """Give tensor r of the `scatter_list` of rank `src`, which alone has one, to rank r."""
        blocks = self._blocks("scatter", "scatter_list", scatter_list, src)
        return self.pending_collectives.collective(
            "scatter", blocks, [tensor], group or self.world, async_op,
            root=src, algorithm=algorithm,
        )  # fmt: skip

    def _blocks(self, what: str, name: str, given: Tensors | None, root: int) -> Tensors:
        """The blocks that the root alone gives; refuse what it lacks or another has too much."""
        rank = self.get_rank()
        blocks = [] if given is None else given
        is_empty = not isinstance(blocks, Tensor) and not blocks
        if rank == root and is_empty:
            raise LocalProtocolError(f"{what}: rank {rank} is the root and gives no {name}")
        if rank != root and not is_empty:
            raise LocalProtocolError(
                f"{what}: rank {rank} gives a {name}, which rank {root} alone has, the root"
            )
        return blocks

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
        return self.pending_collectives.collective(
            "all_gather", [tensor], tensor_list, group or self.world, async_op, algorithm=algorithm
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
        return self.pending_collectives.collective(
            "reduce_scatter",
            input_list,
            [output],
            group or self.world,
            async_op,
            op=op,
            algorithm=algorithm,
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
        return self.pending_collectives.collective(
            "all_to_all", input_tensor_list, output_tensor_list, group or self.world, async_op,
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
        return self.pending_collectives.collective("barrier", [], [], group or self.world, async_op)

    def send(self, tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> None:
        """Send a tensor to a rank; returns when it has been handed over."""
        self.pending_collectives.message(
            tensor, self.get_rank(), dst, group or self.world, is_async=False
        )

    def recv(
        self, tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None
    ) -> int:
        """Receive a tensor from a rank, which has to be named; returns that rank."""
        if src is None:
            raise LocalProtocolError("recv needs src: a receive from any rank has no fixed order")
        self.pending_collectives.message(
            tensor, src, self.get_rank(), group or self.world, is_async=False
        )
        return src

    def isend(self, tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> Work:
        """Begin to send a tensor."""
        work = self.pending_collectives.message(
            tensor, self.get_rank(), dst, group or self.world, is_async=True
        )
        assert work is not None, "an asynchronous call gives something to wait for"
        return work

    def irecv(self, tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Work:
        """Begin to receive a tensor."""
        work = self.pending_collectives.message(
            tensor, src, self.get_rank(), group or self.world, is_async=True
        )
        assert work is not None, "an asynchronous call gives something to wait for"
        return work
