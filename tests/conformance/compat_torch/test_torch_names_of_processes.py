"""Names of torch's processes that are not public, and that programs reach for all the same."""

import importlib
import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
from elastic_sides import RANKWISE, Load, load_from

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@pytest.fixture
def api(load: Load) -> ModuleType:
    return load("multiprocessing.api")


def greet(name: str) -> str:
    """What a worker does."""
    print(f"hello {name}")
    print(f"psst {name}", file=sys.stderr)
    return f"{name} of rank {os.environ['RANK']}"


def started_context(api: ModuleType) -> MagicMock:
    """A context without workers, whose `start` has been called."""
    context = create_autospec(api.PContext, instance=True)
    context._tail_logs = [MagicMock(), MagicMock()]
    api.PContext.start(context)
    return context


@pytest.mark.parametrize("streams", [(), ("stdout",), ("stdout", "stderr")], ids="+".join)
def test_a_function_worker_may_be_had_by_hand(
    api: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: tuple[str, ...]
) -> None:
    monkeypatch.setenv("RANK", "set by the worker")
    files = {name: str(tmp_path / name) for name in streams}
    values: Any = multiprocessing.SimpleQueue()
    was_read = MagicMock()

    api._wrap(
        local_rank=1,
        fn=greet,
        args={1: ("ann",)},
        envs={1: {"RANK": "7"}},
        stdout_redirects={1: files.get("stdout", "")},
        stderr_redirects={1: files.get("stderr", "")},
        ret_vals={1: values},
        queue_finished_reading_event=was_read,
        numa_options=None,
    )

    assert values.get() == "ann of rank 7"
    was_read.wait.assert_called_once()
    written = {name: Path(file).read_text() for name, file in files.items()}
    assert written == {
        name: text
        for name, text in {"stdout": "hello ann\n", "stderr": "psst ann\n"}.items()
        if name in streams
    }


def test_what_is_not_there_for_every_rank_is_refused(api: ModuleType) -> None:
    api._validate_full_rank({0: "a", 1: "b"}, 2, "args")
    with pytest.raises(RuntimeError, match=r"^args, local rank mapping mismatch, expected: \{0, 1"):
        api._validate_full_rank({0: "a"}, 2, "args")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]),
        ("SIGUSR1, SIGUSR2", [signal.SIGUSR1, signal.SIGUSR2]),
        ("SIGTERM,SIGNONSENSE", [signal.SIGTERM]),
    ],
)
def test_signals_are_handled_through_names_that_tests_replace(
    api: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    expected: list[signal.Signals],
) -> None:
    monkeypatch.delenv(SIGNALS_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(SIGNALS_VARIABLE, variable)
    replaced = MagicMock(wraps=signal, spec=signal)
    for each in expected:
        setattr(replaced, each.name, each)
    monkeypatch.setattr(api, "signal", replaced)
    replaced.signal = MagicMock()

    context = started_context(api)

    handler = api._terminate_process_handler
    assert [call.args for call in replaced.signal.call_args_list] == [
        (each, handler) for each in expected
    ]
    context._start.assert_called_once_with()


def test_a_log_that_a_program_adds_is_followed_while_the_workers_run(
    api: ModuleType, tmp_path: Path
) -> None:
    context = started_context(api)

    for tail in context._tail_logs:
        tail.start.assert_called_once_with()


@pytest.mark.parametrize("name", ["SIG_IGN", "SIGNONSENSE", "getsignal", ""])
def test_what_is_no_signal_is_told_and_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # torch looks for any name in the module `signal`: it takes SIG_IGN, which is 1, for SIGHUP.
    api = load_from(RANKWISE, "multiprocessing.api")
    monkeypatch.setenv(SIGNALS_VARIABLE, name)
    before = [signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGTERM)]

    with caplog.at_level(logging.WARNING):
        started_context(api)

    assert "Failed to register signal handler" in caplog.text
    assert [signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGTERM)] == before


@pytest.mark.system
def test_added_logs_are_shown_to_their_end_when_a_context_closes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load_from(RANKWISE, "multiprocessing")
    followed = tmp_path / "more.log"
    followed.write_text("and this\n")
    tail_log = importlib.import_module(f"{RANKWISE}.elastic.multiprocessing.tail_log")
    context = module.MultiprocessContext(
        "worker", greet, {0: ("bob",)}, {0: {"RANK": "0"}}, "spawn", module.DefaultLogsSpecs()
    )
    context._tail_logs.append(tail_log.TailLog("more", {0: str(followed)}, sys.stdout))

    context.start()
    result = context.wait(100)
    context.close()

    assert result.return_values == {0: "bob of rank 0"}
    assert "[more0]:and this\n" in capsys.readouterr().out
    assert all(tail.stopped() for tail in context._tail_logs)
