"""Messages between a pool and a worker, with both ends in one process."""

import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import PickleBuffer
from socket import AF_UNIX, SHUT_WR, SOCK_SEQPACKET, socket, socketpair
from typing import Any

import pytest

from rankwise.drivers.real.pool.messages import (
    MessageKind,
    Packed,
    PoolMessage,
    Receiver,
    send_small,
)
from rankwise.drivers.real.pool.notes import NotesWriter, new_notes
from rankwise.drivers.real.pool.pool_process import (
    NOTES_VARIABLE,
    SOCKET_VARIABLE,
    _PoolWorker,
    serve,
)
from rankwise.drivers.real.pool.remembered_functions import FunctionTable, SentFunction


@pytest.fixture
def ends() -> Iterator[tuple[socket, socket]]:
    pool_end, worker_end = socketpair(AF_UNIX, SOCK_SEQPACKET)
    with pool_end, worker_end:
        yield pool_end, worker_end


def answers(ends: tuple[socket, socket]) -> list[tuple[int, int, Any]]:
    """What a worker answers to what lies in its socket: kind, task, value."""
    pool_end, worker_end = ends
    pool_end.shutdown(SHUT_WR)
    _PoolWorker(worker_end, Receiver(is_writable=False), NotesWriter(new_notes())).serve()
    worker_end.shutdown(SHUT_WR)
    receiver, found = Receiver(is_writable=False), []
    while (message := receiver.receive(pool_end)) is not None:
        body = pickle.loads(message.body) if message.body else None
        found.append((message.kind, message.task, body))
    return found


def call(end: socket, task: int, sent: SentFunction, function: bytes = b"") -> None:
    body = pickle.dumps((("-1",), {}))
    assert send_small(end, MessageKind.CALL, task, body, sent.slot, sent.generation, 0, function)


def test_worker_asks_for_a_function_whose_message_was_taken_back(
    ends: tuple[socket, socket],
) -> None:
    sent = FunctionTable().sent(int)
    call(ends[0], 1, sent)
    call(ends[0], 2, sent, sent.pickled)
    call(ends[0], 3, sent)

    found = answers(ends)

    missing = (MessageKind.FUNCTION_MISSING, 1, None)
    assert found == [missing, (MessageKind.VALUE, 2, -1), (MessageKind.VALUE, 3, -1)]


def test_worker_does_not_take_an_older_function_of_the_same_slot(
    ends: tuple[socket, socket],
) -> None:
    older = FunctionTable().sent(str)
    newer = SentFunction(int, older.slot, older.generation + 1, b"", ())
    call(ends[0], 1, older, older.pickled)
    call(ends[0], 2, newer)

    found = answers(ends)

    assert found == [(MessageKind.VALUE, 1, "-1"), (MessageKind.FUNCTION_MISSING, 2, None)]


def _fail_to_load() -> None:
    raise ZeroDivisionError


class Unreadable:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _fail_to_load, ()


def test_error_of_arguments_that_cannot_be_unpickled_says_so(ends: tuple[socket, socket]) -> None:
    sent = FunctionTable().sent(int)
    body = pickle.dumps(((Unreadable(),), {}))
    send_small(ends[0], MessageKind.CALL, 1, body, sent.slot, sent.generation, 0, sent.pickled)

    [(kind, _, (_, text, _))] = answers(ends)

    assert kind == MessageKind.ERROR
    assert "The worker could not unpickle the arguments." in text


def test_worker_whose_pool_is_gone_ends_quietly(
    ends: tuple[socket, socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = FunctionTable().sent(os.close)
    fd = ends[0].detach()
    body = pickle.dumps(((fd,), {}))
    packed = Packed(MessageKind.CALL, 1, body, (), sent.slot, sent.generation, 0, sent.pickled)
    with socket(AF_UNIX, SOCK_SEQPACKET, 0, os.dup(fd)) as copy:
        packed.send(copy)
    monkeypatch.setenv(SOCKET_VARIABLE, str(ends[1].detach()))
    monkeypatch.setenv(NOTES_VARIABLE, str(new_notes()))

    serve(b"", {}, is_writable=False)  # its READY is unread when the call closes the other end

    assert not Path(f"/proc/self/fd/{fd}").exists()


@contextmanager
def no_more_memory() -> Iterator[None]:
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + (32 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("body_bytes", [0, 64 << 20])
def test_message_for_which_there_is_no_memory_is_received_with_the_reason(
    ends: tuple[socket, socket], body_bytes: int
) -> None:
    large = PickleBuffer(bytes(64 << 20))
    described = [(large, False), (large, False)]
    packed = Packed(MessageKind.CALL, 7, bytes(body_bytes), described)
    packed.send(ends[0])
    before = len([*Path("/proc/self/fd").iterdir()])

    with no_more_memory():
        message = Receiver(is_writable=False).receive(ends[1])

    assert isinstance(message, PoolMessage)
    assert (message.task, message.trouble) == (
        7,
        f"cannot map {64 << 20} bytes: Cannot allocate memory",
    )
    assert not message.buffers
    assert len([*Path("/proc/self/fd").iterdir()]) == before
