"""What counts as progress of a rank, and when its ranks have made none."""

import pytest

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.gang.progress import Activity, Doing, ProgressWatch

PATIENCE = Duration(40 * SECOND)
LOOK = Instant(10 * SECOND)


def watching(*ranks: Activity) -> ProgressWatch:
    """A watch that has just found these ranks, at instant 0."""
    watch = ProgressWatch(PATIENCE, Instant(0))
    watch.look(dict(enumerate(ranks)), Instant(0))
    return watch


def work(
    *marks: int,
    main: float = 0,
    waited: float = 0,
    helpers: dict[int, float] | None = None,
    helpers_waited: dict[int, float] | None = None,
    byte_count: int = 0,
    polls: int = 0,
    runs: int = 0,
    is_in_call: bool = False,
    pid: int = 100,
) -> Activity:
    """What a rank has done so far; times in seconds."""
    return Activity(
        pid=pid,
        marks=marks,
        is_in_call=is_in_call,
        main_time=Duration(round(main * SECOND)),
        main_waited=Duration(round(waited * SECOND)),
        helper_times={key: Duration(round(s * SECOND)) for key, s in (helpers or {}).items()},
        helper_waits={
            key: Duration(round(s * SECOND)) for key, s in (helpers_waited or {}).items()
        },
        byte_count=byte_count,
        polls=polls,
        main_runs=runs,
    )


@pytest.mark.parametrize(
    ("before", "now", "doing"),
    [
        pytest.param(work(7), work(8), Doing.ADVANCES, id="a call, a step or a section"),
        pytest.param(work(pid=1), work(pid=2), Doing.ADVANCES, id="another process"),
        pytest.param(work(main=3), work(main=3.5), Doing.COMPUTES, id="a twentieth of the time"),
        pytest.param(work(main=3), work(main=3.4), Doing.NOTHING, id="less than a twentieth"),
        pytest.param(
            work(main=3, waited=1),
            work(main=3.1, waited=10.9),
            Doing.COMPUTES,
            id="starved, and all of the time in which it could run",
        ),
        pytest.param(
            work(main=3, waited=1),
            work(main=3.05, waited=9.5),
            Doing.NOTHING,
            id="a poller that waits for a CPU whenever it wakes up",
        ),
        pytest.param(
            work(main=3, waited=1),
            work(main=3.019, waited=10.9),
            Doing.NOTHING,
            id="less than 20 ms, whatever it waited",
        ),
        pytest.param(
            work(helpers={7: 1, 8: 1}, helpers_waited={7: 2, 8: 2}),
            work(helpers={7: 1.1, 8: 1.1}, helpers_waited={7: 11.8, 8: 11.8}),
            Doing.COMPUTES,
            id="a starved pool of threads",
        ),
        pytest.param(
            work(helpers={7: 1, 8: 1}, helpers_waited={7: 2, 8: 2}),
            work(helpers={7: 1.05, 8: 1.05}, helpers_waited={7: 9, 8: 9}),
            Doing.NOTHING,
            id="threads that poll on a busy machine",
        ),
        pytest.param(
            work(main=3, polls=5),
            work(main=12.9, polls=1000),
            Doing.NOTHING,
            id="a handle that is asked in vain, and little else",
        ),
        pytest.param(
            work(main=3, polls=5),
            work(main=12.9, polls=900),
            Doing.COMPUTES,
            id="a handle that is asked now and then",
        ),
        pytest.param(
            work(main=3, polls=5),
            work(main=12.9, polls=9000, helpers={1: 0.5}),
            Doing.COMPUTES,
            id="helpers, while a handle is asked in vain",
        ),
        pytest.param(
            work(runs=7), work(runs=100), Doing.POLLS, id="a main thread that wakes up often"
        ),
        pytest.param(
            work(runs=7),
            work(runs=40),
            Doing.NOTHING,
            id="a main thread that wakes up now and then",
        ),
        pytest.param(
            work(helpers={1: 5, 2: 9}),
            work(helpers={1: 5.3, 2: 9.2}),
            Doing.COMPUTES,
            id="threads and children together",
        ),
        pytest.param(
            work(helpers={1: 5, 2: 9}),
            work(helpers={1: 5.1}),
            Doing.NOTHING,
            id="a thread that only wakes up, and one that has ended",
        ),
        pytest.param(
            work(helpers={1: 90}),
            work(helpers={1: 0.6}),
            Doing.COMPUTES,
            id="a number that was given to another thread",
        ),
        pytest.param(work(), work(helpers={1: 0.5}), Doing.COMPUTES, id="a new child"),
        pytest.param(
            work(byte_count=5), work(byte_count=5 + (64 << 10)), Doing.TRANSFERS, id="bytes"
        ),
        pytest.param(
            work(byte_count=5), work(byte_count=4 + (64 << 10)), Doing.NOTHING, id="a line a second"
        ),
        pytest.param(
            work(7, is_in_call=True, main=1, byte_count=1),
            work(7, is_in_call=True, main=9, byte_count=1 << 30),
            Doing.WAITS,
            id="whatever is done in the same call",
        ),
        pytest.param(
            work(7, is_in_call=True), work(8, is_in_call=True), Doing.ADVANCES, id="the next call"
        ),
    ],
)
def test_what_a_rank_did_between_two_looks(before: Activity, now: Activity, doing: Doing) -> None:
    watch = watching(before)

    watch.look({0: now}, LOOK)

    assert watch.ranks[0].doing is doing
    assert watch.ranks[0].last_progress == (LOOK if doing.is_progress else 0)


@pytest.mark.parametrize(
    ("now", "doing"),
    [
        (work(main=0.006), Doing.COMPUTES),
        (work(helpers={7: 0.006}), Doing.COMPUTES),
        (work(main=0.004), Doing.NOTHING),
        (work(main=0.004, waited=0.09), Doing.NOTHING),
    ],
)
def test_in_a_short_look_a_twentieth_of_the_time_is_progress(now: Activity, doing: Doing) -> None:
    watch = ProgressWatch(Duration(400 * MILLISECOND), Instant(0))
    watch.look({0: work(helpers={7: 0})}, Instant(0))

    watch.look({0: now}, Instant(100 * MILLISECOND))

    assert watch.ranks[0].doing is doing


def test_a_long_interval_asks_for_more_bytes() -> None:
    watch = watching(work())

    watch.look({0: work(byte_count=64 << 10)}, Instant(20 * SECOND))

    assert watch.ranks[0].doing is Doing.NOTHING


def test_progress_of_one_rank_is_progress_of_all() -> None:
    watch = watching(work(1, is_in_call=True), work())

    watch.look({0: work(1, is_in_call=True), 1: work(main=9)}, LOOK)

    assert watch.last_progress == LOOK


def test_when_the_last_one_waits_too_nobody_makes_progress() -> None:
    watch = watching(work(1, is_in_call=True), work())
    watch.look({0: work(1, is_in_call=True, main=9), 1: work(byte_count=1 << 30)}, LOOK)

    watch.look({0: work(1, is_in_call=True, main=19), 1: work(byte_count=1 << 30)}, Instant(99))

    assert watch.last_progress == LOOK


def test_a_rank_that_has_ended_holds_up_nobody() -> None:
    watch = watching(work(), work())
    watch.look({0: work(), 1: work(main=9)}, LOOK)

    watch.look({0: work()}, Instant(20 * SECOND))

    assert watch.last_progress == 0


def test_ranks_that_have_all_ended_and_of_whom_nobody_has_told_yet_have_not_hung() -> None:
    watch = watching(work(), work())
    end = Instant(3600 * SECOND)
    watch.look({0: work(main=9), 1: work(main=9)}, end)

    watch.look({}, Instant(end + SECOND))

    assert watch.last_progress == end + SECOND
    assert not watch.warns(Instant(end + SECOND))


def test_looks_are_a_quarter_of_the_patience_apart() -> None:
    watch = watching(work())

    assert watch.next_look == PATIENCE // 4
    watch.look({0: work()}, Instant(PATIENCE // 4))
    assert watch.next_look == PATIENCE // 2


def test_without_patience_nobody_asks_for_a_look() -> None:
    watch = ProgressWatch(None, Instant(0))

    assert watch.next_look is None
    assert not watch.warns(Instant(10**18))


def test_a_look_right_after_another_tells_nothing_new() -> None:
    watch = watching(work())
    watch.look({0: work()}, LOOK)

    # In a millisecond, one wake-up is more than a twentieth of the time.
    watch.look({0: work(main=0.0005)}, Instant(LOOK + MILLISECOND))

    assert watch.ranks[0].doing is Doing.NOTHING
    assert watch.next_look == LOOK + PATIENCE // 4


def test_half_way_it_warns_once_until_there_was_progress() -> None:
    watch = watching(work())

    def warnings(*looks: tuple[float, int]) -> list[int]:
        told = []
        for main, at_s in looks:
            watch.look({0: work(main=main)}, Instant(at_s * SECOND))
            if watch.warns(Instant(at_s * SECOND)):
                told.append(at_s)
        return told

    assert warnings((0, 10), (0, 20), (0, 30)) == [20]
    assert warnings((9, 39), (9, 49), (9, 59), (9, 69)) == [59]


def test_who_asks_in_between_does_not_delay_the_warning() -> None:
    watch = watching(work())
    watch.look({0: work()}, Instant(15 * SECOND))

    assert watch.next_look == PATIENCE // 2
    watch.look({0: work()}, Instant(PATIENCE // 2))

    assert watch.warns(Instant(PATIENCE // 2))
    assert watch.next_look == PATIENCE // 2 + PATIENCE // 4


def test_a_look_just_before_half_way_is_not_followed_at_once() -> None:
    watch = watching(work())
    watch.look({0: work()}, Instant(PATIENCE // 2 - MILLISECOND))

    assert watch.next_look == PATIENCE // 2 - MILLISECOND + PATIENCE // 4


def test_time_in_which_nobody_looked_is_not_held_against_the_ranks() -> None:
    watch = watching(work())
    watch.look({0: work()}, LOOK)

    # Due at 20 s: everything was stopped for 3,600 s.
    watch.look({0: work()}, Instant(3620 * SECOND))

    assert watch.last_progress == 3590 * SECOND


def test_time_in_which_everybody_stood_still_is_not_held_against_the_ranks() -> None:
    watch = watching(work())
    watch.look({0: work(main=9)}, LOOK)

    watch.on_suspended(Duration(3600 * SECOND))
    watch.look({0: work(main=9)}, Instant(3620 * SECOND))

    assert watch.last_progress == 3610 * SECOND
    assert not watch.warns(Instant(3620 * SECOND))
    assert watch.warns(Instant(3630 * SECOND))
