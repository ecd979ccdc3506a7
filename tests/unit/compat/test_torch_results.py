"""A gang's failures in torch's words."""

import json
import socket
from pathlib import Path

import msgspec
import pytest

from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause
from rankwise.base.units import SECOND, Instant
from rankwise.compat.torch.elastic.multiprocessing.errors import ChildFailedError
from rankwise.compat.torch.elastic.multiprocessing.results import process_failures

NOON_NS = 1_700_000_000 * SECOND


def failure(local_rank: int, code: int, wall_ns: int, error: ErrorRecord | None = None) -> Failure:
    return Failure(
        local_rank=local_rank,
        attempt=0,
        cause=FailureCause.SIGNALED if code < 0 else FailureCause.EXITED,
        at=Instant(0),
        exit=ExitStatus(code),
        pid=100 + local_rank,
        error=error,
        wall_ns=wall_ns,
    )


def test_the_root_cause_stays_first_although_its_death_was_seen_later() -> None:
    # The kernel closes a killed process's connections before its parent can see it end.
    killed = failure(2, -9, NOON_NS + 20_000_000)
    victim = failure(0, 1, NOON_NS - 5_000_000)

    told = process_failures([killed, victim], {})

    assert list(told) == [2, 0]
    assert ChildFailedError("job", told).get_first_failure()[0] == 2
    assert told[2].timestamp == told[0].timestamp == 1_699_999_999


def test_failures_of_one_second_keep_their_order() -> None:
    told = process_failures([failure(1, 3, NOON_NS + 1), failure(0, 4, NOON_NS + 2)], {})

    assert [told[rank].timestamp for rank in (0, 1)] == [1_700_000_000] * 2
    assert ChildFailedError("job", {0: told[0], 1: told[1]}).get_first_failure()[0] == 1


def test_what_a_worker_reported_stands_in_for_a_missing_error_file() -> None:
    error = ErrorRecord(
        type="ValueError",
        message="bad shape",
        traceback="Traceback …",
        raised_at=Instant(0),
        wall_ns=NOON_NS,
    )

    [told] = process_failures([failure(0, 1, NOON_NS, error)], {0: ""}).values()

    assert told.error_file == "<N/A>"
    assert told.error_file_data == {
        "message": {
            "message": "ValueError: bad shape",
            "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1700000000"},
        }
    }
    assert told.message == told.error_file_data["message"]


def test_an_error_file_speaks_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "from the file", "timestamp": 1_700_000_000}))

    [told] = process_failures([failure(0, 1, NOON_NS + 7)], {0: str(path)}).values()

    assert (told.message, told.error_file) == ("from the file", str(path))
    assert told.order() == NOON_NS + 7


def test_a_worker_that_went_with_its_guardian_counts_as_killed() -> None:
    lost = Failure(local_rank=0, attempt=0, cause=FailureCause.GUARDIAN_LOST, at=Instant(0))

    [told] = process_failures([lost], {}).values()

    assert (told.exitcode, told.pid) == (-9, -1)


def test_an_exception_has_the_exit_code_of_an_exception_though_we_ended_its_process() -> None:
    ended = msgspec.structs.replace(
        failure(0, -15, NOON_NS), cause=FailureCause.RAISED, ended_by_us=True
    )

    [told] = process_failures([ended], {}).values()

    assert told.exitcode == 1


def test_a_report_of_many_asks_for_the_name_of_the_host_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def look_up(host: str) -> str:
        asked.append(host)
        return "node.test"

    monkeypatch.setattr(socket, "getfqdn", look_up)
    told = process_failures([failure(rank, 3, NOON_NS) for rank in range(3)], {})

    report = str(ChildFailedError("job", told))

    assert report.count("host      : node.test") == 3
    assert len(asked) == 1
