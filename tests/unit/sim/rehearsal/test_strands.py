"""Threads of a rank: which of them may still ask for their turn, and which wait for each other."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from rankwise.simranks.world.ranks import Nap, Rank
from rankwise.simranks.world.scheduler import Scheduler
from rankwise.simranks.world.threads import _Waiter

PATIENCE_S = 60.0


class Nothing:
    """State of ranks that keep none of their own."""

    def move_in(self, rank: Rank) -> None:
        pass

    def move_out(self, rank: Rank) -> None:
        pass


class ShortNap:
    """A wait that may end by itself."""

    is_known_to_last = False

    def describe(self) -> str:
        return "a test"

    def interrupt(self) -> bool:
        return False


class NapLooker:
    """Has a thread that waits woken by `wake`, and sees whether its wait still looks endless."""

    def __init__(self, wake: Callable[[_Waiter], object]) -> None:
        self._wake = wake
        self.lasts: list[bool] = []

    def nap(self, nap: Nap, wait: Callable[[], Any]) -> Any:
        assert isinstance(nap, _Waiter)
        self.lasts.append(nap.is_known_to_last)
        self._wake(nap)
        try:
            return wait()  # it has the lock again now, and has told nobody yet
        finally:
            self.lasts.append(nap.is_known_to_last)
            self._wake = _Waiter.release  # so that an interrupted wait ends


@pytest.mark.parametrize("wake", [_Waiter.release, _Waiter.interrupt])
def test_thread_that_was_woken_is_known_to_go_on_before_it_says_so(
    wake: Callable[[_Waiter], object],
) -> None:
    looker = NapLooker(wake)
    waiter = _Waiter(looker)  # type: ignore[arg-type]  # all that it needs of a scheduler
    waiter.acquire()

    assert waiter.acquire()

    assert looker.lasts[:2] == [True, False]
    waiter.acquire(blocking=False)
    assert waiter.is_known_to_last


def test_thread_that_is_being_started_may_still_ask() -> None:
    begins = threading.Event()
    with Scheduler(own_state=Nothing()) as scheduler:
        rank = scheduler.spawn(0, None, lambda: 0)
        while rank.exit_code is None:
            assert scheduler.run(patience_s=PATIENCE_S) is None
        seen = [scheduler.next_instant]

        def live() -> None:
            assert begins.wait(PATIENCE_S)
            scheduler.turns.end_thread(scheduler.turns.begin_thread(rank, None), lambda: None)

        thread = threading.Thread(target=live)
        with scheduler.turns.starting_thread():
            thread.start()
        seen.append(scheduler.next_instant)
        begins.set()
        thread.join()
        seen.append(scheduler.next_instant)

    assert seen == [None, 0, None]


def test_thread_that_cannot_be_started_is_not_waited_for() -> None:
    with (
        Scheduler(own_state=Nothing()) as scheduler,
        pytest.raises(RuntimeError),
        scheduler.turns.starting_thread(),
    ):
        raise RuntimeError

    assert scheduler.next_instant is None


def test_thread_takes_the_turn_of_a_sibling_that_waits_for_it_within_its_own_turn() -> None:
    taken, done = threading.Event(), threading.Event()
    order: list[str] = []

    def act(rank: Rank) -> None:
        strand = scheduler.turns.begin_thread(rank, threading.current_thread())

        def wait() -> bool:
            taken.set()  # the main thread goes on, and asks
            return done.wait(PATIENCE_S)

        with scheduler.turns.turn():
            order.append("thread")
            scheduler.turns.nap(ShortNap(), wait)
            order.append("thread again")
        scheduler.turns.end_thread(strand, lambda: None)

    def program() -> int:
        rank = scheduler.ranks[0]
        with scheduler.turns.starting_thread():
            thread = threading.Thread(target=act, args=(rank,))
            thread.start()
        scheduler.turns.nap(ShortNap(), lambda: taken.wait(PATIENCE_S))
        order.append("main")
        done.set()
        scheduler.turns.nap(ShortNap(), thread.join)
        return 0

    with ExitStack() as stack:
        scheduler = stack.enter_context(Scheduler(own_state=Nothing()))
        scheduler.spawn(0, None, program)
        stack.callback(done.set)  # a thread that is stuck does not keep the tests
        while scheduler.next_instant is not None:
            assert scheduler.run(patience_s=5.0) is None

    assert order == ["thread", "main", "thread again"]
