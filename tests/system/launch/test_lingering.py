"""A worker whose exception is known and whose interpreter never ends does not hold up the gang."""

from pathlib import Path

import pytest
from running import write_program

from rankwise.base.failure import FailureCause, OutcomeStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.cli.run import exit_code
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.launch.run.job import Job, Script, StartMethod
from rankwise.launch.run.supervision import Supervision

pytestmark = pytest.mark.system

LINGER = """
import os, threading, time
if os.environ["RANK"] == "1":
    threading.Thread(target=lambda: threading.Event().wait()).start()
    raise ValueError("the cause")
time.sleep(1000)
"""


@pytest.mark.parametrize("method", [StartMethod.SUBPROCESS, StartMethod.FORKSERVER])
def test_a_thread_that_never_ends_does_not_hide_an_exception(
    method: StartMethod, tmp_path: Path
) -> None:
    job = Job(
        program=Script(str(write_program(tmp_path, LINGER))),
        gang=GangSpec(size=2, exit_timeout=Duration(300 * MILLISECOND)),
        run_id="lingering",
        start_method=method,
    )
    supervision = Supervision(job)

    outcome = supervision.run()

    assert outcome.status is OutcomeStatus.FAILED
    root, other = outcome.failures
    assert (root.rank, root.cause, other.cause) == (1, FailureCause.RAISED, FailureCause.STOPPED)
    assert root.error is not None
    assert root.error.message == "the cause"
    assert root.detail == "it had not ended 300 ms after its exception"
    assert exit_code(outcome) == 1
    assert supervision.elapsed < 20 * SECOND
