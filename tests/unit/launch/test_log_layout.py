"""Where log files go, and what is said about plans that cannot be carried out."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND
from rankwise.drivers.real.logs.stamps import stamped
from rankwise.launch.run.job import LogPlan, Streams
from rankwise.launch.run.log_layout import (
    Destinations,
    LogLayout,
    LogPlaces,
    console_streams,
    line_prefix,
    log_file_streams,
    log_plan_problems,
    notice_stamp,
    parse_streams,
)
from rankwise.launch.run.private_places import remove_abandoned

NOBODY = 65534


def problems_of(plan: LogPlan, *, size: int) -> list[ConfigError]:
    return log_plan_problems(plan, size=size, label=lambda name: "--" + name.replace("_", "-"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's place for temporary files, for this test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def layout(plan: LogPlan, *, size: int = 2, run_id: str = "mnist") -> LogLayout:
    return LogLayout(plan, size=size, run_id=run_id)


def test_the_layout_is_torchelastics(tmp_path: Path) -> None:
    plan = LogPlan(
        directory=str(tmp_path / "new" / "logs"),
        redirects={0: Streams.BOTH},
        tee={1: Streams.ERR},
        stdout_filters=("loss",),
    )
    places = layout(plan)

    destinations = places.prepare(3)

    assert places.directory is not None
    assert Path(places.directory).parent == tmp_path / "new" / "logs"
    assert Path(places.directory).name.startswith("mnist_")
    attempt = f"{places.directory}/attempt_3"
    assert destinations == Destinations(
        stdouts={0: f"{attempt}/0/stdout.log"},
        stderrs={0: f"{attempt}/0/stderr.log", 1: f"{attempt}/1/stderr.log"},
        tee_stdouts={},
        tee_stderrs={1: f"{attempt}/1/stderr.log"},
        error_files={0: f"{attempt}/0/error.json", 1: f"{attempt}/1/error.json"},
        filtered_stdout=f"{attempt}/filtered_stdout.log",
        filtered_stderr="",
    )
    assert sorted(path.name for path in Path(attempt).iterdir()) == ["0", "1"]


def test_attempts_of_a_run_are_neighbours_and_begin_empty(tmp_path: Path) -> None:
    places = layout(LogPlan(directory=str(tmp_path), tee=Streams.BOTH))
    first = places.prepare(0)
    Path(first.stdouts[0]).write_text("from an earlier life")

    again = places.prepare(0)
    second = places.prepare(1)

    assert again == first
    assert not Path(first.stdouts[0]).exists()
    assert Path(second.stdouts[0]).parents[2] == Path(first.stdouts[0]).parents[2]
    assert len(list(tmp_path.iterdir())) == 1


def test_two_runs_of_one_name_have_directories_of_their_own(tmp_path: Path) -> None:
    plan = LogPlan(directory=str(tmp_path))
    layout(plan).prepare(0)
    layout(plan).prepare(0)

    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_id_with_slashes_stays_inside(tmp_path: Path) -> None:
    places = layout(LogPlan(directory=str(tmp_path)), run_id="../team/run" + "x" * 300)

    places.prepare(0)

    assert places.directory is not None
    assert Path(places.directory).parent == tmp_path


def test_nothing_is_made_before_the_first_attempt(temporary: Path) -> None:
    places = layout(LogPlan())

    assert places.directory is None
    assert places.root is not None
    assert Path(places.root).parent == temporary
    places.discard()
    assert list(temporary.iterdir()) == []


def test_a_private_directory_is_made_and_removed_when_nobody_asked_for_logs(
    temporary: Path,
) -> None:
    places = layout(LogPlan())

    destinations = places.prepare(0)

    (directory,) = temporary.iterdir()
    assert directory.name.startswith("rankwise_")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert places.root == str(directory)
    assert destinations.stdouts == {}
    Path(destinations.error_files[0]).write_text("{}")
    (directory / "link").symlink_to(directory)
    assert not places.keep
    places.discard()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "plan",
    [
        LogPlan(redirects=Streams.OUT),
        LogPlan(tee={1: Streams.ERR}),
        LogPlan(stderr_filters=("warning",)),
    ],
)
def test_log_files_that_were_asked_for_survive_the_run(temporary: Path, plan: LogPlan) -> None:
    places = layout(plan)
    places.prepare(0)

    places.discard()

    assert places.keep
    assert len(list(temporary.iterdir())) == 1


def test_inside_a_worker_only_what_may_survive_the_outer_run_is_made_elsewhere(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = temporary / "outer"
    monkeypatch.setenv("RANKWISE_NESTED_RUNS", str(outer))
    passing, lasting = layout(LogPlan()), layout(LogPlan(tee=Streams.OUT))

    passing.prepare(0)
    lasting.prepare(0)

    assert passing.root is not None
    assert lasting.root is not None
    assert Path(passing.root).parent == outer
    assert Path(lasting.root).parent == temporary
    assert (outer / Path(passing.root).name).stat().st_mode & 0o777 == 0o700


def test_a_private_directory_stays_while_its_run_lives_and_goes_when_another_one_looks(
    temporary: Path,
) -> None:
    runs = [layout(LogPlan()) for _ in range(3)]

    runs[0].prepare(0)
    runs[1].prepare(0)
    assert len(list(temporary.iterdir())) == 2

    runs[0]._exit.close()  # as the kernel does for a process that is killed
    runs[2].prepare(0)
    remove_abandoned(str(runs[2].root))
    assert {str(each) for each in temporary.iterdir()} == {runs[1].root, runs[2].root}


def test_a_directory_of_the_users_survives_the_run(tmp_path: Path) -> None:
    places = layout(LogPlan(directory=str(tmp_path)))
    places.prepare(0)

    places.discard()

    assert places.keep
    assert len(list(tmp_path.iterdir())) == 1


def test_the_null_device_means_no_files(temporary: Path) -> None:
    plan = LogPlan(directory=os.devnull, tee=Streams.OUT, redirects=Streams.ERR)
    places: LogPlaces = layout(plan)

    assert places.prepare(0) == Destinations()
    assert places.directory is None
    assert console_streams(plan, 0) == Streams.OUT
    assert list(temporary.iterdir()) == []
    assert problems_of(plan, size=2) == []


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"cannot make a log directory in .*file.*: Not a dir"):
        layout(LogPlan(directory=str(tmp_path / "file" / "logs"))).prepare(0)


@pytest.mark.parametrize(
    ("plan", "to_file", "to_console"),
    [
        (LogPlan(), Streams.NONE, Streams.BOTH),
        (LogPlan(redirects=Streams.OUT), Streams.OUT, Streams.ERR),
        (LogPlan(tee=Streams.OUT), Streams.OUT, Streams.BOTH),
        (LogPlan(redirects=Streams.BOTH, tee=Streams.ERR), Streams.BOTH, Streams.ERR),
        (LogPlan(redirects={0: Streams.BOTH}), Streams.NONE, Streams.BOTH),
        (LogPlan(redirects={12: Streams.BOTH}), Streams.BOTH, Streams.NONE),
        (LogPlan(tee=Streams.BOTH, console_ranks=frozenset({0})), Streams.BOTH, Streams.NONE),
        (LogPlan(console_ranks=frozenset({12})), Streams.NONE, Streams.BOTH),
    ],
)
def test_a_plan_says_where_each_stream_goes(
    plan: LogPlan, to_file: Streams, to_console: Streams
) -> None:
    assert log_file_streams(plan, 12) == to_file
    assert console_streams(plan, 12) == to_console


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (None, "[trainer3]:"),
        ("", ""),
        ("${role_name}/${rank} ", "trainer/11 "),
        ("<$local_rank of ${nobody}> 100$", "<3 of ${nobody}> 100$"),
    ],
)
def test_the_prefix_follows_its_template(template: str | None, prefix: str) -> None:
    plan = LogPlan(prefix_template=template)

    assert line_prefix(plan, role="trainer", local_rank=3, rank=11) == prefix


def test_the_time_is_that_of_the_line_and_on_notices_too() -> None:
    plan = LogPlan(prefix_template="${date}T${time} [${rank}] $$time ")
    prefix = line_prefix(plan, role="", local_rank=0, rank=0).encode()
    noon = time.mktime((2026, 11, 22, 12, 34, 56, 0, 0, -1))

    assert stamped(prefix, round(noon) * SECOND + 7_000_000) == (
        b"2026-11-22T12:34:56.007 [0] $time "
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", notice_stamp(plan))
    assert notice_stamp(LogPlan(prefix_template="[$rank] ")) == notice_stamp(LogPlan()) == ""


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("0", Streams.NONE),
        ("3", Streams.BOTH),
        ("0:1", {0: Streams.OUT}),
        ("0:1,12:3,7:0", {0: Streams.OUT, 12: Streams.BOTH, 7: Streams.NONE}),
    ],
)
def test_streams_are_chosen_in_torchruns_notation(text: str, choice: object) -> None:
    assert parse_streams(text) == choice


@pytest.mark.parametrize(
    "text",
    ["", "4", "11", "-1", "0:1,", "1,0:1", "0:4", "0:", ":1", "a:1", "0:1:2", " 0:1", "²:1", "0=1"],
)
def test_malformed_choices_are_rejected_by_name_and_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_streams(text, option="--tee")

    assert f"--tee is {text!r}, expected streams" in str(caught.value)
    assert "0:1,12:3" in str(caught.value)


def test_a_rank_that_is_named_twice_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--tee is '0:1,00:2', which names local rank 0 twice"):
        parse_streams("0:1,00:2", option="--tee")


def test_ranks_that_do_not_exist_are_told_one_by_one() -> None:
    plan = LogPlan(
        redirects={4: Streams.OUT, 1: Streams.OUT},
        tee={12: Streams.OUT},
        console_ranks=frozenset({-1, 3}),
    )

    assert [str(problem) for problem in problems_of(plan, size=4)] == [
        "--redirects names local rank 4, but this node's ranks are 0 to 3",
        "--tee names local rank 12, but this node's ranks are 0 to 3",
        "--local-ranks-filter names local rank -1, but this node's ranks are 0 to 3",
    ]


def test_a_directory_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for directory in (tmp_path / "file", tmp_path / "file" / "deeper" / "logs"):
        (problem,) = problems_of(LogPlan(directory=str(directory)), size=1)
        assert f"--log-dir is {directory}, but {tmp_path}/file is not a directory" in str(problem)


def test_a_directory_that_will_be_made_is_no_problem(tmp_path: Path) -> None:
    plan = LogPlan(directory=str(tmp_path / "deep" / "logs"))

    assert problems_of(plan, size=1) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A directory in which we may not write, even if the tests run as root."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    yield directory
    if is_root:
        os.seteuid(0)
    shutil.rmtree(directory)


def test_a_directory_that_is_not_writable_is_told(unwritable: Path) -> None:
    (problem,) = problems_of(LogPlan(directory=str(unwritable / "logs")), size=1)

    assert f"--log-dir is {unwritable}/logs, but nothing can be written in {unwritable}" in str(
        problem
    )
