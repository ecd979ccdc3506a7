"""The line between an agent and a worker that can be recovered: words both ways, and descriptors.

A socket pair for each worker, made where restarts are left to be used. One message is one word, and
the kernel keeps them apart (SOCK_SEQPACKET). The agent never waits on it: there are a few words per
attempt, far less than the socket holds, and one that cannot be sent is for a worker that is dying.
`rankwise.core.gang.vocabulary` explains the words.
"""

import os
import socket
from contextlib import suppress

import msgspec

from rankwise.base.units import Duration
from rankwise.core.gang.vocabulary import RecoveryMessage, RecoveryOrder

LINE_VARIABLE = "RANKWISE_RECOVER_FD"
"""Names the worker's end of the line."""
MASTER_VARIABLE = "RANKWISE_MASTER_FD"
"""Names the socket that listens at MASTER_PORT, in rank 0 of a world in which ranks live on."""
MESSAGE_BYTES_MAX = 1 << 16
DESCRIPTORS_MAX = 3


class WorkerWord(msgspec.Struct, frozen=True):
    """What a worker says."""

    word: RecoveryMessage
    recall_timeout: Duration = Duration(0)


class AgentWord(msgspec.Struct, frozen=True):
    """What a worker is told; descriptors may come beside the word."""

    word: RecoveryOrder
    environment: dict[str, str | None] = {}
    """With AGAIN: the variables of its new world; None for one that is not set in it."""
    descriptors: tuple[str, ...] = ()
    """With AGAIN: the variables that name the descriptors, in their order."""
    peers: tuple[int, ...] = ()
    """With RECALL: the processes of the ranks on this node."""


_words_of_workers = msgspec.json.Decoder(WorkerWord)
_words_of_agents = msgspec.json.Decoder(AgentWord)


def new_line() -> tuple[socket.socket, socket.socket]:
    """Both ends: the agent's, which never blocks, and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)  # noqa: FBT003  # the standard library's signature
    return ours, theirs


def take_words(line: socket.socket) -> tuple[list[WorkerWord], bool]:
    """For the agent: what has been said by now, and whether the line has ended.

    Unreadable words are left out: the program has written to a descriptor that is not its own.
    """
    words: list[WorkerWord] = []
    while True:
        try:
            data = line.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return words, False
        except OSError:
            return words, True
        if not data:
            return words, True
        with suppress(msgspec.DecodeError):
            words.append(_words_of_workers.decode(data))


def tell(line: socket.socket, word: AgentWord, descriptors: tuple[int, ...] = ()) -> None:
    """For the agent: say a word. A dying worker does not read it."""
    with suppress(OSError):
        socket.send_fds(line, [msgspec.json.encode(word)], descriptors)


def attach_line(fd: int) -> socket.socket | None:
    """For a worker: its end; None if the descriptor is something else, or nothing, by now."""
    try:
        line = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    if (line.family, line.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        line.close()
        return None
    os.set_inheritable(fd, False)  # noqa: FBT003  # the same
    return line


def say(line: socket.socket, word: WorkerWord) -> None:
    """For a worker: say a word. An agent that does not read it is dead, and so are we soon."""
    with suppress(OSError):
        line.send(msgspec.json.encode(word))


def receive(line: socket.socket) -> tuple[AgentWord, list[int]] | None:
    """For a worker: wait for the next word and its descriptors; None when the agent has ended."""
    try:
        data, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
    except OSError:
        return None
    return (_words_of_agents.decode(data), descriptors) if data else None
