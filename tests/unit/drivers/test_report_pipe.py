"""The parser of a worker's report pipe, against every way to cut and spoil its bytes."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.failure import ErrorRecord
from rankwise.base.units import Instant
from rankwise.drivers.real.report_pipe import ErrorReported, Ready, ReportPipe, WorkerReport

READY = b'\x1e{"kind": "ready", "pid": 7}\n'
STACK = b'Current thread 0x00007f (most recent call first):\n  File "a.py", line 3 in f\n'
FATAL = b"Fatal Python error: Segmentation fault\n\n" + STACK
ERROR = ErrorRecord(
    type="ValueError",
    message="bad \x1e shape\n\u2603",
    traceback="Traceback (most recent call last):\nValueError: bad shape\n",
    raised_at=Instant(17),
    wall_ns=99,
)


def record_of(error: ErrorRecord) -> bytes:
    fields = {
        "kind": "error",
        "type": error.type,
        "message": error.message,
        "traceback": error.traceback,
        "raised_at": error.raised_at,
        "wall_ns": error.wall_ns,
    }
    return b"\x1e" + json.dumps(fields).encode() + b"\n"


def feed_in_pieces(pipe: ReportPipe, content: bytes, cuts: list[int]) -> list[WorkerReport]:
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    reports: list[WorkerReport] = []
    for start, end in itertools.pairwise(edges):
        reports += pipe.feed(content[start:end])
    return reports + pipe.finish()


def test_reports_come_in_the_order_in_which_they_were_written() -> None:
    pipe = ReportPipe()

    reports = pipe.feed(READY + record_of(ERROR))

    assert reports == [Ready(7), ErrorReported(ERROR)]


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_no_way_of_cutting_the_bytes_changes_what_is_read(cuts: list[int]) -> None:
    pipe = ReportPipe()

    reports = feed_in_pieces(pipe, READY + STACK + record_of(ERROR) + FATAL, cuts)

    assert reports == [Ready(7), ErrorReported(ERROR)]
    assert pipe.take_stacks() == STACK.decode()
    assert pipe.fatal_stacks == FATAL.decode()


@given(st.integers(0, len(record_of(ERROR)) - 2))
def test_a_record_cut_by_death_loses_none_of_the_text_around_it(length: int) -> None:
    pipe = ReportPipe()

    reports = pipe.feed(STACK + record_of(ERROR)[: max(1, length)] + FATAL) + pipe.finish()

    assert reports == []
    assert pipe.take_stacks() == STACK.decode()
    assert pipe.fatal_stacks == FATAL.decode()


def test_stacks_that_interrupt_a_record_are_kept() -> None:
    pipe = ReportPipe()

    pipe.feed(b'\x1e{"kind": "err' + STACK)

    assert pipe.take_stacks() == STACK.decode()


def test_a_record_may_stand_in_the_middle_of_a_line_of_text() -> None:
    pipe = ReportPipe()

    reports = pipe.feed(b'  File "a.py", ' + READY + b"line 3 in f\n")

    assert reports == [Ready(7)]
    assert pipe.take_stacks() == '  File "a.py", line 3 in f\n'


def test_a_record_that_follows_a_cut_one_is_read() -> None:
    pipe = ReportPipe()

    reports = pipe.feed(b'\x1e{"kind": "error", "ty' + record_of(ERROR))

    assert reports == [ErrorReported(ERROR)]


def test_a_whole_record_without_its_newline_is_read_at_the_end() -> None:
    pipe = ReportPipe()

    assert pipe.feed(record_of(ERROR).rstrip(b"\n")) == []
    assert pipe.finish() == [ErrorReported(ERROR)]


def test_records_of_unknown_kind_are_left_alone() -> None:
    pipe = ReportPipe()

    assert pipe.feed(b'\x1e{"kind": "weather"}\n\x1e[1]\n\x1e{"kind": "error"}\n') == []


def test_half_surrogates_in_a_message_are_told_as_escapes() -> None:
    pipe = ReportPipe()
    odd = ErrorRecord(
        type="OSError", message="caf\udce9", traceback="", raised_at=Instant(0), wall_ns=0
    )

    (report,) = pipe.feed(record_of(odd))

    assert isinstance(report, ErrorReported)
    assert report.error.message == r"caf\udce9"


def test_stacks_on_demand_are_given_once_and_in_whole_lines() -> None:
    pipe = ReportPipe()
    pipe.feed(STACK + b"half a")

    assert pipe.take_stacks() == STACK.decode()
    assert not pipe.has_stacks
    pipe.feed(b" line\n")
    assert pipe.take_stacks() == "half a line\n"


def test_text_is_bounded_and_says_what_it_lacks() -> None:
    pipe = ReportPipe(text_bytes_max=100)

    pipe.feed(STACK * 50)
    taken = pipe.take_stacks()

    assert taken.startswith(STACK.decode())
    assert taken.endswith(f"\n... {50 * len(STACK) - 100} bytes more\n")
    pipe.feed(STACK)
    assert pipe.take_stacks() == STACK.decode()


def test_stacks_that_nobody_took_leave_room_for_those_of_a_fatal_signal() -> None:
    pipe = ReportPipe(text_bytes_max=1000)

    pipe.feed(STACK * 100 + FATAL)

    assert pipe.fatal_stacks == FATAL.decode()


def test_a_record_without_end_is_not_kept_and_what_follows_is_read() -> None:
    pipe = ReportPipe(record_bytes_max=1000)

    for _ in range(100):
        assert pipe.feed(b"\x1e" * (_ == 0) + b"x" * 500) == []

    assert pipe.feed(b"\n" + READY) == [Ready(7)]


def test_text_without_newlines_is_kept_but_not_gathered_for_ever() -> None:
    pipe = ReportPipe(text_bytes_max=1000)

    for _ in range(100):
        pipe.feed(b"y" * 10_000)

    assert pipe.has_stacks
    assert len(pipe.take_stacks()) < 1100


@given(st.lists(st.sampled_from([b"\x1e", b"\n", b"{", b'"', FATAL, READY, b"\xff", b"x"])))
def test_no_bytes_at_all_make_it_fail(pieces: list[bytes]) -> None:
    pipe = ReportPipe(text_bytes_max=200, record_bytes_max=100)

    for piece in pieces:
        pipe.feed(piece)
    pipe.finish()

    assert len(pipe.take_stacks()) < 300
    assert len(pipe.fatal_stacks) < 300
