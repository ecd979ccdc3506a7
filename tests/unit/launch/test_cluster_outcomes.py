"""What a run on several nodes came to, as one of them tells."""

from msgspec.structs import replace

from rankwise.base.failure import (
    NO_RANK,
    ErrorRecord,
    ExitStatus,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
)
from rankwise.base.units import Instant
from rankwise.core.agent.vocabulary import FinishRun
from rankwise.core.rendezvous.vocabulary import RefusalKind, Refused
from rankwise.launch.telling.failure_report.composing import compose_report
from rankwise.launch.telling.failure_report.model import ReportContext
from rankwise.launch.telling.notices import fields_of

KILLED = Failure(
    cause=FailureCause.STOPPED, rank=0, local_rank=0, attempt=0, exit=ExitStatus(-9), at=Instant(0)
)
ENDED_BY_US = Outcome(status=OutcomeStatus.STOPPED, attempts=1, failures=(KILLED,), stop_signal=9)


def test_a_refused_node_whose_workers_were_ended_for_it_has_failed_and_says_why() -> None:
    refused = Refused(RefusalKind.FORGOTTEN, "the store has forgotten the run", "use etcd")

    outcome = FinishRun(outcome=ENDED_BY_US, refusal=refused).as_outcome(2)

    assert outcome.status is OutcomeStatus.FAILED
    assert outcome.failures == ()
    assert outcome.stop_signal is None
    assert outcome.detail == "the store has forgotten the run (use etcd)"


def test_a_node_that_was_stopped_and_heard_no_verdict_was_stopped() -> None:
    outcome = FinishRun(outcome=ENDED_BY_US, detail="told to stop").as_outcome(2)

    assert outcome.status is OutcomeStatus.STOPPED
    assert (outcome.stop_signal, outcome.failures) == (9, ())


def test_a_node_that_stopped_by_itself_tells_the_signal_that_asked_for_it() -> None:
    alone = Outcome(status=OutcomeStatus.STOPPED, attempts=1)

    outcome = FinishRun(outcome=alone, stop_signal=15).as_outcome(2)

    assert (outcome.status, outcome.stop_signal) == (OutcomeStatus.STOPPED, 15)


LOST = Refused(RefusalKind.STORE, "the run ends here: its store is lost", "use etcd")


def rank_that_raised(type_name: str, message: str) -> Outcome:
    error = ErrorRecord(
        type=type_name, message=message, traceback="", raised_at=Instant(7), wall_ns=0
    )
    failed = replace(KILLED, cause=FailureCause.RAISED, rank=2, error=error, at=Instant(7))
    return Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(failed,))


def test_of_a_node_that_lost_its_store_the_loss_is_the_root_cause_and_not_a_rank() -> None:
    gang = rank_that_raised("RuntimeError", "Connection closed by peer")

    outcome = FinishRun(outcome=gang, refusal=LOST, last_round=0).as_outcome(4)
    report = compose_report(outcome, ReportContext(program="train.py", nprocs=2))

    loss = Failure(
        local_rank=NO_RANK,
        attempt=0,
        cause=FailureCause.STORE_LOST,
        at=Instant(7),
        detail="the run ends here: its store is lost (use etcd)",
    )
    assert outcome.failures == (loss, *gang.failures)
    assert outcome.detail == ""
    assert report.summary.endswith("failed: the store was lost")
    assert report.notes == (
        "rank 2 failed: RuntimeError: Connection closed by peer (a consequence)",
    )
    assert report.root_cause is not None
    assert report.root_cause.headline == loss.detail
    assert [field.name for field in report.root_cause.fields] == []
    assert (fields_of(loss)["rank"], fields_of(loss)["error"]) == (None, loss.detail)


def test_a_node_that_came_late_tells_in_which_round_and_when_its_store_was_lost() -> None:
    idle = Outcome(status=OutcomeStatus.STOPPED, attempts=1)

    outcome = FinishRun(outcome=idle, refusal=LOST, last_round=5, at=Instant(9)).as_outcome(4)

    (loss,) = outcome.failures
    assert (loss.cause, loss.attempt, loss.at) == (FailureCause.STORE_LOST, 5, Instant(9))


def test_a_rank_that_failed_by_itself_stays_the_root_cause_though_the_store_is_lost() -> None:
    gang = rank_that_raised("ValueError", "bad shape")

    outcome = FinishRun(outcome=gang, refusal=LOST, last_round=0).as_outcome(4)

    assert outcome.failures == gang.failures
    assert outcome.detail == "the run ends here: its store is lost (use etcd)"


def test_a_node_that_was_told_to_stop_and_lost_its_store_meanwhile_was_stopped() -> None:
    outcome = FinishRun(outcome=ENDED_BY_US, refusal=LOST, last_round=0, stop_signal=15).as_outcome(
        4
    )

    assert (outcome.status, outcome.stop_signal) == (OutcomeStatus.STOPPED, 15)
    assert outcome.failures == ()
    assert outcome.detail == "the run ends here: its store is lost (use etcd)"


def test_a_node_that_never_came_to_a_round_has_no_store_to_lose() -> None:
    outcome = FinishRun(refusal=LOST).as_outcome(4)

    assert outcome.failures == ()
