"""The lines of an answer that never ends, however its bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import RemoteProtocolError
from rankwise.drivers.real.stores.etcd_stream import ResponseLines

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
