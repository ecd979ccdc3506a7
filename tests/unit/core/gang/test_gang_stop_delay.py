"""The gang machine when the others may go on for a moment after the first failure."""

from gangs import exited, running_gang, signal_orders, spawned, starting_gang

from rankwise.base.failure import OutcomeStatus
from rankwise.base.units import Duration, Instant
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import StopRequested, Sweep, Swept

SIGTERM = 15
DELAY = Duration(200)


def test_one_that_ends_by_itself_in_the_meantime_has_not_failed() -> None:
    gang = running_gang(size=2, stop_delay=DELAY)

    assert gang.handle(exited(0, 3, at=5), Instant(5)) == []
    assert gang.next_deadline == 5 + DELAY
    assert gang.handle(exited(1, 0, at=9), Instant(9)) == [Sweep(0)]
    gang.handle(Swept(0), Instant(10))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert [failure.local_rank for failure in gang.outcome.failures] == [0]


def test_the_others_are_told_to_stop_when_the_moment_is_over() -> None:
    gang = running_gang(size=3, stop_delay=DELAY)
    gang.handle(exited(0, 3, at=5), Instant(5))

    # A second failure does not make it any longer.
    assert gang.handle(exited(2, 1, at=100), Instant(100)) == []
    assert gang.tick(Instant(4 + DELAY)) == []
    assert gang.tick(Instant(5 + DELAY)) == signal_orders(SIGTERM, [1])
    assert gang.next_deadline == 5 + DELAY + gang.spec.grace


def test_the_last_one_that_fails_is_not_waited_for() -> None:
    gang = running_gang(size=1, stop_delay=DELAY)

    assert gang.handle(exited(0, 3, at=5), Instant(5)) == [Sweep(0)]


def test_a_stop_that_is_asked_for_comes_at_once() -> None:
    gang = running_gang(size=2, stop_delay=DELAY)
    gang.handle(exited(0, 3, at=5), Instant(5))

    assert gang.handle(StopRequested(), Instant(6)) == signal_orders(SIGTERM, [1])
    assert gang.tick(Instant(5 + DELAY)) == []


def test_the_moment_may_end_while_others_still_start() -> None:
    gang = starting_gang(size=2, stop_delay=DELAY)
    gang.handle(spawned(0), Instant(0))
    gang.handle(exited(0, 3, at=5), Instant(5))

    gang.tick(Instant(5 + DELAY))

    assert gang.phase is GangPhase.STOPPING
