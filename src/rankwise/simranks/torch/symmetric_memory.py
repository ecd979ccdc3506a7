"""`torch.distributed._symmetric_memory` between simulated ranks.

All ranks live in one process, so a peer's memory is a tensor like any other: `get_buffer` gives it,
and what a program computes with it is computed. What is simulated is who waits for whom. A signal
is a word of a pad, which a peer sets and the rank that waits for it takes back; one that never
comes stops all ranks, and the report names it.

On a modelled machine a signal, and what `put_signal` copies, take the time of a message. What a
program itself loads from a peer's memory counts as memory of its own device.

An allocation lives as long as its rank has a tensor in it, or a rank a handle or a peer's tensor.
The tensor of the program has a storage of its own over the same bytes, so its end can be seen: then
the rank forgets its handles, and with them its hold on the memory of its peers.

torch makes its objects in C++. The Python module refers to their class by one name,
`_SymmetricMemory`, which stands for `RehearsedSymmetricMemory` while ranks are simulated
(`symmetric_operations`).
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from rankwise.base.errors import CollectiveTimeout, LocalProtocolError
from rankwise.base.units import MILLISECOND, Duration, after, format_duration
from rankwise.core.matching import CallSignature
from rankwise.simranks.torch.gloo_arithmetic import plainly
from rankwise.simranks.torch.loads import Loads, has_no_data, makes_fake_tensors
from rankwise.simranks.torch.process_group import RehearsedProcessGroup
from rankwise.simranks.torch.rank_store import SYMMETRIC_MEMORY
from rankwise.simranks.torch.sentences import operation
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import present_world, running_rank

if TYPE_CHECKING:
    from rankwise.simranks.prediction import RankClock

_PAD_BYTES = 9_216
"""As many as in torch 2.13."""
_WORD_BYTES = 4


class _Allocation:
    """One rank's part of an allocation.

    Attributes:
        number: of the rank.
        memory: its bytes.
        pad: its signal pad.
        arrivals: when a signal comes on a modelled machine, in picoseconds, by word of the pad.
        group_name: the group that it was made for; empty if the rendezvous says.
        handles: what a rendezvous has given for it, by name of the group.
    """

    def __init__(self, memory: Tensor, pad_bytes: int, group_name: str) -> None:
        number = self.number = _running().number
        self.memory = memory
        self.memory.name_in_kernels = f"symmetric memory of rank {number}"
        self.pad = torch.zeros(pad_bytes // _WORD_BYTES, dtype=torch.int32)
        self.pad.name_in_kernels = f"signal pad of rank {number}"
        self._begins = [(each.data_ptr(), int(each.nbytes)) for each in (self.memory, self.pad)]
        present_world().changes.parts.add(self)
        self.arrivals: dict[int, int] = {}
        self.group_name = group_name
        self.handles: dict[str, RehearsedSymmetricMemory] = {}
        self._changes: dict[int, Gate] = {}

    def holds(self, address: int) -> bool:
        """Whether the byte at an address belongs to it."""
        return any(0 <= address - begin < size for begin, size in self._begins)

    def wait_for_word(
        self, word: int, value: int, awaited: Callable[[], "_Signal"], timeout_ms: int
    ) -> None:
        """Wait until a word of the pad has a value; one rank waits for a word at a time.

        Raises:
            CollectiveTimeout: it has not after so much virtual time; 0 is for ever.
        """
        scheduler = _running().scheduler
        patience = Duration(timeout_ms * MILLISECOND)
        until = after(scheduler.now, patience) if patience else None
        while int(self.pad[word]) != value:
            change = self._changes[word] = awaited()
            with present_world().changes.awaited_by_rank(change):
                has_changed = scheduler.wait(change, until)
            if not has_changed:
                raise CollectiveTimeout(
                    f"waited {format_duration(patience)} of virtual time for {change.describe()}"
                )

    def set_words(self, first: int, count: int, value: int) -> None:
        """Write words of the pad, and wake who waits for one of them."""
        self.pad[first : first + count] = value
        self.changed(first, count)

    def changed(self, first: int, count: int) -> None:
        """Wake who waits for one of these words."""
        for word in range(first, first + count):
            change = self._changes.pop(word, None)
            if change is not None:
                change.open()
        present_world().changes.made_by_rank()


class _Signal(Gate):
    """That a signal comes, or is taken, so that the next one can come."""

    is_of_peers = True

    __slots__ = ("_signal",)

    def __init__(self, source: int, target: int, channel: int, *, is_to_come: bool) -> None:
        super().__init__()
        self._signal = (is_to_come, source, target, channel)

    def describe(self) -> str:
        """Say which."""
        is_to_come, source, target, channel = self._signal
        where = f"on channel {channel} of symmetric memory"
        if is_to_come:
            return f"the signal of rank {source} for rank {target} {where}"
        return f"rank {target} to take the last signal of rank {source} {where}"


class _Handles:
    """What one rank knows of symmetric memory; it goes with the rank, or with its groups.

    Attributes:
        allocations: those in which it has a tensor, by address.
        handles: all that are in use, by identity.
        pad_bytes: of the pads of allocations from now on.
        backend: the name that the program has set.
    """

    def __init__(self) -> None:
        self.allocations: dict[int, _Allocation] = {}
        self.handles: weakref.WeakValueDictionary[int, RehearsedSymmetricMemory] = (
            weakref.WeakValueDictionary()
        )
        self.pad_bytes = _PAD_BYTES
        self.backend = "CUDA"

    def around(self, tensor: Tensor) -> _Allocation | None:
        """The allocation that a tensor lies in."""
        return self.allocations.get(tensor.untyped_storage().data_ptr())

    def add(self, tensor: Tensor, allocation: _Allocation) -> None:
        """Know the allocation of a tensor as long as that, or a view of it, lives."""
        storage = tensor.untyped_storage()
        self.allocations[storage.data_ptr()] = allocation
        weakref.finalize(storage, _forget, self.allocations, storage.data_ptr()).atexit = False


class _PropertiesOfRank(type):
    """The properties of torch's class itself."""

    @property
    def signal_pad_size(cls) -> int:
        """Bytes of the pads of allocations from now on."""
        return handles_of_rank().pad_bytes

    @signal_pad_size.setter
    def signal_pad_size(cls, size: int) -> None:
        if size < _WORD_BYTES or size % _WORD_BYTES:
            raise LocalProtocolError(f"signal pads of {size} bytes; expected a multiple of 4")
        handles_of_rank().pad_bytes = size


class RehearsedSymmetricMemory(metaclass=_PropertiesOfRank):
    """What a rendezvous gives to one rank: every rank's part of an allocation.

    Attributes:
        rank, world_size: this rank's place in the group, and how many ranks it has.
        offset: where the tensor of the rendezvous begins in its allocation, in bytes.
        buffer_ptrs, signal_pad_ptrs: where each rank's part begins.
        buffer_ptrs_dev, signal_pad_ptrs_dev: where a kernel finds these numbers.
        buffer_size: bytes of one part.
        multicast_ptr: always 0: there are no multicast addresses.
    """

    multicast_ptr: ClassVar[int] = 0

    def __init__(
        self, group: RehearsedProcessGroup, parts: Sequence[_Allocation], offset: int
    ) -> None:
        self._group = group
        self._parts = parts
        self.rank = group.rank()
        self.world_size = len(parts)
        self.offset = offset
        self.buffer_ptrs = [part.memory.data_ptr() for part in parts]
        self.signal_pad_ptrs = [part.pad.data_ptr() for part in parts]
        self._tables = torch.tensor([self.buffer_ptrs, self.signal_pad_ptrs])
        self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = (
            table.data_ptr() for table in self._tables
        )
        self.buffer_size = parts[0].memory.nbytes
        self._pad_bytes = int(parts[0].pad.nbytes)

    @staticmethod
    def empty_strided_p2p(  # noqa: PLR0917  # torch's signature
        size: Sequence[int],
        stride: Sequence[int],
        dtype: Any,
        device: Any,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> Tensor:
        """Allocate a part."""
        del alloc_id
        mine = handles_of_rank()
        if torch.device(device).type == "meta" or makes_fake_tensors():
            raise _without_memory("empty", size)
        if not math.prod(size):
            raise LocalProtocolError(f"symmetric memory of shape {tuple(size)} has no bytes")
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        memory = torch.empty((last + 1) * dtype.itemsize, dtype=torch.uint8, device=device)
        storage = torch.frombuffer(memory.numpy(), dtype=torch.uint8).untyped_storage()
        tensor: Tensor = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))
        mine.add(tensor, _Allocation(memory, mine.pad_bytes, group_name or ""))
        return tensor

    @staticmethod
    def rendezvous(tensor: Tensor, group_name: str | None = None) -> "RehearsedSymmetricMemory":
        """Share an allocation among the ranks of a group; a collective, but for the second time."""
        own = allocation_of("rendezvous", tensor)
        name = group_name or own.group_name or c10d.group.WORLD.group_name
        known = own.handles.get(name)
        if known is not None:
            return known
        group = c10d._resolve_process_group(name)  # noqa: SLF001  # torch has no public name
        assert isinstance(group, RehearsedProcessGroup), "simulated ranks have no other groups"
        parts: list[_Allocation] = []

        def carry_out(loads: Loads) -> None:
            allocations = [allocation for allocation, _ in loads]
            for _, mine in loads:
                mine.extend(allocations)

        call = CallSignature("symm_mem.rendezvous", size_bytes=own.memory.nbytes)
        group.exchange(call, [], (own, parts), carry_out)
        offset = tensor.data_ptr() - own.memory.data_ptr()
        handle = own.handles[name] = RehearsedSymmetricMemory(group, parts, offset)
        handles_of_rank().handles[id(handle)] = handle
        return handle

    @staticmethod
    def is_symm_mem_tensor(tensor: Tensor) -> bool:
        """Whether a tensor lies in symmetric memory."""
        return handles_of_rank().around(tensor) is not None

    @staticmethod
    def set_backend(name: str) -> None:
        """Remember the name: there is one kind of memory here."""
        handles_of_rank().backend = name

    @staticmethod
    def get_backend(device: Any) -> str:
        """The name that was set."""
        del device
        return handles_of_rank().backend

    @staticmethod
    def has_multicast_support(device_type: Any, device_index: int) -> bool:
        """There is none."""
        del device_type, device_index
        return False

    @staticmethod
    def set_group_info(name: str, rank: int, size: int, store: Any) -> None:
        """Groups know that themselves."""

    @property
    def device(self) -> Any:
        """Where this rank's part lies."""
        return self._parts[self.rank].memory.device

    @property
    def signal_pad_size(self) -> int:
        """Bytes of one signal pad."""
        return self._pad_bytes

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: Any, storage_offset: int = 0
    ) -> Tensor:
        """A rank's part, or some of it; the offset counts elements."""
        return self._view(self._part(rank).memory, "buffer", sizes, dtype, storage_offset)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: Any) -> Tensor:
        """What corresponds, at a peer, to the tensor of the rendezvous."""
        return self.get_buffer(peer, sizes, dtype, self.offset // dtype.itemsize)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: Any = None, storage_offset: int = 0
    ) -> Tensor:
        """A rank's signal pad, or some of it; write to it by `put_signal`, which wakes."""
        kind = torch.uint32 if dtype is None else dtype
        if not sizes:
            sizes = (self._pad_bytes // kind.itemsize - storage_offset,)
        return self._view(self._part(rank).pad, "signal pad", sizes, kind, storage_offset)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal a rank, as soon as it has taken the last one."""
        self._signal(dst_rank, channel, timeout_ms, _WORD_BYTES)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for the signal of a rank, and take it."""
        self._part(src_rank)
        word, own = self._word(channel, src_rank), self._parts[self.rank]
        source, here = self._numbers(src_rank, self.rank)
        awaited = partial(_Signal, source, here, channel, is_to_come=True)
        own.wait_for_word(word, 1, awaited, timeout_ms)
        own.set_words(word, 1, 0)
        clock = _clock()
        if clock is not None:
            # Of a signal by a kernel it is not known more than that.
            clock.wait_until(own.arrivals.pop(word, present_world().changes.time))

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until all ranks have come."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            self.put_signal(rank, channel, timeout_ms)
        for rank in others:
            self.wait_signal(rank, channel, timeout_ms)

    def put(self, source: Tensor, peer: int) -> None:
        """Copy a tensor to a peer's part, and signal the peer."""
        target = self.get_remote_tensor(peer, source.shape, source.dtype)
        plainly(target.copy_, source)
        self._signal(peer, 0, 0, source.nbytes)

    def boxed(self) -> "RehearsedSymmetricMemory":
        """Itself: nothing of C++ is asked."""
        return self

    def wake(self, address: int, count: int) -> None:
        """Words have been written from an address on: if they are of a pad, wake who waits."""
        for part in self._parts:
            first = (address - part.pad.data_ptr()) // _WORD_BYTES
            if 0 <= first < part.pad.numel():
                part.changed(first, count)

    def meet(self, call: str, alike: Tensor, load: Any, carry_out: Callable[[Loads], None]) -> None:
        """Do an operation of all ranks of the group."""
        self._group.exchange(operation(f"symm_mem.{call}"), [alike], load, carry_out)

    def _signal(self, target: int, channel: int, timeout_ms: int, size: int) -> None:
        there, word = self._part(target), self._word(channel, self.rank)
        source, peer = self._numbers(self.rank, target)
        taken = partial(_Signal, source, peer, channel, is_to_come=False)
        there.wait_for_word(word, 0, taken, timeout_ms)
        clock = _clock()
        if clock is not None:
            there.arrivals[word] = clock.message_arrives(peer, size)
        there.set_words(word, 1, 1)

    def _numbers(self, *ranks: int) -> tuple[int, ...]:
        """Those of the world, for people."""
        return tuple(self._group.members[rank] for rank in ranks)

    def _part(self, rank: int) -> _Allocation:
        if not 0 <= rank < self.world_size:
            raise LocalProtocolError(
                f"rank {rank} is not in the group of this symmetric memory: its ranks are 0 to"
                f" {self.world_size - 1}"
            )
        return self._parts[rank]

    def _word(self, channel: int, source: int) -> int:
        channels = self._pad_bytes // _WORD_BYTES // self.world_size
        if not 0 <= channel < channels:
            raise LocalProtocolError(
                f"channel {channel}: the signal pad of {self._pad_bytes} bytes has channels 0 to"
                f" {channels - 1} for {self.world_size} ranks",
                hint="set_signal_pad_size(...) before the allocation gives more",
            )
        return channel * self.world_size + source

    def _view(
        self, memory: Tensor, what: str, sizes: Sequence[int], dtype: Any, offset: int
    ) -> Tensor:
        end = (offset + math.prod(sizes)) * dtype.itemsize
        if offset < 0 or end > memory.nbytes:
            raise LocalProtocolError(
                f"{what} of symmetric memory: {tuple(sizes)} {dtype} from element {offset} on end"
                f" at byte {end}, and it has {memory.nbytes}"
            )
        view: Tensor = torch.empty(0, dtype=dtype).set_(
            memory.untyped_storage(), offset, tuple(sizes)
        )
        return view


def allocation_of(name: str, tensor: Tensor) -> _Allocation:
    """The allocation that a tensor lies in; `name` is the operation that needs it."""
    if has_no_data(tensor):
        raise _without_memory(name, tensor.shape)
    found = handles_of_rank().around(tensor)
    if found is None:
        raise LocalProtocolError(
            f"symm_mem.{name} of a tensor of shape {tuple(tensor.shape)}, which is not symmetric"
            " memory",
            hint="allocate it with symm_mem.empty",
        )
    return found


def _without_memory(name: str, shape: Sequence[int]) -> LocalProtocolError:
    return LocalProtocolError(
        f"symm_mem.{name} of a fake or meta tensor of shape {tuple(shape)}: symmetric memory is"
        " memory that ranks share, and such a tensor has none",
        hint="give the shapes of results by torch.ops.symm_mem.one_shot_all_reduce or by"
        " functional collectives, which take such tensors",
    )


def _forget(allocations: dict[int, _Allocation], address: int) -> None:
    """The last tensor of an allocation is gone."""
    allocation = allocations.pop(address, None)
    if allocation is not None:
        allocation.handles.clear()


def _running() -> Rank:
    rank = running_rank()
    assert rank is not None, "installed for simulated ranks"
    return rank


def handles_of_rank() -> _Handles:
    """What the rank that runs knows of symmetric memory."""
    rank = _running()
    mine: _Handles | None = rank.own_state.get(SYMMETRIC_MEMORY)
    if mine is None:
        mine = rank.own_state[SYMMETRIC_MEMORY] = _Handles()
    return mine


def _clock() -> "RankClock | None":
    prediction = present_world().prediction
    return None if prediction is None else prediction.clock_of(_running())
