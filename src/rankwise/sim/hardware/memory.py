"""Virtual address spaces: where a SIP's addresses lie, and the bytes behind them.

Every SIP has one, and no two have an address in common, so that a pointer to a peer's memory is a
pointer like any other. `map` gives a range of addresses a place in an HBM channel, or several,
against the channels' capacity; unwritten memory reads as zero, without a byte being stored for it
until the first write. Addresses outside of every mapping are an error that names the nearest one.

With data off, only the places are kept.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.base.errors import SimulationError
from rankwise.sim.hardware.hardware_machine import Memory
from rankwise.sim.hardware.interleaving import Consecutive, Interleaved, Offsets, Places
from rankwise.sim.hardware.watchpoints import Watchpoints

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = 4_096
FIRST_ADDRESS = 0x1000_0000
"""Not zero, so that a null pointer is never valid."""
SIP_STRIDE = 1 << 44
"""The addresses of a SIP begin so far behind those of the one before: an address names its SIP."""


def sip_of(address: int) -> int:
    """The SIP that an address lies on."""
    return address // SIP_STRIDE


class MemoryExhausted(SimulationError):
    """A memory has no room for what was to be placed in it."""


class BadAddress(SimulationError):
    """Addresses were used that nothing is mapped to."""


class Mapping:
    """A range of addresses that was mapped at once; it lies in one memory, or in several.

    Attributes:
        wanted: how many bytes it has in each memory.
        places: where which byte lies.
    """

    __slots__ = ("_data", "end", "has_data", "places", "size", "start", "wanted")

    def __init__(
        self, start: int, wanted: dict[Memory, int], places: Places, *, has_data: bool
    ) -> None:
        self.start = start
        self.wanted = wanted
        self.places = places
        self.size = sum(wanted.values())
        self.end = start + self.size
        self.has_data = has_data
        self._data: Bytes | None = None

    @property
    def data(self) -> Bytes:
        """The bytes themselves, to be read and written in place."""
        if self._data is None:
            if not self.has_data:
                raise SimulationError("this engine keeps no data", hint="enable_data=True does")
            self._data = np.zeros(self.size, np.uint8)
        return self._data

    def keep_data(self) -> None:
        """Keep the bytes even where the engine keeps none: programs wait for them."""
        self.has_data = True

    def lie_in(self, data: Bytes) -> None:
        """Let its bytes be these, which others see too: memory that processes share."""
        if data.size != self.size or not self.has_data:
            raise SimulationError(f"{self!r} cannot lie in {data.size} bytes of foreign memory")
        self._data = data

    @property
    def was_written(self) -> bool:
        """Whether the bytes were ever asked for; if not, they are all zero."""
        return self._data is not None

    def shares(self, begins: Offsets, ends: Offsets) -> list[tuple[Memory, int]]:
        """How many bytes of ascending ranges of addresses lie in which memory.

        In the order of the memories; what reaches beyond the mapping is left out.
        """
        memories = self.places.memories
        if len(memories) == 1:
            low, high = max(int(begins[0]), self.start), min(int(ends[-1]), self.end)
            outside = int(ends[-1]) - int(begins[0]) - (high - low)
            return [(memories[0], int((ends - begins).sum()) - outside)]
        lows, highs = begins - self.start, ends - self.start
        if lows[0] < 0 or highs[-1] > self.size:
            lows, highs = (np.clip(edges, 0, self.size) for edges in (lows, highs))
        numbers, sizes = self.places.pieces(lows, highs)
        totals = np.bincount(numbers, sizes, len(memories)).astype(np.int64)
        shares: dict[Memory, int] = {}
        for number in np.flatnonzero(totals).tolist():
            shares[memories[number]] = shares.get(memories[number], 0) + int(totals[number])
        return list(shares.items())

    def __repr__(self) -> str:
        return f"<Mapping {self.start:#x}..{self.end:#x} in {self.places.memories[0].name}>"


class AddressSpace:
    """The virtual addresses of one SIP; what is written to them wakes who watches them."""

    def __init__(self, sip: int, watchpoints: Watchpoints, *, has_data: bool) -> None:
        self.sip = sip
        self._watchpoints = watchpoints
        self.has_data = has_data
        self._starts: list[int] = []
        self._mappings: dict[int, Mapping] = {}
        self._used: dict[Memory, int] = {}
        self._next_address = sip * SIP_STRIDE + FIRST_ADDRESS

    def reserve(self, size: int) -> int:
        """Take a range of unused addresses; it still has to be mapped."""
        address = self._next_address
        self._next_address += -(-max(size, 1) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        return address

    def map(self, address: int, size: int, memory: Memory) -> Mapping:
        """Let a range of addresses lie in `memory`; it reads as zero."""
        return self.map_places(address, [(size, memory)])

    def map_places(
        self, address: int, places: Sequence[tuple[int, Memory]], interleave: int = 0
    ) -> Mapping:
        """Let a range lie in memories: how many bytes, and where.

        Args:
            address: its first byte.
            places: consecutive stretches.
            interleave: if not 0, places take turns instead, so many bytes each (`places`).
        """
        size = sum(length for length, _ in places)
        if size < 1 or min(length for length, _ in places) < 1:
            raise BadAddress(f"sip{self.sip}: the mapping at {address:#x} has an empty place")
        place = bisect_right(self._starts, address + size - 1)
        if place and self._mappings[self._starts[place - 1]].end > address:
            raise BadAddress(
                f"sip{self.sip}: {address:#x}..{address + size:#x} overlaps"
                f" {self._mappings[self._starts[place - 1]]!r}"
            )
        wanted: dict[Memory, int] = {}
        for length, memory in places:
            wanted[memory] = wanted.get(memory, 0) + length
        for memory, length in wanted.items():
            used = self._used.get(memory, 0)
            if used + length > memory.capacity:
                raise MemoryExhausted(
                    f"{memory.name} is full: {length:,} bytes wanted,"
                    f" {memory.capacity - used:,} of {memory.capacity:,} free",
                    hint="spread the tensor over more cubes or PEs, or give the cubes more memory",
                )
        sizes, memories = zip(*places, strict=True)
        rule = Interleaved(interleave, memories) if interleave else Consecutive(sizes, memories)
        return self._add(Mapping(address, wanted, rule, has_data=self.has_data))

    def map_like(self, mapping: Mapping, memory_of: Callable[[Memory], Memory]) -> Mapping:
        """Map what another space has mapped, in memories that stand for those it has there."""
        wanted = {memory_of(memory): size for memory, size in mapping.wanted.items()}
        return self._add(
            Mapping(mapping.start, wanted, mapping.places.on(memory_of), has_data=self.has_data)
        )

    def _add(self, mapping: Mapping) -> Mapping:
        for memory, length in mapping.wanted.items():
            self._used[memory] = self._used.get(memory, 0) + length
        insort(self._starts, mapping.start)
        self._mappings[mapping.start] = mapping
        return mapping

    def unmap(self, address: int) -> None:
        """Give up the mapping that starts at `address`, and its memory."""
        mapping = self._mappings.pop(address, None)
        if mapping is None:
            raise BadAddress(f"sip{self.sip}: no mapping starts at {address:#x}")
        self._starts.remove(address)
        for memory, length in mapping.wanted.items():
            self._used[memory] -= length

    def used(self, memory: Memory) -> int:
        """How many bytes of a memory are mapped."""
        return self._used.get(memory, 0)

    def __contains__(self, address: int) -> bool:
        place = bisect_right(self._starts, address)
        return bool(place) and address < self._mappings[self._starts[place - 1]].end

    def mapping_at(self, address: int) -> Mapping:
        """The mapping that an address lies in."""
        place = bisect_right(self._starts, address)
        if place:
            mapping = self._mappings[self._starts[place - 1]]
            if address < mapping.end:
                return mapping
        raise BadAddress(f"sip{self.sip}: nothing is mapped at {address:#x}{self._nearest(place)}")

    def _nearest(self, place: int) -> str:
        near = [self._mappings[start] for start in self._starts[max(0, place - 1) : place + 1]]
        return "".join(f"; near it is {mapping!r}" for mapping in near)

    def pieces(self, address: int, size: int) -> Iterator[tuple[Mapping, int, int]]:
        """Cut a range at the borders of mappings: mapping, offset in it, bytes."""
        while size > 0:
            mapping = self.mapping_at(address)
            count = min(size, mapping.end - address)
            yield mapping, address - mapping.start, count
            address += count
            size -= count

    def stretches(self, address: int, size: int) -> Iterator[tuple[Memory, int]]:
        """Where the bytes of a range lie, in order: a memory, and how many there."""
        for mapping, offset, count in self.pieces(address, size):
            yield from mapping.places.stretches(offset, count)

    def shares(self, address: int, size: int) -> list[tuple[Memory, int]]:
        """Which memories the bytes of a range lie in, each once, and how many there."""
        mapping = self.mapping_at(address)
        if address + size <= mapping.end:
            return mapping.shares(np.array([address]), np.array([address + size]))
        shares: dict[Memory, int] = {}
        for memory, count in self.stretches(address, size):
            shares[memory] = shares.get(memory, 0) + count
        return list(shares.items())

    def read(self, address: int, size: int) -> Bytes:
        """Copy bytes out."""
        result = np.zeros(size, np.uint8)
        position = 0
        for mapping, offset, count in self.pieces(address, size):
            if mapping.was_written:
                result[position : position + count] = mapping.data[offset : offset + count]
            position += count
        return result

    def write(self, address: int, data: Any) -> None:
        """Copy bytes in, from a bytes-like object or an array of any dtype.

        Zeros that are written to unwritten memory take no memory of the host.
        """
        source = as_bytes(data)
        position = 0
        for mapping, offset, count in self.pieces(address, source.size):
            piece = source[position : position + count]
            if mapping.was_written or piece.any():
                mapping.data[offset : offset + count] = piece
            position += count
        self._watchpoints.changed(address, source.size)

    def mappings(self) -> list[Mapping]:
        """All mappings, by address."""
        return [self._mappings[start] for start in self._starts]


def ways_between(
    source: AddressSpace, address: int, target: AddressSpace, destination: int, size: int
) -> dict[tuple[Memory, Memory], int]:
    """Of bytes that are copied: how many go from which memory to which."""
    ways: dict[tuple[Memory, Memory], int] = {}
    for memory, count in source.stretches(address, size):
        for other, part in target.stretches(destination, count):
            ways[memory, other] = ways.get((memory, other), 0) + part
        destination += count
    return ways


def as_bytes(data: Any) -> Bytes:
    """View a bytes-like object or an array as bytes; copied only if it is not contiguous."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
