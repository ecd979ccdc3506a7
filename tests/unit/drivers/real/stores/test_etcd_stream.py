"""Answers of HTTP, however their bytes arrive: whole ones, and the lines of one without an end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import RemoteProtocolError
from rankwise.drivers.real.stores.etcd_stream import Response, ResponseLines

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
LINES = st.lists(st.binary(min_size=1, max_size=30).map(lambda b: b.replace(b"\n", b" ")))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@given(lines=LINES, cuts=st.lists(st.integers(1, 40)), pieces=st.lists(st.integers(1, 40)))
def test_every_line_arrives_once_whatever_the_chunks_and_packets(
    lines: list[bytes], cuts: list[int], pieces: list[int]
) -> None:
    body = b"".join(line + b"\n" for line in lines)
    chunks = b"".join(chunk(part) for part in cut(body, cuts))
    reader = ResponseLines()

    told = [line for part in cut(HEAD + chunks, pieces) for line in reader.feed(part)]

    assert told == lines
    assert reader.status == 200
    assert not reader.is_over
    assert reader.feed(b"0\r\n\r\n") == []
    assert reader.is_over


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in [*sizes, len(data)]:
        parts.append(data[:size])
        data = data[size:]
    return [part for part in parts if part]


def test_an_error_of_known_length_is_told_when_it_is_complete() -> None:
    reader = ResponseLines()

    assert reader.feed(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 4\r\n\r\nab") == []
    assert reader.feed(b"cd") == [b"abcd"]
    assert (reader.status, reader.is_over) == (401, True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 what\r\n\r\n",
        HEAD + b"size\r\n",
        b"HTTP/1.1" + b" " * 70_000,
    ],
)
def test_what_is_no_http_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="no HTTP"):
        ResponseLines().feed(data)


@given(
    body=st.binary(max_size=60),
    cuts=st.none() | st.lists(st.integers(1, 40)),
    pieces=st.lists(st.integers(1, 40)),
)
def test_a_whole_answer_is_over_with_its_last_byte_and_leaves_the_connection_to_the_next(
    body: bytes, cuts: list[int] | None, pieces: list[int]
) -> None:
    if cuts is None:
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    else:
        answer = HEAD + b"".join(chunk(part) for part in cut(body, cuts)) + b"0\r\n\r\n"
    parts = cut(answer, pieces)
    response = Response()

    told = b""
    for part in parts:
        assert not response.is_over
        told += response.feed(part)

    assert told == body
    assert (response.status, response.is_over) == (200, True)
    assert not response.ends_with_connection


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 400 Bad Request\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
    ],
)
def test_a_body_of_unknown_length_ends_with_its_connection(head: bytes) -> None:
    response = Response()

    assert response.feed(head + b"abc") == b"abc"
    assert not response.is_over
    assert response.end()
    assert response.ends_with_connection


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc",
        HEAD + b"3\r\nab",
        HEAD + chunk(b"abc"),
        HEAD + chunk(b"abc") + b"0\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_not_over(data: bytes) -> None:
    response = Response()

    response.feed(data)

    assert not response.end()


def test_what_follows_the_last_chunk_belongs_to_the_answer() -> None:
    response = Response()

    assert response.feed(HEAD + chunk(b"abc") + b"0\r\nGrpc-Trailer: 1\r\n") == b"abc"
    assert not response.is_over
    assert response.feed(b"\r\n") == b""
    assert response.is_over
