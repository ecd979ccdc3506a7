"""What becomes of the evidence of a failure, in both worlds."""

import os
from pathlib import Path

import msgspec
import pytest

from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause
from rankwise.base.units import Instant
from rankwise.cli.run import config_from_cli
from rankwise.launch.run.log_layout import Destinations
from rankwise.launch.telling.failure_description import RankEvidence, describe_failure

EXIT = Failure(
    local_rank=1, rank=5, attempt=0, cause=FailureCause.EXITED, at=Instant(7), exit=ExitStatus(3)
)
EVIDENCE = RankEvidence(host="h1", wall_ns=70, file_key=1, exit_place="train.py:8")
JOB = config_from_cli(["--role=trainer", "--no-python", "true"], os.environ)


def described(
    failure: Failure, evidence: RankEvidence = EVIDENCE, *, keeps_files: bool = True
) -> Failure:
    return describe_failure(failure, JOB, lambda _: evidence, keeps_files=keeps_files)


def test_a_failure_is_described_once() -> None:
    once = described(EXIT)

    assert (once.host, once.role, once.wall_ns) == ("h1", "trainer", 70)
    assert once.detail == "SystemExit at train.py:8"
    assert described(once, msgspec.structs.replace(EVIDENCE, host="another")) is once


def test_the_instant_of_an_exception_by_the_calendar_is_that_of_its_rank() -> None:
    error = ErrorRecord(
        type="ValueError", message="x", traceback="", raised_at=Instant(6), wall_ns=60
    )

    assert described(msgspec.structs.replace(EXIT, error=error)).wall_ns == 60


@pytest.mark.parametrize(
    ("cause", "stacks"),
    [
        (FailureCause.HUNG, "hang"),
        (FailureCause.OUT_OF_STEP, "hang"),
        (FailureCause.EXITED, "fatal"),
    ],
)
def test_stacks_are_those_of_the_hang_or_of_the_fatal_signal(
    cause: FailureCause, stacks: str
) -> None:
    evidence = msgspec.structs.replace(EVIDENCE, hang_stacks="hang", fatal_stacks="fatal")

    assert described(msgspec.structs.replace(EXIT, cause=cause), evidence).stacks == stacks


def test_an_error_file_is_named_if_it_was_written_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    evidence = msgspec.structs.replace(
        EVIDENCE, destinations=Destinations(error_files={1: str(path)}, stderrs={1: "err.log"})
    )

    assert described(EXIT, evidence).error_file == ""  # on a full disk
    path.touch()
    assert described(EXIT, evidence).error_file == str(path)
    assert described(EXIT, evidence, keeps_files=False).error_file == ""
    assert described(EXIT, evidence).log_paths == ("err.log",)
