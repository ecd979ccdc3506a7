"""What is known of each storage: whose memory it is, on which device, and whether it has numbers.

A storage is known by its identity: torch keeps the Python object of a storage as long as the
storage lives, whichever tensors and views it has.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rankwise.simranks.prediction.caching_allocator import CachedBlock
    from rankwise.simranks.prediction.clocks import RankClock
    from rankwise.simranks.prediction.holders import Holder

SMALL_BYTES = 1 << 20
"""Tensors up to this size have numbers on a run without data, if what they come from has."""


class Storage:
    """One storage of a rank.

    Attributes:
        reference: ends with it.
        size: its bytes.
        clock: of the rank whose it is.
        is_on_device: whether it takes memory of the modelled device; otherwise of the host.
        is_known: whether its numbers are computed; otherwise nothing may read them.
        holder: who has made it, for the report of memory; None if that is not wanted.
        block: its memory on the device; None if it has none there.
    """

    __slots__ = ("block", "clock", "holder", "is_known", "is_on_device", "reference", "size")

    def __init__(
        self, size: int, clock: "RankClock", holder: "Holder | None", *, is_on_device: bool
    ) -> None:
        self.reference: Any = None
        self.size = size
        self.clock = clock
        self.holder = holder
        self.is_on_device = is_on_device
        self.is_known = True
        self.block: CachedBlock | None = None

    def occupy(self, *, is_new: bool = False) -> None:
        """Take memory of the device, if it is there; what it had is given back after that."""
        before, clock = self.block, self.clock
        self.block = None
        if clock.recording is not None and (self.is_on_device or before is not None):
            if is_new and self.is_on_device:
                clock.recording.note_made(self)
            else:
                clock.recording.note_resized(self)
        if self.is_on_device:
            stream, now, retries = clock.stream_number, clock.time, clock.memory.retries
            self.block = clock.memory.take(self.size, self.holder, stream, now)
            clock.note_taken(self.block, self.size)
            if clock.memory.retries > retries:
                if clock.recording is not None:
                    clock.recording.refuse("the device is full")
                clock.synchronize()  # the allocator waits for all streams before it tries again
        if before is not None:
            clock.note_freed(before, before.requested)
            clock.memory.give_back(before, clock.stream_ends(), clock.time)

    def vacate(self) -> None:
        """Give the memory of the device back."""
        block, self.block = self.block, None
        if block is not None:
            clock = self.clock
            if clock.recording is not None:
                clock.recording.note_given_back(self)
            clock.note_freed(block, block.requested)
            clock.memory.give_back(
                block, clock.stream_ends() if block.used_by else None, clock.time
            )

    def use(self, stream: int) -> None:
        """Note that another stream uses it (`Tensor.record_stream`)."""
        if self.block is not None:
            if self.clock.recording is not None:
                self.clock.recording.note_use(self, stream)
            self.clock.memory.use(self.block, stream)


_held: dict[int, Storage] = {}
"""By the identity of a storage."""


class TensorPlacement(threading.local):
    """Where the calling thread's tensors are made.

    Attributes:
        names_cuda: whether its program has named CUDA. Until it does, all is on the device.
        hint: where the call under way makes its tensors, if that was said: on the device or not.
        is_default: whether tensors are made on the device if nothing is said
            (`torch.set_default_device`).
    """

    names_cuda = False
    hint: bool | None = None
    is_default = False
    target: bool | None = None


PLACEMENT = TensorPlacement()
_is_without_data = False


def storage_of(tensor: Tensor) -> Storage | None:
    """What is known of a tensor's storage; None if no operation has made it."""
    return _held.get(id(tensor.untyped_storage()))


def hold(
    tensor: Tensor, clock: "RankClock", holder: "Holder | None" = None, *, is_on_device: bool = True
) -> Storage:
    """Count the storage of a tensor as memory of a rank, as long as it lives."""
    storage = tensor.untyped_storage()
    identity = id(storage)
    held = _held.get(identity)
    if held is not None:
        return held
    size = storage.nbytes()
    held = Storage(size, clock, holder, is_on_device=is_on_device)

    def release(_: Any) -> None:
        _held.pop(identity).vacate()

    held.reference = weakref.ref(storage, release)
    _held[identity] = held
    held.occupy(is_new=True)
    return held


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor lies on the modelled device, as far as the program can tell."""
    if not PLACEMENT.names_cuda:
        return False
    local = getattr(tensor, "_local_tensor", tensor)
    if local.is_meta or local.layout is not torch.strided:
        return False
    held = storage_of(local)
    return held is not None and held.is_on_device


def name_cuda(clock: "RankClock") -> None:
    """The calling thread's program names CUDA: what it has made so far lies on the host."""
    if PLACEMENT.names_cuda:
        return
    PLACEMENT.names_cuda = True
    for held in list(_held.values()):
        if held.clock is clock and held.is_on_device:
            held.block = None
            held.is_on_device = False
    clock.memory.forget()


def keep_counters_on_host(optimizer: Any, clock: "RankClock") -> None:
    """Tell the steps that an optimiser counts from tensors of the device, as torch does on CUDA.

    They are numbers of the host, unless its kernels read them (`capturable`, `fused`).
    """
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            count = optimizer.state.get(parameter, {}).get("step")
            if type(count) is not Tensor or count.is_meta:
                continue
            # No operation makes the result of `torch.tensor`.
            held = hold(count, clock, is_on_device=False)
            if held.is_on_device:
                held.vacate()
                held.is_on_device = False


def are_of_host(tensors: Iterable[Tensor]) -> bool:
    """Whether these are single numbers, of which the host has at least one."""
    found = False
    for tensor in tensors:
        if tensor.dim():
            return False
        held = storage_of(tensor)
        found = found or (held is not None and not held.is_on_device)
    return found


def be_without_data(*, is_so: bool) -> None:  # nothing else is said
    """Whether there are tensors without numbers in this process."""
    global _is_without_data  # noqa: PLW0603  # there is one world at a time
    _is_without_data = is_so


def is_hollow(load: Any) -> bool:
    """Whether any tensor of a load has no numbers."""
    if not _is_without_data:
        return False
    if isinstance(load, Tensor):
        if load.is_meta or load.layout is not torch.strided:
            return False
        held = storage_of(load)
        return held is not None and not held.is_known
    return isinstance(load, list | tuple) and any(map(is_hollow, load))


def mark_hollow(load: Any) -> None:
    """The tensors of a load have been written by something of which the numbers are not known."""
    for tensor in strided_in(load):
        held = storage_of(tensor)
        if held is not None:
            held.is_known = False


def strided_in(load: Any) -> Iterable[Tensor]:
    """The tensors of a load that have memory."""
    if isinstance(load, Tensor):
        if load.layout is torch.strided and not load.is_meta:
            yield load
    elif isinstance(load, list | tuple):
        for part in load:
            yield from strided_in(part)


def with_counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`UntypedStorage.resize_`, which frees and takes memory without an operation (FSDP)."""

    def resize_(storage: Any, size: int) -> Any:
        result = original(storage, size)
        note_size(storage, size)
        return result

    return resize_


def note_size(storage: Any, size: int) -> None:
    """A storage has another size now."""
    held = _held.get(id(storage))
    if held is not None:
        held.size = size
        if size > SMALL_BYTES:
            held.is_known = False
        held.occupy()
