"""A data loader's worker that was killed is told from other reasons to raise."""

import pytest

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.base.units import Instant
from rankwise.launch.telling.failure_report.hints import hint_for
from rankwise.launch.telling.failure_report.sentences import headline
from rankwise.launch.telling.failure_report.tracebacks import lost_loader

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


FETCHING = """Traceback (most recent call last):
  File "train.py", line 15, in <module>
    batch = next(batches)
  File "/lib/torch/utils/data/dataloader.py", line 1291, in _try_get_data
    data = self._data_queue.get(timeout=timeout)
  File "/lib/torch/multiprocessing/reductions.py", line 538, in rebuild_storage_fd
    fd = df.detach()
  File "/lib/python3.11/multiprocessing/resource_sharer.py", line 57, in detach
    with _resource_sharer.get_connection(self._id) as conn:
ConnectionResetError: [Errno 104] Connection reset by peer
"""


def reset(traceback: str) -> Failure:
    error = ErrorRecord(
        type="ConnectionResetError",
        message="[Errno 104] Connection reset by peer",
        traceback=traceback,
        raised_at=Instant(0),
        wall_ns=0,
    )
    return Failure(local_rank=1, attempt=0, cause=FailureCause.RAISED, at=Instant(0), error=error)


def test_who_cannot_fetch_what_a_dead_worker_had_sent_is_told_of_that_worker() -> None:
    failure = reset(FETCHING)

    assert lost_loader(failure)
    assert headline(failure) == (
        "rank 1 failed: ConnectionResetError: [Errno 104] Connection reset by peer"
        " (a worker of its data loader has died)"
    )
    assert "another rank" not in hint_for(failure)


def test_a_connection_of_the_program_itself_is_no_data_loaders() -> None:
    failure = reset(FETCHING.replace("torch/utils/data/dataloader", "mine/messages"))

    assert not lost_loader(failure)
    assert "it lost another rank" in hint_for(failure)
