"""The segment: memory that the workers of one node share, watched over by their agent.

The agent makes one segment per attempt and hands its descriptor to every worker
(`RANKWISE_SEGMENT_FD`). It is an anonymous memfd: it has no name, appears in no directory, and is
gone when the last process that holds it is. It is sparse: untouched memory costs nothing, so a
program without collectives pays for none. It is sealed, so that no worker can shrink it under the
others.

Layout (native byte order, offsets from `SegmentLayout`):

    identity     magic, version, worker count, bytes of a buffer, bytes in all
    arrivals     the futex word that all ranks count up and sleep on (see futex.py)
    quiet        a word without sleepers
    stopping     two words by which ranks agree on the step to stop at (see stop_words.py)
    deaths       u32 per worker, written by the agent: 1 when it is gone
    withdrawals  u32 per worker, written by that worker: 1 when it gave up in an operation, 2
                 when it did so because a peer had died
    ledgers      16 u64 per worker, written by that worker: who it is and how far it has come
    last words   text per worker, written by that worker before it withdraws
    headers      BUFFER_COUNT texts per worker, written by that worker: what it is doing
    slots        BUFFER_COUNT buffers per worker, page-aligned: its data
    calls        behind all that, an area per worker: its call record (`call_ring`)
                 and its sections (`section_ring`)

Every word but `arrivals` has one writer, is aligned, and only ever grows, so a reader sees an old
value or a new one and never a mixture. `arrivals` is written by the kernel on behalf of all. How
the ranks read and write slots in phases is told in `rankwise.collectives.barrier`.

The agent's half costs nothing until a worker dies: `create` and `marks` are a handful of
system calls, and ctypes is imported by the first `mark_dead`.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from mmap import mmap
from stat import S_ISREG
from typing import TYPE_CHECKING, Self

import msgspec

from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.base.units import Duration

if TYPE_CHECKING:
    from rankwise.drivers.real.futex import FutexWord

SEGMENT_VARIABLE = "RANKWISE_SEGMENT_FD"
STOP_VARIABLE = "RANKWISE_STOP_FD"
"""Names the descriptor of an eventfd beside the segment, by which a rank that was sent SIGTERM asks
its agent to stop the run."""
MAGIC = b"rankwise"
VERSION = 5
BUFFER_COUNT = 3
"""Buffers per slot: one is written, one reduced, one read (see `barrier`)."""
HEADER_BYTES = 128
ABORT_REASON_BYTES = 256
WITHDRAWN, WITHDRAWN_FOR_PEER = 1, 2
WORKERS_MAX = 4096
CALLS_BYTES, SECTIONS_AT = 282_624, 275_520
"""A worker's call record, and where its sections begin there: `call_ring.AREA_BYTES` and
`SECTIONS_AT`, told here so that agents need not load that."""
DEFAULT_BUFFER_BYTES = 1 << 20
"""Large enough that barriers are rare, small enough that the buffers of a few ranks stay in the
caches: among 128 KiB to 2 MiB the fastest for arrays of 64 MiB, for 2 and 4 ranks."""

LEDGER_WORDS = 16
LEDGER_PID, LEDGER_PHASES, LEDGER_OPERATIONS, LEDGER_OPENING_PHASE, LEDGER_MOVED_AT = range(5)
LEDGER_PLACE = 5
"""Where in its window a rank's array lies, plus one; 0 when it lies elsewhere (windows only)."""
LEDGER_STEPS = 6
"""How many steps a rank has begun."""
LEDGER_TAKES_SIGTERM = 8
"""1 for a rank that takes SIGTERM for a request to stop, instead of dying of it."""
LEDGER_SECTIONS = 9
"""How often a rank has entered or left a section (`rankwise.section`)."""
LEDGER_STEP_BEGAN, LEDGER_STEP_TIME = 10, 11
"""When a rank began its present step, and how long those before took together, in nanoseconds."""
LEDGER_SECTION_RUNS, LEDGER_SECTION_TIME = 12, 13
"""How many sections it has left that were in no other one, and how long they took together."""
LEDGER_SECTION_STUCK = 14
"""1 while the limit of a section that a rank is in is over."""

_IDENTITY = struct.Struct("=8sIIQQ")
_CACHE_LINE = 64
_PAGE = 4096


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class SegmentLayout(msgspec.Struct, frozen=True):
    """Where things are in a segment.

    Attributes:
        worker_count: how many workers share it.
        buffer_bytes: size of each of a slot's buffers; a whole number of pages.
        base: where it begins in the memory that it is a part of; a whole number of pages.
    """

    worker_count: int
    buffer_bytes: int
    base: int = 0

    @property
    def arrivals(self) -> int:
        """The word that all count up."""
        return self.base + _CACHE_LINE

    @property
    def quiet(self) -> int:
        """The word without sleepers."""
        return self.base + 2 * _CACHE_LINE

    @property
    def stopping(self) -> int:
        """The words of a stop, in the same cache line as `quiet`, which is never written."""
        return self.quiet + 16

    @property
    def deaths(self) -> int:
        """One u32 per worker, directly followed by `withdrawals`."""
        return self.base + 3 * _CACHE_LINE

    @property
    def withdrawals(self) -> int:
        """One u32 per worker."""
        return self.deaths + 4 * self.worker_count

    @property
    def ledgers(self) -> int:
        """LEDGER_WORDS u64 per worker."""
        return _round_up(self.withdrawals + 4 * self.worker_count, _CACHE_LINE)

    @property
    def abort_reasons(self) -> int:
        """ABORT_REASON_BYTES of text per worker."""
        return self.ledgers + 8 * LEDGER_WORDS * self.worker_count

    @property
    def headers(self) -> int:
        """BUFFER_COUNT rows of HEADER_BYTES per worker."""
        return self.abort_reasons + ABORT_REASON_BYTES * self.worker_count

    @property
    def slots(self) -> int:
        """BUFFER_COUNT buffers per worker."""
        end_of_headers = self.headers + BUFFER_COUNT * HEADER_BYTES * self.worker_count
        return _round_up(end_of_headers, _PAGE)

    @property
    def total_bytes(self) -> int:
        """Size of the whole segment."""
        return self.slots + BUFFER_COUNT * self.buffer_bytes * self.worker_count - self.base

    def header(self, buffer: int, local_rank: int) -> int:
        """Offset of a header; those of all workers for one buffer lie next to each other."""
        return self.headers + HEADER_BYTES * (buffer * self.worker_count + local_rank)

    def buffer(self, buffer: int, local_rank: int) -> int:
        """Offset of one of a slot's buffers."""
        return self.slots + self.buffer_bytes * (BUFFER_COUNT * local_rank + buffer)


class Pace(msgspec.Struct, frozen=True):
    """The progress rate of a worker: in steps, or where it counts none, in its outermost sections.

    Attributes:
        steps: how many it has done.
        time: how long they took together.
    """

    steps: int
    time: Duration


class Segment:
    """Memory shared by the workers of one node; made with `create`, `attach` or `within`."""

    def __init__(
        self, fd: int, layout: SegmentLayout, *, owns_fd: bool, memory: mmap | None = None
    ) -> None:
        self.fd = fd
        self.layout = layout
        self._owns_fd = owns_fd
        self._memory = memory
        self._is_part = memory is not None
        self._arrivals: FutexWord | None = None

    @classmethod
    def create(cls, worker_count: int, *, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> Self:
        """Make a segment for `worker_count` workers; the caller closes it.

        `buffer_bytes` is how much of an array travels at a time; it is rounded up to whole pages,
        and to what leaves every worker a part of it.
        """
        if not 1 <= worker_count <= WORKERS_MAX:
            raise ConfigError(
                f"worker_count is {worker_count}, expected between 1 and {WORKERS_MAX}"
            )
        if buffer_bytes < 1:
            raise ConfigError(f"buffer_bytes is {buffer_bytes}, expected at least 1")
        layout = SegmentLayout(worker_count, cls.buffer_bytes_for(worker_count, buffer_bytes))
        fd = os.memfd_create("rankwise-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.total_bytes + worker_count * CALLS_BYTES)
            identity = _IDENTITY.pack(
                MAGIC, VERSION, worker_count, layout.buffer_bytes, layout.total_bytes
            )
            os.pwrite(fd, identity, 0)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, layout, owns_fd=True)

    @classmethod
    def within(cls, memory: mmap, layout: SegmentLayout) -> Self:
        """The part of larger memory that begins at `layout.base`; the memory stays its owner's.

        It has no identity: the layout of the larger memory says where a segment is, and how large.
        """
        return cls(-1, layout, owns_fd=False, memory=memory)

    @staticmethod
    def buffer_bytes_for(worker_count: int, wanted: int) -> int:
        """`wanted`, rounded up to whole pages, and to what leaves every worker a part of it."""
        return _round_up(max(wanted, _CACHE_LINE * worker_count), _PAGE)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Use a segment of another process; the descriptor stays the caller's."""
        try:
            status = os.fstat(fd)
            identity = os.pread(fd, _IDENTITY.size, 0) if S_ISREG(status.st_mode) else b""
        except OSError as error:
            raise ConfigError(
                f"descriptor {fd} cannot be read as a rankwise segment: {error.strerror}",
                hint="a process that a worker starts does not inherit the worker's segment",
            ) from error
        if len(identity) < _IDENTITY.size or not identity.startswith(MAGIC):
            raise ConfigError(
                f"descriptor {fd} is something else than a rankwise segment",
                hint="a process that a worker starts does not inherit the worker's segment",
            )
        _, version, worker_count, buffer_bytes, total_bytes = _IDENTITY.unpack(identity)
        if version != VERSION:
            raise ConfigError(
                f"the segment has layout version {version}, expected {VERSION}",
                hint="agent and workers must use the same release of rankwise",
            )
        layout = SegmentLayout(worker_count, buffer_bytes)
        expected = layout.total_bytes + worker_count * CALLS_BYTES
        if total_bytes != layout.total_bytes or status.st_size != expected:
            raise ConfigError(
                f"the segment for {worker_count} workers has {status.st_size} bytes, "
                f"expected {expected}",
            )
        return cls(fd, layout, owns_fd=False)

    @property
    def worker_count(self) -> int:
        """How many workers share it."""
        return self.layout.worker_count

    def area_of_calls(self, local_rank: int) -> int:
        """Where in the descriptor's file a worker's call record begins."""
        return self.layout.total_bytes + local_rank * CALLS_BYTES

    @property
    def memory(self) -> mmap:
        """All of it, mapped on first use, at least until `close`."""
        if self._memory is None:
            if self.fd < 0:
                raise LocalProtocolError("the segment is closed")
            self._memory = mmap(self.fd, self.layout.total_bytes)
        return self._memory

    @property
    def ledgers(self) -> "memoryview[int]":
        """All ledgers as native words: one is loaded and stored whole; single bytes are not."""
        return memoryview(self.memory)[self.layout.ledgers : self.layout.abort_reasons].cast("Q")

    @property
    def arrivals(self) -> "FutexWord":
        """The word that all ranks count up and sleep on."""
        if self._arrivals is None:
            from rankwise.drivers.real.futex import FutexWord  # noqa: PLC0415  # ctypes takes ms

            self._arrivals = FutexWord(self.memory, self.layout.arrivals, self.layout.quiet)
        return self._arrivals

    def mark_dead(self, local_rank: int) -> None:
        """Let the others know that a worker is gone; for the agent, at *every* exit of a worker.

        Ranks that wait for it raise `PeerDied`; to those that wait for nothing from it, nothing
        happens, so marking workers that ended well is right too. While no rank has entered its
        ledger no rank can be asleep, and ringing, whose first time imports ctypes, is left out: one
        that enters later looks at the deaths before it sleeps.
        """
        if not 0 <= local_rank < self.worker_count:
            raise ConfigError(
                f"local rank {local_rank} is not one of the segment's {self.worker_count} workers"
            )
        word, offset = struct.pack("=I", 1), self.layout.deaths + 4 * local_rank
        if self._is_part:
            self.memory[offset : offset + len(word)] = word
        else:
            os.pwrite(self.fd, word, offset)
        ledgers = self._ledger_bytes()
        is_used = ledgers != bytes(len(ledgers))  # quick, since this is done for each worker
        if is_used and any(memoryview(ledgers).cast("Q")[LEDGER_PID::LEDGER_WORDS]):
            self.arrivals.ring()

    def marks(self, local_rank: int) -> tuple[int, ...]:
        """How far a worker has come, as words that change when it goes on.

        They are when it last came to a barrier, of which a long collective has several, and its
        counts of steps and sections.
        """
        ledger = self._ledger(local_rank)
        return ledger[LEDGER_MOVED_AT], ledger[LEDGER_STEPS], ledger[LEDGER_SECTIONS]

    def pace(self, local_rank: int) -> Pace:
        """How many steps a worker has done, and in what time."""
        ledger = self._ledger(local_rank)
        if begun := ledger[LEDGER_STEPS]:
            return Pace(begun - 1, Duration(ledger[LEDGER_STEP_TIME]))
        return Pace(ledger[LEDGER_SECTION_RUNS], Duration(ledger[LEDGER_SECTION_TIME]))

    def is_stuck_in_section(self, local_rank: int) -> bool:
        """Whether the limit of a section that a worker is in, or died in, is over."""
        return self.stuck_section(local_rank) is not None

    def stuck_section(self, local_rank: int) -> int | None:
        """In how many others the section lies whose limit is over; None if none is."""
        place = self._ledger(local_rank)[LEDGER_SECTION_STUCK]
        return place - 1 if place else None

    def steps(self) -> int | None:
        """How many steps the farthest worker has begun; None where they are not counted."""
        return max(ledger[LEDGER_STEPS] for ledger in self._read_ledgers()) or None

    def takes_sigterm(self, local_rank: int) -> bool:
        """Whether a worker takes SIGTERM for a request to stop."""
        return local_rank in self.sigterm_takers()

    def sigterm_takers(self) -> set[int]:
        """The workers that take SIGTERM for a request to stop."""
        ledgers = enumerate(self._read_ledgers())
        return {rank for rank, ledger in ledgers if ledger[LEDGER_TAKES_SIGTERM]}

    def note_sigterm_taker(self, local_rank: int) -> None:
        """For the agent: a worker that comes from an earlier segment takes SIGTERM as it did."""
        at = self.layout.ledgers + 8 * (LEDGER_WORDS * local_rank + LEDGER_TAKES_SIGTERM)
        os.pwrite(self.fd, struct.pack("=Q", 1), at)

    def _ledger(self, local_rank: int) -> tuple[int, ...]:
        at = self.layout.ledgers + 8 * LEDGER_WORDS * local_rank
        return struct.unpack(f"={LEDGER_WORDS}Q", os.pread(self.fd, 8 * LEDGER_WORDS, at))

    def _read_ledgers(self) -> Iterator[tuple[int, ...]]:
        """Every worker's ledger."""
        return struct.iter_unpack(f"={LEDGER_WORDS}Q", self._ledger_bytes())

    def _ledger_bytes(self) -> bytes:
        """All ledgers, read without mapping the segment."""
        if self._is_part:
            return self.memory[self.layout.ledgers : self.layout.abort_reasons]
        return os.pread(self.fd, 8 * LEDGER_WORDS * self.worker_count, self.layout.ledgers)

    def close(self) -> None:
        """Unmap it, and close the descriptor if it was created here. Twice is once."""
        if self._arrivals is not None:
            self._arrivals.release()
            self._arrivals = None
        if self._memory is not None:
            # A traceback may still hold views; the mapping then goes when they go.
            with suppress(BufferError):
                if not self._is_part:
                    self._memory.close()
            self._memory = None
        if self._owns_fd and self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
