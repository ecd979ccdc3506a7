"""What is sent to those who read along: history, chunks, and no more than they take."""

import base64
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.base.units import Instant
from rankwise.launch.control.addresses import socket_name
from rankwise.launch.control.server import ControlRequest, ControlServer, Reply
from rankwise.launch.looking.log_readers import (
    UNSENT_BYTES_MAX,
    FollowedStream,
    LogReaders,
    StreamName,
    WrittenExtent,
)

STDOUT, STDERR, OTHER = (
    StreamName(0, 0, "stdout"),
    StreamName(0, 0, "stderr"),
    StreamName(1, 0, "stdout"),
)
NOW = Instant(0)


class Run:
    """A run with two ranks, whose agent is this thread."""

    def __init__(self, log_file: Path) -> None:
        self.readers = LogReaders()
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self._written = [
            WrittenExtent(STDOUT, str(log_file), b""),
            WrittenExtent(STDERR, "/no/such/file", b"a warning\n"),
            WrittenExtent(OTHER, "", b"hello"),
        ]
        self.server = ControlServer(self.name, self._on_request)

    def _on_request(self, request: ControlRequest, reply: Reply) -> None:
        self.readers.serve(request, reply, self._written)

    def connect(self, **request: Any) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(socket_name(self.name, os.getpid()))
        connection.sendall(json.dumps({"ask": "logs", **request}).encode() + b"\n")
        self.server.on_readable()  # the connection
        self.server.on_readable()  # and what it says
        return connection

    def end(self) -> None:
        self.server.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    log_file = tmp_path / "stdout.log"
    log_file.write_bytes(b"line\n")
    run = Run(log_file)
    yield run
    run.end()


def read(connection: socket.socket) -> list[dict[str, Any]]:
    with connection, connection.makefile("rb") as answer:
        return [json.loads(line) for line in answer]


def test_the_history_comes_from_files_and_else_from_memory(run: Run, tmp_path: Path) -> None:
    header, *lines = read(run.connect())

    assert header == {"streams": 3}
    path = str(tmp_path / "stdout.log")
    assert [line.get("path") for line in lines] == [path, None, None]
    assert lines[0]["size_bytes"] == 5
    assert [base64.b64decode(line["data"]) for line in lines[1:]] == [b"a warning\n", b"hello"]


def test_who_follows_a_rank_gets_what_it_writes_until_the_run_ends(run: Run) -> None:
    connection = run.connect(rank=1, follow=True)

    FollowedStream(run.readers, OTHER).take(b" world", NOW)
    FollowedStream(run.readers, STDOUT).take(b"of another rank", NOW)
    run.end()

    header, *lines = read(connection)
    assert header == {"streams": 1}
    assert [base64.b64decode(line["data"]) for line in lines] == [b"hello", b" world"]
    assert {line["rank"] for line in lines} == {1}


def test_a_reader_that_takes_nothing_is_given_up_and_told_so(run: Run) -> None:
    connection = run.connect(follow=True)
    stream = FollowedStream(run.readers, STDOUT)
    chunk = b"x" * (1 << 20)

    for _ in range(3 * UNSENT_BYTES_MAX // len(chunk)):
        stream.take(chunk, NOW)

    # No more is kept for it than it may be behind, and a chunk in base64.
    connection.settimeout(5)
    run.server.on_readable()
    received = bytearray()
    while not received.endswith(b'ranks write"}\n'):
        received += connection.recv(1 << 20)
        run.server.on_readable()
    connection.close()
    assert len(received) < UNSENT_BYTES_MAX + 3 * len(chunk)
    assert json.loads(received.splitlines()[-1]) == {
        "error": "it reads more slowly than the ranks write"
    }
