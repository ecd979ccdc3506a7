"""Log files: raw bytes, and a job that goes on when the disk is full."""

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankwise.base.units import MILLISECOND, SECOND, Instant
from rankwise.drivers.real.logs.file import DiskComplaints, LogFile

START = Instant(100 * SECOND)
LATER = Instant(102 * SECOND)
MUCH_LATER = Instant(104 * SECOND)


@contextlib.contextmanager
def room_in_files(size: int) -> Iterator[None]:
    """Make the kernel refuse what would make a file longer than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def log_file(path: Path | str) -> tuple[LogFile, list[str]]:
    said: list[str] = []
    return LogFile(str(path), DiskComplaints(said.append)), said


def test_the_file_has_the_bytes_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"from an earlier life")
    file, said = log_file(path)

    file.take(b"\0\xff\r 10%", START)
    file.take(b"\r 20%\nno newline at end", START)
    file.end(START)
    file.end(START)

    assert path.read_bytes() == b"\0\xff\r 10%\r 20%\nno newline at end"
    assert file.lost_bytes == 0
    assert said == []


def test_files_that_were_removed_are_told_of_once(tmp_path: Path) -> None:
    said: list[str] = []
    complaints = DiskComplaints(said.append)
    files = [LogFile(str(tmp_path / name), complaints) for name in ("stdout.log", "stderr.log")]

    for file in files:
        file.take(b"lost\n", START)
        Path(file.path).unlink()
    for file in files:
        file.end(START)

    path = tmp_path / "stdout.log"
    assert said == [f"{path} was removed while the job ran; what was written there is lost"]


def test_what_is_read_is_in_the_file_at_once(tmp_path: Path) -> None:
    file, _ = log_file(tmp_path / "stdout.log")

    file.take(b"partial", START)

    assert (tmp_path / "stdout.log").read_bytes() == b"partial"
    file.end(START)


def test_a_full_disk_is_told_once_for_all_its_files_and_the_loss_is_counted() -> None:
    said: list[str] = []
    complaints = DiskComplaints(said.append)
    files = [LogFile("/dev/full", complaints) for _ in range(2)]

    for file in files:
        file.take(b"12345\n", START)
        file.take(b"6789\n", Instant(START + 10 * MILLISECOND))
        file.take(b"0\n", LATER)
        file.end(LATER)

    assert [file.lost_bytes for file in files] == [13, 13]
    (sentence,) = said
    assert sentence.startswith("cannot write /dev/full: No space left on device; ")
    complaints.tell_losses()
    assert said[1:] == ["26 bytes of output could not be written to the disk of /dev/full"]


def test_a_file_that_cannot_be_opened_is_a_disk_that_is_full(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "stdout.log"
    file, said = log_file(path)

    file.take(b"lost\n", START)
    path.parent.mkdir()
    file.take(b"found\n", LATER)
    file.end(LATER)

    assert file.lost_bytes == len(b"lost\n")
    assert path.read_bytes() == (
        b"[rankwise: 5 bytes are missing here: No such file or directory]\nfound\n"
    )
    assert len(said) == 1
    assert said[0].startswith(f"cannot write {path}: No such file or directory;")


def test_writing_resumes_at_a_line_behind_a_note_when_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    file, said = log_file(path)

    with room_in_files(10):
        file.take(b"one\ntwo\nthree\nfour", START)
    file.take(b" five\nsix", Instant(START + 10 * MILLISECOND))
    file.take(b" seven\neight\n", LATER)
    file.take(b"nine\n", LATER)
    file.end(LATER)

    lost = b"ree\nfour" + b" five\nsix" + b" seven\n"
    note = b"\n[rankwise: %d bytes are missing here: File too large]\n" % len(lost)
    assert path.read_bytes() == b"one\ntwo\nth" + note + b"eight\nnine\n"
    assert file.lost_bytes == len(lost)
    assert len(said) == 1


def test_a_disk_that_fills_up_again_leaves_a_second_note(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    file, said = log_file(path)

    with room_in_files(4):
        file.take(b"one\ntwo\n", START)
        file.take(b"three\n", LATER)
    file.take(b"four\n", MUCH_LATER)
    file.end(MUCH_LATER)

    assert path.read_bytes() == (
        b"one\n[rankwise: 10 bytes are missing here: File too large]\nfour\n"
    )
    assert file.lost_bytes == 10
    assert len(said) == 1


def test_a_loss_at_the_end_is_noted_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    file, _ = log_file(path)

    with room_in_files(6):
        file.take(b"one\ntwo\n", START)
    file.end(START)

    assert path.read_bytes() == b"one\ntw\n[rankwise: 2 bytes are missing here: File too large]\n"


def test_a_file_that_is_full_is_put_aside_at_the_end_of_a_line(tmp_path: Path) -> None:
    path, older, said = tmp_path / "stdout.log", tmp_path / "stdout.log.1", list[str]()
    file = LogFile(str(path), DiskComplaints(said.append), bytes_max=10)

    file.take(b"one\ntwo\nthr", START)
    assert not older.exists()  # the line goes on
    file.take(b"ee\n", START)
    assert (older.read_bytes(), path.read_bytes()) == (b"one\ntwo\nthree\n", b"")
    file.take(b"four\n", START)
    assert path.read_bytes() == b"four\n"
    file.take(b"x" * 20, START)  # no line may be so long
    assert (older.read_bytes(), path.read_bytes()) == (b"four\n" + b"x" * 20, b"")
    file.end(START)

    assert said == []
    assert file.lost_bytes == 0


def test_what_is_written_at_once_fills_several_files(tmp_path: Path) -> None:
    path, older = tmp_path / "stdout.log", tmp_path / "stdout.log.1"
    file = LogFile(str(path), DiskComplaints(list[str]().append), bytes_max=10)

    file.take(b"".join(b"line %d\n" % number for number in range(9)) + b"torn", START)
    file.end(START)

    assert older.read_bytes() == b"line 6\nline 7\n"
    assert path.read_bytes() == b"line 8\ntorn"


def test_a_full_file_that_cannot_be_put_aside_goes_on(tmp_path: Path) -> None:
    path, said = tmp_path / "stdout.log", list[str]()
    file = LogFile(str(path), DiskComplaints(said.append), bytes_max=4)
    (tmp_path / "stdout.log.1").mkdir()

    file.take(b"first\n", START)
    file.take(b"second\n", START)
    file.end(START)

    assert path.read_bytes() == b"first\nsecond\n"
    assert said == []


def test_a_full_file_whose_disk_complains_at_its_close_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "stdout.log", list[str]()
    file = LogFile(str(path), DiskComplaints(said.append), bytes_max=4)

    def close(fd: int, close: Callable[[int], None] = os.close) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        file.take(b"first\nsecond\n", START)
    stranger = os.open(os.devnull, os.O_WRONLY)  # has got the number that was closed
    file.take(b"third\n", LATER)
    os.fstat(stranger)
    file.end(LATER)
    os.fstat(stranger)
    os.close(stranger)

    lost = b"[rankwise: 7 bytes are missing here: Disk quota exceeded]\n"
    assert file.lost_bytes == 7
    assert (tmp_path / "stdout.log.1").read_bytes() == lost + b"third\n"  # full again
    assert path.read_bytes() == b""
    assert ["Disk quota exceeded" in sentence for sentence in said] == [True]
