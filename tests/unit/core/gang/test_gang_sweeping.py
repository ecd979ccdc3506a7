"""The gang machine when its last worker has ended: what is left behind, and the outcome."""

from gangs import sweeping_gang

from rankwise.base.failure import OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.gang.vocabulary import Swept

PATIENCE = Duration(10 * SECOND)


def test_a_gang_that_was_swept_clean_has_one_life_and_no_obstacle_to_another() -> None:
    gang = sweeping_gang(size=1, code=1, attempt=2)

    gang.handle(Swept(2), Instant(5 * SECOND))

    assert gang.outcome is not None
    assert (gang.outcome.status, gang.outcome.attempts) == (OutcomeStatus.FAILED, 1)
    assert [failure.attempt for failure in gang.outcome.failures] == [2]
    assert gang.outcome.detail == ""


def test_a_process_that_survives_sigkill_is_named_and_forbids_another_gang() -> None:
    gang = sweeping_gang(size=1, code=1)

    gang.handle(Swept(0, survivors=(71, 72)), Instant(1))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert gang.outcome.survivors == (71, 72)
    assert gang.outcome.detail == (
        "not restarted: SIGKILL does not end processes that ranks left behind (pids 71, 72)"
    )


def test_a_sweep_that_does_not_end_forbids_another_gang() -> None:
    gang = sweeping_gang(size=1, code=1, sweep_timeout=PATIENCE)

    gang.tick(Instant(PATIENCE))

    assert gang.outcome is not None
    assert gang.outcome.status is OutcomeStatus.FAILED
    assert gang.outcome.detail == (
        "not restarted: processes that ranks left behind were not killed within 10 s"
    )
