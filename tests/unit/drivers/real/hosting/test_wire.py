"""Frames survive any cut of the stream, and nonsense is refused in words."""

import fcntl
import marshal
import os
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.drivers.real.hosting import wire
from rankwise.drivers.real.hosting.wire import BadFrame, FrameReader, FrameWriter

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + bytes(4) + body


messages = st.lists(st.tuples(st.text(), values), max_size=5)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(messages, st.data())
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(
    sent: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    stream = b"".join(map(wire.encode, sent))
    reader = FrameReader()

    received = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += reader.feed(stream[:cut])
        stream = stream[cut:]

    assert received == [(message, []) for message in sent]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_descriptors_go_to_the_frame_that_announced_them(
    counts: list[int], data: st.DataObject
) -> None:
    """As the kernel does: a read ends with the bytes that begin with descriptors, or before."""
    reader = FrameReader()
    received = []
    expected = []
    for frame, count in enumerate(counts):
        fds = [100 * frame + index for index in range(count)]
        stream = wire.encode(("frame", frame), count)
        cut = data.draw(st.integers(1, len(stream)))
        received += reader.feed(stream[:cut], fds or None)
        received += reader.feed(stream[cut:])
        expected.append((("frame", frame), fds))

    assert received == expected


def test_lone_surrogates_of_the_environment_survive() -> None:
    message = ("spawn", 1, {"env": {"NAME": os.fsdecode(b"\xff\xfe")}})

    assert FrameReader().feed(wire.encode(message)) == [(message, [])]


def test_descriptors_arrive_open_and_are_not_inherited(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    read_fd, write_fd = os.pipe()
    wire.send(ours, ("first",))
    wire.send(ours, ("take", 1), [write_fd])
    wire.send(ours, ("last",))
    os.close(write_fd)
    theirs.settimeout(0)
    reader = FrameReader()

    frames: list[wire.Frame] = []
    while len(frames) < 3:
        frames += reader.receive(theirs)

    assert [message[0] for message, _ in frames] == ["first", "take", "last"]
    (received,) = frames[1][1]
    assert fcntl.fcntl(received, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.write(received, b"through")
    assert os.read(read_fd, 10) == b"through"
    os.close(received)
    os.close(read_fd)


def test_a_message_larger_than_the_socket_goes_through_a_non_blocking_socket(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    ours.settimeout(0)
    message = ("large", "x" * 5_000_000)
    sender = threading.Thread(target=wire.send, args=(ours, message))
    sender.start()
    reader = FrameReader()

    frames: list[Any] = []
    while not frames:
        frames = reader.receive(theirs)
    sender.join()

    assert frames == [(message, [])]


def test_a_descriptor_that_does_not_fit_is_missing_and_the_stream_goes_on(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    wire.send(ours, ("take", 1), [0, 0])
    wire.send(ours, ("after",))
    reader = FrameReader()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        frames = reader.receive(theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    while len(frames) < 2:
        frames += reader.receive(theirs)

    assert frames == [(("take", 1), []), (("after",), [])]


def test_the_end_of_the_stream_shows_though_it_cuts_a_frame(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    ours.sendall(wire.encode(("whole",)) + wire.encode(("cut",))[:-1])
    ours.close()
    reader = FrameReader()

    assert reader.receive(theirs) == [(("whole",), [])]
    assert not reader.ended
    assert reader.receive(theirs) == []
    assert reader.ended


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n", "announced a frame of"),
        (framed(b"\xffnope"), "not a marshalled value"),
        (framed(marshal.dumps(["spawn"])), "holds a list, expected a tuple with a name"),
        (wire.encode(("x",), 1), "announced 1 descriptors, but none came"),
    ],
)
def test_nonsense_is_refused_in_words(stream: bytes, complaint: str) -> None:
    with pytest.raises(BadFrame, match=complaint):
        FrameReader().feed(stream)


def test_more_descriptors_than_announced_are_refused() -> None:
    with pytest.raises(BadFrame, match="announced 1 descriptors, but 2 came"):
        FrameReader().feed(wire.encode(("x",), 1), [900, 901])


def test_what_the_kernel_could_not_carry_is_refused_before_it_is_sent() -> None:
    with pytest.raises(BadFrame, match="254 descriptors"):
        wire.encode(("x",), 254)
    with pytest.raises(BadFrame, match="is more than a frame"):
        wire.encode(("x" * (wire.BODY_BYTES_MAX + 1),))


def test_replies_wait_for_a_reader_that_is_slow(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.settimeout(0)
    writer = FrameWriter()
    for number in range(200):
        writer.add(("reply", number, "x" * 10_000))

    writer.flush(ours)

    assert not writer.is_empty
    reader = FrameReader()
    received: list[Any] = []
    while len(received) < 200:
        received += reader.receive(theirs)
        writer.flush(ours)
    assert [message[1] for message, _ in received] == list(range(200))
    assert writer.is_empty


def test_closing_a_reader_closes_descriptors_of_a_frame_that_never_ended(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    read_fd, write_fd = os.pipe()
    stream = wire.encode(("cut",), 1)
    socket.send_fds(ours, [stream[:-1]], [write_fd])
    os.close(write_fd)
    reader = FrameReader()
    assert reader.receive(theirs) == []

    reader.close()

    assert os.read(read_fd, 1) == b"", "nobody holds the other end any more"
    os.close(read_fd)
