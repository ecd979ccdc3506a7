"""What a run on several nodes came to, as one of them tells."""

from msgspec.structs import replace

from rankwise.base.failure import (
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
from rankwise.launch.failure_report.composing import compose_report
from rankwise.launch.failure_report.model import ReportContext

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


def test_a_node_that_lost_its_store_says_nothing_of_the_ranks_of_other_nodes() -> None:
    gone = ErrorRecord(
        type="RuntimeError",
        message="Connection closed by peer",
        traceback="",
        raised_at=Instant(0),
        wall_ns=0,
    )
    lost = replace(KILLED, cause=FailureCause.RAISED, rank=2, error=gone)
    gang = Outcome(status=OutcomeStatus.FAILED, attempts=1, failures=(lost,))
    refused = Refused(RefusalKind.STORE, "the run ends here: its store is lost")

    outcome = FinishRun(outcome=gang, refusal=refused).as_outcome(4)
    report = compose_report(outcome, ReportContext(program="train.py", nprocs=2))

    assert report.summary.endswith("1 of 4 ranks failed")
    assert report.root_cause is not None
    assert "ended with exit code 0" not in report.root_cause.hint
