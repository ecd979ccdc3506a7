"""Both sides of a request over one piece of memory, with what may go wrong in it."""

import os
import struct
from collections.abc import Iterator

import msgspec
import pytest

from rankwise.base.errors import ConfigError, RemoteProtocolError
from rankwise.core.tasks.frames import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    FrameKind,
    decode_frame,
    encode_frame,
)
from rankwise.core.tasks.request import Deliver, GiveUp
from rankwise.drivers.real.tree.arena import FRAME_BYTES
from rankwise.drivers.real.tree.pipe_protocol import (
    ANSWERED,
    KIND_SHIFT,
    LEFT_IN_FILE,
    VALUE_SHIFT,
    unpack_word,
)
from rankwise.drivers.real.tree.reports import ReportFile, decode_report
from rankwise.drivers.real.tree.requests import ChildRequests, RequestServer


def answer(body: bytes) -> bytes:
    if body == b"fail":
        raise ValueError("as you wish")
    return body * 2


class Pair:
    """A parent and a child whose words do not ring by themselves."""

    def __init__(self) -> None:
        self.frame = memoryview(bytearray(FRAME_BYTES))
        self.read_fd, self.write_fd = os.pipe()
        self.reports = ReportFile()
        self.rung: list[int] = []
        self.kills = 0
        self.parent = ChildRequests("chip 0", self.frame, self.rung.append, self.kill)
        self.child = RequestServer(0, self.frame, self.write_fd, self.reports, answer)

    def kill(self) -> None:
        self.kills += 1

    def word(self) -> tuple[int, int]:
        (word,) = unpack_word(os.read(self.read_fd, 8))
        return word >> KIND_SHIFT & 0xFF, word >> VALUE_SHIFT

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)
        self.reports.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_request_is_answered(pair: Pair) -> None:
    call = pair.parent.call(b"ab")
    pair.child.serve(pair.rung.pop())
    kind, length = pair.word()
    pair.parent.on_answer(length)

    assert kind == ANSWERED
    assert pair.parent.end_of(call) == Deliver(call, b"abab", succeeded=True)


def test_what_the_child_raises_is_the_answer(pair: Pair) -> None:
    call = pair.parent.call(b"fail")
    pair.child.serve(pair.rung.pop())
    pair.parent.on_answer(pair.word()[1])
    end = pair.parent.end_of(call)

    assert isinstance(end, Deliver)
    assert not end.succeeded
    assert decode_report(end.body).summary == "ValueError: as you wish"


def test_an_answer_that_is_too_long_for_the_frame_goes_into_the_file(pair: Pair) -> None:
    body = b"x" * (FRAME_BYTES - HEADER_BYTES)
    call = pair.parent.call(body)
    pair.child.serve(pair.rung.pop())
    length = pair.word()[1]
    ((_, report),) = pair.reports.read_new()
    pair.parent.on_answer_bytes(report.left)

    assert length == LEFT_IN_FILE
    assert pair.parent.end_of(call) == Deliver(call, body * 2, succeeded=True)


def test_a_request_that_is_too_long_for_the_frame_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"too much for a frame"):
        pair.parent.call(b"x" * FRAME_BYTES)


def test_a_forgotten_request_keeps_its_place_until_it_is_answered(pair: Pair) -> None:
    forgotten = pair.parent.call(b"a")
    pair.parent.forget(forgotten)
    call = pair.parent.call(b"b")

    assert len(pair.rung) == 1
    pair.child.serve(pair.rung.pop())
    pair.parent.on_answer(pair.word()[1])
    assert pair.parent.end_of(call) is None
    pair.child.serve(pair.rung.pop())
    pair.parent.on_answer(pair.word()[1])
    assert pair.parent.end_of(call) == Deliver(call, b"bb", succeeded=True)


def test_who_waits_for_a_child_that_dies_is_told(pair: Pair) -> None:
    call = pair.parent.call(b"a")
    pair.parent.on_child_ended("was killed by SIGKILL")
    end = pair.parent.end_of(call)

    assert isinstance(end, GiveUp)
    assert end.reason == "chip 0 is gone: it was killed by SIGKILL"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(0, MAGIC + 1, "it is not a message of rankwise"), (4, VERSION + 1, "layout version")],
)
def test_a_child_ends_when_a_request_is_none_of_its_release(
    pair: Pair, place: int, value: int, message: str
) -> None:
    pair.parent.call(b"ab")
    struct.pack_into("=I" if place == 0 else "=H", pair.frame, place, value)

    with pytest.raises(RemoteProtocolError, match=message):
        pair.child.serve(pair.rung.pop())


def test_a_child_ends_when_a_request_was_cut(pair: Pair) -> None:
    pair.parent.call(b"ab")

    with pytest.raises(RemoteProtocolError, match="a message was cut"):
        pair.child.serve(pair.rung.pop() - 1)


def test_a_child_whose_answer_was_cut_is_killed_and_its_caller_told(pair: Pair) -> None:
    call = pair.parent.call(b"ab")
    pair.child.serve(pair.rung.pop())
    pair.parent.on_answer(pair.word()[1] - 1)
    end = pair.parent.end_of(call)

    assert pair.kills == 1
    assert isinstance(end, GiveUp)
    assert "a message was cut" in end.reason


def test_a_child_that_answers_what_nobody_asked_is_killed_and_asked_nothing_more(
    pair: Pair,
) -> None:
    pair.parent.call(b"ab")
    pair.child.serve(pair.rung.pop())
    length = pair.word()[1]
    pair.parent.on_answer(length)

    pair.parent.on_answer(length)
    end = pair.parent.end_of(pair.parent.call(b"c"))

    assert pair.kills == 1
    assert isinstance(end, GiveUp)
    assert end.reason == "chip 0 takes no more requests: it answered request #1 out of turn"


def test_neither_side_takes_what_is_the_others_to_send(pair: Pair) -> None:
    call = pair.parent.call(b"ab")
    length = pair.rung.pop()
    request = bytes(pair.frame[:length])
    pair.parent.on_answer(length)
    end = pair.parent.end_of(call)

    assert isinstance(end, GiveUp)
    assert "it sent a REQUEST, which is the parent's to send" in end.reason
    pair.frame[:length] = encode_frame(
        msgspec.structs.replace(decode_frame(request), kind=FrameKind.REPLY)
    )
    with pytest.raises(RemoteProtocolError, match="sent a REPLY, which is a worker's to send"):
        pair.child.serve(length)
