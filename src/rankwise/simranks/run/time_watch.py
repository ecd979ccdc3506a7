"""Whether simulated ranks make progress while virtual time passes, or only sleep and wait.

A rank that asks in a loop whether something has happened, or whose alarm rings for ever, lets time
pass, so no deadlock stops the world. Progress is the same as on real processes
(`rankwise.core.gang.progress`): a call, a step or a section, the begin or end of a rank, and to
compute, read or write enough for the virtual time that has passed. The cost of a look in vain is
the simulation's doing, and no progress.

With `--hang-timeout` that much virtual time without progress is a hang, found at most a quarter of
it late. Without, how long ranks may rest is unknown, and a program may sleep for days on purpose:
only ranks have hung that let another one wait in an operation for longer than the time-outs of
torch would, and that have woken up so often meanwhile that a real minute has passed.

What a rank has started, threads and processes, lives in real time: as long as there is any, ranks
may wait for it in a loop, and only real time counts, or without a time-out none.
"""

import os
import threading
import time
from collections.abc import Callable

from rankwise.base.units import MICROSECOND, SECOND, Duration, Instant, after, between
from rankwise.core.gang.progress import (
    BYTES_MIN,
    BYTES_PER_SECOND,
    CPU_SHARE,
    LEAST_INTERVAL,
    LOOKS_PER_PATIENCE,
    Activity,
    ProgressWatch,
)
from rankwise.drivers.real.process_work import bytes_of_this_process, work_beside_this_thread
from rankwise.ports.clock import Clock
from rankwise.simranks.world.world import SimulatedWorld

UNASKED = Duration(3_600 * SECOND)
"""Of virtual time; torch's operations give up after half an hour."""
UNASKED_REAL = Duration(60 * SECOND)
_PAUSE = Duration(SECOND)
"""Of real time, until what ranks have started is looked for again: that reads all of `/proc`."""
_COST_OF_LOOK = 50 * MICROSECOND
"""What a rank computes, at most, that wakes up, looks in vain and goes to sleep again."""


class TimeWatch:
    """Checks the progress of ranks; called in the scheduler thread.

    Args:
        world: the ranks.
        hang_timeout: time without progress that counts as a hang; None leaves it to the watch.
        clock: real time.
        printed: returns the number of bytes that ranks have printed so far.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        hang_timeout: Duration | None,
        clock: Clock,
        printed: Callable[[], int],
    ) -> None:
        self._world = world
        self._hang_timeout = hang_timeout
        self._clock = clock
        self._printed = printed
        self._looked_at = self._since = Instant(0)
        self._real_since = self._looks_again_at = clock.now()
        self._marks: tuple[int, ...] = ()
        self._computed = self._bytes = 0
        self._others: ProgressWatch | None = None
        self._began_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def look_interval(self) -> Duration:
        """How often to ask, in virtual time."""
        limit = self._hang_timeout or UNASKED
        return max(Duration(limit // LOOKS_PER_PATIENCE), LEAST_INTERVAL)

    def begin_attempt(self) -> None:
        """Other ranks begin, which is progress, though as many of them may do nothing again."""
        self._marks = ()

    def hung_for(self, now: Instant) -> Duration | None:
        """How long no rank has got on, in virtual time, if that is a hang; None if it is none."""
        if self._have_got_on(now):
            self._since, self._real_since, self._others = now, self._clock.now(), None
        still = between(self._since, now)
        if self._hang_timeout is not None:
            is_over = still >= self._hang_timeout
        else:
            rested = between(self._real_since, self._clock.now())
            is_over = still >= UNASKED and rested >= UNASKED_REAL and self._is_call_awaited()
        return still if is_over and not self._may_others_help() else None

    def _have_got_on(self, now: Instant) -> bool:
        marks, marks_before = self._world.marks, self._marks
        elapsed = between(self._looked_at, now)
        if elapsed < LEAST_INTERVAL:  # the agents of all nodes look, one after another
            return marks != marks_before
        self._looked_at = now
        looks = self._world.scheduler.wake_ups * _COST_OF_LOOK
        # That of the calling thread is no rank's.
        computed = time.process_time_ns() - time.thread_time_ns() - looks
        byte_count = bytes_of_this_process() - self._printed()
        # Without a limit, a quarter of the time is enough in which a rank computes.
        share = CPU_SHARE if self._hang_timeout else CPU_SHARE * LOOKS_PER_PATIENCE
        did, moved = computed - self._computed, byte_count - self._bytes
        self._marks, self._computed, self._bytes = marks, computed, byte_count
        return (
            marks != marks_before
            or did * share >= elapsed
            or moved >= max(BYTES_MIN, BYTES_PER_SECOND * elapsed // SECOND)
        )

    def _is_call_awaited(self) -> bool:
        return any(group.is_awaited for group in self._world.groups.values())

    def _may_others_help(self) -> bool:
        """Whether what ranks have started lives, and has done something within the time-out."""
        now = self._clock.now()
        if now < self._looks_again_at:
            return True
        done = self._work_of_others()
        if done is None:
            return False
        patience = self._hang_timeout
        if patience is None:
            self._looks_again_at = after(now, _PAUSE)
            return True
        self._looks_again_at = after(now, Duration(patience // LOOKS_PER_PATIENCE))
        if self._others is None:
            self._others = ProgressWatch(patience, now)
        self._others.look({0: done}, now)
        return between(self._others.last_progress, now) < patience

    def _work_of_others(self) -> Activity | None:
        """What threads and processes have done that are no rank; None if ranks started none."""
        pid = os.getpid()
        work = work_beside_this_thread(threading.get_native_id(), since_s=self._began_s)
        ranks = {rank.thread.native_id for rank in self._world.scheduler.ranks.values()}
        times = {} if work is None else work.helper_times
        times = {key: computed for key, computed in times.items() if key not in ranks}
        has_children = any(key < 0 and key != -pid for key in times)
        if not has_children and not self._world.scheduler.helpers:
            return None
        # Of starved ones, too, counts what they have computed of the time when they had a CPU.
        waits = {} if work is None else work.helper_waits
        waited = {key: waits[key] for key in times if key in waits}
        return Activity(pid=0, helper_times=times, helper_waits=waited)
