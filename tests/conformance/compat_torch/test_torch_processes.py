"""Contexts of worker processes: torch's and ours through the same scenarios."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import elastic_workers as workers
import pytest
from elastic_sides import RANKWISE, Load, load_from
from leftovers import open_files

pytestmark = pytest.mark.system

PATIENCE_S = 100.0
SH = "/bin/sh"

Start = Callable[..., Any]


@pytest.fixture
def multiprocessing(load: Load) -> ModuleType:
    return load("multiprocessing")


@pytest.fixture
def ours() -> ModuleType:
    return load_from(RANKWISE, "multiprocessing")


@pytest.fixture
def start(multiprocessing: ModuleType, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield make_start(multiprocessing, tmp_path, stack)


@pytest.fixture
def start_ours(ours: ModuleType, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield make_start(ours, tmp_path, stack)


def make_start(module: ModuleType, directory: Path, stack: ExitStack) -> Start:
    """`start_processes` with what most tests do not care about; closed when the test ends."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    stack.callback(lambda: [signal.signal(number, old) for number, old in handlers.items()])

    def start(entrypoint: object, *args: tuple[Any, ...], **options: Any) -> Any:
        by_rank = dict(enumerate(args))
        envs = options.pop("envs", None) or {rank: {} for rank in by_rank}
        logs = options.pop("logs", None) or module.DefaultLogsSpecs(str(directory / "logs"))
        context = module.start_processes("tr", entrypoint, by_rank, envs, logs, **options)
        stack.callback(context.close)
        return context

    return start


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def result_of(context: Any) -> Any:
    result = context.wait(PATIENCE_S, 0.01)
    assert result is not None, "the workers did not end"
    return result


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_functions_return_values_and_write_to_their_files(
    multiprocessing: ModuleType, start: Start, tmp_path: Path
) -> None:
    logs = multiprocessing.DefaultLogsSpecs(str(tmp_path), redirects=multiprocessing.Std.ALL)
    context = start(
        workers.greet, ("ann",), ("bob",), envs={0: {"GREETING": "hi"}, 1: {}}, logs=logs
    )

    assert set(context.pids()) == {0, 1}
    result = result_of(context)

    assert not result.is_failed()
    assert result.return_values == {
        0: {"name": "ann", "greeting": "hi"},
        1: {"name": "bob", "greeting": None},
    }
    assert (result.stdouts, result.stderrs) == (context.stdouts, context.stderrs)
    assert (context.name, context.nprocs) == ("tr", 2)
    assert Path(context.stdouts[0]).read_text() == "hello ann\n"
    assert Path(context.stderrs[1]).read_text() == "complaint of bob\n"
    assert context.wait(0).return_values == result.return_values


def test_the_function_that_raises_is_the_one_that_failed(start: Start) -> None:
    context = start(workers.raise_on, (0, 1), (1, 1))
    pids = context.pids()

    result = result_of(context)

    assert result.is_failed()
    assert result.return_values == {}
    [(rank, failure)] = result.failures.items()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    assert failure.pid == pids[1]
    assert failure.message["message"] == "ValueError: rank 1 raises"
    assert "in raise_on" in failure.message["extraInfo"]["py_callstack"]
    assert failure.error_file == context.error_files[1]
    assert not is_alive(pids[0])


@pytest.mark.parametrize(
    ("function", "argument", "exit_code"),
    [(workers.exit_with, 7, 7), (workers.die_of, signal.SIGKILL, -9)],
)
def test_the_way_a_function_ends_is_its_exit_code(
    start: Start, function: object, argument: int, exit_code: int
) -> None:
    failure = result_of(start(function, (argument,))).failures[0]

    assert failure.exitcode == exit_code
    assert failure.error_file == "<N/A>"


def test_an_exit_with_zero_returns_none(start: Start) -> None:
    assert result_of(start(workers.exit_with, (0,))).return_values == {0: None}


def test_a_large_value_arrives(start: Start) -> None:
    assert len(result_of(start(workers.ten_megabytes, ())).return_values[0]) == 10_000_000


def test_programs_succeed_with_none_and_see_their_variables(
    multiprocessing: ModuleType, start: Start, tmp_path: Path
) -> None:
    logs = multiprocessing.DefaultLogsSpecs(str(tmp_path), redirects=multiprocessing.Std.OUT)
    script = 'echo "$0 $A ${RANK-unset} $local_rank"'
    context = start(
        SH, ("-c", script, 1), ("-c", script, "x"), envs={0: {"A": "a"}, 1: {"A": "b"}}, logs=logs
    )

    result = result_of(context)

    assert result.return_values == {0: None, 1: None}
    assert Path(context.stdouts[0]).read_text() == "1 a unset \n"
    assert Path(context.stdouts[1]).read_text() == "x b unset \n"


def test_programs_that_were_only_told_to_stop_are_among_the_failures(start: Start) -> None:
    context = start(SH, ("-c", "exit 3"), ("-c", "exec sleep 600"))
    pids = context.pids()

    failures = result_of(context).failures

    assert {rank: failure.exitcode for rank, failure in failures.items()} == {0: 3, 1: -15}
    assert failures[1].message == f"Signal 15 (SIGTERM) received by PID {pids[1]}"
    assert not is_alive(pids[1])


def test_a_poll_says_nothing_while_workers_run(start: Start) -> None:
    context = start(SH, ("-c", "exec sleep 600"))

    assert context.wait(0) is None
    assert context.wait(0.01, 0.01) is None


@pytest.mark.parametrize("death_signal", [None, signal.SIGINT])
def test_closing_ends_the_workers_with_the_signal_asked_for(
    start: Start, death_signal: signal.Signals | None
) -> None:
    context = start(SH, ("-c", "exec sleep 600"), ("-c", "exec sleep 600"))
    pids = context.pids()

    context.close(death_signal)

    assert [is_alive(pid) for pid in pids.values()] == [False, False]
    codes = {failure.exitcode for failure in context.wait(0).failures.values()}
    assert codes == {-(death_signal or signal.SIGTERM)}


def test_a_worker_that_ignores_the_signal_is_killed_after_the_timeout(
    start: Start, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    context = start(workers.ignore_sigterm_and_say_so, (str(fifo),))
    [pid] = context.pids().values()
    assert fifo.read_text() == "ready"

    context.close(timeout=1)

    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("args", "envs", "message"),
    [
        ({1: ()}, {1: {}}, r"args, local rank mapping mismatch, expected: \{0\}, actual: \{1\}"),
        ({0: ()}, {}, r"envs, local rank mapping mismatch, expected: \{0\}, actual: set\(\)"),
    ],
)
def test_arguments_and_variables_are_for_all_ranks(
    multiprocessing: ModuleType, tmp_path: Path, args: Any, envs: Any, message: str
) -> None:
    logs = multiprocessing.DefaultLogsSpecs(str(tmp_path))

    with pytest.raises(RuntimeError, match=message):
        multiprocessing.start_processes("tr", "true", args, envs, logs)


def test_a_program_that_is_not_there_is_a_missing_file(start: Start) -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        start("/no/such/program", ())


def test_a_program_without_run_bit_may_not_be_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\n")

    with pytest.raises(PermissionError, match="program"):
        start(str(tmp_path / "program"), ())


def test_an_unknown_start_method_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="telepathy"):
        start(workers.greet, ("ann",), start_method="telepathy")


def test_tee_shows_lines_with_prefixes_and_copies_what_filters_choose(
    ours: ModuleType, start_ours: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # torch loses what a program writes between the last look at its file and the news of its end.
    std = ours.Std
    logs = ours.DefaultLogsSpecs(str(tmp_path), tee={0: std.ALL, 1: std.OUT})
    script = "echo out; echo loss 3; echo err >&2"
    context = start_ours(
        SH,
        ("-c", script),
        ("-c", script),
        logs=logs,
        log_line_prefixes={1: "(one) "},
        duplicate_stdout_filters=["loss"],
    )

    result_of(context)
    context.close()

    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["(one) loss 3", "(one) out", "[tr0]:loss 3", "[tr0]:out"]
    assert sorted(err.splitlines()) == ["[tr0]:err", "err"]
    [filtered] = tmp_path.glob("*/attempt_0/filtered_stdout.log")
    assert sorted(filtered.read_text().splitlines()) == ["(one) loss 3", "[tr0]:loss 3"]
    assert Path(context.stdouts[0]).read_text() == "out\nloss 3\n"


def test_with_devnull_output_is_shown_bare_and_nothing_is_written(
    multiprocessing: ModuleType, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = multiprocessing.DefaultLogsSpecs(os.devnull, tee=multiprocessing.Std.ALL)

    result_of(start(SH, ("-c", 'echo "file:$TORCHELASTIC_ERROR_FILE"'), logs=logs))

    assert capfd.readouterr().out == "file:\n"


def test_a_rank_outside_the_filter_is_not_shown(
    multiprocessing: ModuleType,
    start: Start,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs = multiprocessing.DefaultLogsSpecs(str(tmp_path), local_ranks_filter={1})

    result_of(start(SH, ("-c", "echo zero"), ("-c", "echo one"), logs=logs))

    assert capfd.readouterr().out == "one\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_waiting(
    multiprocessing: ModuleType, start: Start, number: signal.Signals, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # For torch not while the waiting begins: an exception between two steps of Popen.poll, which it
    # calls then, leaves that one locked for ever. Ours take it at any moment.
    pause = "" if multiprocessing.__name__.startswith(RANKWISE) else "sleep 0.3;"
    command = f"read go < '{fifo}'; {pause} kill -{number.value} {os.getpid()}; exec sleep 600"
    context = start(SH, ("-c", command))

    with pytest.raises(multiprocessing.SignalException) as raised:  # noqa: PT012  # once told to
        fifo.write_text("go\n")  # go, the signal may come at any moment
        context.wait(PATIENCE_S, 5)

    assert raised.value.sigval is number
    assert str(raised.value) == f"Process {os.getpid()} got signal: {number.value}"
    context.close(raised.value.sigval)


def test_a_signal_at_any_moment_of_the_waiting_ends_it(start_ours: Start) -> None:
    class TimeUp(Exception):
        pass

    def raise_time_up(*_: object) -> None:
        raise TimeUp

    context = start_ours(SH, ("-c", "exec sleep 600"))
    descriptors = open_files()
    before = signal.signal(signal.SIGALRM, raise_time_up)
    try:
        for number in range(1000):
            began_at = time.monotonic()
            with pytest.raises(TimeUp):  # noqa: PT012  # the signal may come before the wait
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 100 * 3e-6)
                context.wait(PATIENCE_S)
            assert time.monotonic() - began_at < PATIENCE_S / 2, number
    finally:
        signal.signal(signal.SIGALRM, before)

    assert signal.set_wakeup_fd(-1) == -1
    assert open_files() <= descriptors


def test_in_another_thread_no_handlers_are_installed_and_this_is_said(
    multiprocessing: ModuleType, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        multiprocessing.api.logger, "warning", lambda text, *_, **__: said.append(text)
    )
    before = [signal.getsignal(number) for number in HANDLED]
    results: list[Any] = []

    thread = threading.Thread(target=lambda: results.append(result_of(start("true", ()))))
    thread.start()
    thread.join(PATIENCE_S)

    assert results[0].return_values == {0: None}
    assert [signal.getsignal(number) for number in HANDLED] == before
    [sentence] = said
    assert sentence == (
        "Failed to register signal handlers since torchelastic is running on a child thread. "
        "This could lead to orphaned worker processes if the torchrun is terminated."
    )


def test_a_program_can_be_started_on_its_own(load: Load, tmp_path: Path) -> None:
    handlers = load("multiprocessing.subprocess_handler")

    handler = handlers.get_subprocess_handler(
        entrypoint=SH,
        args=("-c", 'echo "$X $0"; echo err >&2', 5),
        env={"X": "x"},
        stdout=str(tmp_path / "out"),
        stderr=str(tmp_path / "err"),
        local_rank_id=3,
    )

    assert handler.proc.wait(PATIENCE_S) == 0
    assert handler.local_rank_id == 3
    assert (tmp_path / "out").read_text() == "x 5\n"
    assert (tmp_path / "err").read_text() == "err\n"
    assert isinstance(handler, handlers.SubprocessHandler)


def test_closing_a_program_signals_all_of_its_group(load: Load, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    handler = load("multiprocessing.subprocess_handler").get_subprocess_handler(
        SH, ("-c", f"sleep 600 & echo $! > '{fifo}'; wait"), {}, "", "", 0
    )
    child = os.pidfd_open(int(fifo.read_text()))
    assert os.getpgid(handler.proc.pid) == handler.proc.pid != os.getpgid(0)

    handler.close()

    assert handler.proc.wait(PATIENCE_S) == -signal.SIGTERM
    assert select.select([child], [], [], PATIENCE_S)[0], "the child lives on"
    os.close(child)


def test_closing_a_program_that_has_ended_is_harmless(tmp_path: Path) -> None:
    # torch raises ProcessLookupError.
    handlers = load_from(RANKWISE, "multiprocessing.subprocess_handler")
    handler = handlers.get_subprocess_handler("true", (), {}, "", "", 0)
    handler.proc.wait(PATIENCE_S)

    handler.close()


def test_handlers_are_put_back_when_the_context_is_closed(start_ours: Start) -> None:
    # torch leaves them installed, so that later signals raise in the caller's own code.
    before = [signal.getsignal(number) for number in HANDLED]

    context = start_ours("true", ())
    during = [signal.getsignal(number) for number in HANDLED]
    context.close()

    assert all(handler not in before for handler in during)
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_the_signals_to_handle_come_from_the_environment(
    start_ours: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1,SIGNONSENSE")
    sigterm, sigusr1 = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)

    context = start_ours("true", ())

    assert signal.getsignal(signal.SIGTERM) == sigterm
    assert signal.getsignal(signal.SIGUSR1) != sigusr1
    assert "SIGNONSENSE" in caplog.text
    context.close()
    assert signal.getsignal(signal.SIGUSR1) == sigusr1


def test_functions_need_not_be_importable(start_ours: Start) -> None:
    offset = 40

    context = start_ours(lambda number: number + offset, (2,))

    assert result_of(context).return_values == {0: 42}


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_functions_may_be_forked(start_ours: Start, start_method: str) -> None:
    context = start_ours(workers.greet, ("ann",), ("bob",), start_method=start_method)

    values = result_of(context).return_values
    assert [values[rank]["name"] for rank in (0, 1)] == ["ann", "bob"]


def test_functions_see_no_variables_that_nobody_set(
    start_ours: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    context = start_ours(
        workers.rank_variables, (), (), envs={0: {}, 1: {"RANK": "7", "LOCAL_RANK": "5"}}
    )

    assert result_of(context).return_values == {
        0: {"RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None},
        1: {"RANK": "7", "LOCAL_RANK": "5", "WORLD_SIZE": None},
    }


def test_without_error_files_the_exception_is_told_all_the_same(
    ours: ModuleType, start_ours: Start
) -> None:
    logs = ours.DefaultLogsSpecs(os.devnull)

    failure = result_of(start_ours(workers.raise_on, (0, 0), logs=logs)).failures[0]

    assert failure.error_file == "<N/A>"
    assert failure.message["message"] == "ValueError: rank 0 raises"


def test_the_report_names_the_root_cause_that_rankwise_found(
    ours: ModuleType, start_ours: Start
) -> None:
    context = start_ours(SH, ("-c", "exec sleep 600"), ("-c", "exit 5"))

    failures = result_of(context).failures
    error = ours.errors.ChildFailedError("tr", failures)

    assert list(failures) == [1, 0]
    assert error.get_first_failure()[0] == 1


class NumaOptions:
    """Torch's, which cannot be made without torch."""

    def __init__(self, affinity_mode: str, *, falls_back: bool = False) -> None:
        self.affinity_mode = affinity_mode
        self.should_fall_back_if_binding_fails = falls_back


def test_numa_options_that_mean_nothing_are_refused_before_anything_starts(
    start_ours: Start,
) -> None:
    with pytest.raises(ValueError, match="expected options whose affinity_mode is one of node, "):
        start_ours("true", (), numa_options=object())


def test_numa_options_bind_workers(start_ours: Start) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is only one CPU to bind to")
    options = NumaOptions("exclusive")
    try:
        context = start_ours(workers.own_cpus, (), (), numa_options=options)
    except ValueError:
        pytest.skip("there are fewer cores than ranks")

    first, second = result_of(context).return_values.values()

    assert first
    assert second
    assert first.isdisjoint(second)


def test_numa_options_that_cannot_be_fulfilled_bind_nobody_if_that_is_asked_for(
    start_ours: Start,
) -> None:
    too_many = [()] * (len(os.sched_getaffinity(0)) + 1)
    with pytest.raises(ValueError, match="exclusive"):
        start_ours(workers.own_cpus, *too_many, numa_options=NumaOptions("exclusive"))

    options = NumaOptions("exclusive", falls_back=True)
    context = start_ours("true", *too_many, numa_options=options)

    assert not result_of(context).failures


def test_what_torch_imports_into_its_api_module_is_found_there(ours: ModuleType) -> None:
    names = ("IS_WINDOWS", "ProcessFailure", "SubprocessHandler", "TailLog", "record")

    assert all(hasattr(ours.api, name) for name in (*names, "get_subprocess_handler"))
    assert ours.api.record is ours.errors.record
    assert not hasattr(ours.api, "no_such_name")


def test_a_context_that_was_not_started_cannot_be_waited_for(
    ours: ModuleType, tmp_path: Path
) -> None:
    context = ours.SubprocessContext(
        "tr", "true", {0: ()}, {0: {}}, ours.DefaultLogsSpecs(str(tmp_path))
    )

    assert context.pids() == {}
    context.close()
    with pytest.raises(Exception, match="not been started"):
        context.wait(0)
