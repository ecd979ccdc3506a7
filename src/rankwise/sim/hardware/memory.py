"""Virtual address spaces: where a SIP's addresses lie, and the bytes behind them.

Every SIP has one. `map` gives a range of addresses a place in an HBM channel, against that
channel's capacity; memory that nobody has written reads as zero, without a byte being stored for it
until the first write. Addresses outside of every mapping are an error that names the nearest one.

With data off, only the places are kept.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.base.errors import SimulationError
from rankwise.sim.hardware.machine import Memory

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = 4_096
FIRST_ADDRESS = 0x1000_0000
"""Not zero, so that a null pointer is never valid."""


class MemoryExhausted(SimulationError):
    """A memory has no room for what was to be placed in it."""


class BadAddress(SimulationError):
    """Addresses were used that nothing is mapped to."""


class Mapping:
    """A range of addresses that was mapped at once; it lies in one memory, or in several in turn.

    Attributes:
        memory: the memory of its first byte.
        places: its parts in order: the offset at which each ends, and its memory.
    """

    __slots__ = ("_data", "end", "has_data", "memory", "places", "size", "start")

    def __init__(self, start: int, places: Sequence[tuple[int, Memory]], *, has_data: bool) -> None:
        self.start = start
        self.places = tuple(places)
        self.size, self.memory = self.places[-1][0], self.places[0][1]
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

    def lie_in(self, data: Bytes) -> None:
        """Let its bytes be these, which others see too: memory that processes share."""
        if data.size != self.size or not self.has_data:
            raise SimulationError(f"{self!r} cannot lie in {data.size} bytes of somebody else's")
        self._data = data

    @property
    def was_written(self) -> bool:
        """Whether anybody has asked for the bytes; if not, they are all zero."""
        return self._data is not None

    def __repr__(self) -> str:
        return f"<Mapping {self.start:#x}..{self.end:#x} in {self.memory.name}>"


class AddressSpace:
    """The virtual addresses of one SIP."""

    def __init__(self, sip: int, *, has_data: bool) -> None:
        self.sip = sip
        self.has_data = has_data
        self._starts: list[int] = []
        self._mappings: dict[int, Mapping] = {}
        self._used: dict[Memory, int] = {}
        self._next_address = FIRST_ADDRESS

    def reserve(self, size: int) -> int:
        """Take a range of addresses that nobody else will get; it still has to be mapped."""
        address = self._next_address
        self._next_address += -(-max(size, 1) // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        return address

    def map(self, address: int, size: int, memory: Memory) -> Mapping:
        """Let a range of addresses lie in `memory`; it reads as zero."""
        return self.map_places(address, [(size, memory)])

    def map_places(self, address: int, places: Sequence[tuple[int, Memory]]) -> Mapping:
        """Let consecutive stretches of a range lie in memories: the bytes of each, and where."""
        size = sum(length for length, _ in places)
        if size < 1 or min(length for length, _ in places) < 1:
            raise BadAddress(f"sip{self.sip}: a mapping of {size} bytes at {address:#x}")
        place = bisect_right(self._starts, address + size - 1)
        if place and self._mappings[self._starts[place - 1]].end > address:
            raise BadAddress(
                f"sip{self.sip}: {address:#x}..{address + size:#x} overlaps"
                f" {self._mappings[self._starts[place - 1]]!r}"
            )
        wanted: dict[Memory, int] = {}
        ends: list[tuple[int, Memory]] = []
        for length, memory in places:
            wanted[memory] = wanted.get(memory, 0) + length
            ends.append((length + (ends[-1][0] if ends else 0), memory))
        for memory, length in wanted.items():
            used = self._used.get(memory, 0)
            if used + length > memory.capacity:
                raise MemoryExhausted(
                    f"{memory.name} is full: {length} bytes wanted, {memory.capacity - used} of"
                    f" {memory.capacity} free",
                    hint="spread the tensor over more cubes or PEs, or give the cubes more memory",
                )
        for memory, length in wanted.items():
            self._used[memory] = self._used.get(memory, 0) + length
        mapping = Mapping(address, ends, has_data=self.has_data)
        insort(self._starts, address)
        self._mappings[address] = mapping
        return mapping

    def unmap(self, address: int) -> None:
        """Give up the mapping that starts at `address`, and its memory."""
        mapping = self._mappings.pop(address, None)
        if mapping is None:
            raise BadAddress(f"sip{self.sip}: no mapping starts at {address:#x}")
        self._starts.remove(address)
        begin = 0
        for end, memory in mapping.places:
            self._used[memory] -= end - begin
            begin = end

    def used(self, memory: Memory) -> int:
        """How many bytes of a memory are mapped."""
        return self._used.get(memory, 0)

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
            position, end = offset, offset + count
            place = bisect_right(mapping.places, position, key=lambda each: each[0])
            while position < end:
                border, memory = mapping.places[place]
                yield memory, min(border, end) - position
                position = min(border, end)
                place += 1

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
        """Copy bytes in, from a bytes-like object or an array of any dtype."""
        source = as_bytes(data)
        position = 0
        for mapping, offset, count in self.pieces(address, source.size):
            mapping.data[offset : offset + count] = source[position : position + count]
            position += count

    def mappings(self) -> list[Mapping]:
        """All mappings, by address."""
        return [self._mappings[start] for start in self._starts]


def as_bytes(data: Any) -> Bytes:
    """View a bytes-like object or an array as bytes; copied only if it is not contiguous."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
