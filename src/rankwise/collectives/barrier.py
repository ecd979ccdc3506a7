"""The barrier of a segment: all ranks have come this far, or it is known which of them have not.

All ranks of a segment go through the same sequence of *phases*, each ended by a barrier. In a
phase, a rank reads and writes what the protocol of its operation gives to it; then it calls
`arrive_and_wait`, and no rank leaves the barrier before all have arrived. Since all have arrived at
the end of phase t, no rank still works on what belonged to phase t - 1 or before. With three
buffers used in rotation, phase t's buffer can therefore be written again in phase t + 3 (and read
by stragglers in t + 1) without any further exchange: one barrier per step is all the
synchronisation there is.

An arrival is one atomic addition to the segment's word `arrivals`, done by the kernel, which is
also a full memory barrier (see `rankwise.drivers.real.futex`). The count in its lower bits is
`phase * size` when all have arrived; it wraps around, and is compared as a distance. The rank that
completes it wakes all others with the same system call. If two complete it at once, neither
having seen the other, then both see the full count right after their own addition, and wake the
sleepers then. No rank spins: one that is early sleeps, which on a machine with fewer cores than
ranks is the only thing that lets the late one run.

Before it sleeps, a rank checks whether a missing rank can still come: `deaths` is written by the
agent, `withdrawals` by a rank that left an operation with an error. The writer then
*rings*: it changes the upper bits of `arrivals`, so that a rank which looked too early does not
fall asleep. A phase that every rank ended is complete even if one died right after it. A rank that
gave up in an operation, though, has not done it, wherever it was then: all ranks that are still in
it, or come to it later, give up as well, so that no rank takes for done what failed on another.

The first barrier of an operation also compares headers. Each rank has published its own in the
row of the phase's buffer, and reads the whole row after the barrier.
"""

from collections.abc import Callable
from functools import partial

from rankwise.base.errors import CollectiveError, CollectiveTimeout, LocalProtocolError, PeerDied
from rankwise.base.units import Duration
from rankwise.base.wording import ranks_in_words
from rankwise.collectives import wording
from rankwise.collectives.calls import AgreedCall, read_header
from rankwise.core.matching import MemberCalls, agree, behind
from rankwise.drivers.real.futex import FutexWord
from rankwise.drivers.real.segments import (
    ABORT_REASON_BYTES,
    BUFFER_COUNT,
    HEADER_BYTES,
    LEDGER_MOVED_AT,
    LEDGER_OPENING_PHASE,
    LEDGER_OPERATIONS,
    LEDGER_PHASES,
    LEDGER_PID,
    LEDGER_WORDS,
    WITHDRAWN,
    WITHDRAWN_FOR_PEER,
    Segment,
)

_COUNT_MASK = (1 << FutexWord.RING_BIT) - 1
_HALF = 1 << (FutexWord.RING_BIT - 1)


def plain_fate(rank: int) -> str:
    """How a rank ended that is marked dead, when nothing more is known."""
    del rank
    return "has ended"


class Barrier:
    """One rank's way through the phases of a segment."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        pid: int,
        fate_of: Callable[[int], str] = plain_fate,
        *,
        first_rank: int = 0,
    ) -> None:
        """Take the place of `rank`; `fate_of` says what became of one that is marked dead.

        `first_rank` is what errors call rank 0 of the segment.
        """
        self._first = first_rank
        layout = segment.layout
        self._fate_of = fate_of
        self.rank = rank
        self.size = layout.worker_count
        self._layout = layout
        self._memory = segment.memory
        self._ledgers = segment.ledgers
        self._fates = slice(layout.deaths, layout.deaths + 8 * self.size)
        self._all_well = bytes(8 * self.size)
        self._arrivals = segment.arrivals
        self._phase_index = self._ledger_index(rank, LEDGER_PHASES)
        self._claim(pid)
        self.phase: int = self._ledgers[self._phase_index]
        # The segment outlives a communicator: the next one of this rank goes on counting.
        self.calls = MemberCalls(self._read(rank, LEDGER_OPERATIONS))
        self._call: AgreedCall | None = None
        self._patience = Duration(0)
        self._expected_headers = b""
        self._header_rows = [
            slice(layout.header(buffer, 0), layout.header(buffer, self.size))
            for buffer in range(BUFFER_COUNT)
        ]
        self._own_headers = [
            slice(layout.header(buffer, rank), layout.header(buffer, rank) + HEADER_BYTES)
            for buffer in range(BUFFER_COUNT)
        ]

    @property
    def buffer(self) -> int:
        """The buffer that may be written before the next barrier."""
        return self.phase % BUFFER_COUNT

    def begin(self, call: AgreedCall, patience: Duration) -> None:
        """Open an operation; its first barrier compares what the ranks are doing."""
        self._call = call
        self._patience = patience
        number = self.calls.begin(call.header)
        self._memory[self._own_headers[self.phase % BUFFER_COUNT]] = call.header
        ledgers, own = self._ledgers, self._phase_index - LEDGER_PHASES
        ledgers[own + LEDGER_OPERATIONS] = number
        ledgers[own + LEDGER_OPENING_PHASE] = self.phase
        self._expected_headers = call.header * self.size

    def arrive_and_wait(self) -> None:
        """Wait until all ranks have come to the end of this phase.

        What they wrote before it can be read now; what they read before it can be overwritten.
        """
        phase = self.phase + 1
        self._ledgers[self._phase_index - LEDGER_PHASES + LEDGER_MOVED_AT] = self._arrivals.now()
        target = phase * self.size & _COUNT_MASK
        arrivals = self._arrivals
        # The ledger follows the count: a rank that is killed between the two is counted and yet
        # missing, so that its death is noticed. The other way round no rank would ever notice it.
        if (arrivals.look() + 1 - target) & _COUNT_MASK == 0:
            arrivals.add_and_wake()
            self._ledgers[self._phase_index] = phase
        else:
            arrivals.add()
            self._ledgers[self._phase_index] = phase
            if (arrivals.look() - target) & _COUNT_MASK < _HALF:
                arrivals.wake()
            else:
                self._sleep_until_complete(phase, target)
        self.phase = phase
        if self._expected_headers:
            headers = self._memory[self._header_rows[(phase - 1) % BUFFER_COUNT]]
            if not agree(self._expected_headers, headers):
                raise self._mismatch(headers)
            self._expected_headers = b""
        if self._memory[self._fates] != self._all_well:
            self._look_for_the_withdrawn(phase)

    def _sleep_until_complete(self, phase: int, target: int) -> None:
        arrivals = self._arrivals
        deadline = arrivals.deadline_after(self._patience)
        arrivals.awaited = partial(self._describe_wait, phase)
        while True:
            value = arrivals.look()
            if (value - target) & _COUNT_MASK < _HALF:
                return
            if self._memory[self._fates] != self._all_well:
                self._look_for_the_lost(phase)
            if arrivals.now() >= deadline:
                raise self._timeout(phase)
            arrivals.sleep(value, deadline)

    def withdraw(self, reason: str, *, lost_peer: bool = False) -> None:
        """Tell the others not to wait for this rank any more."""
        words = reason.encode()[:ABORT_REASON_BYTES].ljust(ABORT_REASON_BYTES, b"\0")
        start = self._layout.abort_reasons + ABORT_REASON_BYTES * self.rank
        self._memory[start : start + ABORT_REASON_BYTES] = words
        flag = WITHDRAWN_FOR_PEER if lost_peer else WITHDRAWN
        self._memory[self._layout.withdrawals + 4 * self.rank] = flag
        self._arrivals.ring()

    def close(self) -> None:
        """Let the rank's other calls continue, and let go of the memory."""
        self._ledgers[self._ledger_index(self.rank, LEDGER_PID)] = 0
        self._ledgers.release()

    def _claim(self, pid: int) -> None:
        owner = self._read(self.rank, LEDGER_PID)
        if owner:
            whose = "this process" if owner == pid else f"process {owner}"
            raise LocalProtocolError(
                f"rank {self.rank} of the segment is already in use by {whose}",
                hint="a rank has one communicator; children of a worker cannot take its place",
            )
        self._ledgers[self._ledger_index(self.rank, LEDGER_PID)] = pid

    @staticmethod
    def _ledger_index(rank: int, word: int) -> int:
        return LEDGER_WORDS * rank + word

    def _read(self, rank: int, word: int) -> int:
        value: int = self._ledgers[self._ledger_index(rank, word)]
        return value

    def _describe_own(self) -> str:
        assert self._call is not None, "only operations have barriers"
        return self._call.numbered(self.calls.begun)

    def _describe_wait(self, phase: int) -> str:
        missing = [self._first + rank for rank in self._missing(phase)]
        return f"{self._describe_own()}, not called by {ranks_in_words(missing)}"

    def _describe_last_of(self, rank: int) -> str:
        operations = self._read(rank, LEDGER_OPERATIONS)
        if operations == 0:
            return wording.NOTHING_YET
        start = self._layout.header(
            self._read(rank, LEDGER_OPENING_PHASE) % BUFFER_COUNT, rank
        )  # fmt: skip
        header = self._memory[start : start + HEADER_BYTES]
        return wording.last_in(read_header(header, operations))

    def _missing(self, phase: int) -> list[int]:
        ranks = range(self.size)
        return behind(ranks, {rank: self._read(rank, LEDGER_PHASES) for rank in ranks}, phase)

    def _flags(self, offset: int, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if self._memory[offset + 4 * rank]]

    def _look_for_the_lost(self, phase: int) -> None:
        # A rank that died silently is the cause; one that withdrew may have done so because of
        # that.
        dead = self._flags(self._layout.deaths, self._missing(phase))
        withdrawn = self._flags(self._layout.withdrawals, dead)
        silent = [rank for rank in dead if rank not in withdrawn]
        if silent:
            raise self._peer_died(silent)
        self._look_for_the_withdrawn(phase)

    def _peer_died(self, silent: list[int]) -> PeerDied:
        return wording.peers_died(
            self._describe_own(),
            self._first + self.rank,
            [
                (self._first + rank, self._fate_of(rank), self._describe_last_of(rank))
                for rank in silent
            ],
        )

    def _look_for_the_withdrawn(self, phase: int) -> None:
        """Raise if a rank gave up in this operation, or before this phase."""
        withdrawn = [
            rank
            for rank in self._flags(self._layout.withdrawals, list(range(self.size)))
            if self._read(rank, LEDGER_PHASES) < phase
            or self._read(rank, LEDGER_OPERATIONS) <= self.calls.begun
        ]
        if withdrawn:
            flags = self._layout.withdrawals
            if any(self._memory[flags + 4 * rank] == WITHDRAWN_FOR_PEER for rank in withdrawn):
                # They have missed a rank that we will miss a phase later: that is the cause.
                others = [rank for rank in range(self.size) if rank not in withdrawn]
                silent = self._flags(self._layout.deaths, others)
                if silent:
                    raise self._peer_died(silent)
            dead = self._flags(self._layout.deaths, withdrawn)
            raise wording.peers_gave_up(
                self._describe_own(),
                self._first + self.rank,
                [self._describe_withdrawal(rank, died=rank in dead) for rank in withdrawn],
                because_of_death=bool(dead),
            )

    def _describe_withdrawal(self, rank: int, *, died: bool) -> str:
        did = "gave up, and has ended" if died else "gave up"
        return f"rank {self._first + rank} {did}: {self._abort_reason_of(rank)}"

    def _abort_reason_of(self, rank: int) -> str:
        start = self._layout.abort_reasons + ABORT_REASON_BYTES * rank
        words = self._memory[start : start + ABORT_REASON_BYTES].rstrip(b"\0")
        return words.decode(errors="replace")

    def _timeout(self, phase: int) -> CollectiveTimeout:
        return wording.timed_out(
            self._describe_own(),
            self._first + self.rank,
            self._patience,
            [(self._first + rank, self._describe_last_of(rank)) for rank in self._missing(phase)],
        )

    def _mismatch(self, headers: bytes) -> CollectiveError:
        doings = [
            (
                self._first + rank,
                read_header(headers[HEADER_BYTES * rank :][:HEADER_BYTES], self.calls.begun),
            )
            for rank in range(self.size)
        ]
        return wording.mismatch(doings)
