"""`torch.distributed._symmetric_memory` for simulated devices: memory that ranks share.

Each rank of a group allocates (`empty`), all come together (`rendezvous`), and from then on each
has a tensor of every peer's memory (`get_buffer`), which kernels load from and store to over the
links of the machine. Beside each allocation lies a signal pad, whose words say that something is
ready. `barrier`, `put_signal` and `wait_signal` are kernels on the current stream.
"""

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.hardware.peers import Shared
from rankwise.sim.runtime import symmetric_kernels as kernels
from rankwise.sim.runtime.process_groups import ProcessGroup
from rankwise.sim.runtime.tensor import Tensor, element_type, short_name
from rankwise.sim.triton.dtypes import float32

if TYPE_CHECKING:
    from rankwise.sim.runtime.context import RuntimeContext

_SIGNAL_PAD_BYTES = 9_216
"""As many as in torch."""


class SymmetricMemory:
    """What `rendezvous` gives to one rank: every rank's part of an allocation.

    Ranks count in the group here, and so do the peers that kernels name (`dl.symm_at`,
    `dl.notify`, ...); `dl.rank()` of a kernel counts among all ranks.

    Attributes:
        group: whose ranks share it.
        rank: this rank's place in the group.
        world_size: how many ranks the group has.
        buffer_ptrs: where each rank's part begins.
        signal_pad_ptrs: where each rank's signal pad begins.
        buffer_size: bytes of one part.
        signal_pad_size: bytes of one signal pad.
    """

    def __init__(
        self,
        context: "RuntimeContext",
        rank: int,
        buffers: Sequence[Tensor],
        pads: Sequence[Tensor],
        group: ProcessGroup,
    ) -> None:
        self._context = context
        self.group = group
        self._buffers = buffers
        self._pads = pads
        self.rank = rank
        self.world_size = len(buffers)
        self.buffer_ptrs = [each.address for each in buffers]
        self.signal_pad_ptrs = [each.address for each in pads]
        self.buffer_size = buffers[0].nbytes
        self.signal_pad_size = pads[0].nbytes

    @property
    def own_pad(self) -> Tensor:
        """The signal pad of this rank."""
        return self._pads[self.rank]

    @property
    def device(self) -> Any:
        """The device that this rank's part lies on."""
        return self._buffers[self.rank].device

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: Any, storage_offset: int = 0
    ) -> Tensor:
        """A rank's part, or some of it, as a tensor; the offset counts elements."""
        return self._view("buffer", self._buffers, rank, sizes, dtype, storage_offset)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: Any) -> Tensor:
        """A peer's part as a tensor."""
        return self.get_buffer(peer, sizes, dtype)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: Any = None, storage_offset: int = 0
    ) -> Tensor:
        """A rank's signal pad, or some of it, as a tensor of u32 unless told otherwise."""
        kind = element_type("u32" if dtype is None else dtype)
        if not sizes:
            sizes = (self.signal_pad_size // kind.itemsize - storage_offset,)
        return self._view("signal pad", self._pads, rank, sizes, kind, storage_offset)

    def _view(  # noqa: PLR0917  # one more than its callers have
        self,
        what: str,
        parts: Sequence[Tensor],
        rank: int,
        sizes: Sequence[int],
        dtype: Any,
        offset: int,
    ) -> Tensor:
        self._check_rank(rank)
        part, kind = parts[rank], element_type(dtype)
        first, count = offset * kind.itemsize, math.prod(sizes) * kind.itemsize
        if first < 0 or first + count > part.nbytes:
            raise LocalProtocolError(
                f"{what} of {part.name}: {tuple(sizes)} {short_name(kind)} from element {offset} on"
                f" end at byte {first + count}, and it has {part.nbytes}"
            )
        return part.seen_as(tuple(sizes), kind, first, name=f"{part.name} of rank {rank}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LocalProtocolError(
                f"rank {rank} is not in the group of {self._buffers[0].name}: its ranks are 0 to"
                f" {self.world_size - 1}"
            )

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Let this rank's stream wait until those of all ranks have come here."""
        del timeout_ms
        self._launch(kernels.barrier_kernel, self.world_size, channel, self.rank, self.world_size)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal a rank, when all that is in this rank's stream before is done."""
        del timeout_ms
        self._check_rank(dst_rank)
        self._launch(kernels.put_signal_kernel, 1, channel, self.rank, self.world_size, dst_rank)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Let this rank's stream wait for the signal of a rank."""
        del timeout_ms
        self._check_rank(src_rank)
        self._launch(kernels.wait_signal_kernel, 1, channel, self.world_size, src_rank)

    def put(self, source: Tensor, peer: int, channel: int = 0) -> None:
        """Copy a tensor to a peer's part, and signal the peer."""
        self._check_rank(peer)
        if source.nbytes > self.buffer_size:
            raise LocalProtocolError(
                f"put_signal of {source.name}: it has {source.nbytes} bytes, and"
                f" {self._buffers[peer].name} has {self.buffer_size}"
            )
        here = self.get_buffer(self.rank, (source.numel(),), source.kind)
        self._check_channel(channel)
        self._context.launch(
            kernels.put_kernel, 1, here, source, source.numel(), self._pads[self.rank], channel,
            self.rank, self.world_size, peer,
        )  # fmt: skip

    def block_for(self, elements: int) -> int:
        """Elements of one program of an all-reduce, a power of two: all meet at the signal pad."""
        needed = _WORDS_OF_PROGRAM * self.world_size * 4
        programs = min(_PROGRAMS_MAX, self.signal_pad_size // needed)
        if not programs:
            raise LocalProtocolError(
                f"an all-reduce of {self.world_size} ranks needs {needed} bytes of the signal pad"
                f" of {self._buffers[0].name}, which has {self.signal_pad_size}",
                hint=f"set_signal_pad_size({needed}) before the allocation gives as many",
            )
        return max(_BLOCK_MIN, 1 << (-(-elements // programs) - 1).bit_length())

    def _launch(self, kernel: Any, grid: int, channel: int, *args: int) -> None:
        self._check_channel(channel)
        self._context.launch(kernel, grid, self._pads[self.rank], channel, *args)

    def _check_channel(self, channel: int) -> None:
        channels = self.signal_pad_size // 4 // self.world_size
        if not 0 <= channel < channels:
            raise LocalProtocolError(
                f"channel {channel}: the signal pad of {self.signal_pad_size} bytes has channels 0"
                f" to {channels - 1} for {self.world_size} ranks",
                hint="set_signal_pad_size(...) before the allocation gives more",
            )


class SymmetricMemoryOperations:
    """`torch.ops.symm_mem`: collectives as one kernel each, on memory that has been shared."""

    def __init__(self, context: "RuntimeContext", module: "SymmetricMemoryModule") -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self._module = module

    def one_shot_all_reduce(
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        reduce_op: str = "sum",
        group_name: Any = None,
    ) -> Tensor:
        """The sum over all ranks, for few elements: every rank loads all, and adds."""
        handle = self._checked("one_shot_all_reduce", input, reduce_op, group_name)
        out = self._context.empty(*input.shape, dtype=input.kind)
        block = handle.block_for(input.numel())
        self._context.launch(
            kernels.one_shot_kernel, -(-input.numel() // block), input, out, input.numel(),
            handle.get_signal_pad(handle.rank), handle.rank, SIZE=handle.world_size, B=block,
            SUM=_added_in(input.kind),
        )  # fmt: skip
        return out

    def two_shot_all_reduce_(
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        reduce_op: str = "sum",
        group_name: Any = None,
    ) -> Tensor:
        """The sum over all ranks, in place, for many: every rank adds its share, and sends it."""
        handle = self._checked("two_shot_all_reduce_", input, reduce_op, group_name)
        share = -(-input.numel() // handle.world_size)
        block = handle.block_for(share)
        self._context.launch(
            kernels.two_shot_kernel, -(-share // block), input, input.numel(), share,
            handle.get_signal_pad(handle.rank), handle.rank, SIZE=handle.world_size, B=block,
            SUM=_added_in(input.kind),
        )  # fmt: skip
        return input

    def _checked(self, name: str, tensor: Tensor, reduce_op: str, group: Any) -> SymmetricMemory:
        if reduce_op != "sum":
            raise LocalProtocolError(f"{name} has reduce_op={reduce_op!r}; it can do 'sum'")
        handle = self._module.handle_of(tensor)
        if handle is None:
            raise LocalProtocolError(
                f"{name} of {tensor.name}, which is not shared",
                hint="allocate it with symm_mem.empty, and call symm_mem.rendezvous on every rank",
            )
        if group is not None:
            _check_group(name, tensor, handle, self._module.group_of(group))
        return handle


def _check_group(name: str, tensor: Tensor, handle: SymmetricMemory, group: ProcessGroup) -> None:
    if group.ranks != handle.group.ranks:
        raise LocalProtocolError(
            f"{name} of {tensor.name} in {group}: it is shared in {handle.group}",
            hint="an allocation is shared in one group; allocate another one for another group",
        )


def _added_in(kind: Any) -> Any:
    """The type that elements are added in: their own, if it is wide enough for their sums."""
    return float32 if kind.is_floating() and kind.itemsize < float32.itemsize else kind


_PROGRAMS_MAX = 24
"""As many as in torch. Each of them signals every rank twice."""
_BLOCK_MIN = 256
_WORDS_OF_PROGRAM = 2
"""For each rank: how many words of the signal pad a program of an all-reduce meets at."""


class SymmetricMemoryModule:
    """The functions of torch's module."""

    def __init__(self, context: "RuntimeContext") -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self._pad_bytes = _SIGNAL_PAD_BYTES
        self._own: dict[int, Tensor] = {}
        self._handles: dict[int, SymmetricMemory] = {}
        # Until the last has come; who has come holds on to it.
        self._arrived: dict[tuple[str, int], dict[int, tuple[Tensor, Tensor]]] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def clear(self) -> None:
        """Forget who is at a rendezvous: the ranks have gone."""
        self._arrived.clear()
        self._counts.clear()

    def empty(
        self, *size: Any, dtype: Any = "f32", device: Any = None, name: str | None = None
    ) -> Tensor:
        """A tensor that can be shared with `rendezvous`; its values read as zero."""
        del device
        tensor = self._context.empty(*size, dtype=dtype, name=name)
        if not tensor.nbytes:
            raise LocalProtocolError(f"symmetric memory of shape {tensor.shape} has no bytes")
        self._own[tensor.address] = tensor
        return tensor

    def is_symm_mem_tensor(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by `empty`, or is a view of such a one."""
        return any(
            each.address <= tensor.address < each.address + each.nbytes
            for each in self._own.values()
        )

    def set_signal_pad_size(self, size: int) -> None:
        """Let allocations from now on have signal pads of so many bytes, a multiple of 4."""
        if size < 4 or size % 4:
            raise LocalProtocolError(f"signal pads of {size} bytes; expected a multiple of 4")
        self._pad_bytes = size

    def get_signal_pad_size(self) -> int:
        """Bytes of a signal pad."""
        return self._pad_bytes

    def get_backend(self, device: Any = None) -> str:
        """What the memory is made of."""
        del device
        return "RANKWISE"

    def put_signal(self, src: Tensor, hdl: SymmetricMemory, peer: int) -> None:
        """Copy a tensor to a peer's part, and signal the peer."""
        hdl.put(src, peer)

    def wait_signal(self, hdl: SymmetricMemory, peer: int) -> None:
        """Let this rank's stream wait for the signal of a peer."""
        hdl.wait_signal(peer)

    def rendezvous(
        self, tensor: Tensor, group: ProcessGroup | str | None = None
    ) -> SymmetricMemory:
        """Share a tensor among the ranks of a group, all of which call this; a collective.

        The second time, it gives what the first has given. Ranks count in the group from then on
        wherever a peer is named, in kernels as well (`dl.symm_at`).

        Raises:
            LocalProtocolError: the tensor was not made by `empty`, ranks differ in its size, or it
                is shared with another group.
        """
        context, group = self._context, self.group_of(group)
        tensor.check_alive()
        if self._own.get(tensor.address) is None:
            raise LocalProtocolError(
                f"rendezvous of {tensor.name}, which is not symmetric memory",
                hint="allocate it with symm_mem.empty",
            )
        own = group.rank()
        if own < 0:
            raise LocalProtocolError(f"rank {context.rank} is not a member of {group}")
        before = self._handles.get(tensor.address)
        if before is not None:
            _check_group("rendezvous", tensor, before, group)
            return before
        pad = context.empty(self._pad_bytes // 4, dtype="u32", name=f"signal pad of {tensor.name}")
        number = self._counts.get((group.name, own), 0)
        self._counts[group.name, own] = number + 1
        arrived = self._arrived.setdefault((group.name, number), {})
        arrived[own] = (tensor, pad)
        context.distributed.barrier(group)
        self._arrived.pop((group.name, number), None)
        buffers, pads = zip(*(arrived[rank] for rank in range(group.size())), strict=True)
        self._check_alike(buffers)
        # All ranks say the same, so that it does not matter who does it first.
        for parts in (buffers, pads):
            self._share(parts)
        handle = self._handles[tensor.address] = SymmetricMemory(context, own, buffers, pads, group)
        return handle

    def forget(self, tensor: Tensor) -> None:
        """Give back what belongs to a tensor that is freed: its signal pad, and who shares it."""
        self._own.pop(tensor.address, None)
        handle = self._handles.pop(tensor.address, None)
        if handle is not None:
            handle.own_pad.free()

    def handle_of(self, tensor: Tensor) -> SymmetricMemory | None:
        """What `rendezvous` has given for a tensor; None if it is not shared."""
        return self._handles.get(tensor.address)

    def group_of(self, named: ProcessGroup | str | None) -> ProcessGroup:
        """The group that a caller names: itself, its name, or None for all ranks."""
        if isinstance(named, ProcessGroup):
            return named
        found = self._context.distributed.group_named(named or "world")
        if found is not None:
            return found
        raise LocalProtocolError(
            f"symmetric memory of group {named!r}: there is no such group",
            hint="pass what new_group gives or its name, or nothing for all ranks",
        )

    def _check_alike(self, buffers: Sequence[Tensor]) -> None:
        first = buffers[0]
        for rank, each in enumerate(buffers):
            if (each.shape, each.kind) != (first.shape, first.kind):
                raise LocalProtocolError(
                    f"rendezvous: rank {rank} of the group has {each.shape} {each.dtype}, and rank"
                    f" 0 has {first.shape} {first.dtype}",
                    hint="every rank allocates the same",
                )

    def _share(self, parts: Sequence[Tensor]) -> None:
        engine = self._context.engine
        sips = frozenset(part.device.sip for part in parts)
        for part in parts:
            part.share_with(sips)
            if not part.kind.is_floating():
                engine.space(part.device.sip).mapping_at(part.address).keep_data()
        bases = tuple(part.address for part in parts)
        engine.peers.share(Shared(parts[0].name, bases, parts[0].nbytes))
