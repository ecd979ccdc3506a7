"""`rankwise.run` raises one exception that tells everything about every rank that failed."""

import linecache
import os
import signal
import traceback
from typing import Any

import pytest

import rankwise
from rankwise import FailureCause, WorkersFailed
from rankwise.collectives import barrier
from rankwise.launch.run.job import StartMethodName

pytestmark = pytest.mark.system


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_real_exception_is_the_cause(method: StartMethodName) -> None:
    def divide(number: int) -> float:
        if rankwise.rank() == 1:
            return number / 0
        signal.pause()
        return 0

    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(divide, (3,), nprocs=3, start_method=method)

    root, *others = caught.value.failures
    assert (root.rank, root.cause, root.exit) == (1, FailureCause.RAISED, rankwise.ExitStatus(1))
    assert [failure.cause for failure in others] == [FailureCause.STOPPED] * 2
    assert root.error is not None
    assert root.error.type == "ZeroDivisionError"
    assert "return number / 0" in root.error.traceback
    assert "rankwise/drivers" not in root.error.traceback
    cause = caught.value.__cause__
    assert type(cause) is ZeroDivisionError
    assert cause is caught.value.exceptions[1]
    shown = "".join(traceback.format_exception(caught.value))
    assert "raised on rank 1" in shown
    assert "return number / 0" in str(cause.__cause__)


def test_every_failure_is_carried(server: rankwise.ForkServer) -> None:
    def fail_together() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        barrier()
        raise KeyError(rankwise.rank())

    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(fail_together, nprocs=3, server=server)

    assert sorted(failure.rank for failure in caught.value.failures) == [0, 1, 2]
    assert {rank: error.args for rank, error in caught.value.exceptions.items()} == {
        0: (0,),
        1: (1,),
        2: (2,),
    }


def test_rank_that_leaves_out_a_barrier_is_the_root_cause_each_time(
    server: rankwise.ForkServer,
) -> None:
    def leave_out() -> None:
        if rankwise.rank():
            barrier()

    roots = set()
    for _ in range(10):
        with pytest.raises(WorkersFailed) as caught:
            rankwise.run(leave_out, nprocs=3, server=server)
        roots.add(caught.value.failures[0].rank)

    assert roots == {0}


def test_an_exception_that_cannot_travel_is_told_in_text(server: rankwise.ForkServer) -> None:
    class Unspeakable(Exception):
        def __reduce__(self) -> tuple[object, ...]:
            raise TypeError("never")

    def fail() -> None:
        raise Unspeakable("1 and 2")

    with pytest.raises(WorkersFailed, match="Unspeakable: 1 and 2") as caught:
        rankwise.run(fail, nprocs=1, server=server)

    assert caught.value.__cause__ is None
    assert caught.value.exceptions == {}
    (failure,) = caught.value.failures
    assert failure.error is not None
    assert 'raise Unspeakable("1 and 2")' in failure.error.traceback


def test_an_exception_leaves_behind_only_what_cannot_travel(server: rankwise.ForkServer) -> None:
    class TwoArguments(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")
            self.sum = one + two
            self.lock = __import__("threading").Lock()

    def fail() -> None:
        raise TwoArguments(1, 2)

    with pytest.raises(WorkersFailed, match="TwoArguments: 1 and 2") as caught:
        rankwise.run(fail, nprocs=1, server=server)

    (exception,) = caught.value.exceptions.values()
    assert (type(exception).__name__, str(exception)) == ("TwoArguments", "1 and 2")
    assert vars(exception)["sum"] == 3
    assert not hasattr(exception, "lock")


def test_notes_causes_and_the_members_of_groups_arrive(server: rankwise.ForkServer) -> None:
    def fail() -> None:
        try:
            raise_several(rankwise.ConfigError("bad", hint="x"))
        except ExceptionGroup as group:
            group.add_note("a note")
            raise ValueError("of the group") from group

    def raise_several(bad: Exception) -> None:
        raise ExceptionGroup("several", [KeyError("k"), bad])

    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(fail, nprocs=1, server=server)

    cause = caught.value.exceptions[0]
    assert isinstance(cause, ValueError)
    group = cause.__cause__
    assert isinstance(group, ExceptionGroup)
    assert group.__notes__ == ["a note"]
    missing, bad = group.exceptions
    assert isinstance(missing, KeyError)
    assert isinstance(bad, rankwise.ConfigError)
    assert bad.hint == "x"
    assert "in raise_several" in str(group.__cause__)


def test_a_return_value_that_cannot_travel_is_a_failure_which_names_it(
    server: rankwise.ForkServer,
) -> None:
    with pytest.raises(
        WorkersFailed, match=r"returned a _thread.lock, which cannot be sent"
    ) as caught:
        rankwise.run(lambda: __import__("threading").Lock(), nprocs=1, server=server)

    assert isinstance(caught.value.__cause__, TypeError)


def test_an_alarm_while_a_return_value_is_pickled_is_the_failure(
    server: rankwise.ForkServer,
) -> None:
    class Slow:
        def __reduce__(self) -> str:
            signal.raise_signal(signal.SIGALRM)
            return "never"

    def time_is_up(*_: object) -> None:
        raise KeyError

    def return_slowly() -> Slow:
        signal.signal(signal.SIGALRM, time_is_up)
        return Slow()

    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(return_slowly, nprocs=1, server=server)

    assert isinstance(caught.value.__cause__, KeyError)
    assert "Slow, which was being pickled for the caller" in str(caught.value)


def test_a_return_value_that_only_the_worker_understands_is_an_error_which_says_so(
    server: rankwise.ForkServer,
) -> None:
    class Odd:
        def __reduce__(self) -> tuple[object, ...]:
            return (exec, ("raise LookupError('not here')",))

    with pytest.raises(
        rankwise.GangError, match=r"result of rank 0 cannot be unpickled: LookupError"
    ):
        rankwise.run(Odd, nprocs=1, server=server)


@pytest.mark.parametrize(
    ("how", "cause", "code"),
    [
        ("__import__('os').kill(__import__('os').getpid(), 11)", FailureCause.SIGNALED, -11),
        ("__import__('os')._exit(7)", FailureCause.EXITED, 7),
        ("__import__('sys').exit(5)", FailureCause.EXITED, 5),
        ("__import__('sys').exit('a last word')", FailureCause.EXITED, 1),
    ],
)
def test_a_death_without_exception_is_told(
    how: str, cause: FailureCause, code: int, server: rankwise.ForkServer
) -> None:
    with pytest.raises(WorkersFailed) as caught:
        rankwise.run(eval, (how,), nprocs=1, server=server)

    (failure,) = caught.value.failures
    assert (failure.cause, failure.exit) == (cause, rankwise.ExitStatus(code))
    assert caught.value.__cause__ is None
    if code == 1:
        assert failure.stderr_tail == ("a last word",)
    if code == -11:
        assert "Segmentation fault" in failure.stacks


def test_a_server_that_was_killed_is_told_and_cannot_be_used_again() -> None:
    with rankwise.ForkServer() as server:
        with pytest.raises(
            WorkersFailed, match="the fork server has ended with signal 9"
        ) as caught:
            rankwise.run(lambda: os.kill(os.getppid(), signal.SIGKILL), nprocs=2, server=server)
        with pytest.raises(rankwise.SpawnFailed, match="cannot be used any more"):
            rankwise.run(rankwise.rank, nprocs=1, server=server)

    assert {failure.cause for failure in caught.value.failures} == {FailureCause.GUARDIAN_LOST}


def test_a_server_can_be_used_after_a_failure(server: rankwise.ForkServer) -> None:
    with pytest.raises(WorkersFailed):
        rankwise.run(lambda: 1 / 0, nprocs=2, server=server)

    assert rankwise.run(rankwise.rank, nprocs=2, server=server) == [0, 1]


def test_a_closed_server_is_told() -> None:
    server = rankwise.ForkServer()
    server.close()
    server.close()

    with pytest.raises(rankwise.RankwiseError, match="has been closed"):
        rankwise.run(rankwise.rank, nprocs=1, server=server)


def test_signal_handlers_are_as_before_after_a_failure(server: rankwise.ForkServer) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in signals]

    with pytest.raises(WorkersFailed):
        rankwise.run(lambda: 1 / 0, nprocs=1, server=server)

    assert [signal.getsignal(number) for number in signals] == before


def test_a_module_that_the_server_cannot_import_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert rankwise.run(rankwise.rank, nprocs=1, preload=["no_such_module"]) == [0]

    told = capfd.readouterr().err
    assert told == (
        "rankwise: the fork server could not import no_such_module: "
        "ModuleNotFoundError: No module named 'no_such_module'\n"
    )


def test_a_traceback_has_the_lines_of_a_notebooks_cell(
    server: rankwise.ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "def fail():\n    raise ValueError('in a cell')  # its line\n"
    name = "/no/such/folder/ipykernel_1/2.py"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), cell)  # as IPython does

    with pytest.raises(rankwise.WorkersFailed) as caught:
        rankwise.run(cell["fail"], nprocs=1, server=server)

    del linecache.cache[name]
    line = "raise ValueError('in a cell')  # its line"
    assert line in str(caught.value)
    assert capfd.readouterr().err.count(line) == 1, "as it was printed by the rank"
