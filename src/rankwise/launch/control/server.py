"""The agent's end of the control socket: no thread, one descriptor to watch.

The server watches its connections with an epoll of its own, and an epoll can itself be watched:
the agent's reactor sees one descriptor and calls `on_readable`.
"""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from select import EPOLLIN, EPOLLOUT, epoll
from typing import Any, Literal, Self

import msgspec

from rankwise.launch.control.addresses import peer, socket_name

Question = Literal["status", "ranks", "stacks", "why", "logs", "stop", "end"]

_REQUEST_BYTES_MAX = 4096
_CONVERSATIONS_MAX = 32
_LAST_SEND_S = 1.0
"""How long a client may take to read on when the run is over."""


class ControlRequest(msgspec.Struct, frozen=True):
    """What a client wants to know, or to be done.

    Attributes:
        ask: which of the questions.
        rank: whose logs; None for those of all ranks.
        follow: whether to send what is written from now on, too.
        at_once: kill the ranks, without a grace.
    """

    ask: Question
    rank: int | None = None
    follow: bool = False
    at_once: bool = False


class Reply:
    """Where the answer to one question goes. Writing to a client that has left does nothing."""

    def __init__(self, conversation: "_ControlConversation") -> None:
        self._conversation = conversation

    @property
    def is_wanted(self) -> bool:
        """Whether the client is still there and the answer not complete."""
        return self._conversation.is_open and not self._conversation.is_answered

    @property
    def unsent_bytes(self) -> int:
        """How much of it the client has not taken yet."""
        return len(self._conversation.unsent)

    def send(self, line: Mapping[str, Any]) -> None:
        """Add one line to the answer; never blocks."""
        if self.is_wanted:
            self._conversation.unsent += msgspec.json.encode(line) + b"\n"
            self._conversation.write()

    def finish(self) -> None:
        """The answer is complete."""
        if self.is_wanted:
            self._conversation.is_answered = True
            self._conversation.write()


class _ControlConversation:
    """One client: reads its question, then writes the answer, then ends."""

    def __init__(
        self,
        connection: socket.socket,
        watcher: epoll,
        on_question: Callable[[bytes, "_ControlConversation"], None],
    ) -> None:
        self.unsent = bytearray()
        self.is_open = True
        self.is_answered = False
        self.asked: Question | None = None
        """What it wants to know, once that is known."""
        self._is_asked = False
        self._received = bytearray()
        self._connection = connection
        self._watcher = watcher
        self._on_question = on_question
        connection.settimeout(0)
        watcher.register(connection, EPOLLIN)

    def go_on(self, events: int) -> None:
        """Do what the events of this connection allow."""
        if not self._is_asked:
            self._read()
        elif events & EPOLLOUT:
            self.write()
        else:
            self.end()  # nothing but its leaving is watched for while the answer is on its way

    def write(self) -> None:
        """Send what the client is ready to take of the answer; end once it has all."""
        try:
            while self.unsent:
                del self.unsent[: self._connection.send(self.unsent)]
        except BlockingIOError:
            self._watcher.modify(self._connection, EPOLLOUT)
            return
        except OSError:
            self.end()  # the client has left
            return
        if self.is_answered:
            self.end()
        else:
            self._watcher.modify(self._connection, 0)

    def end(self) -> None:
        """Hang up."""
        if self.is_open:
            self.is_open = False
            self._watcher.unregister(self._connection)
            self._connection.close()

    def send_the_rest(self) -> None:
        """Send what waits, since this is the end, to a client that takes it soon."""
        if self.is_open and self.unsent:
            self._connection.settimeout(_LAST_SEND_S)
            with suppress(OSError):  # it has left, or sleeps
                self._connection.sendall(self.unsent)

    def _read(self) -> None:
        try:
            piece = self._connection.recv(_REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        self._received += piece
        line, newline, _ = self._received.partition(b"\n")
        if newline:
            self._is_asked = True
            self._watcher.modify(self._connection, 0)
            self._on_question(bytes(line), self)
        elif not piece or len(self._received) >= _REQUEST_BYTES_MAX:
            self.end()


class ControlServer:
    """The agent's end: one descriptor for the reactor, `on_request` for each question.

    The constructor raises OSError where unix sockets are forbidden; a run there is still a run, so
    the caller decides what that means.
    """

    def __init__(
        self,
        run_id: str,
        on_request: Callable[[ControlRequest, Reply], None],
        *,
        pid: int | None = None,
        is_pool: bool = False,
    ) -> None:
        self._on_request = on_request
        self._conversations: dict[int, _ControlConversation] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            own = os.getpid() if pid is None else pid
            self._listener.bind(socket_name(run_id, own, is_pool=is_pool))
            self._listener.listen(_CONVERSATIONS_MAX)
            self._watcher = epoll()
        except BaseException:
            self._listener.close()
            raise
        self._watcher.register(self._listener, EPOLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor to watch for readability."""
        return self._watcher.fileno()

    def on_readable(self) -> None:
        """Serve whatever is ready; never blocks."""
        for fd, events in self._watcher.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif (conversation := self._conversations.get(fd)) is not None:
                conversation.go_on(events)
        self._forget_ended()

    def close(self) -> None:
        """Leave: the name is free, and then clients see end of file. Harmless when repeated."""
        self._listener.close()
        for conversation in self._conversations.values():
            conversation.send_the_rest()
            conversation.end()
        self._conversations.clear()
        self._watcher.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if peer(connection)[1] not in (os.geteuid(), 0):
            connection.close()
            return
        self._forget_ended()
        if len(self._conversations) >= _CONVERSATIONS_MAX:
            self._make_room()
        self._conversations[connection.fileno()] = _ControlConversation(
            connection, self._watcher, self._answer
        )

    def _make_room(self) -> None:
        """Send the oldest client away: one that asks nothing, or else one that reads logs."""
        clients = list(self._conversations.values())
        silent = [client for client in clients if client.asked is None]
        readers = [client for client in clients if client.asked == "logs"]
        leaving = next(iter(silent or readers or clients))
        Reply(leaving).send(
            {"error": f"{_CONVERSATIONS_MAX} newer requests came; try again, the run continues"}
        )
        leaving.end()
        self._forget_ended()

    def _forget_ended(self) -> None:
        # Replies end conversations at any time, also between two calls of `on_readable`.
        self._conversations = {
            fd: conversation
            for fd, conversation in self._conversations.items()
            if conversation.is_open
        }

    def _answer(self, line: bytes, conversation: _ControlConversation) -> None:
        reply = Reply(conversation)
        try:
            request = msgspec.json.decode(line, type=ControlRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reply.send({"error": f"not a request: {error}"})
            reply.finish()
        else:
            conversation.asked = request.ask
            self._on_request(request, reply)
