"""The fork server: forked once by a worker process, and the parent of all its children.

It has one thread and the program's memory as it was in `init()`, so children can be forked from it
at any time, successors of dead ones included, with the same closures. It is a child subreaper, so
whatever its children leave behind becomes its own, and it looks at the worker process through a
pidfd: when that is readable, it kills all its descendants and ends. Nothing it waits for is polled.
If somebody has stopped it, an order continues it, and so does the end of the worker process.

Orders come in datagrams of three bytes and more: `S` spawn, `K` kill, `Q` end, then a u16 child.
What it has to say goes into the completion pipe: `ENDED` with the wait status, `NOT_STARTED` with
an error number. A child cannot be reaped before it is dead, so its own last words are in the pipe
by then.
"""

import gc
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from rankwise.drivers.real.hosting.descendants import kill_descendants
from rankwise.drivers.real.hosting.prctl import (
    adopt_orphans,
    continue_with_parent_s_end,
    die_with_parent,
)
from rankwise.drivers.real.interrupts import gate_here
from rankwise.drivers.real.tree.words import ENDED, NOT_STARTED, completion

_ORDER = struct.Struct("=cH")
SPAWN, KILL, END = b"S", b"K", b"Q"
_SWEEP_PATIENCE_NS = 5_000_000_000
_POLLED_END = select.POLLIN | select.POLLHUP | select.POLLERR


def order(kind: bytes, child: int = 0) -> bytes:
    """An order as it travels."""
    return _ORDER.pack(kind, child)


class WorkerForkServer:
    """The process's whole life is `live`, which never returns."""

    def __init__(
        self,
        orders_fd: int,
        done_fd: int,
        worker_pidfd: int,
        become_child: Callable[[int], int],
        unneeded_fds: tuple[int, ...],
    ) -> None:
        self._orders_fd = orders_fd
        self._done_fd = done_fd
        self._worker_pidfd = worker_pidfd
        self._become_child = become_child
        self._unneeded_fds = unneeded_fds
        self._poll = select.poll()
        self._children: dict[int, int] = {}
        """Which child a pid is."""
        self._pidfds: dict[int, int] = {}
        """The pidfd of a pid."""

    def live(self) -> NoReturn:
        """Serve until the worker process ends or says so."""
        code = 1
        try:
            self._settle_in()
            self._serve()
            code = 0
        finally:
            try:
                kill_descendants(_SWEEP_PATIENCE_NS)
            finally:
                os._exit(code)

    def _settle_in(self) -> None:
        os.setsid()
        adopt_orphans()
        continue_with_parent_s_end()
        forget_handlers()
        for fd in self._unneeded_fds:
            os.close(fd)
        # What is old now stays as it is: the collector would write to every page of it.
        gc.freeze()
        self._poll.register(self._orders_fd, select.POLLIN)
        self._poll.register(self._worker_pidfd, select.POLLIN)

    def _serve(self) -> None:
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            self._reap()
            if self._worker_pidfd in ready:
                return
            if self._orders_fd in ready and not self._take_order():
                return

    def _take_order(self) -> bool:
        """Carry out an order; whether to go on."""
        message = os.read(self._orders_fd, _ORDER.size)
        if not message:
            return False
        kind, child = _ORDER.unpack(message)
        if kind == SPAWN:
            self._spawn(child)
        elif kind == KILL:
            for pid, other in self._children.items():
                if other == child:
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so it is still ours
        return bool(kind != END)

    def _spawn(self, child: int) -> None:
        myself = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(NOT_STARTED, child, error.errno or 0)
            return
        if pid == 0:
            self._live_as_child(child, myself)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # Its end would not be seen.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._tell(NOT_STARTED, child, error.errno or 0)
            return
        self._children[pid] = child
        self._pidfds[pid] = pidfd
        self._poll.register(pidfd, select.POLLIN)

    def _live_as_child(self, child: int, fork_server: int) -> NoReturn:
        """Nothing in here may reach the frames below: they belong to the caller of `init()`."""
        code = 1
        try:
            die_with_parent(fork_server)
            for fd in self._pidfds.values():
                os.close(fd)
            os.close(self._orders_fd)
            code = self._become_child(child)
        finally:
            try:
                flush_output()
            finally:
                os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue  # somebody whom a child has left behind
            pidfd = self._pidfds.pop(pid)
            self._poll.unregister(pidfd)
            os.close(pidfd)
            self._tell(ENDED, child, status)

    def _tell(self, kind: int, child: int, value: int) -> None:
        os.write(self._done_fd, completion(kind, child, value))


def flush_output() -> None:
    """Write what `print` has kept; `os._exit` would drop it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone
            if stream is not None:
                stream.flush()


def forget_handlers() -> None:
    """Leave the program's signal handlers behind, and Ctrl-C to the worker process."""
    gate_here().forget()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.setitimer(signal.ITIMER_REAL, 0)
