"""Which ranks make progress, told from what they have done up to several moments.

Theory of operation
===================

A hang is the absence of progress, not of output. A *look* counts what each rank has done so far
(`Activity`). Its work between two looks is progress or is none:

    it has begun or ended a collective call, a step or a section              progress
    it is in the same collective call as before, whatever it does there       none: waits may spin
    its main thread has computed for a twentieth of the time                  progress
    its other threads and its child processes have, together                  progress
    any of these has, of the time in which it could have run                  progress
    it has read or written 64 KiB, and 4 KiB for each second                  progress
    anything less                                                             none

Output alone is no progress (what came through the rank's output streams is not counted), nor is a
thread that wakes up now and then to say that it lives, nor one that watches a library's calls.

Nothing polls: `next_look` is a quarter of the patience after the last look, or half of it after the
last progress, when it is time to warn. Progress is dated to the look that found it, so a hang is
found at most a quarter of the patience late, never early.

That all others wait for one rank, and this one makes no progress, needs no rule of its own: those
who wait in a call make none, so the rank that made progress last is the one they wait for.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after, between, postponed

LOOKS_PER_PATIENCE = 4
LEAST_INTERVAL = Duration(50 * MILLISECOND)
"""Looks that follow each other faster are one look: too little can have been done meanwhile."""
CPU_SHARE = 20
COMPUTED_MIN = Duration(20 * MILLISECOND)
PER_POLL = Duration(10 * MILLISECOND)
BYTES_MIN = 64 << 10
BYTES_PER_SECOND = 4 << 10
POLLS_PER_SECOND = 4
"""A main thread that wakes up more often, and makes no progress, polls; signals and timers of an
interpreter that sleeps wake it up less often."""


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has done up to one moment.

    Attributes:
        pid: its process; another one is another life.
        marks: how far it has come, such as its count of calls; any change is progress.
        is_in_call: whether its main thread is in a collective call.
        main_time: the CPU time of its main thread.
        main_waited: for how long that was ready to run and had no CPU.
        polls: how often it has asked in vain whether a call that it has issued is over.
        helper_times: the CPU time of its other threads and of its child processes, by a key each.
        helper_waits: for how long those were ready and had no CPU, where that is counted.
        byte_count: what all of them have read and written, output streams left out.
        main_runs: how often its main thread got a CPU, where that is counted.
    """

    pid: int
    marks: tuple[int, ...] = ()
    is_in_call: bool = False
    main_time: Duration = Duration(0)
    main_waited: Duration = Duration(0)
    polls: int = 0
    helper_times: Mapping[int, Duration] = {}
    helper_waits: Mapping[int, Duration] = {}
    byte_count: int = 0
    main_runs: int = 0


class Doing(StrEnum):
    """What a rank did between two looks."""

    ADVANCES = "advances"
    """It came farther in its program."""
    COMPUTES = "computes"
    TRANSFERS = "transfers"
    """It reads or writes."""
    WAITS = "waits"
    """It is in the same collective call as before."""
    POLLS = "polls"
    """Its main thread wakes up again and again, and does next to nothing."""
    NOTHING = "nothing"

    @property
    def is_progress(self) -> bool:
        """Whether a rank that does this makes progress."""
        return self not in (Doing.WAITS, Doing.POLLS, Doing.NOTHING)


class RankProgress(msgspec.Struct, frozen=True):
    """What the looks have told of one rank."""

    doing: Doing
    last_progress: Instant
    """The look that found its latest progress, or first found it."""


class ProgressWatch:
    """Judges the progress of one node's ranks.

    Args:
        patience: without progress of any rank for so long they have hung; None never says so.
        now: when the watch begins.
    """

    def __init__(self, patience: Duration | None, now: Instant) -> None:
        self._patience = patience
        self._idle_since = now
        self._looked_at = now
        self._works: dict[int, Activity] = {}
        self._ranks: dict[int, RankProgress] = {}
        self._warned_of: Instant | None = None

    @property
    def ranks(self) -> Mapping[int, RankProgress]:
        """What is known of each rank that the last look has found."""
        return self._ranks

    @property
    def last_progress(self) -> Instant:
        """When any of the ranks last made progress; where all have ended, when that was seen."""
        return max((rank.last_progress for rank in self._ranks.values()), default=self._idle_since)

    @property
    def next_look(self) -> Instant | None:
        """When to look next; None while no patience is set."""
        if self._patience is None:
            return None
        regular = after(self._looked_at, self._interval(self._patience))
        # An extra query reschedules the periodic check, so the warning needs its own deadline.
        half = after(self.last_progress, Duration(self._patience // 2))
        return half if after(self._looked_at, LEAST_INTERVAL) <= half < regular else regular

    def look(self, works: Mapping[int, Activity], now: Instant) -> None:
        """Take in what each rank has done so far; those that are left out have ended."""
        elapsed = between(self._looked_at, now)
        # Too little can be done in so short a time: it would count as none, and age the progress.
        is_same_look = elapsed < LEAST_INTERVAL and works.keys() <= self._works.keys()
        if is_same_look:
            return
        # A look that runs much later than it was due: the agent was suspended (SIGSTOP, a suspended
        # machine), and the ranks perhaps too. They get the time again that it has not seen.
        late = 0
        if self._patience is not None:
            # Twice the interval: a busy agent is late by one, and that is no suspension.
            late = max(elapsed - 2 * self._interval(self._patience), 0)
        self._ranks = {
            rank: self._judge(rank, work, Duration(late), now) for rank, work in works.items()
        }
        if not works:
            self._idle_since = now
        self._works = dict(works)
        self._looked_at = now

    def on_suspended(self, duration: Duration) -> None:
        """Take note that ranks and agent were stopped for so long, and have just gone on."""
        self._idle_since = after(self._idle_since, duration)
        self._looked_at = after(self._looked_at, duration)
        self._warned_of = postponed(self._warned_of, duration)
        self._ranks = {
            rank: RankProgress(known.doing, after(known.last_progress, duration))
            for rank, known in self._ranks.items()
        }

    def warns(self, now: Instant) -> bool:
        """True if half of the patience is over, and the warning was not given yet."""
        last = self.last_progress
        if self._patience is None or last == self._warned_of:
            return False
        if between(last, now) < self._patience // 2:
            return False
        self._warned_of = last
        return True

    @staticmethod
    def _interval(patience: Duration) -> Duration:
        return max(Duration(patience // LOOKS_PER_PATIENCE), LEAST_INTERVAL)

    def _judge(self, rank: int, work: Activity, late: Duration, now: Instant) -> RankProgress:
        before = self._works.get(rank)
        # Another process in its place is another life: to have begun is progress.
        if before is None or before.pid != work.pid:
            return RankProgress(Doing.ADVANCES, now)
        doing = _what_it_did(before, work, between(self._looked_at, now))
        if doing.is_progress:
            return RankProgress(doing, now)
        return RankProgress(doing, after(self._ranks[rank].last_progress, late))


def _what_it_did(before: Activity, now: Activity, elapsed: Duration) -> Doing:
    if now.marks != before.marks:
        return Doing.ADVANCES
    # Before its CPU time: a backend that spins in a call computes, and gets nowhere.
    if now.is_in_call:
        return Doing.WAITS
    if _main_computes(before, now, elapsed) or _helpers_compute(before, now, elapsed):
        return Doing.COMPUTES
    enough = max(BYTES_MIN, BYTES_PER_SECOND * elapsed // SECOND)
    if now.byte_count - before.byte_count >= enough:
        return Doing.TRANSFERS
    runs = now.main_runs - before.main_runs
    return Doing.POLLS if runs * SECOND > POLLS_PER_SECOND * elapsed else Doing.NOTHING


def _main_computes(before: Activity, now: Activity, elapsed: Duration) -> bool:
    computed = now.main_time - before.main_time
    # A thread that asks a handle again and again waits, and spins, unless it computes in between.
    if computed < max((now.polls - before.polls) * PER_POLL, _computed_min(elapsed)):
        return False
    # Of the time in which it could have run: on a busy machine a thread computes less than it
    # would. The wait for a CPU itself is no progress: a polling rank has one at each wake-up.
    return computed * CPU_SHARE >= elapsed - (now.main_waited - before.main_waited)


def _computed_min(elapsed: Duration) -> int:
    """What has to be computed in any case; never more than the twentieth that is enough."""
    # A starved thread gets that much.
    return min(COMPUTED_MIN, elapsed // CPU_SHARE)


def _helpers_compute(before: Activity, now: Activity, elapsed: Duration) -> bool:
    computed = {key: _grown(before.helper_times, now.helper_times, key) for key in now.helper_times}
    together = sum(computed.values())
    if together < _computed_min(elapsed):
        return False
    # Data loaders share the work: each may do little, and together they keep the rank going.
    if together * CPU_SHARE >= elapsed:
        return True
    return any(
        time * CPU_SHARE >= elapsed - _grown(before.helper_waits, now.helper_waits, key)
        for key, time in computed.items()
        if time
    )


def _grown(before: Mapping[int, Duration], now: Mapping[int, Duration], key: int) -> int:
    """By how much a helper has more; one that has less than before is another one."""
    earlier, time = before.get(key, 0), now.get(key, 0)
    return time - earlier if time >= earlier else time
