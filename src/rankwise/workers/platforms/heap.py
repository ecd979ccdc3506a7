"""The owners of a chip's bytes: addresses that tell the chip, and an account of them.

A pointer is `(chip + 1) << 48` plus a distance. No address of a process is so large, so a number
says whether it is a pointer of a chip, and of which one: what was taken from one chip and is given
to another is an error that names both, and never the wrong data. Distances are not used twice, so
a pointer that was freed is known as such, too.
"""

from bisect import bisect_right, insort
from typing import NamedTuple

from rankwise.base.errors import TreeValueError
from rankwise.base.units import format_bytes
from rankwise.workers.errors import BadPointer, DeviceMemoryExhausted
from rankwise.workers.platforms.port import Leak

_CHIP_SHIFT = 48
CHIPS_MAX = (1 << 15) - 2
"""So that every address fits into 63 bits."""
_PAGE = 4096


class HeapBlock(NamedTuple):
    """Bytes that were given out at once.

    Attributes:
        is_own: whether they are the chip's; if not, they are shared memory of the host.
    """

    address: int
    size: int
    name: str
    is_own: bool

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.address + self.size


class DeviceHeap:
    """The addresses of one chip.

    Args:
        chip: its number.
        capacity: how many bytes it has; None if the caller sees to that.
    """

    def __init__(self, chip: int, capacity: int | None = None) -> None:
        if not 0 <= chip <= CHIPS_MAX:
            raise TreeValueError(f"device_id is {chip}, expected 0 to {CHIPS_MAX}")
        self.chip = chip
        self.capacity = capacity
        self.used = 0
        self._next = (chip + 1) << _CHIP_SHIFT
        self._starts: list[int] = []
        self._blocks: dict[int, HeapBlock] = {}

    def reserve(self, size: int, name: str) -> int:
        """Give out bytes.

        Raises:
            ConfigError: it is not at least one byte.
            DeviceMemoryExhausted: there is too little left.
        """
        if size < 1:
            raise TreeValueError(
                f"{size} bytes of chip {self.chip}'s memory were asked for, expected 1 or more"
            )
        if self.capacity is not None and self.used + size > self.capacity:
            raise self.exhausted(size)
        address = self._next
        # A page lies between any two, so that running over an end does not go unseen.
        self._next += -(-size // _PAGE) * _PAGE + _PAGE
        self.used += size
        self._add(HeapBlock(address, size, name, is_own=True))
        return address

    def exhausted(self, size: int) -> DeviceMemoryExhausted:
        """The error of one who wanted so much; says who holds the most."""
        largest = max(self._own(), key=lambda block: block.size, default=None)
        left = "" if self.capacity is None else f", {format_bytes(self.capacity - self.used)} left"
        held = (
            f"; the largest of its {len(self._own())} blocks is {largest.name!r} with "
            + (format_bytes(largest.size))
            if largest
            else ""
        )
        return DeviceMemoryExhausted(
            f"chip {self.chip} has no room for {format_bytes(size)}{left}{held}",
            hint="free what is no longer needed, or take a larger topology",
        )

    def release(self, pointer: int) -> HeapBlock:
        """Take bytes back that `reserve` has given.

        Raises:
            BadPointer: it has not, or they were given back before.
        """
        block = self._blocks.get(pointer)
        if block is None or not block.is_own:
            raise self._unknown(pointer, 1, "free", must_begin=True)
        self._remove(block)
        self.used -= block.size
        return block

    def attach(self, address: int, size: int, name: str) -> None:
        """Let shared memory of the host be used like the chip's."""
        if address >> _CHIP_SHIFT:
            raise BadPointer(f"{name} at {address:#x} lies at no address of the host")
        self._add(HeapBlock(address, size, name, is_own=False))

    def detach(self, address: int) -> None:
        """Undo `attach`; twice is once."""
        block = self._blocks.get(address)
        if block is not None and not block.is_own:
            self._remove(block)

    def find(self, pointer: int, size: int, what: str) -> HeapBlock:
        """The block in which a range lies, the whole of it.

        Raises:
            BadPointer: there is none; says whose the pointer is.
        """
        block = self._at(pointer)
        if block is None:
            raise self._unknown(pointer, size, what)
        if pointer + size > block.end:
            raise BadPointer(
                f"{what}: {size} bytes at {pointer:#x} run over the end of {block.name!r} of chip "
                f"{self.chip}, which has {block.size} bytes at {block.address:#x}"
            )
        return block

    def leaks(self) -> tuple[Leak, ...]:
        """What was given out and not given back, by address."""
        return tuple(Leak(block.address, block.size, block.name) for block in self._own())

    def _own(self) -> list[HeapBlock]:
        blocks = [self._blocks[start] for start in self._starts]
        return [block for block in blocks if block.is_own]

    def _at(self, pointer: int) -> HeapBlock | None:
        place = bisect_right(self._starts, pointer)
        if not place:
            return None
        block = self._blocks[self._starts[place - 1]]
        return block if pointer < block.end else None

    def _add(self, block: HeapBlock) -> None:
        insort(self._starts, block.address)
        self._blocks[block.address] = block

    def _remove(self, block: HeapBlock) -> None:
        self._starts.remove(block.address)
        del self._blocks[block.address]

    def _unknown(
        self, pointer: int, size: int, what: str, *, must_begin: bool = False
    ) -> BadPointer:
        chip = (pointer >> _CHIP_SHIFT) - 1
        where = f"{what}: {pointer:#x}" if must_begin else f"{what}: {size} bytes at {pointer:#x}"
        inside = self._at(pointer)
        hint = None
        if pointer == 0:
            problem = f"is a null pointer, expected one of chip {self.chip}"
        elif inside is not None and inside.is_own:
            problem = f"is {pointer - inside.address} bytes into {inside.name!r}"
            hint = f"free takes what malloc gave: {inside.address:#x}"
        elif inside is not None:
            problem = f"is in {inside.name!r}, which malloc has not returned"
        elif 0 <= chip <= CHIPS_MAX and chip != self.chip:
            problem = f"is memory of chip {chip}, and this is chip {self.chip}"
            hint = "run the task on the chip that owns the memory, or copy it through the host"
        elif chip == self.chip and pointer < self._next:
            problem = f"is memory of chip {self.chip} that was freed before"
        elif chip == self.chip:
            problem = f"is memory that chip {self.chip} has never given out"
        else:
            problem = f"is not memory of chip {self.chip}"
            hint = "a tensor in memory of the host is made with child_memory=False"
        return BadPointer(f"{where} {problem}", hint=hint)
