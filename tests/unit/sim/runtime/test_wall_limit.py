"""What never gives the simulator a turn is ended all the same, and named with its line."""

import gc
import signal
import threading
import weakref
from typing import Any

import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError, TimeLimit
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.runtime.wall_limit import wall_limit


@pytest.fixture
def ctx() -> RuntimeContext:
    return RuntimeContext(GraphEngine("default"), ccl={})


def loop_beyond_the_limit() -> None:
    """Loop for ever, and let the time be up soon, however long it took to get here."""
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    while True:
        pass


def test_a_rank_that_loops_for_ever_is_named_with_its_line(ctx: RuntimeContext) -> None:
    endings: list[int] = []

    def worker(rank: int) -> None:
        try:
            if rank == 1:
                loop_beyond_the_limit()
            ctx.distributed.barrier()
        finally:
            endings.append(rank)

    with pytest.raises(TimeLimit, match=r"rank 1 still ran after 60 s.*test_wall_limit\.py:\d+"):
        ctx.multiprocessing.spawn(worker, nprocs=3, wall_limit_s=60)

    assert endings == [1, 0]
    assert ctx._pending_worker_waits == []


def test_ranks_that_all_loop_for_ever_end_at_the_first(ctx: RuntimeContext) -> None:
    begun: list[int] = []

    def worker(rank: int) -> None:
        begun.append(rank)
        loop_beyond_the_limit()

    with pytest.raises(TimeLimit, match="rank 0 still ran"):
        ctx.multiprocessing.spawn(worker, nprocs=4, wall_limit_s=60)

    assert begun == [0]


def test_a_rank_that_goes_on_for_ever_while_it_is_ended_is_interrupted_again(
    ctx: RuntimeContext,
) -> None:
    def worker(rank: int) -> None:
        try:
            if rank == 1:
                loop_beyond_the_limit()
            ctx.distributed.barrier()
        finally:
            while rank == 0:
                pass

    with pytest.raises(TimeLimit, match="rank 1 still ran"):
        ctx.multiprocessing.spawn(worker, nprocs=2, wall_limit_s=60)


@pytest.mark.parametrize(
    ("nprocs", "name"),
    [(1, r"endless\[0\] on sip0\.cube0\.pe0"), (2, "^endless")],
    ids=["on the machine", "calculated for several ranks at once"],
)
def test_a_kernel_that_loops_for_ever_is_named_with_its_line(
    ctx: RuntimeContext, nprocs: int, name: str
) -> None:
    def endless(x: Any) -> None:
        tl.load(x)
        loop_beyond_the_limit()

    with pytest.raises(TimeLimit, match=rf"{name} still ran after 60 s.*test_wall_limit\.py:\d+"):
        ctx.multiprocessing.spawn(
            lambda _rank: ctx.launch(endless, 1, ctx.zeros(4)), nprocs=nprocs, wall_limit_s=60
        )


def test_ranks_that_do_nothing_but_meet_for_ever_are_told_of_the_limit_and_of_no_deadlock(
    ctx: RuntimeContext,
) -> None:
    def worker(_rank: int) -> None:
        while True:
            ctx.distributed.barrier()

    with pytest.raises(TimeLimit, match=r"still ran after 0\.2 s of real time"):
        ctx.multiprocessing.spawn(worker, nprocs=2, wall_limit_s=0.2)


def test_a_limit_is_not_lost_where_python_drops_exceptions() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGALRM)

    def on_collection(_phase: str, _details: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    class Signals:
        """Equal to another one only after a signal, as a set finds out that drops one of them."""

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            signal.raise_signal(signal.SIGALRM)
            return self is other

    gc.callbacks.append(on_collection)
    one, another = Signals(), Signals()
    ones = weakref.WeakSet([one])
    try:
        with wall_limit(60):
            gc.collect()
            Finalized()
            assert another not in ones  # the signal comes within a function of the set
    finally:
        gc.callbacks.remove(on_collection)
    with pytest.raises(TimeLimit), wall_limit(60):
        signal.raise_signal(signal.SIGALRM)


def test_no_line_outside_of_what_is_limited_is_blamed() -> None:
    ctx = RuntimeContext(GraphEngine("default"), ccl={})

    def worker(_rank: int) -> None:
        # The signal comes when no rank runs, in the middle of the simulation.
        ctx.engine.simulator.call_at(1, signal.raise_signal, signal.SIGALRM)
        ctx.zeros(4)

    with pytest.raises(
        TimeLimit, match=r"^the simulation still ran after 60 s of real time \(it loops"
    ):
        ctx.multiprocessing.spawn(worker, nprocs=1, wall_limit_s=60)


def test_ranks_within_their_limit_leave_no_timer_behind(ctx: RuntimeContext) -> None:
    before = signal.getsignal(signal.SIGALRM)
    of_pytest = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        ctx.multiprocessing.spawn(lambda _rank: ctx.zeros(4), nprocs=2, wall_limit_s=60)

        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before
    finally:
        signal.setitimer(signal.ITIMER_REAL, *of_pytest)


def test_an_outer_timer_goes_on_afterwards(ctx: RuntimeContext) -> None:
    before = signal.signal(signal.SIGALRM, lambda _signal, _frame: None)
    of_pytest = signal.setitimer(signal.ITIMER_REAL, 1_000)
    try:
        ctx.multiprocessing.spawn(lambda _rank: None, nprocs=2, wall_limit_s=60)

        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1_000
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *of_pytest)


def test_a_limit_of_nothing_is_refused(ctx: RuntimeContext) -> None:
    with pytest.raises(ConfigError, match="a wall limit of 0 s; expected more than 0"):
        ctx.multiprocessing.spawn(lambda _rank: None, wall_limit_s=0)


def test_another_thread_has_no_signals_and_runs_without_the_limit() -> None:
    ended: list[int] = []

    def simulate() -> None:
        context = RuntimeContext(GraphEngine("default"), ccl={})
        context.multiprocessing.spawn(ended.append, nprocs=2, wall_limit_s=60)

    thread = threading.Thread(target=simulate)
    thread.start()
    thread.join()

    assert ended == [0, 1]


def loop_for_ever() -> None:
    while True:
        pass


def test_of_nested_limits_the_one_that_comes_first_holds() -> None:
    before = signal.getitimer(signal.ITIMER_REAL)[0]  # pytest may have one, too

    with pytest.raises(TimeLimit, match=r"after 0\.1 s"), wall_limit(0.1), wall_limit(60):
        loop_for_ever()
    with wall_limit(60):
        with pytest.raises(TimeLimit, match=r"after 0\.1 s"), wall_limit(0.1):
            loop_for_ever()
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60

    after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert (after > 0) == (before > 0)
    assert after <= before


def test_a_limit_says_what_to_do_about_it() -> None:
    with (
        pytest.raises(TimeLimit, match="needs a larger spoon"),
        wall_limit(0.1, remedy="a larger spoon"),
    ):
        loop_for_ever()
