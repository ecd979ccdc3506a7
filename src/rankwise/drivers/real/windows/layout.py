"""Where things are in a region of windows.

A region is a whole number of pages, in a memfd of its own or cut from larger shared memory. From
its base on, in native byte order:

    identity     magic, version, counts and sizes, name
    presences    u32 per rank, written by that rank: absent, joined, left
    doorbells    a futex word per rank in a cache line of its own: counted up by a rank that has
                 something to tell the rank, which sleeps on it
    obituaries   text per rank, written by the process that marks it dead, before it does so
    signals      for each rank that receives and each signal a row of u64: a base, and what each
                 rank has added (see `signals`)
    segment      `rankwise.drivers.real.segments`: barriers, deaths, what collectives need
    windows      `window_bytes` per rank, page-aligned
"""

import struct
from functools import cached_property

from rankwise.base.errors import TreeValueError
from rankwise.drivers.real.segments import DEFAULT_BUFFER_BYTES, WORKERS_MAX, Segment, SegmentLayout

MAGIC = b"rw-windw"
VERSION = 1
RANKS_MAX = WORKERS_MAX
SIGNALS_MAX = 4096
REGION_BYTES_MAX = 1 << 46
"""64 TiB: half of what a process can address."""
NAME_BYTES = 64
DEATH_REASON_BYTES = 128
PAGE = 4096
WORD_BYTES = 8
DEFAULT_SIGNAL_COUNT = 64

IDENTITY = struct.Struct(f"=8sIIQQQQ{NAME_BYTES}s")
_CACHE_LINE = 64


def round_up(count: int, unit: int) -> int:
    """The least multiple of `unit` that is no less than `count`."""
    return -(-count // unit) * unit


class WindowLayout:
    """Offsets in the memory that holds the region, computed once.

    Attributes:
        rank_count: how many ranks have a window.
        window_bytes: the size that was asked for; windows lie whole pages apart.
        signal_count: signals per rank.
        chunk_bytes: how much of an array a collective moves at a time.
        base: where the region begins; a whole number of pages.
    """

    def __init__(
        self,
        rank_count: int,
        window_bytes: int,
        signal_count: int = DEFAULT_SIGNAL_COUNT,
        chunk_bytes: int = DEFAULT_BUFFER_BYTES,
        base: int = 0,
    ) -> None:
        """Refuse what cannot be laid out; ConfigError names the value."""
        for name, value, least, most in (
            ("rank_count", rank_count, 1, RANKS_MAX),
            ("window_bytes", window_bytes, 0, REGION_BYTES_MAX),
            ("signal_count", signal_count, 0, SIGNALS_MAX),
            ("chunk_bytes", chunk_bytes, 1, REGION_BYTES_MAX),
        ):
            if not least <= value <= most:
                raise TreeValueError(f"{name} is {value}, expected between {least} and {most}")
        if base % PAGE or base < 0:
            raise TreeValueError(
                f"offset is {base}, expected a whole number of pages of {PAGE} bytes"
            )
        self.rank_count = rank_count
        self.window_bytes = window_bytes
        self.signal_count = signal_count
        self.base = base
        self.chunk_bytes = Segment.buffer_bytes_for(rank_count, chunk_bytes)
        self.window_stride = round_up(window_bytes, PAGE)
        self.presences = base + round_up(IDENTITY.size, _CACHE_LINE)
        self.doorbells = round_up(self.presences + 4 * rank_count, _CACHE_LINE)
        self.obituaries = self.doorbells + _CACHE_LINE * rank_count
        self.signals = self.obituaries + DEATH_REASON_BYTES * rank_count
        self.row_words = 1 + rank_count
        signals_end = self.signals + WORD_BYTES * self.row_words * rank_count * signal_count
        self.segment = SegmentLayout(rank_count, self.chunk_bytes, round_up(signals_end, PAGE))
        self.windows = self.segment.base + self.segment.total_bytes
        self.total_bytes = self.windows + self.window_stride * rank_count - base
        if self.total_bytes > REGION_BYTES_MAX:
            raise TreeValueError(
                f"{rank_count} windows of {window_bytes} bytes with {signal_count} signals need "
                f"{self.total_bytes} bytes, expected at most {REGION_BYTES_MAX}"
            )

    @cached_property
    def head(self) -> slice:
        """What must be zero when a region begins: all but the slots and the windows."""
        return slice(self.base, self.segment.slots)

    def presence(self, rank: int) -> int:
        """Offset of a rank's u32."""
        return self.presences + 4 * rank

    def doorbell(self, rank: int) -> int:
        """Offset of a rank's futex word."""
        return self.doorbells + _CACHE_LINE * rank

    def death_reason(self, rank: int) -> slice:
        """Where the text about a rank's death is."""
        start = self.obituaries + DEATH_REASON_BYTES * rank
        return slice(start, start + DEATH_REASON_BYTES)

    def window(self, rank: int) -> int:
        """Offset of a rank's window."""
        return self.windows + self.window_stride * rank


def region_bytes(
    rank_count: int,
    window_bytes: int,
    signal_count: int = DEFAULT_SIGNAL_COUNT,
    chunk_bytes: int = DEFAULT_BUFFER_BYTES,
) -> int:
    """How many bytes a region takes, a whole number of pages; most are never touched."""
    return WindowLayout(rank_count, window_bytes, signal_count, chunk_bytes).total_bytes
