"""The line splitter: any chunking of any bytes gives the same whole lines."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import MILLISECOND, SECOND, Instant
from rankwise.drivers.real.logs.lines import CUT_MARK, LineSplitter, prefixed

START = Instant(5 * SECOND)

plain_bytes = st.text(alphabet="ab\n\0\u00e9", max_size=60).map(str.encode)
any_bytes = st.lists(
    st.sampled_from([b"a", b"b", b"\r", b"\n", b"\r\n", b"\0", b"\xff", b"\xc3"]), max_size=40
).map(b"".join)


@st.composite
def chunkings(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> list[bytes]:
    """Some bytes, cut anywhere."""
    content = draw(contents)
    cuts = draw(st.sets(st.integers(1, max(len(content) - 1, 1)), max_size=12))
    places = [0, *sorted(cuts), len(content)]
    return [content[start:end] for start, end in pairwise(places) if start < end]


def split(chunks: list[bytes], splitter: LineSplitter) -> list[bytes]:
    """All blocks, with time standing still."""
    blocks = [splitter.feed(chunk, START) for chunk in chunks]
    blocks.append(splitter.flush())
    return [block for block in blocks if block]


@given(chunkings(plain_bytes))
def test_any_chunking_gives_every_byte_in_whole_lines(chunks: list[bytes]) -> None:
    content = b"".join(chunks)

    blocks = split(chunks, LineSplitter())

    assert all(block.endswith(b"\n") for block in blocks)
    missing_newline = b"\n" if content and not content.endswith(b"\n") else b""
    assert b"".join(block for block in blocks) == content + missing_newline


@given(chunkings(any_bytes))
def test_a_line_shows_what_follows_its_last_carriage_return(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\rnothing more is shown early within this second\n\rx", START)
    splitter.feed(b"\n", START)

    blocks = split(chunks, splitter)

    *lines, last = b"".join(chunks).split(b"\n")
    shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
    if last.rstrip(b"\r"):
        shown.append(last.rstrip(b"\r").rpartition(b"\r")[2])
    assert b"".join(block for block in blocks) == b"".join(line + b"\n" for line in shown)


@given(chunkings(plain_bytes), st.integers(1, 10))
def test_a_line_over_the_limit_leaves_in_pieces_with_a_prefix_each(
    chunks: list[bytes], line_limit: int
) -> None:
    content = b"".join(chunks)
    splitter = LineSplitter(line_limit=line_limit)
    blocks = []

    for chunk in chunks:
        blocks.append(splitter.feed(chunk, START))
        assert len(splitter._held) <= line_limit
    blocks.append(splitter.flush())

    text = b"".join(prefixed(block, b"\xff") for block in blocks if block)
    whole = text.replace(CUT_MARK, b"").replace(b"\n", b"").replace(b"\xff", b"")
    assert whole == content.replace(b"\n", b"")
    assert [line for line in text.splitlines() if line.rfind(b"\xff") != 0] == []


def test_a_line_written_in_pieces_is_one_line() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"abc", START) == b""
    assert splitter.feed(b"def", START) == b""
    assert splitter.feed(b"\nghi", START) == b"abcdef\n"
    assert splitter.flush() == b"ghi\n"
    assert splitter.flush() == b""


def test_a_prefix_stands_in_front_of_every_line() -> None:
    assert prefixed(b"one\ntwo\n", b"[0]:") == b"[0]:one\n[0]:two\n"
    assert prefixed(b"\n\n", b"[0]:") == b"[0]:\n[0]:\n"
    assert prefixed(b"one\n", b"") == b"one\n"


def test_windows_line_ends_are_line_ends_even_when_cut_in_two() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"one\r\ntwo\r", START) == b"one\n"
    assert splitter.feed(b"\nthree\r\r\n", START) == b"two\nthree\n"


def test_a_progress_bar_is_shown_once_a_second() -> None:
    splitter = LineSplitter()
    shown = []

    for step in range(25):
        now = Instant(START + step * 100 * MILLISECOND)
        shown.append(splitter.feed(b"\r%3d%%" % step, now))
    shown.append(splitter.feed(b"\r100%\n", Instant(START + 2 * SECOND + 600 * MILLISECOND)))

    assert [block for block in shown if block] == [
        b"  0%\n",
        b" 10%\n",
        b" 20%\n",
        b"100%\n",
    ]


def test_a_progress_bar_that_ends_as_it_was_shown_is_not_shown_twice() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"\r100%", START) == b"100%\n"
    assert splitter.feed(b"\nafter\n", START) == b"after\n"


def test_a_killed_progress_bar_that_was_shown_is_not_shown_twice() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"\r43%", START) == b"43%\n"
    assert splitter.flush() == b""


def test_a_bar_that_is_drawn_with_carriage_returns_at_the_end_shows_too() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"1 of 3\r", START) == b""
    assert splitter.feed(b"2 of 3\r", START) == b"2 of 3\n"
    assert splitter.feed(b"3 of 3\r", START) == b""
    assert splitter.flush() == b"3 of 3\n"


def test_a_bar_that_is_redrawn_for_hours_takes_no_memory() -> None:
    splitter = LineSplitter(line_limit=100)

    for step in range(1000):
        block = splitter.feed(b"\rstep %d" % step, START)
        assert not block or block == b"step 0\n"

    assert splitter.flush() == b"step 999\n"


def test_a_bar_whose_carriage_return_came_alone_shows_its_next_state() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"1 of 3\r", START) == b""
    assert splitter.feed(b"2 of 3", START) == b"2 of 3\n"


def test_carriage_returns_alone_take_no_memory() -> None:
    splitter = LineSplitter(line_limit=100)

    assert splitter.feed(b"x" + b"\r" * 1000, START) == b""
    assert splitter.feed(b"\r" * 1000 + b"\n", START) == b"x\n"


def test_the_newline_of_a_line_that_left_in_pieces_is_no_empty_line() -> None:
    splitter = LineSplitter(line_limit=3)

    assert splitter.feed(b"12345", START) == b"12345" + CUT_MARK + b"\n"
    assert splitter.feed(b"67890", START) == b"67890" + CUT_MARK + b"\n"
    assert splitter.feed(b"\n", START) == b""
    assert splitter.feed(b"\n", START) == b"\n"


def test_a_line_that_left_in_pieces_and_is_redrawn_shows_its_last_state() -> None:
    at_once, held = LineSplitter(line_limit=3), LineSplitter(line_limit=3)
    for splitter in (at_once, held):
        assert splitter.feed(b"\rbar\n", START) == b"bar\n"
        assert splitter.feed(b"12345", START) == b"12345" + CUT_MARK + b"\n"

    assert at_once.feed(b"6\rnew\n", START) == b"new\n"
    assert held.feed(b"6\rne", START) == b"ne\n"
    assert held.feed(b"w", Instant(START + 1)) == b""
    assert held.feed(b"\n", Instant(START + 1)) == b"new\n"


def test_a_piece_that_repeats_what_was_shown_is_shown() -> None:
    splitter = LineSplitter(line_limit=5)

    assert splitter.feed(b"\rab", START) == b"ab\n"
    assert splitter.feed(b"cdefg", START) == b"abcdefg" + CUT_MARK + b"\n"
    assert splitter.feed(b"ab\n", START) == b"ab\n"


def test_a_line_after_finished_ones_that_is_redrawn_shows_with_them() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"epoch 1\n\r10%", START) == b"epoch 1\n10%\n"


def test_a_line_of_32_mib_stays_whole() -> None:
    splitter = LineSplitter()

    told = [splitter.feed(b"x" * (1 << 20), Instant(0)) for _ in range(32)]
    lines = splitter.feed(b"\n", Instant(0))

    assert told == [b""] * 32
    assert lines == b"x" * (32 << 20) + b"\n"
