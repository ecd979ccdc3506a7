"""What threads that simulated ranks have started do, as the watch of their time sees it."""

import threading
from types import SimpleNamespace
from typing import Any, cast

from rankwise.drivers.real.clock import SystemClock
from rankwise.launch.on_sim.time_watch import TimeWatch


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
