"""A data loader's worker that was killed is told from other reasons to raise."""

import pytest

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.base.units import Instant
from rankwise.launch.decoration import lost_loader

KILLED = "DataLoader worker (pid 4711) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("message", "traceback", "is_lost"),
    [
        (KILLED, "", True),
        ("DataLoader worker (pid(s) 4711) exited unexpectedly", f"RuntimeError: {KILLED}\n", True),
        ("DataLoader worker (pid 4711) is killed by signal: Segmentation fault. ", "", False),
        ("bad shape", "", False),
    ],
)
def test_what_torch_says_of_a_killed_worker_is_known(
    message: str, traceback: str, *, is_lost: bool
) -> None:
    error = ErrorRecord(
        type="RuntimeError", message=message, traceback=traceback, raised_at=Instant(0), wall_ns=0
    )

    def failed(cause: FailureCause) -> Failure:
        return Failure(local_rank=0, attempt=0, cause=cause, at=Instant(0), error=error)

    assert lost_loader(failed(FailureCause.RAISED)) is is_lost
    assert not lost_loader(failed(FailureCause.STOPPED))
