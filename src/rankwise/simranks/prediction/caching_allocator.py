"""The caching allocator of PyTorch for CUDA, as a machine: what a device's memory is cut into.

Theory of operation
===================

The device hands out *segments*; the allocator cuts them into *blocks* and keeps what programs free.
So a program holds more of the device (reserved) than its tensors take (allocated). The rules are
those of torch's `c10/cuda/CUDACachingAllocator.cpp`:

- Sizes are multiples of 512 bytes. Blocks up to 1 MiB come from the small pool, which takes
  segments of 2 MiB; larger ones from the large pool: segments of 20 MiB for less than 10 MiB, else
  of their own size, in multiples of 2 MiB.
- A freed block joins its free neighbours, and waits in its pool for the next request of its stream:
  the smallest block that is large enough serves it. The rest becomes a block again, if it is at
  least 512 bytes (small pool) or more than 1 MiB (large pool).
- A block that another stream has used (`record_stream`) stays active until that stream has passed
  the point at which it was freed. The allocator looks whenever it is asked for memory.
- If the device is full, the allocator returns all segments without a block in use, and tries again.

With `expandable_segments:True`, each pool and stream has one segment of addresses, which is backed
by memory in pages of 2 MiB (small pool) and 20 MiB (large pool), at the lowest address that fits.

The machine has no clock: the caller that frees a block says when its other streams pass.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any

import msgspec

BLOCK_BYTES_MIN = 512
SMALL_BYTES_MAX = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
LARGE_BYTES_MIN = 10 << 20
"""From this size on, a segment is as large as the request."""
ROUNDING_BYTES = 2 << 20
_FIRST_ADDRESS = 0x7F00_0000_0000
_ADDRESS_SPACE = 9, 8
"""An expandable segment has addresses for that much of the device."""


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `PYTORCH_ALLOC_CONF` sets.

    Attributes:
        expandable: whether segments grow (`expandable_segments`).
        max_split_bytes: blocks of that size are not cut; None for all are.
        roundup_divisions: into how many steps a power of two is divided, to which sizes are rounded
            up (`roundup_power2_divisions`); 0 for multiples of 512 bytes.
    """

    expandable: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: int = 0


class NoMemory(Exception):  # an event, which the rank's own error tells
    """The device has too little memory for a request, also after the cache was returned.

    Attributes:
        size: of the request, rounded.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class UsageStatistic:
    """One quantity: what there is now, the most there was, and the sum of all that came.

    Attributes:
        current, peak, total: bytes.
    """

    __slots__ = ("current", "peak", "total")

    def __init__(self) -> None:
        self.current = self.peak = self.total = 0

    def add(self, amount: int) -> None:
        """Note that there is more, or less if it is negative."""
        self.current += amount
        if amount > 0:
            self.total += amount
            self.peak = max(self.peak, self.current)


class CachedBlock:
    """A part of a segment.

    Attributes:
        address, size: where it lies, in bytes.
        requested: how much of it was asked for.
        stream: whose requests it serves.
        is_allocated: whether a tensor has it.
        is_mapped: whether memory backs it; only of expandable segments may it be false.
        used_by: the other streams that use it.
        passes_left: how many of them have not passed the point at which it was freed.
        frames: where it was asked for: dicts of `filename`, `name` and `line`, innermost first.
    """

    __slots__ = (
        "address", "after", "before", "frames", "is_allocated", "is_expandable", "is_mapped",
        "passes_left", "pool", "requested", "segment", "size", "stream", "used_by",
    )  # fmt: skip

    def __init__(self, pool: "_BlockPool", stream: int, address: int, size: int) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size = size
        self.requested = 0
        self.is_allocated = self.is_expandable = False
        self.is_mapped = True
        self.used_by: set[int] = set()
        self.passes_left = 0
        self.before: CachedBlock | None = None
        self.after: CachedBlock | None = None
        self.segment = address
        self.frames: list[dict[str, Any]] = []

    @property
    def is_free(self) -> bool:
        """Whether it may serve a request, or join a neighbour."""
        return not (self.is_allocated or self.passes_left or self.used_by)

    def put_between(self, before: "CachedBlock | None", after: "CachedBlock | None") -> None:
        """Take a place in the chain of a segment's blocks."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


class _BlockPool:
    """Free blocks of a kind, in the order of their stream, size and address."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self._free: list[tuple[int, int, int, CachedBlock]] = []
        self.unmapped: list[tuple[int, int, CachedBlock]] = []

    def add(self, block: CachedBlock) -> None:
        if block.is_mapped:
            insort(self._free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: CachedBlock) -> None:
        if block.is_mapped:
            del self._free[bisect_left(self._free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]

    def best(self, stream: int, size: int, *, expands: bool) -> CachedBlock | None:
        """The free block that serves a request best; None if none is large enough."""
        free = self._free
        place = bisect_left(free, (stream, size))
        if place == len(free) or free[place][0] != stream:
            return None
        if expands:
            # A block at the end of what is mapped counts with what it may grow to.
            while (
                place + 1 < len(free)
                and free[place + 1][0] == stream
                and _size_to_grow_to(free[place + 1][3]) < _size_to_grow_to(free[place][3])
            ):
                place += 1
        return free[place][3]

    def blocks(self) -> list[CachedBlock]:
        return [entry[-1] for entry in self._free]


def _size_to_grow_to(block: CachedBlock) -> int:
    after = block.after
    return block.size + (0 if after is None or after.is_mapped else after.size)


class CachingAllocator:
    """See the module's text.

    Args:
        settings: what `PYTORCH_ALLOC_CONF` sets.
        limit: how many bytes the device has for segments; None for as many as are asked for.
        device_bytes: of the whole device, for the addresses of expandable segments.
        on_end: is told of each block that is not active any more, before it joins others.

    Attributes:
        allocated: bytes of blocks that tensors have.
        active: the same, with those that other streams still use.
        requested: what was asked for of the active ones.
        reserved: bytes of segments.
        retries: how often the cache was returned since the device was full.
        trace: what has happened, as torch's snapshots have it; None if it is not recorded.
    """

    def __init__(
        self,
        settings: AllocatorSettings = AllocatorSettings(),  # noqa: B008 - it is frozen
        limit: int | None = None,
        device_bytes: int = 80 << 30,
        on_end: Callable[[CachedBlock], None] | None = None,
    ) -> None:
        self.settings = settings
        self.limit = limit
        self._on_end = on_end
        self.allocated, self.active = UsageStatistic(), UsageStatistic()
        self.requested, self.reserved = UsageStatistic(), UsageStatistic()
        self.retries = 0
        self.trace: list[dict[str, Any]] | None = None
        self._small, self._large = _BlockPool(is_small=True), _BlockPool(is_small=False)
        self._segments: dict[int, CachedBlock] = {}
        """The first block of each, by address."""
        self._address = _FIRST_ADDRESS
        self._address_bytes = _rounded_up(
            device_bytes * _ADDRESS_SPACE[0] // _ADDRESS_SPACE[1], LARGE_SEGMENT_BYTES
        )
        self._passes: list[tuple[int, int, CachedBlock]] = []
        """When a stream passes a freed block: instant, number, block."""
        self._pass_count = 0

    def allocate(
        self, size: int, stream: int = 0, now: int = 0, frames: list[dict[str, Any]] | None = None
    ) -> CachedBlock:
        """A block of at least `size` bytes for a stream.

        Args:
            size: more than 0.
            stream: the number of the stream that uses it first; 0 is the default stream.
            now: an instant of the host, in the unit of `free`.
            frames: who asks.

        Raises:
            NoMemory: the device is full.
        """
        self._note_passes(now)
        wanted = self._rounded(size)
        pool = self._small if wanted <= SMALL_BYTES_MAX else self._large
        block = self._cached(pool, stream, wanted) or self._new(pool, stream, wanted, now)
        if block is None and self.limit is not None:
            self._release_cached()
            self.retries += 1
            block = self._new(pool, stream, wanted, now)
        if block is None:
            self._note("oom", 0, wanted, stream, now, frames)
            raise NoMemory(wanted)
        if self._is_cut(block, wanted):
            self._cut(block, wanted)
        block.is_allocated = True
        block.requested = size
        block.frames = frames or []
        self.allocated.add(block.size)
        self.active.add(block.size)
        self.requested.add(size)
        self._note("alloc", block.address, size, stream, now, frames)
        return block

    def use(self, block: CachedBlock, stream: int) -> None:
        """Note that another stream uses a block (`record_stream`)."""
        if stream != block.stream:
            block.used_by.add(stream)

    def free(
        self, block: CachedBlock, passes: Mapping[int, int] | None = None, now: int = 0
    ) -> None:
        """Take a block back.

        Args:
            block: one that is allocated.
            passes: when each stream has done what it was given so far; at once if it is missing.
            now: an instant of the host.
        """
        assert block.is_allocated, "a tensor has it"
        block.is_allocated = False
        self.allocated.add(-block.size)
        self._note("free_requested", block.address, block.requested, block.stream, now)
        streams, block.used_by = sorted(block.used_by), set()
        for stream in streams:
            block.passes_left += 1
            self._pass_count += 1
            at = now if passes is None else passes.get(stream, now)
            heappush(self._passes, (at, self._pass_count, block))
        if not streams:
            self._give_back(block, now)

    def empty_cache(self) -> None:
        """Return all segments without a block in use to the device."""
        self._release_cached()

    def snapshot(self) -> dict[str, Any]:
        """The state as `torch.cuda.memory._snapshot` gives it, for torch's memory visualizer."""
        segments = []
        for address in sorted(self._segments):
            blocks = list(_chain(self._segments[address]))
            # Without the addresses that nothing backs.
            mapped = [block for block in blocks if block.is_mapped]
            if not mapped:
                continue
            first = blocks[0]
            segments.append(
                {
                    "device": 0,
                    "address": mapped[0].address,
                    "total_size": sum(block.size for block in mapped),
                    "allocated_size": sum(block.size for block in mapped if block.is_allocated),
                    "active_size": sum(block.size for block in mapped if not block.is_free),
                    "requested_size": sum(block.requested for block in mapped if not block.is_free),
                    "stream": first.stream,
                    "segment_type": "small" if first.pool.is_small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": first.is_expandable,
                    "frames": [],
                    "blocks": [_described(block) for block in mapped],
                }
            )
        return {
            "segments": segments,
            "device_traces": [self.trace or []],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "expandable_segments": self.settings.expandable,
                "max_split_size": self.settings.max_split_bytes or -1,
                "garbage_collection_threshold": 0.0,
                "roundup_power2_divisions": {},
            },
            "external_annotations": [],
        }

    # Requests

    def _rounded(self, size: int) -> int:
        divisions = self.settings.roundup_divisions
        if divisions > 1 and size > BLOCK_BYTES_MIN * divisions:
            power = 1 << (size.bit_length() - 1)
            return size if power == size else _rounded_up(size, power // divisions)
        return _rounded_up(max(size, 1), BLOCK_BYTES_MIN)

    def _cached(self, pool: _BlockPool, stream: int, size: int) -> CachedBlock | None:
        block = pool.best(stream, size, expands=self.settings.expandable)
        limit = self.settings.max_split_bytes
        if block is None:
            return None
        if limit is not None:
            is_wasted = size < limit <= block.size
            if is_wasted or (size >= limit and block.size >= size + LARGE_SEGMENT_BYTES):
                return None
        pool.remove(block)
        return block

    def _new(self, pool: _BlockPool, stream: int, size: int, now: int) -> CachedBlock | None:
        if self.settings.expandable:
            return self._expanded(pool, stream, size, now)
        if size <= SMALL_BYTES_MAX:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES_MIN:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = _rounded_up(size, ROUNDING_BYTES)
        if not self._has_room(segment_bytes):
            return None
        block = CachedBlock(pool, stream, self._next_address(segment_bytes), segment_bytes)
        self._segments[block.address] = block
        self.reserved.add(segment_bytes)
        self._note("segment_alloc", block.address, segment_bytes, stream, now)
        return block

    def _is_cut(self, block: CachedBlock, size: int) -> bool:
        left = block.size - size
        if block.pool.is_small or self.settings.expandable:
            return left >= BLOCK_BYTES_MIN
        limit = self.settings.max_split_bytes
        return (limit is None or size < limit) and left > SMALL_BYTES_MAX

    def _cut(self, block: CachedBlock, size: int) -> None:
        """Let a block keep its first `size` bytes; the rest is free."""
        rest = CachedBlock(block.pool, block.stream, block.address + size, block.size - size)
        rest.segment, rest.is_expandable = block.segment, block.is_expandable
        rest.put_between(block, block.after)
        block.size = size
        block.pool.add(rest)

    def _give_back(self, block: CachedBlock, now: int) -> None:
        self.active.add(-block.size)
        self.requested.add(-block.requested)
        self._note("free_completed", block.address, block.requested, block.stream, now)
        if self._on_end is not None:
            self._on_end(block)
        block.frames = []
        block.requested = 0
        block.pool.add(self._joined(block))

    def _joined(self, block: CachedBlock) -> CachedBlock:
        """A block with its free neighbours; these are in no pool any more."""
        before, after = block.before, block.after
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            block.pool.remove(before)
            block.address, block.size = before.address, before.size + block.size
            block.put_between(before.before, after)
            if self._segments.get(block.segment) is before:
                self._segments[block.segment] = block
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            block.pool.remove(after)
            block.size += after.size
            block.put_between(block.before, after.after)
        return block

    def _note_passes(self, now: int) -> None:
        while self._passes and self._passes[0][0] <= now:
            self._note_pass(heappop(self._passes)[2], now)

    def _note_pass(self, block: CachedBlock, now: int) -> None:
        block.passes_left -= 1
        if not block.passes_left:
            self._give_back(block, now)

    # Segments

    def _next_address(self, size: int) -> int:
        address = self._address
        self._address += _rounded_up(size, LARGE_SEGMENT_BYTES)
        return address

    def _has_room(self, size: int) -> bool:
        return self.limit is None or self.reserved.current + size <= self.limit

    def _release_cached(self) -> None:
        """Return what no tensor has, after waiting for all streams."""
        while self._passes:
            at, _, block = heappop(self._passes)
            self._note_pass(block, at)
        for pool in (self._large, self._small):
            for block in pool.blocks():
                if block.is_expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    del self._segments[block.segment]
                    self.reserved.add(-block.size)
                    self._note("segment_free", block.address, block.size, block.stream, 0)

    def _expanded(self, pool: _BlockPool, stream: int, size: int, now: int) -> CachedBlock | None:
        """A free block in an expandable segment that has grown so that it fits."""
        block = self._place_to_grow(pool, stream, size)
        if not block.is_mapped and not self._map(block, min(block.size, size), now):
            return None
        while block.size < size:
            after = block.after
            assert after is not None, "there are addresses for all of it"
            if not self._map(after, min(size - block.size, after.size), now):
                return None
            block = after  # the free one before it has joined it
        pool.remove(block)
        return block

    def _place_to_grow(self, pool: _BlockPool, stream: int, size: int) -> CachedBlock:
        """The lowest block without memory, or the free one before it, with addresses for it all."""
        for entry in pool.unmapped[bisect_left(pool.unmapped, (stream,)) :]:
            block: CachedBlock = entry[-1]
            if block.stream != stream:
                break
            if block.before is not None and block.before.is_free:
                block = block.before
            if _free_bytes_from(block, size) >= size:
                return block
        block = CachedBlock(
            pool, stream, self._next_address(self._address_bytes), self._address_bytes
        )
        block.is_expandable, block.is_mapped = True, False
        self._segments[block.address] = block
        pool.add(block)
        return block

    def _map(self, block: CachedBlock, size: int, now: int) -> bool:
        """Back the first `size` bytes of a block by memory; whether there was some."""
        mapped = _rounded_up(size, block.pool.page_bytes)
        if not self._has_room(mapped):
            return False
        block.pool.remove(block)
        block.is_mapped = True
        if mapped < block.size:
            rest = CachedBlock(
                block.pool, block.stream, block.address + mapped, block.size - mapped
            )
            rest.segment, rest.is_expandable, rest.is_mapped = block.segment, True, False
            rest.put_between(block, block.after)
            rest.pool.add(rest)
            block.size = mapped
        self.reserved.add(mapped)
        self._note("segment_map", block.address, mapped, block.stream, now)
        block.pool.add(self._joined(block))
        return True

    def _unmap(self, block: CachedBlock) -> None:
        """Return the whole pages of a free block."""
        page, end = block.pool.page_bytes, block.address + block.size
        start = block.segment + _rounded_up(block.address - block.segment, page)
        stop = block.segment + (end - block.segment) // page * page
        if stop <= start:
            return
        block.pool.remove(block)
        if start > block.address:
            kept = CachedBlock(block.pool, block.stream, block.address, start - block.address)
            kept.segment, kept.is_expandable = block.segment, True
            kept.put_between(block.before, block)
            if self._segments[block.segment] is block:
                self._segments[block.segment] = kept
            block.pool.add(kept)
        if stop < end:
            kept = CachedBlock(block.pool, block.stream, stop, end - stop)
            kept.segment, kept.is_expandable = block.segment, True
            kept.put_between(block, block.after)
            block.pool.add(kept)
        block.address, block.size, block.is_mapped = start, stop - start, False
        self.reserved.add(start - stop)
        self._note("segment_unmap", start, stop - start, block.stream, 0)
        block.pool.add(self._joined(block))

    def _note(  # noqa: PLR0917 - as a line of the trace has them
        self,
        action: str,
        address: int,
        size: int,
        stream: int,
        now: int,
        frames: list[dict[str, Any]] | None = None,
    ) -> None:
        if self.trace is not None:
            self.trace.append(
                {
                    "action": action,
                    "addr": address,
                    "size": size,
                    "stream": stream,
                    "time_us": now,
                    "frames": frames or [],
                }
            )


def replay(trace: list[dict[str, Any]], settings: AllocatorSettings) -> CachingAllocator:
    """What an allocator does with the requests of a recorded trace (`device_traces[0]`).

    Blocks that were there before the recording began are unknown: their ends are left out.
    Segments that the program returned (`torch.cuda.empty_cache()`) are returned here, too.
    """
    allocator = CachingAllocator(settings)
    blocks: dict[int, CachedBlock] = {}
    before = ""
    for entry in trace:
        address, action = entry["addr"], entry["action"]
        if action == "alloc":
            blocks[address] = allocator.allocate(entry["size"], entry["stream"])
        elif action == "free_completed" and address in blocks:
            allocator.free(blocks.pop(address))
        elif action in _RETURNS and before not in _RETURNS:
            allocator.empty_cache()
        before = action
    return allocator


_RETURNS = frozenset({"segment_free", "segment_unmap"})
"""An emptied cache leaves one of these for each segment, or each run of pages."""


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _free_bytes_from(block: CachedBlock, enough: int) -> int:
    total = 0
    each: CachedBlock | None = block
    while total < enough and each is not None and each.is_free:
        total += each.size
        each = each.after
    return total


def _chain(first: CachedBlock) -> list[CachedBlock]:
    blocks: list[CachedBlock] = []
    block: CachedBlock | None = first
    while block is not None:
        blocks.append(block)
        block = block.after
    return blocks


def _described(block: CachedBlock) -> dict[str, Any]:
    if block.is_allocated:
        state = "active_allocated"
    else:
        state = "inactive" if block.is_free else "active_pending_free"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": state,
        "frames": block.frames,
    }
