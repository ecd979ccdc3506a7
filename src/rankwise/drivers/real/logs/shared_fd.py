"""Writing to a descriptor that other processes share, without ever waiting for its reader.

Standard output belongs to the shell, to a pager, to other programs of a pipeline as much as to us.
O_NONBLOCK is a property of what they all share, so setting it would break them. The way to write
instead depends on the descriptor:

- pipes and terminals: opened anew through `/proc/self/fd`, which gives a private view of the
  same pipe or terminal, non-blocking for us alone;
- where that is refused (a terminal of another user, no /proc): the descriptor itself, asked with
  poll before each write, and at most PIPE_BUF bytes at a time, which a pipe takes at once when it
  takes any. A terminal that has been stopped could still block us there;
- sockets: a flag of each single send;
- regular files and devices such as /dev/null: never wait for a reader.
"""

import os
import stat
from select import POLLOUT, poll
from typing import Protocol

PIPE_BUF = 4096
"""How much a pipe that is writable takes without blocking."""


class SharedWriter(Protocol):
    """A way to write without waiting."""

    fd: int
    """What to wait on until it is writable."""

    def write(self, data: memoryview) -> int:
        """Write some of `data`, at least a byte; return how much.

        Raises:
            BlockingIOError: nothing can be written now.
            OSError: nothing can be written ever again.
        """
        ...

    def close(self) -> None:
        """Give back what was opened, never the descriptor that is shared."""
        ...


class DirectWriter:
    """Writes to what never makes a writer wait."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, data: memoryview) -> int:
        """Write as much as there is room for."""
        return os.write(self.fd, data)

    def close(self) -> None:
        """Nothing was opened."""


class ReopenedWriter:
    """Writes through a non-blocking view of its own."""

    def __init__(self, shared_fd: int) -> None:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self.fd = os.open(f"/proc/self/fd/{shared_fd}", flags)

    def write(self, data: memoryview) -> int:
        """Write what fits now."""
        return os.write(self.fd, data)

    def close(self) -> None:
        """Close our view."""
        os.close(self.fd)


class CautiousWriter:
    """Asks before each write whether it would wait, and writes little at a time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = poll()
        self._poll.register(fd, POLLOUT)

    def write(self, data: memoryview) -> int:
        """Write up to PIPE_BUF bytes if the descriptor says that it takes some."""
        if not self._poll.poll(0):
            raise BlockingIOError
        return os.write(self.fd, data[:PIPE_BUF])

    def close(self) -> None:
        """Nothing was opened."""


class SocketWriter:
    """Sends with the flag that forbids waiting."""

    def __init__(self, fd: int) -> None:
        import socket  # noqa: PLC0415 - a console that is a socket is rare

        self.fd = fd
        self._flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        self._socket = socket.socket(fileno=os.dup(fd))

    def write(self, data: memoryview) -> int:
        """Send what fits now."""
        return self._socket.send(data, self._flags)

    def close(self) -> None:
        """Close our duplicate."""
        self._socket.close()


def shared_writer(fd: int) -> SharedWriter:
    """The best way to write to `fd`.

    Raises:
        OSError: `fd` is closed.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return SocketWriter(fd)
    if not stat.S_ISFIFO(mode) and not os.isatty(fd):
        return DirectWriter(fd)
    try:
        return ReopenedWriter(fd)
    except OSError:
        return CautiousWriter(fd)
