"""Ranks as threads with a run token: who runs when, in which time, and how ranks end."""

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rankwise.base.units import Instant
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.ranks import SIGKILL, Rank
from rankwise.simranks.world.scheduler import Scheduler

PATIENCE_S = 60.0
ENTERED = ExitStack()


@pytest.fixture(autouse=True)
def _leave_schedulers() -> Iterator[None]:
    with ENTERED:
        yield


class Nothing:
    """State of ranks that keep none of their own."""

    def move_in(self, rank: Rank) -> None:
        pass

    def move_out(self, rank: Rank) -> None:
        pass


def scheduler_of(*programs: Callable[[], object], **options: Any) -> Scheduler:
    """Ranks that run these programs; what is no exit code counts as 0."""

    def ending(program: Callable[[], object]) -> Callable[[], int]:
        def run() -> int:
            code = program()
            return code if type(code) is int else 0

        return run

    scheduler = ENTERED.enter_context(Scheduler(own_state=Nothing(), **options))
    for number, program in enumerate(programs):
        scheduler.spawn(number, None, ending(program))
    return scheduler


def run_to_the_end(scheduler: Scheduler) -> None:
    while scheduler.next_instant is not None:
        assert scheduler.run(patience_s=PATIENCE_S) is None


def test_a_rank_that_keeps_others_waiting_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.simranks.world.patience.NOTICE_S", 0.05)
    told: list[int] = []
    goes_on = threading.Event()

    def block() -> None:
        assert goes_on.wait(PATIENCE_S)

    def tell(rank: Rank) -> None:
        told.append(rank.number)
        goes_on.set()

    scheduler = scheduler_of(block, block)
    scheduler.patience.on_held = tell
    run_to_the_end(scheduler)

    assert told == [0]


def test_a_rank_that_is_the_only_one_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.simranks.world.patience.NOTICE_S", 0.01)
    told: list[Rank] = []
    scheduler = scheduler_of(lambda: threading.Event().wait(0.2) and None)
    scheduler.patience.on_held = told.append
    run_to_the_end(scheduler)

    assert told == []


def test_ranks_run_in_their_order_and_one_at_a_time() -> None:
    seen: list[str] = []

    def program(name: str) -> Callable[[], None]:
        def run() -> None:
            for turn in range(2):
                seen.append(f"{name}{turn}")
                scheduler.yield_to_others()

        return run

    scheduler = scheduler_of(program("a"), program("b"), program("c"))
    run_to_the_end(scheduler)

    assert seen == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_another_choice_gives_another_order() -> None:
    seen: list[int] = []
    scheduler = scheduler_of(
        *(lambda n=n: seen.append(n) for n in range(3)), choose=lambda n: n - 1
    )

    run_to_the_end(scheduler)

    assert seen == [2, 1, 0]


def test_sleeping_takes_virtual_time_only() -> None:
    woken: list[tuple[str, int]] = []

    def sleeper(name: str, nanoseconds: int) -> Callable[[], None]:
        def run() -> None:
            scheduler.sleep(nanoseconds)
            woken.append((name, scheduler.now))

        return run

    hour = 3600 * 10**9
    scheduler = scheduler_of(sleeper("late", 2 * hour), sleeper("early", hour))
    run_to_the_end(scheduler)

    assert woken == [("early", hour), ("late", 2 * hour)]


def test_a_wait_ends_at_its_deadline_and_leaves_no_time_behind() -> None:
    answers: list[bool] = []
    gate = Gate()

    def waiter() -> None:
        answers.append(scheduler.wait(gate, until=Instant(10)))
        answers.append(scheduler.wait(gate, until=Instant(1000)))

    def opener() -> None:
        scheduler.sleep(20)
        gate.open()

    scheduler = scheduler_of(waiter, opener)
    run_to_the_end(scheduler)

    assert answers == [False, True]
    assert scheduler.now == 20


def test_a_rank_that_waits_for_ever_leaves_nothing_to_do() -> None:
    scheduler = scheduler_of(lambda: scheduler.wait(Gate()))

    scheduler.run(patience_s=PATIENCE_S)

    assert scheduler.next_instant is None
    assert scheduler.ranks[0].waits_for is not None
    scheduler.ranks[0].signal(SIGKILL)
    run_to_the_end(scheduler)
    assert scheduler.ranks[0].exit_code == -SIGKILL


def test_a_killed_rank_is_unwound_even_if_it_tries_to_go_on() -> None:
    unwound: list[str] = []

    def stubborn() -> None:
        try:
            scheduler.wait(Gate())
        finally:
            unwound.append("finally")
            scheduler.wait(Gate())
            unwound.append("never")

    scheduler = scheduler_of(stubborn)
    scheduler.run(patience_s=PATIENCE_S)
    scheduler.ranks[0].signal(15)
    run_to_the_end(scheduler)

    assert unwound == ["finally"]
    assert scheduler.ranks[0].exit_code == -15


def test_a_handler_takes_a_signal_and_the_rank_goes_on_waiting() -> None:
    taken: list[int] = []
    gate = Gate()

    def waiter() -> int:
        scheduler.ranks[0].handlers[15] = lambda number, _frame: taken.append(number)
        scheduler.wait(gate)
        return 7

    scheduler = scheduler_of(waiter)
    scheduler.run(patience_s=PATIENCE_S)
    scheduler.ranks[0].signal(15)
    scheduler.run(patience_s=PATIENCE_S)
    assert scheduler.ranks[0].exit_code is None
    gate.open()
    run_to_the_end(scheduler)

    assert taken == [15]
    assert scheduler.ranks[0].exit_code == 7


def test_a_rank_that_lets_nobody_run_is_given_up() -> None:
    held = threading.Event()
    scheduler = scheduler_of(held.wait, lambda: 5)

    stuck = scheduler.run(patience_s=0.05)

    assert stuck is scheduler.ranks[0]
    run_to_the_end(scheduler)
    assert scheduler.ranks[1].exit_code == 5
    held.set()
    scheduler.ranks[0].thread.join(PATIENCE_S)
    assert scheduler.ranks[0].exit_code == -SIGKILL


def test_who_waited_for_what_has_happened_waits_no_more() -> None:
    gate = Gate()
    scheduler = scheduler_of(lambda: scheduler.wait(gate))
    scheduler.run(patience_s=PATIENCE_S)
    waiter = scheduler.ranks[0]
    assert waiter.waits_for is gate

    gate.open()

    assert waiter.waits_for is None
    run_to_the_end(scheduler)


def test_a_rank_that_gets_on_is_given_up_when_it_does_no_more() -> None:
    held, looks = threading.Event(), []
    scheduler = scheduler_of(held.wait)

    def makes_progress(rank: Rank) -> bool:
        looks.append(rank.number)
        return len(looks) < 6

    scheduler.patience.makes_progress = makes_progress
    stuck = scheduler.run(patience_s=0.02)

    assert stuck is scheduler.ranks[0]
    assert len(looks) == 5 + 4, "it got on at five looks, and four are as long as the patience"
    held.set()
    scheduler.ranks[0].thread.join(PATIENCE_S)


def test_who_asks_for_a_stop_does_not_wait_for_a_rank_that_gets_on() -> None:
    held = threading.Event()
    scheduler = scheduler_of(held.wait)

    def makes_progress(_rank: Rank) -> bool:
        scheduler.interrupt(0.02)
        return True

    scheduler.patience.makes_progress = makes_progress

    assert scheduler.run(patience_s=0.02) is scheduler.ranks[0]
    held.set()
    scheduler.ranks[0].thread.join(PATIENCE_S)


def test_a_rank_that_a_signal_ends_counts_as_ended_by_it_when_it_is_given_up() -> None:
    held = threading.Event()
    scheduler = scheduler_of(held.wait)
    rank = scheduler.ranks[0]
    ends = rank.is_ended_by(signal.SIGTERM), rank.is_ended_by(signal.SIGCHLD)
    before = signal.signal(
        signal.SIGALRM, lambda *_: scheduler.interrupt(0.02, signal=signal.SIGTERM)
    )
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert scheduler.run() is rank
    finally:
        signal.signal(signal.SIGALRM, before)

    assert ends == (True, False)
    assert rank.exit_code == -signal.SIGTERM
    held.set()
    rank.thread.join(PATIENCE_S)


def test_the_scheduler_thread_gets_the_run_token_at_its_horizon() -> None:
    scheduler = scheduler_of(lambda: scheduler.sleep(100))

    scheduler.run(Instant(50), PATIENCE_S)

    assert scheduler.ranks[0].exit_code is None
    assert scheduler.next_instant == 100
    run_to_the_end(scheduler)
    assert scheduler.ranks[0].exit_code == 0


def test_what_comes_up_while_ranks_run_brings_their_horizon_forward() -> None:
    woken: list[int] = []

    def program() -> None:
        scheduler.return_by(Instant(20))
        scheduler.return_by(Instant(60))
        for _ in range(3):
            scheduler.sleep(10)
            woken.append(scheduler.now)

    scheduler = scheduler_of(program)

    scheduler.run(horizon=Instant(100))
    assert woken == [10, 20]
    run_to_the_end(scheduler)
    assert woken == [10, 20, 30]


def test_a_signal_at_any_moment_of_the_wait_brings_the_scheduler_thread_back() -> None:
    is_told = False

    def turn() -> None:
        while not is_told:
            scheduler.yield_to_others()

    def interrupt(*_: object) -> None:
        scheduler.interrupt()

    scheduler = scheduler_of(turn, turn)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(200):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
            scheduler.run()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)

    is_told = True
    run_to_the_end(scheduler)
    assert [rank.exit_code for rank in scheduler.ranks.values()] == [0, 0]
