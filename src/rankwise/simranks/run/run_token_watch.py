"""Progress of the rank that holds the run token, for `--hang-timeout`.

Progress is the same as on real processes (`rankwise.core.gang.progress`). Ranks are threads of this
process, so its other threads, its children and what it reads and writes count for the one rank that
runs. The scheduler thread, which calls this, and output of ranks do not count.
"""

import time
from collections.abc import Callable

from msgspec import structs

from rankwise.base.units import Duration
from rankwise.core.gang.progress import ProgressWatch
from rankwise.drivers.real.process_work import work_beside_this_thread
from rankwise.launch.looking.rank_activity import activity_of
from rankwise.ports.clock import Clock
from rankwise.simranks.world.ranks import Rank


class RunTokenWatch:
    """Looks at the rank that holds the run token; called in the scheduler thread.

    Args:
        hang_timeout: without progress for so long it has hung.
        clock: real time.
        printed: how many bytes ranks have printed so far.
    """

    def __init__(self, hang_timeout: Duration, clock: Clock, printed: Callable[[], int]) -> None:
        self._watch = ProgressWatch(hang_timeout, clock.now())
        self._clock = clock
        self._printed = printed
        # Processes that this one had started before belong to no rank: a notebook's, a test's.
        self._began_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    def makes_progress(self, rank: Rank) -> bool:
        """Whether it has made progress since the look before, or is another rank than then."""
        number = rank.thread.native_id or 0
        work = work_beside_this_thread(number, since_s=self._began_s)
        if work is None:
            return True  # it has ended
        done = activity_of(number, work)
        done = structs.replace(done, byte_count=done.byte_count - self._printed())
        self._watch.look({rank.number: done}, self._clock.now())
        return self._watch.ranks[rank.number].doing.is_progress
