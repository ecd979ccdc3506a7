"""Drives a guardian or a fork server over its socket, as the agent does."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from rankwise.drivers.real.hosting import wire

PATIENCE = 60.0
"""How long a test waits for what must happen, in seconds; far longer than it takes."""


class Hosted:
    """A guardian or fork server with its socket; leaving the context ends it."""

    def __init__(
        self, program: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        with ExitStack() as stack:
            self.socket, theirs = socket.socketpair()
            stack.callback(self.socket.close)
            self.socket.settimeout(PATIENCE)
            with theirs:
                fd = theirs.fileno()
                self.process = subprocess.Popen(
                    [sys.executable, *wire.program_arguments(program, fd), *arguments],
                    pass_fds=[fd],
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
            self._exit = stack.pop_all()
        self._reader = wire.FrameReader()
        self._messages: list[tuple[Any, ...]] = []
        while (message := self.next())[0] == "importing":
            pass
        _, self.pid, self.details = message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()
        self.process.wait(PATIENCE)

    def order(self, worker: int, fds: dict[int | str, int] | None = None, **order: Any) -> None:
        """Order a worker; `argv` or `program` and more are keywords."""
        fds = fds or {}
        self.send("environment", order.pop("env", dict(os.environ)))
        order = {"env": {}, "cwd": None, **order, "fds": list(fds)}
        self.send("spawn", worker, order, fds=tuple(fds.values()))

    def send(self, *message: Any, fds: Sequence[int] = ()) -> None:
        wire.send(self.socket, message, fds)

    def signal(self, worker: int, number: int, *, group: bool) -> None:
        """Order a signal."""
        self.send("signal", worker, int(number), group)

    def next(self) -> tuple[Any, ...]:
        """Return the next message."""
        while not self._messages:
            self._messages += [message for message, _ in self._reader.receive(self.socket)]
            assert not self._reader.ended, "it has died"
        return self._messages.pop(0)

    def wait_for(self, *beginning: Any) -> tuple[Any, ...]:
        """Return the next message that begins like this; those before it are dropped."""
        while True:
            message = self.next()
            if message[: len(beginning)] == beginning:
                return message

    def run(self, worker: int, fds: dict[int | str, int] | None = None, **order: Any) -> int:
        """Run a worker to its end and return its exit code."""
        self.order(worker, fds, **order)
        code: int = self.wait_for("exited", worker)[2]
        return code

    def output_of(self, worker: int, **order: Any) -> tuple[int, str]:
        """Run a worker; return its exit code, and what it has written to stdout and stderr."""
        read_fd, write_fd = os.pipe()
        self.order(worker, {1: write_fd, 2: write_fd}, **order)
        os.close(write_fd)
        text = read_to_end(read_fd).decode()
        return self.wait_for("exited", worker)[2], text


def read_to_end(fd: int) -> bytes:
    """Read until every writer has closed, and close."""
    with open(fd, "rb") as file:
        return file.read()


def read_line(fd: int) -> str:
    """Read one line, waiting for it, and nothing behind it."""
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], PATIENCE)
        assert readable, f"nothing came after {line!r}"
        line += os.read(fd, 1)
    return line.decode().strip()


def all_ended(pidfds: Sequence[int], patience: float) -> bool:
    """Wait until all these processes have ended, and close the descriptors."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    living = set(pidfds)
    while living:
        ended = poll.poll(patience * 1000)
        for pidfd, _ in ended:
            poll.unregister(pidfd)
            living.discard(pidfd)
        if not ended:
            break
    for pidfd in pidfds:
        os.close(pidfd)
    return not living
