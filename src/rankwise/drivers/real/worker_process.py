"""The agent's own hold on a worker's process, beside that of its parent.

A worker's parent makes it and tells of its end. But a parent can be stopped, or stuck in an import,
and then neither carries out an order nor says a word. So the agent holds a pidfd of each worker:
with it, it sends signals itself, and sees an end without a message about it.

Only a parent may wait for a process. While it does not, the process stays a zombie, and the kernel
shows every process how it ended.
"""

import os
import select
import signal
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

_PF_SIGNALED = 0x400
"""Among the flags of a process: a signal ends it. From Linux's `sched.h`, as proc(5) says."""


class WorkerProcess:
    """A process that another one has made. `fileno` is readable once it has ended.

    Raises:
        ProcessLookupError: it has ended, and its end has been seen by its parent.
        OSError: there is no descriptor left for it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """The descriptor to watch for reading."""
        return self._pidfd

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or has been let go of."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def signal(self, signum: int, *, group: bool) -> None:
        """Send a signal, if it lives, to it or to the process group that it leads."""
        # Another user's process cannot be signalled: a setuid program. Its end is all we will see.
        with suppress(ProcessLookupError, PermissionError):
            if not group:
                signal.pidfd_send_signal(self._pidfd, signum)
            elif not self.has_ended:
                os.killpg(self.pid, signum)

    def signal_thread(self, thread: int, signum: int) -> bool:
        """Send a signal to a thread of it, by the kernel's number; whether that was possible."""
        import ctypes  # noqa: PLC0415  # rare

        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # since glibc 2.30
        return tgkill is not None and not self.has_ended and tgkill(self.pid, thread, signum) == 0

    def catches(self, signum: int) -> bool:
        """Whether it has a handler for a signal, as the kernel shows it."""
        mask = self._status().get(b"SigCgt", b"0")
        return bool(int(mask, 16) >> (signum - 1) & 1)

    @property
    def is_dying(self) -> bool:
        """Whether a signal is ending it, or has: its core is written, or its memory taken down."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return False
        if self.has_ended and fields[0] != b"Z":  # another process may have the number
            return False
        is_signalled = bool(int(fields[6]) & _PF_SIGNALED)
        return is_signalled or self._status().get(b"CoreDumping") == b"1"

    def _status(self) -> dict[bytes, bytes]:
        """What the kernel tells of it, by name; nothing if it has ended."""
        try:
            with open(f"/proc/{self.pid}/status", "rb") as file:
                lines = file.read().splitlines()
        except OSError:
            return {}
        if self.has_ended:  # another process may have the number
            return {}
        return {name: value.strip() for name, _, value in (each.partition(b":") for each in lines)}

    def exit_code(self) -> int | None:
        """How it ended, minus the signal that killed it; None when the kernel does not show it."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        is_zombie = fields[0] == b"Z"
        return os.waitstatus_to_exitcode(int(fields[-1])) if is_zombie and is_ours else None

    def close(self) -> None:
        """Let go of it. Twice is once."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Ends(Generic[T]):
    """Which of many processes have ended, without asking for each: of each it is told once.

    `fileno` is readable while there is something to tell. Raises OSError where no file can be
    opened.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, T] = {}

    def fileno(self) -> int:
        """The descriptor to watch for reading."""
        return self._epoll.fileno()

    def watch(self, process: WorkerProcess, owner: T) -> None:
        """Tell `owner` when this one has ended. Raises OSError if the kernel has no memory."""
        self._epoll.register(process.fileno(), select.EPOLLIN)
        self._watched[process.fileno()] = owner

    def forget(self, process: WorkerProcess) -> None:
        """Tell no more of this one, which is about to be let go of."""
        if self._watched.pop(process.fileno(), None) is not None:
            self._epoll.unregister(process.fileno())

    def take(self) -> list[T]:
        """The owners of those that have ended since the last time."""
        ended = []
        while self._watched and (ready := self._epoll.poll(0)):
            for fd, _ in ready:
                self._epoll.unregister(fd)
                ended.append(self._watched.pop(fd))
        return ended

    def close(self) -> None:
        """Tell of nothing any more."""
        self._watched.clear()
        self._epoll.close()
