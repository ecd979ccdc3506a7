"""What a run on several nodes came to, as one of them tells."""

from rankwise.base.failure import ExitStatus, Failure, FailureCause, Outcome, OutcomeStatus
from rankwise.base.units import Instant
from rankwise.core.agent.vocabulary import FinishRun
from rankwise.core.rendezvous.vocabulary import RefusalKind, Refused

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
