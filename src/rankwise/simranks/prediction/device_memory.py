"""What a device's memory holds, and what the caching allocator keeps of it."""

from collections import deque
from collections.abc import Callable, Mapping

from rankwise.simranks.prediction.caching_allocator import (
    AllocatorSettings,
    CachedBlock,
    CachingAllocator,
    NoMemory,
    UsageStatistic,
)
from rankwise.simranks.prediction.holders import Holder, HolderRecords


class DeviceFull(Exception):  # an event, which the rank's own error tells
    """A request finds no memory.

    Attributes:
        wanted: bytes that would be in use.
        in_pieces: bytes that are free, but in no piece that is large enough.
        taker: who wants them.
    """

    def __init__(self, wanted: int, in_pieces: int, taker: Holder | None) -> None:
        super().__init__(wanted, in_pieces, taker)
        self.wanted = wanted
        self.in_pieces = in_pieces
        self.taker = taker


class DeviceMemory:
    """Bytes on one device.

    Attributes:
        peak_of_run: the most of `used` in the whole run.
        holder_records: who holds it, if that is to be told; otherwise None.
    """

    __slots__ = (
        "_ended", "_holders", "_is_busy", "_is_traced", "_limit", "_present", "_settings",
        "holder_records", "peak_of_run",
    )  # fmt: skip

    def __init__(self) -> None:
        self.holder_records: HolderRecords | None = None
        self._settings: Callable[[], AllocatorSettings] = AllocatorSettings
        self._limit: int | None = None
        self._ended: deque[tuple[CachedBlock, Mapping[int, int] | None, int]] = deque()
        self._is_busy = self._is_traced = False
        self._start()

    def _start(self) -> None:
        self.peak_of_run = 0
        self._present: CachingAllocator | None = None
        self._holders: dict[int, Holder | None] = {}

    def be_limited(self, limit: int, settings: Callable[[], AllocatorSettings]) -> None:
        """Begin anew: the device has so much; its allocator asks for settings when it begins."""
        self._limit, self._settings = limit, settings
        self._start()

    @property
    def limit(self) -> int | None:
        """How much there is, if that is enforced."""
        return self._limit

    @property
    def used(self) -> int:
        """What tensors have asked for, with what other streams still use of freed ones."""
        return self.allocator.requested.current

    @property
    def allocated(self) -> UsageStatistic:
        """What `torch.cuda.memory_allocated` tells: blocks that tensors have."""
        return self.allocator.allocated

    @property
    def active(self) -> UsageStatistic:
        """The same, with those that other streams still use."""
        return self.allocator.active

    @property
    def requested(self) -> UsageStatistic:
        """What was asked for of the active blocks."""
        return self.allocator.requested

    @property
    def reserved(self) -> UsageStatistic:
        """Segments that the allocator holds."""
        return self.allocator.reserved

    @property
    def retries(self) -> int:
        """How often the allocator has returned its cache, since the device was full."""
        return self.allocator.retries

    @property
    def allocator(self) -> CachingAllocator:
        """What cuts the memory; it begins when it is asked for first."""
        if self._present is None:
            self._present = CachingAllocator(self._settings(), self._limit, on_end=self._note_end)
            self._present.trace = [] if self._is_traced else None
        return self._present

    def trace(self, *, is_wanted: bool) -> None:
        """Begin to keep what the allocator does, or stop."""
        self._is_traced = is_wanted
        self.allocator.trace = [] if is_wanted else None

    def take(
        self, size: int, holder: Holder | None = None, stream: int = 0, now: int = 0
    ) -> CachedBlock | None:
        """Take bytes for a stream; None if there are none to take.

        Args:
            size: how many.
            holder: who takes them.
            stream: the number of the stream on which they are used first.
            now: the time of the host.

        Raises:
            DeviceFull: there are fewer, and a limit is enforced.
        """
        if not size:
            return None
        self._is_busy = True  # the garbage collector may end other tensors meanwhile
        try:
            frames = None if self.allocator.trace is None else _frames(holder)
            block = self.allocator.allocate(size, stream, now, frames)
            if self.holder_records is not None:
                self._holders[block.address] = holder
                self.holder_records.note(holder, size)
            self.peak_of_run = max(self.peak_of_run, self.used)
        except NoMemory as full:
            free = self.reserved.current - self.active.current
            wanted = self.used + size
            is_split = self._limit is not None and wanted <= self._limit
            raise DeviceFull(max(wanted, full.size), free if is_split else 0, holder) from None
        finally:
            self._is_busy = False
            self._settle()
        return block

    def use(self, block: CachedBlock, stream: int) -> None:
        """Note that another stream uses a block (`Tensor.record_stream`)."""
        self.allocator.use(block, stream)

    def give_back(
        self, block: CachedBlock, passes: Mapping[int, int] | None = None, now: int = 0
    ) -> None:
        """Give a block back.

        Args:
            block: from `take`.
            passes: when each stream has done what it was given until now.
            now: the time of the host.
        """
        self._ended.append((block, passes, now))
        if not self._is_busy:
            self._settle()

    def _settle(self) -> None:
        while self._ended and not self._is_busy:
            self._is_busy = True
            try:
                block, passes, now = self._ended.popleft()
                self.allocator.free(block, passes, now)
            finally:
                self._is_busy = False

    def _note_end(self, block: CachedBlock) -> None:
        if self.holder_records is not None:
            self.holder_records.note(self._holders.pop(block.address, None), -block.requested)

    def reset_peaks(self) -> None:
        """Begin the peaks that the program asks for anew."""
        for each in (self.allocated, self.active, self.requested, self.reserved):
            each.peak = each.current

    def forget(self) -> None:
        """Begin anew: what was in use was not on the device."""
        self._start()
        if self.holder_records is not None:
            self.holder_records.forget()

    def empty_cache(self) -> None:
        """Keep no more segments than are used."""
        self.allocator.empty_cache()


def _frames(holder: Holder | None) -> list[dict[str, object]]:
    """The program's line and module, as torch's snapshots have frames."""
    if holder is None:
        return []
    file, _, line = holder.place.rpartition(":")
    return [{"filename": file, "line": int(line or 0), "name": holder.module or "the program"}]
