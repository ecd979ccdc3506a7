"""The tail: the last lines of a stream, in bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.tail import Tail

NOW = Instant(0)


def test_the_last_lines_are_told_oldest_first() -> None:
    tail = Tail()
    for number in range(100):
        tail.take(b"line %d\n" % number, NOW)

    assert tail.lines() == tuple(f"line {number}" for number in range(80, 100))
    assert tail.lines(2) == ("line 98", "line 99")


def test_a_last_line_without_newline_counts() -> None:
    tail = Tail()
    tail.take(b"one\ntwo\nthr", NOW)

    assert tail.lines() == ("one", "two", "thr")


def test_a_silent_stream_has_no_lines() -> None:
    assert Tail().lines() == ()


def test_a_progress_bar_shows_its_last_state() -> None:
    tail = Tail()
    tail.take(b"\r 10%\r 20%\r\nfailed\r\n", NOW)

    assert tail.lines() == (" 20%", "failed")


def test_bytes_that_are_no_text_are_replaced() -> None:
    tail = Tail()
    tail.take(b"\xff\xfe ok\n", NOW)

    assert tail.lines() == ("\ufffd\ufffd ok",)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 5000])
def test_a_line_that_lost_its_beginning_is_marked_when_it_is_the_only_one(chunk_bytes: int) -> None:
    tail = Tail(byte_limit=100)
    for start in range(0, 5000, chunk_bytes):
        tail.take(b"x" * min(chunk_bytes, 5000 - start), NOW)

    (line,) = tail.lines()

    assert line.startswith("…x")
    assert 100 <= len(line) <= 201


@given(st.lists(st.integers(0, 30).map(lambda size: b"y" * size + b"\n"), min_size=1, max_size=80))
def test_lines_are_whole_and_memory_is_bounded(lines: list[bytes]) -> None:
    tail = Tail(byte_limit=64)
    for line in lines:
        tail.take(line, NOW)
        assert len(tail._kept) <= 128

    told = [line.encode() + b"\n" for line in tail.lines(5)]

    assert told == lines[len(lines) - len(told) :]
    is_bound_reached = sum(map(len, lines[-len(told) - 1 :])) >= 64
    assert len(told) == min(5, len(lines)) or is_bound_reached
