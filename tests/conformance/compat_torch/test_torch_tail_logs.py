"""Following log files: torch's and ours through the same scenarios."""

import io
import logging
import operator
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import RANKWISE, Load, load_from

PATIENCE_S = 60.0


class Destination(io.StringIO):
    """Text that another thread writes, and that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        with self._changed:
            count = super().write(text)
            self._changed.notify_all()
        return count

    def wait_for(self, condition: Callable[[str], bool]) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.getvalue()), PATIENCE_S), (
                self.getvalue()
            )
            return self.getvalue()


@pytest.fixture
def tail_log(load: Load) -> ModuleType:
    return load("multiprocessing.tail_log")


@pytest.fixture
def ours() -> ModuleType:
    return load_from(RANKWISE, "multiprocessing.tail_log")


def make(module: ModuleType, files: dict[int, str], dst: Any, **options: Any) -> Any:
    return module.TailLog("trainer", files, dst, interval_sec=0.01, **options).start()


def test_lines_of_all_files_arrive_with_their_prefix(tail_log: ModuleType, tmp_path: Path) -> None:
    files = {rank: str(tmp_path / f"{rank}.log") for rank in (0, 1)}
    for rank, path in files.items():
        Path(path).write_text(f"first of {rank}\n")
    dst = Destination()

    tail = make(tail_log, files, dst, log_line_prefixes={1: "(one) "})
    dst.wait_for(lambda text: text.count("\n") == 2)
    for path in files.values():
        with open(path, "a") as file:  # noqa: PTH123
            file.write("second\n")
    text = dst.wait_for(lambda text: text.count("\n") == 4)
    assert not tail.stopped()
    tail.stop()

    assert tail.stopped()
    assert sorted(text.splitlines()) == [
        "(one) first of 1",
        "(one) second",
        "[trainer0]:first of 0",
        "[trainer0]:second",
    ]


def test_a_file_may_appear_later(tail_log: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there.log"
    dst = Destination()
    tail = make(tail_log, {0: str(path)}, dst)

    path.parent.mkdir(parents=True)
    path.write_text("late\n")

    dst.wait_for(lambda text: text == "[trainer0]:late\n")
    tail.stop()


def test_a_file_that_never_appears_does_not_hold_up_stop(
    tail_log: ModuleType, tmp_path: Path
) -> None:
    dst = Destination()
    tail = make(tail_log, {0: str(tmp_path / "never")}, dst)

    tail.stop()

    assert tail.stopped()
    assert dst.getvalue() == ""


def test_stop_shows_everything_that_was_written_before(ours: ModuleType, tmp_path: Path) -> None:
    """Ours alone: torch misses a file that is made shortly before `stop`, and passes on half a line
    that is in the file already, so that lines of two files tear each other."""
    files = {rank: str(tmp_path / f"{rank}.log") for rank in range(32)}
    dst = Destination()
    tail = make(ours, files, dst)
    for rank, path in files.items():
        Path(path).write_text("".join(f"{rank} {number}\n" for number in range(1000)))

    tail.stop()

    lines = dst.getvalue().splitlines()
    assert len(lines) == 32_000
    for rank in files:
        mine = [line for line in lines if line.startswith(f"[trainer{rank}]:")]
        assert mine == [f"[trainer{rank}]:{rank} {number}" for number in range(1000)]


def test_stop_sees_a_file_that_has_just_been_made(ours: ModuleType, tmp_path: Path) -> None:
    dst = Destination()
    tail = make(ours, {0: str(tmp_path / "log")}, dst)
    (tmp_path / "log").write_text("in the last moment\n")

    tail.stop()

    assert dst.getvalue() == "[trainer0]:in the last moment\n"


def test_a_filter_chooses_lines(tail_log: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("loss 3\nstep\nloss 2\n")
    dst = Destination()

    make(tail_log, {0: str(path)}, dst, log_line_filter=lambda line: "loss" in line).stop()

    assert dst.getvalue() == "[trainer0]:loss 3\n[trainer0]:loss 2\n"


def test_without_files_there_is_nothing_to_stop_but_stop_stops(tail_log: ModuleType) -> None:
    tail = make(tail_log, {}, sys.stdout)

    assert not tail.stopped()
    tail.stop()
    assert tail.stopped()


def test_a_file_that_cannot_be_read_is_told_once_when_following_ends(
    tail_log: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(tail_log.logger, "exception", lambda *_, **__: told.append("told"))

    make(tail_log, {0: str(tmp_path)}, sys.stdout).stop()

    assert told == ["told"]


def test_one_file_is_followed_in_the_callers_thread(tail_log: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\n")
    dst = Destination()
    finished = threading.Event()
    follower = threading.Thread(
        target=tail_log.tail_logfile,
        args=(">", str(path), dst, finished, 0.01, lambda _: True),
    )

    follower.start()
    dst.wait_for(lambda text: text == ">a\n>b\n")
    finished.set()
    follower.join(PATIENCE_S)

    assert not follower.is_alive()


def test_a_line_that_is_written_in_pieces_is_shown_whole(ours: ModuleType, tmp_path: Path) -> None:
    # torch shows the pieces, each with a prefix.
    path = tmp_path / "log"
    dst = Destination()
    tail = make(ours, {0: str(path)}, dst)

    with open(path, "w") as file:  # noqa: PTH123
        for piece in ("whole\nto", "ge", "ther"):
            file.write(piece)
            file.flush()
            dst.wait_for(lambda text: "whole" in text)
        file.write("\n")
    text = dst.wait_for(lambda text: "together" in text)
    tail.stop()

    assert text == "[trainer0]:whole\n[trainer0]:together\n"


def test_a_last_line_without_newline_gets_one(ours: ModuleType, tmp_path: Path) -> None:
    # torch glues the next rank's line to it.
    path = tmp_path / "log"
    path.write_text("no newline")
    dst = Destination()

    make(ours, {0: str(path)}, dst).stop()

    assert dst.getvalue() == "[trainer0]:no newline\n"


def test_bytes_that_are_no_text_do_no_harm(tail_log: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe ok\nnext\n")
    dst = Destination()

    make(tail_log, {0: str(path)}, dst).stop()

    first, second = dst.getvalue().splitlines()
    assert first.endswith(" ok")
    assert second == "[trainer0]:next"


def test_a_file_that_is_emptied_is_followed_from_its_new_beginning(
    ours: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_text("a long line of the first attempt\n")
    dst = Destination()
    tail = make(ours, {0: str(path)}, dst)
    dst.wait_for(lambda text: "first" in text)

    path.write_text("second\n")
    dst.wait_for(lambda text: text.endswith("[trainer0]:second\n"))
    tail.stop()


def test_all_files_share_one_thread_that_wakes_only_when_something_has_happened(
    ours: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_ups: list[float] = []
    wait = ours.FileWatch.wait

    def counted_wait(watch: Any) -> None:
        wait(watch)
        wake_ups.append(time.monotonic())

    monkeypatch.setattr(ours.FileWatch, "wait", counted_wait)
    files = {rank: str(tmp_path / f"{rank}.log") for rank in range(16)}
    dst = Destination()
    threads = set(threading.enumerate())

    tail = ours.TailLog("trainer", files, dst, interval_sec=0.0).start()
    assert len(set(threading.enumerate()) - threads) == 1
    for rank in (3, 5, 3, 5):
        shown = dst.getvalue()
        with open(files[rank], "a") as file:  # noqa: PTH123
            file.write("x\n")
        dst.wait_for(partial(operator.ne, shown))
    tail.stop()

    # Two files made, four writes, one stop; a thread that looked all the time would count on.
    assert len(wake_ups) <= 7
    assert set(threading.enumerate()) <= threads


def test_where_inotify_is_not_to_be_had_files_are_looked_at(
    ours: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NoInotify:
        def inotify_init1(self, _flags: int) -> int:
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: NoInotify())
    dst = Destination()
    with caplog.at_level(logging.WARNING):
        tail = make(ours, {0: str(tmp_path / "log")}, dst)

    (tmp_path / "log").write_text("seen\n")

    dst.wait_for(lambda text: text == "[trainer0]:seen\n")
    tail.stop()
    assert "inotify_init1" in caplog.text
