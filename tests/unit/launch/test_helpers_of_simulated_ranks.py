"""What simulated ranks have started, as those see it that watch for hangs."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.drivers.real.clock import SystemClock
from rankwise.simranks.run.run_token_watch import RunTokenWatch
from rankwise.simranks.run.time_watch import TimeWatch

COMPUTES = """
from time import process_time
while True:
    until = process_time() + 0.1
    while process_time() < until: pass
    print(flush=True)
"""
"""Prints a line after each tenth of a second that it has computed."""


def watch_of(helpers: set[object]) -> TimeWatch:
    world: Any = SimpleNamespace(scheduler=SimpleNamespace(ranks={}, helpers=helpers))
    return TimeWatch(cast("Any", world), None, SystemClock(), lambda: 0)


def test_of_a_helper_it_is_known_how_long_it_waited_for_a_cpu() -> None:
    stop = threading.Event()
    helper = threading.Thread(target=stop.wait)
    helper.start()
    try:
        done = watch_of({helper})._work_of_others()
    finally:
        stop.set()
        helper.join()

    assert done is not None
    assert helper.native_id in done.helper_times
    assert helper.native_id in done.helper_waits, "a starved helper that computes is progress"


def test_ranks_that_have_started_nothing_wait_for_nothing() -> None:
    assert watch_of(set())._work_of_others() is None


def test_what_a_process_had_started_before_its_ranks_is_no_progress_of_theirs() -> None:
    loop = subprocess.Popen([sys.executable, "-c", COMPUTES], stdout=subprocess.PIPE)
    stop = threading.Event()
    resting = threading.Thread(target=stop.wait)
    resting.start()
    rank: Any = SimpleNamespace(number=0, thread=resting)
    clock = Later()
    try:
        assert loop.stdout is not None
        loop.stdout.readline()
        watch = RunTokenWatch(Duration(2 * SECOND), clock, lambda: 0)
        seen = [watch.makes_progress(rank) for _ in range(4) if loop.stdout.readline()]
    finally:
        stop.set()
        resting.join()
        loop.kill()
        loop.communicate()

    assert not any(seen[1:])


class Later(SystemClock):
    """A clock on which a quarter of the time-out has passed from each look to the next."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0

    def now(self) -> Instant:
        self._looks += 1
        return after(super().now(), Duration(self._looks * SECOND // 2))
