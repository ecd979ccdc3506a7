"""The sections of a rank (`rankwise.section`), in memory that its agent reads for the run's record.

They lie in a worker's area of the segment, behind its call record:

    head    how many sections have ended, and how many are open
    open    OPEN_MAX slots, the outermost first: when each began, the longest run of its name
            before (0: none), and its name
    ring    ENTRIES entries: the sections that ended last, each over the one ENTRIES before

A section enters the ring when it ends, so that a long one is not lost among the short ones in it.
An entry's sequence number is stored last. As with calls, a reader leaves out those that could be
written over while it reads.
"""

import os
import struct
from itertools import count
from mmap import mmap
from typing import NamedTuple

from rankwise.drivers.real.segments import CALLS_BYTES, SECTIONS_AT, Segment

OPEN_MAX = 8
ENTRIES = 64
NAME_BYTES = 64
_HEAD = struct.Struct("=QQ")
_OPEN = struct.Struct(f"=QQ{NAME_BYTES}s")
_ENTRY = struct.Struct(f"=QQQ{NAME_BYTES}s")
_SEQUENCE = struct.Struct("=Q")
_OPEN_AT = _HEAD.size
_RING_AT = _OPEN_AT + OPEN_MAX * _OPEN.size
_ENTRY_BYTES = _SEQUENCE.size + _ENTRY.size
BYTES = _RING_AT + ENTRIES * _ENTRY_BYTES
_SAFE_ENTRIES = ENTRIES - 6


class SeenSection(NamedTuple):
    """A section of a rank: how many others it lies in, and from when to when (0: it is open)."""

    name: str
    depth: int
    begun_at: int
    ended_at: int


class OpenSection(NamedTuple):
    """A section that a rank is in, or died in, and its longest run before (0: none)."""

    name: str
    longest: int


class SectionWriter:
    """The rank's end."""

    def __init__(self, segment: Segment, local_rank: int) -> None:
        offset = segment.area_of_calls(local_rank)
        self._memory = mmap(segment.fd, CALLS_BYTES, offset=offset)
        self._pid = os.getpid()
        self._sequence = count(1)
        self._depth = 0

    def begin(self, name: str, now: int, longest: int = 0) -> None:
        """Enter that a section begins inside of the open ones, and its longest run so far."""
        if os.getpid() != self._pid:
            return  # a process that the rank has forked
        if self._depth < OPEN_MAX:
            at = SECTIONS_AT + _OPEN_AT + self._depth * _OPEN.size
            _OPEN.pack_into(self._memory, at, now, longest, _fitted(name))
        self._depth += 1
        _SEQUENCE.pack_into(self._memory, SECTIONS_AT + 8, self._depth)

    def end(self, name: str, begun_at: int, now: int) -> None:
        """Enter that the innermost section has ended."""
        if os.getpid() != self._pid:
            return
        self._depth -= 1
        _SEQUENCE.pack_into(self._memory, SECTIONS_AT + 8, self._depth)
        sequence = next(self._sequence)
        at = SECTIONS_AT + _RING_AT + sequence % ENTRIES * _ENTRY_BYTES
        _ENTRY.pack_into(
            self._memory, at + _SEQUENCE.size, self._depth, begun_at, now, _fitted(name)
        )
        _SEQUENCE.pack_into(self._memory, at, sequence)
        _SEQUENCE.pack_into(self._memory, SECTIONS_AT, sequence)


class SectionReader:
    """The agent's end: reads the sections of one worker, each once."""

    def __init__(self, segment: Segment, local_rank: int) -> None:
        self._fd = segment.fd
        self._at = segment.area_of_calls(local_rank) + SECTIONS_AT
        self._seen = 0

    def read(self, *, is_last: bool = False) -> list[SeenSection]:
        """Those that have ended since the last look; at the last one also those that are open."""
        ended, depth = _HEAD.unpack(os.pread(self._fd, _HEAD.size, self._at))
        if ended == self._seen and not (is_last and depth):
            return []
        area = os.pread(self._fd, BYTES, self._at)
        found: list[SeenSection] = []
        for sequence in range(max(self._seen, ended - _SAFE_ENTRIES) + 1, ended + 1):
            at = _RING_AT + sequence % ENTRIES * _ENTRY_BYTES
            if _SEQUENCE.unpack_from(area, at)[0] == sequence:
                level, begun_at, ended_at, name = _ENTRY.unpack_from(area, at + _SEQUENCE.size)
                found.append(SeenSection(_text(name), level, begun_at, ended_at))
        self._seen = ended
        if is_last:
            for level in range(min(depth, OPEN_MAX)):
                begun_at, _, name = _OPEN.unpack_from(area, _OPEN_AT + level * _OPEN.size)
                found.append(SeenSection(_text(name), level, begun_at, 0))
        return found

    def open_at(self, level: int) -> OpenSection | None:
        """The section inside of `level` others; None where there is none, or too many are open."""
        _, depth = _HEAD.unpack(os.pread(self._fd, _HEAD.size, self._at))
        if level >= min(depth, OPEN_MAX):
            return None
        slot = os.pread(self._fd, _OPEN.size, self._at + _OPEN_AT + level * _OPEN.size)
        _, longest, name = _OPEN.unpack(slot)
        return OpenSection(_text(name), longest)


def _fitted(name: str) -> bytes:
    return name.encode("utf-8", "replace")[:NAME_BYTES]  # `struct` fills up with zeros


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")
