"""The root cause is what failed first, and what rankwise ended itself is told as that."""

import os
import signal
import sys
from pathlib import Path

import pytest

import rankwise
from rankwise import FailureCause, WorkersFailed, collectives
from rankwise.compat.torch.elastic.multiprocessing import DefaultLogsSpecs, start_processes

pytestmark = pytest.mark.system


def test_a_death_does_not_explain_a_value_error_that_came_before_it(
    server: rankwise.ForkServer, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def fail() -> None:
        if rankwise.rank() == 0:
            # Its end comes after the other's, though it failed before.
            sys.excepthook = lambda *_: print(fifo.read_bytes())
            raise ValueError("the cause")
        with fifo.open("wb"):  # opens when the other has raised
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(fail, nprocs=2, server=server)

    assert caught.value.failures[0].rank == 0
    assert isinstance(caught.value.__cause__, ValueError)
    assert "root cause: rank 0 failed: ValueError: the cause" in str(caught.value)


def raise_and_wait_for_the_end(directory: str) -> None:
    """Rank 0 raises last and ends at once; the others have raised and are on their way out."""
    rank = int(os.environ["LOCAL_RANK"])
    if rank == 0:
        for other in (1, 2):
            Path(directory, str(other)).read_bytes()
    else:

        def wait(*_: object) -> None:
            Path(directory, str(rank)).write_bytes(b"")
            while True:  # whoever asks for its stacks ends a pause
                signal.pause()

        sys.excepthook = wait
    raise ValueError(rank)


def test_ranks_that_we_ended_are_not_listed_among_the_failures_of_a_function(
    tmp_path: Path,
) -> None:
    for rank in (1, 2):
        os.mkfifo(tmp_path / str(rank))
    context = start_processes(
        name="blame",
        entrypoint=raise_and_wait_for_the_end,
        args=dict.fromkeys(range(3), (str(tmp_path),)),
        envs={rank: {"LOCAL_RANK": str(rank)} for rank in range(3)},
        logs_specs=DefaultLogsSpecs(),
        start_method="spawn",
    )
    try:
        result = context.wait(60)
    finally:
        context.close()

    assert result is not None
    root, *others = result.failures
    assert root in (1, 2)
    assert others == [0]
    assert {failure.exitcode for failure in result.failures.values()} == {1}


def test_a_sigkill_within_the_grace_is_not_told_as_ours(server: rankwise.ForkServer) -> None:
    def fail() -> None:
        if rankwise.rank() == 1:
            signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        collectives.barrier()
        if rankwise.rank() == 0:
            raise ValueError("the cause")
        signal.pause()

    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(fail, nprocs=2, server=server)

    killed = caught.value.failures[1]
    assert (killed.cause, killed.exit) == (FailureCause.STOPPED, rankwise.ExitStatus(-9))
    assert not killed.ended_by_us
    assert "did not end" not in str(caught.value)
    assert "by a SIGKILL that rankwise did not send" in str(caught.value)


def test_an_exception_arrives_though_its_rank_is_told_to_stop_meanwhile(
    server: rankwise.ForkServer, tmp_path: Path
) -> None:
    ready, told, stopped = (tmp_path / name for name in ("ready", "told", "stopped"))
    for fifo in (ready, told, stopped):
        os.mkfifo(fifo)

    class Slow(Exception):
        def __reduce__(self) -> tuple[object, ...]:
            if not told.exists():  # it is pickled in a second way
                return RuntimeError, ("made of a slow one",)
            ready.read_bytes()
            told.write_bytes(b"")  # lets rank 1 fail
            stopped.read_bytes()  # until rank 2 is told to stop, and so rank 0 before it
            told.unlink()
            return RuntimeError, ("made of a slow one",)

    def fail() -> None:
        if rankwise.rank() == 0:
            raise Slow
        if rankwise.rank() == 1:
            told.read_bytes()
            os._exit(3)
        signal.signal(signal.SIGTERM, lambda *_: stopped.write_bytes(b""))
        ready.write_bytes(b"")
        signal.pause()

    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(fail, nprocs=3, server=server)

    assert repr(caught.value.exceptions) == "{0: RuntimeError('made of a slow one')}"
    assert caught.value.failures[0].rank == 0
