"""A stream on its way to the console: prefix, colour, duplicates."""

import os
import pty
import re
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.channel import ConsoleChannel, DuplicateFilter
from rankwise.drivers.real.logs.console import Outlet
from rankwise.drivers.real.logs.file import DiskComplaints, LogFile
from rankwise.drivers.real.logs.lines import CUT_MARK
from rankwise.drivers.real.logs.stamps import TIME_MARK
from rankwise.drivers.real.logs.terminal import RESET, colour_of

NOW = Instant(0)


@pytest.fixture
def console_file(tmp_path: Path) -> Iterator[tuple[Outlet, Path]]:
    path = tmp_path / "console.txt"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    outlet = Outlet(fd)
    yield outlet, path
    outlet.close()
    os.close(fd)


def duplicates_in(path: Path, *needles: str) -> DuplicateFilter:
    return DuplicateFilter(needles, LogFile(str(path), DiskComplaints(pytest.fail)))


def test_every_line_has_the_prefix_directly_in_front(console_file: tuple[Outlet, Path]) -> None:
    outlet, path = console_file
    channel = ConsoleChannel(outlet, prefix="[default0]:")

    channel.take(b"one\ntwo\nno newline", NOW)
    channel.end(NOW)

    assert path.read_bytes() == b"[default0]:one\n[default0]:two\n[default0]:no newline\n"


def test_binary_bytes_reach_a_file_unharmed(console_file: tuple[Outlet, Path]) -> None:
    outlet, path = console_file
    channel = ConsoleChannel(outlet, prefix="")

    channel.take(b"\0\x07\xff\x1bP\n", NOW)

    assert path.read_bytes() == b"\0\x07\xff\x1bP\n"


def test_a_prefix_can_be_coloured_and_duplicates_are_not(
    console_file: tuple[Outlet, Path], tmp_path: Path
) -> None:
    outlet, path = console_file
    duplicates = duplicates_in(tmp_path / "filtered.log", "[3]:")
    channel = ConsoleChannel(outlet, prefix="[3]:", colour=colour_of(3), duplicates=duplicates)

    channel.take(b"one\n", NOW)

    assert path.read_bytes() == colour_of(3) + b"[3]:" + RESET + b"one\n"
    assert (tmp_path / "filtered.log").read_bytes() == b"[3]:one\n"


def test_each_block_of_lines_has_its_time(
    console_file: tuple[Outlet, Path], tmp_path: Path
) -> None:
    outlet, path = console_file
    duplicates = duplicates_in(tmp_path / "filtered.log", "one")
    channel = ConsoleChannel(outlet, prefix=f"{TIME_MARK} [3]:", duplicates=duplicates)

    channel.take(b"one\ntwo\n", NOW)

    first, second = path.read_text().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \[3\]:one", first)
    assert second == first.replace("one", "two")
    assert re.fullmatch(r"[\d:.]{12} \[3\]:one\n", (tmp_path / "filtered.log").read_text())


def test_lines_with_any_of_the_words_are_duplicated_whole(
    console_file: tuple[Outlet, Path], tmp_path: Path
) -> None:
    outlet, path = console_file
    duplicates = duplicates_in(tmp_path / "filtered.log", "loss", "acc")
    channels = [
        ConsoleChannel(outlet, prefix=f"[{rank}]:", duplicates=duplicates) for rank in range(2)
    ]

    channels[0].take(b"start\nlo", NOW)
    channels[1].take(b"accuracy 1\nnothing\n", NOW)
    channels[0].take(b"ss 0.5\nend", NOW)
    channels[0].end(NOW)

    assert (tmp_path / "filtered.log").read_bytes() == b"[1]:accuracy 1\n[0]:loss 0.5\n"
    assert path.read_bytes().count(b"\n") == 5


def test_words_are_found_within_lines_only(
    console_file: tuple[Outlet, Path], tmp_path: Path
) -> None:
    outlet, _ = console_file
    duplicates = duplicates_in(tmp_path / "filtered.log", "a\nb")
    channel = ConsoleChannel(outlet, duplicates=duplicates)

    channel.take(b"a\nb\n", NOW)

    assert (tmp_path / "filtered.log").read_bytes() == b""


def test_a_terminal_is_spared_what_would_wedge_it() -> None:
    reader, terminal = pty.openpty()
    tty.setraw(terminal)
    outlet = Outlet(terminal)
    channel = ConsoleChannel(outlet, prefix="[0]:")

    channel.take(b"\x0egarbage\x1bPmore\n", NOW)

    assert os.read(reader, 1000) == b"[0]:^Ngarbage^[Pmore\n"
    outlet.close()
    os.close(reader)
    os.close(terminal)


def test_a_very_long_line_passes_in_pieces_with_a_prefix_each(
    console_file: tuple[Outlet, Path],
) -> None:
    outlet, path = console_file
    channel = ConsoleChannel(outlet, prefix="[0]:", line_limit=10)

    for chunk in (b"a" * 11, b"b" * 5, b"c" * 6, b"d\nnext\n"):
        channel.take(chunk, NOW)

    assert path.read_bytes().splitlines() == [
        b"[0]:" + b"a" * 11 + CUT_MARK,
        b"[0]:bbbbbcccccc" + CUT_MARK,
        b"[0]:d",
        b"[0]:next",
    ]


class Terminal:
    """A terminal with an outlet, and what it shows."""

    def __init__(self) -> None:
        self.reader, self._terminal = pty.openpty()
        tty.setraw(self._terminal)
        self.outlet = Outlet(self._terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.outlet.close()
        os.close(self._terminal)
        os.close(self.reader)

    def read(self) -> bytes:
        """What it shows more than at the last look: all that was written, as a mark comes last."""
        os.write(self._terminal, b"\0")
        shown = b""
        while not shown.endswith(b"\0"):
            shown += os.read(self.reader, 1 << 16)
        return shown[:-1]


def test_an_unfinished_line_is_shown_on_a_terminal_and_goes_on_behind_what_was_shown() -> None:
    with Terminal() as terminal:
        channel = ConsoleChannel(terminal.outlet, prefix="[0]:")

        channel.take(b"Loading model ... ", NOW)
        assert terminal.read() == b""

        terminal.outlet.show_unfinished()
        assert terminal.read() == b"[0]:Loading model ... "

        channel.take(b"half", NOW)
        terminal.outlet.show_unfinished()
        assert terminal.read() == b"half"

        channel.take(b" done\nnext\n", NOW)
        assert terminal.read() == b" done\n[0]:next\n"


def test_whoever_writes_behind_an_unfinished_line_begins_a_line() -> None:
    with Terminal() as terminal:
        first = ConsoleChannel(terminal.outlet, prefix="[0]:")
        second = ConsoleChannel(terminal.outlet, prefix="[1]:")
        first.take(b"(Pdb) ", NOW)
        second.take(b"> ", NOW)

        terminal.outlet.show_unfinished()
        assert terminal.read() == b"[0]:(Pdb) \n[1]:> "

        first.take(b"bye\n", NOW)
        assert terminal.read() == b"\n[0]:(Pdb) bye\n"

        second.end(NOW)
        assert terminal.read() == b"[1]:> \n"


def test_an_unfinished_line_that_the_stream_has_ended_is_ended() -> None:
    with Terminal() as terminal:
        channel = ConsoleChannel(terminal.outlet)
        channel.take(b"? ", NOW)
        terminal.outlet.show_unfinished()

        channel.end(NOW)

        assert terminal.read() == b"? \n"


def test_a_line_that_is_redrawn_is_not_shown_as_an_unfinished_one() -> None:
    with Terminal() as terminal:
        channel = ConsoleChannel(terminal.outlet)
        channel.take(b"\r 10%", NOW)
        channel.take(b"\r 20%", NOW)
        assert terminal.read() == b" 10%\n"

        terminal.outlet.show_unfinished()

        assert terminal.read() == b""


def test_a_file_keeps_whole_lines(console_file: tuple[Outlet, Path]) -> None:
    outlet, path = console_file
    channel = ConsoleChannel(outlet)

    channel.take(b"Loading model ... ", NOW)
    outlet.show_unfinished()

    assert path.read_bytes() == b""
