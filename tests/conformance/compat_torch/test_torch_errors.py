"""Error files, reports and `record`: torch's and ours through the same scenarios."""

import json
import logging
import os
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import RANKWISE, TORCH, Load, load_from

STRUCTURED = {
    "message": {
        "message": "ValueError: bad shape",
        "extraInfo": {
            "py_callstack": "Traceback (most recent call last):\n  ...\nValueError: bad shape\n",
            "timestamp": "1700000005",
        },
    }
}
PLAIN = {"message": "out of cheese\nredo", "timestamp": 1700000001}


@pytest.fixture
def errors(load: Load) -> ModuleType:
    return load("multiprocessing.errors")


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def write_json(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_record_returns_what_the_function_returns(errors: ModuleType, error_file: Path) -> None:
    @errors.record
    def add(left: int, right: int = 1) -> int:
        """Add."""
        return left + right

    assert add(1, right=3) == 4
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    assert not error_file.exists()


def test_record_leaves_the_exception_in_the_error_file(
    errors: ModuleType, error_file: Path
) -> None:
    @errors.record
    def fail() -> None:
        raise ValueError("bad \ud800 shape")

    with pytest.raises(ValueError, match=r"bad . shape"):
        fail()

    content = json.loads(error_file.read_text())
    assert content["message"]["message"] == "ValueError: bad \ud800 shape"
    assert 'raise ValueError("bad' in content["message"]["extraInfo"]["py_callstack"]
    assert content["message"]["extraInfo"]["timestamp"].isdigit()
    assert set(content) == {"message"}
    assert set(content["message"]) == {"message", "extraInfo"}
    assert set(content["message"]["extraInfo"]) == {"py_callstack", "timestamp"}


def test_record_without_an_error_file_only_raises(
    errors: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)

    @errors.record
    def fail() -> None:
        raise ValueError("told nobody")

    with pytest.raises(ValueError, match="told nobody"):
        fail()


def test_an_exit_with_zero_is_a_return(errors: ModuleType, error_file: Path) -> None:
    assert errors.record(sys.exit)(0) is None
    assert not error_file.exists()


@pytest.mark.parametrize("code", [1, 255, "a reason"])
def test_any_other_exit_goes_through_unrecorded(
    errors: ModuleType, error_file: Path, code: int | str
) -> None:
    with pytest.raises(SystemExit) as raised:
        errors.record(sys.exit)(code)

    assert raised.value.code == code
    assert not error_file.exists()


def test_an_interrupt_goes_through_unrecorded(errors: ModuleType, error_file: Path) -> None:
    @errors.record
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert not error_file.exists()


def test_record_stands_under_contextmanager(errors: ModuleType, error_file: Path) -> None:
    steps: list[str] = []

    @contextmanager
    @errors.record
    def resource(name: str) -> Any:
        steps.append(f"open {name}")
        try:
            yield name
        finally:
            steps.append(f"close {name}")

    with resource("valve") as name:
        steps.append(f"use {name}")
    with pytest.raises(ValueError, match="inside"), resource("tap"):
        raise ValueError("inside")

    assert steps == ["open valve", "use valve", "close valve", "open tap", "close tap"]
    assert not error_file.exists()


def test_a_child_failure_passes_on_the_first_childs_error_file(
    errors: ModuleType, error_file: Path, tmp_path: Path
) -> None:
    late = errors.ProcessFailure(0, 100, 1, write_json(tmp_path / "late", STRUCTURED))
    early_content = {"message": {**STRUCTURED["message"]}}
    early_content["message"]["extraInfo"] = {"py_callstack": "T", "timestamp": "1700000001"}
    early = errors.ProcessFailure(1, 101, 7, write_json(tmp_path / "early", early_content))

    @errors.record
    def launcher() -> None:
        raise errors.ChildFailedError("trainer", {0: late, 1: early})

    with pytest.raises(errors.ChildFailedError):
        launcher()

    early_content["message"]["errorCode"] = 7  # type: ignore[assignment]
    assert json.loads(error_file.read_text()) == early_content


def test_a_child_failure_without_file_leaves_none(errors: ModuleType, error_file: Path) -> None:
    @errors.record
    def launcher() -> None:
        raise errors.ChildFailedError("trainer", {0: errors.ProcessFailure(0, 1, -9, "")})

    with pytest.raises(errors.ChildFailedError):
        launcher()

    assert not error_file.exists()


def test_record_asks_the_handler_it_is_given(errors: ModuleType, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Handler(errors.ErrorHandler):  # type: ignore[name-defined,misc]
        def initialize(self) -> None:
            calls.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            calls.append(e)

        def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
            calls.append((rootcause_error_file, error_code))

    problem = ValueError("x")
    file = write_json(tmp_path / "child", PLAIN)
    child_failed = errors.ChildFailedError("t", {0: errors.ProcessFailure(0, 1, 3, file)})

    def fail(error: Exception) -> None:
        raise error

    for error in (problem, child_failed):
        with pytest.raises(type(error)):
            errors.record(fail, error_handler=Handler())(error)

    assert calls == ["initialize", problem, "initialize", (file, 3)]


def test_dumping_without_an_exit_code_copies_byte_for_byte(
    errors: ModuleType, error_file: Path, tmp_path: Path
) -> None:
    source = write_json(tmp_path / "child.json", STRUCTURED)
    error_file.write_text("{}")

    errors.get_error_handler().dump_error_file(source)

    assert error_file.read_bytes() == Path(source).read_bytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"message": {"x": 1}}, {"message": {"x": 1, "errorCode": 7}}),
        (PLAIN, PLAIN),
        ({"other": 3}, {"other": 3}),
    ],
)
def test_dumping_adds_the_exit_code_where_the_format_has_a_place(
    errors: ModuleType, error_file: Path, tmp_path: Path, content: object, expected: object
) -> None:
    errors.get_error_handler().dump_error_file(write_json(tmp_path / "child", content), 7)

    assert json.loads(error_file.read_text()) == expected


def test_dumping_a_missing_file_raises(
    errors: ModuleType, error_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        errors.get_error_handler().dump_error_file(str(tmp_path / "none"))
    assert not error_file.exists()


def test_a_process_failure_reads_both_forms_of_error_file(
    errors: ModuleType, tmp_path: Path
) -> None:
    structured = errors.ProcessFailure(0, 100, 1, write_json(tmp_path / "new", STRUCTURED))
    plain = errors.ProcessFailure(1, 101, 1, write_json(tmp_path / "old", PLAIN))
    undated = errors.ProcessFailure(1, 101, 1, write_json(tmp_path / "un", {"message": "m"}))

    assert structured.message == STRUCTURED["message"]
    assert structured.error_file_data == STRUCTURED
    assert structured.timestamp == 1700000005
    assert (plain.message, plain.timestamp) == ("out of cheese\nredo", 1700000001)
    assert (undated.message, undated.timestamp) == ("m", 0)


@pytest.mark.parametrize(
    ("content", "exception"),
    [
        ({"nothing": 1}, KeyError),
        ({"message": {"message": "m"}}, KeyError),
        ({"message": {"message": "m", "extraInfo": {"timestamp": "1.5"}}}, ValueError),
    ],
)
def test_an_error_file_of_another_format_is_an_error(
    errors: ModuleType,
    tmp_path: Path,
    content: object,
    exception: type[Exception],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.CRITICAL), pytest.raises(exception):
        errors.ProcessFailure(0, 1, 1, write_json(tmp_path / "odd", content))


@pytest.mark.parametrize(
    ("exit_code", "message", "signal_name"),
    [
        (-9, "Signal 9 (SIGKILL) received by PID 42", "SIGKILL"),
        (-11, "Signal 11 (SIGSEGV) received by PID 42", "SIGSEGV"),
        (-100, "Signal 100 (<N/A>) received by PID 42", "<N/A>"),
        (
            3,
            "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
            "<N/A>",
        ),
    ],
)
def test_without_error_file_the_exit_code_tells(
    errors: ModuleType, tmp_path: Path, exit_code: int, message: str, signal_name: str
) -> None:
    failure = errors.ProcessFailure(0, 42, exit_code, str(tmp_path / "none"))

    assert failure.message == message
    assert failure.signal_name() == signal_name
    assert failure.error_file == "<N/A>"
    assert failure.error_file_data["message"] == "<NONE>"


def test_only_an_exit_without_signal_gets_error_traits(tmp_path: Path) -> None:
    # torch writes them into one shared default, whence every later failure has them.
    errors = load_from(RANKWISE, "multiprocessing.errors")
    exited = errors.ProcessFailure(0, 42, 3, "")
    killed = errors.ProcessFailure(0, 42, -9, "")

    assert exited.error_file_data == {
        "message": "<NONE>",
        "errorTraits": {"category": "system_terminated_error", "retryability": "False"},
    }
    assert killed.error_file_data == {"message": "<NONE>"}


def test_a_report_needs_a_failure(errors: ModuleType) -> None:
    with pytest.raises(AssertionError):
        errors.ChildFailedError("trainer", {})


def build_failures(errors: ModuleType, directory: Path) -> dict[int, Any]:
    multiline = {"message": {"extraInfo": {"timestamp": "1700000009"}}}
    failures = {
        4: errors.ProcessFailure(0, 100, 1, write_json(directory / "a", STRUCTURED)),
        5: errors.ProcessFailure(1, 101, -11, ""),
        6: errors.ProcessFailure(2, 102, 3, write_json(directory / "b", PLAIN)),
        7: errors.ProcessFailure(3, 103, 3, write_json(directory / "c", multiline)),
    }
    failures[5].timestamp = 1700000003
    return failures


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [[6], [5], [4, 5, 6, 7], [7, 6], [4, 5]])
@pytest.mark.parametrize("name", ["t", "trainer_" + "x" * 40, "trainer_" + "x" * 80])
def test_the_report_is_torchs_letter_by_letter(tmp_path: Path, ranks: list[int], name: str) -> None:
    reports = []
    for side in (TORCH, RANKWISE):
        errors = load_from(side, "multiprocessing.errors")
        failures = build_failures(errors, tmp_path)
        error = errors.ChildFailedError(name, {rank: failures[rank] for rank in ranks})
        reports.append((str(error), error.format_msg("*", "+"), error.get_first_failure()[0]))

    assert reports[0] == reports[1]


def test_the_first_of_simultaneous_failures_is_the_root_cause(
    errors: ModuleType, tmp_path: Path
) -> None:
    first = errors.ProcessFailure(0, 100, 1, write_json(tmp_path / "a", PLAIN))
    second = errors.ProcessFailure(1, 101, 1, write_json(tmp_path / "b", PLAIN))

    assert errors.ChildFailedError("t", {3: second, 1: first}).get_first_failure()[0] == 3


def test_failures_of_one_second_are_ordered_by_when_their_files_were_written(
    tmp_path: Path,
) -> None:
    errors = load_from(RANKWISE, "multiprocessing.errors")
    written = {"early": 1700000001_200_000_000, "late": 1700000001_700_000_000}
    failures = {}
    for rank, (name, instant) in enumerate(reversed(written.items())):
        path = write_json(tmp_path / name, PLAIN)
        os.utime(path, ns=(instant, instant))
        failures[rank] = errors.ProcessFailure(rank, 100, 1, path)

    rank, failure = errors.ChildFailedError("t", failures).get_first_failure()

    assert rank == 1
    assert failure.timestamp == 1700000001


def test_a_report_survives_pickling(tmp_path: Path) -> None:
    # torch's does not: its constructor wants two arguments and gets one.
    errors = load_from(RANKWISE, "multiprocessing.errors")
    error = errors.ChildFailedError("t", build_failures(errors, tmp_path))

    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), copy.failures) == (str(error), error.failures)


def test_a_full_disk_does_not_replace_the_users_exception(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = load_from(RANKWISE, "multiprocessing.errors")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no such directory" / "e.json"))

    @errors.record
    def fail() -> None:
        raise ValueError("the real one")

    with pytest.raises(ValueError, match="the real one"):
        fail()


def test_the_hint_about_missing_error_files_is_one_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = load_from(RANKWISE, "multiprocessing.errors")
    error = errors.ChildFailedError("t", {5: errors.ProcessFailure(0, 42, 3, "")})

    @errors.record
    def launcher() -> None:
        raise error

    with caplog.at_level(logging.INFO), pytest.raises(errors.ChildFailedError):
        launcher()

    [message] = [record.getMessage() for record in caplog.records]
    assert "rank 5" in message
    assert "`record`" in message
