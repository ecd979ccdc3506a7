"""Ranks that agree on a step: threads stand for ranks, each with its own view of one segment."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from rankwise.base.units import Duration, Instant
from rankwise.collectives.communicator import Communicator
from rankwise.collectives.shared_memory import SharedMemoryTransport
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.segments import Pace, Segment
from rankwise.drivers.real.stop_words import StopWords

LONG_S = 30.0


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(3) as made:
        yield made


@pytest.fixture
def words(segment: Segment) -> Iterator[StopWords]:
    view = StopWords(segment, SystemClock())
    yield view
    view.release()


def view_of(segment: Segment) -> StopWords:
    return StopWords(Segment.attach(segment.fd), SystemClock())


def test_nobody_stops_while_nobody_asks(words: StopWords) -> None:
    assert [words.begin_step(0) for _ in range(5)] == [False] * 5
    assert words.uses_steps(0)
    assert not words.uses_steps(1)


def test_a_rank_that_was_called_again_is_known_to_ask_from_the_beginning(
    segment: Segment, words: StopWords
) -> None:
    with Segment.create(3) as earlier:
        before = view_of(earlier)
        before.begin_step(1, takes_sigterm=True)
        before.begin_step(2)
        assert earlier.sigterm_takers() == {1}
        before.release()

    segment.note_sigterm_taker(1)

    assert [segment.takes_sigterm(rank) for rank in range(3)] == [False, True, False]
    assert [words.uses_steps(rank) for rank in range(3)] == [False, True, False]
    assert segment.steps() is None


def test_all_ranks_stop_at_the_step_of_the_farthest(segment: Segment, words: StopWords) -> None:
    ahead = {0: 7, 1: 4, 2: 6}

    def run(rank: int) -> int:
        own = view_of(segment)
        for _ in range(ahead[rank]):
            assert not own.begin_step(rank)
        done = ahead[rank]
        ready.wait(LONG_S)
        asked.wait(LONG_S)
        while not own.begin_step(rank):
            done += 1
        return done

    ready, asked = threading.Barrier(4), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(run, rank) for rank in range(3)]
        ready.wait(LONG_S)
        step = words.ask({0, 1, 2})
        asked.set()
        words.decide(step)
        done = [rank.result(LONG_S) for rank in ranks]

    assert step == 8
    assert done == [7, 7, 7]


def test_another_node_may_be_farther(segment: Segment, words: StopWords) -> None:
    def run() -> int:
        own = view_of(segment)
        done = 0
        while not own.begin_step(0):
            done += 1
        return done

    assert words.ask({0}) == 1
    with ThreadPoolExecutor(1) as pool:
        rank: Future[int] = pool.submit(run)
        words.decide(12)

        assert rank.result(LONG_S) == 11


def test_a_rank_that_has_ended_is_not_caught_up_with(segment: Segment, words: StopWords) -> None:
    for _ in range(9):
        words.begin_step(1)
    words.begin_step(0)

    assert words.ask({0}) == 2
    words.decide(2)

    assert words.begin_step(0)


def test_ranks_that_meet_in_each_step_stop_whenever_they_are_asked(
    segment: Segment, words: StopWords
) -> None:
    """One of them is often told to go on with a step that the other one is to begin."""
    met = threading.Barrier(2)

    def run(rank: int) -> int:
        own = view_of(segment)
        done = 0
        while not own.begin_step(rank):
            met.wait(LONG_S)
            done += 1
            if done == 100:
                under_way.set()
        return done

    under_way = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, rank) for rank in range(2)]
        under_way.wait(LONG_S)
        step = words.ask({0, 1})
        words.decide(step)

        assert [rank.result(LONG_S) for rank in ranks] == [step - 1, step - 1]


def test_a_rank_that_was_asked_at_a_step_that_another_one_has_begun_does_it(
    segment: Segment, words: StopWords
) -> None:
    assert not words.begin_step(0)
    words.ask({0, 1})
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(view_of(segment).begin_step, 1)
        words.decide(words.ask({0, 1}))

        assert not late.result(LONG_S)
    assert words.begin_step(0)
    assert words.begin_step(1)


def test_asking_and_deciding_twice_changes_nothing(words: StopWords) -> None:
    words.ask({0})
    words.ask({0})
    words.decide(1)
    words.decide(99)

    assert words.begin_step(0)
    assert words.begin_step(0)


def test_the_farthest_step_is_told(segment: Segment, words: StopWords) -> None:
    assert segment.steps() is None
    words.begin_step(2)
    words.begin_step(2)
    words.begin_step(0)

    assert segment.steps() == 2


def test_steps_are_counted_with_the_time_that_they_took(segment: Segment) -> None:
    class Steps(SystemClock):
        instants = iter((1_000, 1_500, 2_700))

        def now(self) -> Instant:
            return Instant(next(self.instants))

    words = StopWords(segment, Steps())
    assert segment.pace(1) == Pace(0, Duration(0))

    for _ in range(3):
        words.begin_step(1)
    words.release()

    assert segment.pace(1) == Pace(2, Duration(1_700))  # the third goes on
    assert segment.pace(0) == Pace(0, Duration(0))


def test_who_has_begun_a_step_may_still_begin_to_communicate(
    segment: Segment, words: StopWords
) -> None:
    words.begin_step(0)
    ranks = [
        Communicator(SharedMemoryTransport(Segment.attach(segment.fd), rank, os.getpid()))
        for rank in range(3)
    ]

    with ThreadPoolExecutor(3) as pool:
        sums = [pool.submit(rank.all_reduce, np.array([1])) for rank in ranks]

    assert [int(each.result(LONG_S)[0]) for each in sums] == [3, 3, 3]
