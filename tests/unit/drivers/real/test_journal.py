"""A journal that cannot be written is told of once, and the run goes on."""

import errno
import os
from pathlib import Path

import pytest

from rankwise.base.units import Instant
from rankwise.core.gang.vocabulary import Started, Sweep
from rankwise.drivers.real.journal import FileJournal

WALL_NS = 1_795_389_623_750_123_456


def test_what_is_told_and_ordered_is_a_line_each(tmp_path: Path) -> None:
    told: list[tuple[str, OSError]] = []
    journal = FileJournal(
        str(tmp_path / "j"), lambda path, error: told.append((path, error)), lambda: WALL_NS
    )

    journal.stimulus("gang", 1, Started(), Instant(1))
    journal.effect("gang", 1, Sweep(0), Instant(2))
    journal.close()

    assert (tmp_path / "j").read_text().splitlines() == [
        '{"at":1,"wall":"2026-11-22T23:20:23.750123Z","machine":"gang","number":1,"stimulus":{"type":"Started"}}',
        '{"at":2,"wall":"2026-11-22T23:20:23.750123Z","machine":"gang","cause":1,"effect":{"type":"Sweep","attempt":0,"spares":[]}}',
    ]
    assert told == []


def test_a_line_for_which_there_is_no_room_leaves_no_piece_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    journal = FileJournal(
        str(tmp_path / "j"), lambda path, error: told.append(f"{path} {error.strerror}")
    )
    journal.stimulus("gang", 1, Started(), Instant(1))
    whole = (tmp_path / "j").read_text()
    room = [10]
    write = os.write

    def write_what_fits(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: room.pop()])

    monkeypatch.setattr(os, "write", write_what_fits)
    journal.stimulus("gang", 1, Started(), Instant(2))
    journal.stimulus("gang", 1, Started(), Instant(3))
    journal.close()

    assert (tmp_path / "j").read_text() == whole
    assert told == [f"{tmp_path}/j No space left on device"]


def test_a_disk_that_refuses_it_is_told_of_once() -> None:
    told: list[str] = []
    journal = FileJournal("/dev/full", lambda path, error: told.append(f"{path} {error.strerror}"))

    for _ in range(3):
        journal.stimulus("gang", 1, Started(), Instant(1))
    journal.close()

    assert told == ["/dev/full No space left on device"]
