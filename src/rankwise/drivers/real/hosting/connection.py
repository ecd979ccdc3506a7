"""The agent's side of a guardian and of a fork server.

Both speak the same frames (wire.py; docs/development/architecture.md lists them), so one
`Connection` serves both. `GuardianConnection` owns the guardian process: making it, its socket,
waiting for its end.
`ForkServer` is a worker of the guardian as far as processes go, and a second connection.

If the other side dies, the kernel closes its socket, `on_readable` finds the end of the stream and
calls `on_lost`, once. One that is ready and does not answer orders to make processes, since it is
stopped or stuck, is lost too, see `on_silent`.
"""

import errno
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any, Protocol, Self

from rankwise.base.errors import RemoteProtocolError, SpawnFailed
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, format_duration
from rankwise.drivers.real.hosting import wire
from rankwise.drivers.real.reactor import Reactor, ReactorTimer

MARK_VARIABLE = "RANKWISE_GUARDIAN"
"""In the environment of a guardian and of everything beneath it."""

GUARDIAN_PATIENCE = Duration(6 * SECOND)
"""How long a guardian may take to end: it tries for five seconds to kill what does not die."""
KILL_PATIENCE = Duration(1 * SECOND)
"""How long processes may take to die of SIGKILL."""
SPAWN_PATIENCE = Duration(30 * SECOND)
"""How long one that is ready may take to make a process."""
LATE = Duration(1 * SECOND)
"""If a check runs this late, the process was suspended."""

_CHANGES_SHARE_MAX = 0.25
"""How many variables a worker may have to itself, before those that all share are sent anew."""
_CONTROL_FD = 3
_TOO_MANY_PROCESSES = "too many processes: see ulimit -u, and pids.max of the control group"


class HostingListener(Protocol):
    """Is told what becomes of the orders given through a connection."""

    def on_spawned(self, worker: int, pid: int) -> None:
        """A process exists."""
        ...

    def on_refused(self, worker: int, reason: str) -> None:
        """A process could not be made."""
        ...

    def on_exited(self, worker: int, code: int, at: Instant) -> None:
        """A process has ended; `code` is minus the signal if one killed it."""
        ...

    def on_swept(self, token: int, survivors: tuple[int, ...], killed: Mapping[int, str]) -> None:
        """Nothing is left of what was to be swept, but for the survivors.

        `killed` were alive, and are still if they are to be kept: their command lines by pid.
        """
        ...

    def on_ready(self, details: Mapping[str, Any]) -> None:
        """The other side has started, and imported what it was told to."""
        ...

    def on_lost(self, reason: str) -> None:
        """The other side is gone, and with it everything it had made."""
        ...


class _UnsentFrame:
    """A frame on its way, with the descriptors that go with its first byte."""

    def __init__(self, message: tuple[Any, ...], fds: Sequence[int]) -> None:
        self._rest = memoryview(wire.encode(message, len(fds)))
        self._fds = list(fds)
        self._owned: list[int] = []

    def send(self, sock: socket.socket) -> None:
        """Send all of it; raises BlockingIOError when only a part was taken."""
        while self._rest:
            sent = wire.send_part(sock, self._rest, self._fds)
            self._rest = self._rest[sent:]
            self._fds = []
            self.close()

    def keep_descriptors(self) -> None:
        """Make copies of our own, since the caller closes its descriptors."""
        self._fds = self._owned = [os.dup(fd) for fd in self._fds]

    def close(self) -> None:
        """Close our copies."""
        owned, self._owned = self._owned, []
        for fd in owned:
            os.close(fd)


class Connection:
    """One socket to a process that makes processes."""

    def __init__(self, name: str, ours: socket.socket) -> None:
        self.name = name
        self.listener: HostingListener | None = None
        """Is told of the other side, of sweeps, and of processes that are no workers."""
        self.workers: HostingListener | None = None
        """Is told of workers, whose numbers are those of `next_number`."""
        self.loss = ""
        """Why the other side is gone; empty while it is there."""
        self._socket = ours
        ours.setblocking(False)  # noqa: FBT003  # the standard library's signature
        self._reader = wire.FrameReader()
        self._numbers = count(1)
        self.unanswered: set[int] = set()
        """Processes that were ordered, and neither made nor refused yet."""
        self.importing = ""
        """The module that a fork server imports, or has imported last, of those it was told."""
        self.unfit = ""
        """Why an automatic fork server leaves its work to another; empty if it does not."""
        self.on_silent: Callable[[str], None] = self._lose
        """Is told why the other side must be given up though it has not died."""
        self._is_ready = False
        self._answer_timer: ReactorTimer | None = None
        self._environment: dict[str, str] | None = None
        self._unsent: deque[_UnsentFrame] = deque()
        self._untold: deque[tuple[Any, ...]] = deque()
        """Messages that have come: one of them may lead to a wait for those behind it."""
        self._reactor: Reactor | None = None

    def next_number(self) -> int:
        """A number for a new process, never given out twice on this connection."""
        return next(self._numbers)

    def watch(self, reactor: Reactor) -> None:
        """Let a reactor listen, and send what the other side does not take at once."""
        self._reactor = reactor
        reactor.watch_readable(self._socket.fileno(), self.on_readable)
        if self._unsent:
            reactor.watch_writable(self._socket.fileno(), self._send_unsent)
        self._expect_answer()

    def unwatch(self) -> None:
        """Leave the reactor. Unsent messages stay so until the next one."""
        if self._reactor is not None:
            self._reactor.unwatch_readable(self._socket.fileno())
            self._reactor.unwatch_writable(self._socket.fileno())
            self._reactor = None
        self._expect_no_answer()

    def spawn(self, worker: int, order: dict[str, Any], fds: Sequence[int]) -> None:
        """Order a process; `fds` are copied on the way and remain the caller's."""
        changes = self._environment_changes(order["env"])
        self._send(("spawn", worker, {**order, "env": changes}), fds)
        self.unanswered.add(worker)
        self._expect_answer()

    def signal(self, worker: int, signum: int, *, group: bool) -> None:
        """Order a signal to a process or to its group."""
        self._send(("signal", worker, signum, group))

    def sweep(self, token: int, spared: Sequence[int] = (), manner: str = "kill") -> None:
        """Order that everything beneath is killed, but these workers (pids) and what is theirs.

        `manner` says what becomes of what workers have left running: see the guardian.
        """
        self._send(("sweep", token, list(spared), manner))

    def guard(self, paths: Sequence[str]) -> None:
        """Order that these directories are removed if the agent dies."""
        self._send(("guard", list(paths)))

    def fence(self, at: Instant | None) -> None:
        """Let the guardian kill all workers at that instant, unless it is told another before."""
        self._send(("fence", at))

    def on_readable(self) -> None:
        """Take in what has arrived and tell the listener."""
        try:
            frames = self._reader.receive(self._socket)
        except (OSError, wire.BadFrame) as error:
            self._lose(f"the connection to the {self.name} broke: {error}")
            return
        self._untold.extend(message for message, _ in frames)
        while self._untold:
            self._tell(self._untold.popleft())
        if self._reader.ended:
            self._lose(f"the {self.name} has died")

    def wait_until(self, is_done: Callable[[], bool], patience: Duration) -> None:
        """Take in answers, without a reactor, until that is so, the other side is gone, or time is.

        For the end of a run that something has broken: no message is sent any more.
        """
        deadline = time.monotonic_ns() + patience
        waiting = select.poll()
        while not is_done() and not self.loss and time.monotonic_ns() < deadline:
            waiting.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            waiting.poll(max(0, deadline - time.monotonic_ns()) / MILLISECOND)
            self._send_unsent()
            self.on_readable()

    def reopen(self, ours: socket.socket) -> None:
        """Go on, after `close`, with a process that takes the place of the one that was left."""
        self._socket = ours
        ours.setblocking(False)  # noqa: FBT003  # the standard library's signature
        self._reader = wire.FrameReader()
        self._environment = None
        self._is_ready, self.importing = False, ""
        self._untold.clear()
        self.unanswered.clear()
        self.loss = ""

    def close(self) -> None:
        """Hang up; the other side takes that as our end and clears up."""
        self.loss = self.loss or f"the {self.name} has been closed"
        self.unwatch()
        self._forget_unsent()
        self._socket.close()

    def _expect_answer(self) -> None:
        """Give up the other side if it can answer, has to, and does not."""
        if self._reactor is None or self._answer_timer or not self._is_ready or not self.unanswered:
            return

        waited_for = set(self.unanswered)

        def look() -> None:
            self._answer_timer = None
            self.on_readable()
            if time.monotonic_ns() > due + LATE:
                self._expect_answer()  # we have been stopped, and so has the other side, perhaps
            elif waited_for <= self.unanswered:
                patience = format_duration(SPAWN_PATIENCE)
                self.on_silent(f"the {self.name} has not answered for {patience}, as if stopped")
            else:
                self._expect_answer()

        due = Instant(time.monotonic_ns() + SPAWN_PATIENCE)
        self._answer_timer = self._reactor.call_at(due, look)

    def _expect_no_answer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _environment_changes(self, wanted: dict[str, str]) -> dict[str, str | None]:
        """Say what a process is to have that the other side does not know; None removes a variable.

        The workers of a gang differ in a few variables out of many, so the others are sent once.
        Writing what all of them share for each of them would cost a fork server more than a fork.
        """
        if self._environment is not None:
            known = self._environment
            changes: dict[str, str | None] = dict.fromkeys(known.keys() - wanted.keys())
            changes.update(wanted.items() - known.items())
            if len(changes) <= len(wanted) * _CHANGES_SHARE_MAX:
                return changes
        self._send(("environment", wanted))
        self._environment = dict(wanted)
        return {}

    def _send(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        """Send now, or, if the other side is busy, when it takes it, without waiting for it.

        Raises:
            OSError: the descriptors cannot be sent, since too many are on their way already.
        """
        if self.loss:
            return
        frame = _UnsentFrame(message, fds)
        if self._unsent or not self._try_to_send(frame):
            frame.keep_descriptors()
            self._unsent.append(frame)
            if self._reactor is not None:
                self._reactor.watch_writable(self._socket.fileno(), self._send_unsent)

    def _try_to_send(self, frame: "_UnsentFrame") -> bool:
        """Send as much of a frame as is taken; tell whether it is off our hands."""
        try:
            frame.send(self._socket)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died: reading the end of the stream tells that, once
        return True

    def _send_unsent(self) -> None:
        while self._unsent and self._try_to_send(self._unsent[0]):
            self._unsent.popleft().close()
        if not self._unsent and self._reactor is not None:
            self._reactor.unwatch_writable(self._socket.fileno())

    def _forget_unsent(self) -> None:
        while self._unsent:
            self._unsent.popleft().close()

    def _lose(self, reason: str) -> None:
        if not self.loss:
            self.loss = reason
            if self.listener is not None:
                self.listener.on_lost(reason)

    def _listener_to(self, worker: int) -> HostingListener | None:
        return self.workers if worker > 0 else self.listener

    def _tell(self, message: tuple[Any, ...]) -> None:
        if self.listener is None:
            return
        match message:
            case ("spawned", int(worker), int(pid)):
                self.unanswered.discard(worker)
                if (listener := self._listener_to(worker)) is not None:
                    listener.on_spawned(worker, pid)
            case ("refused", int(worker), str(reason)):
                self.unanswered.discard(worker)
                if (listener := self._listener_to(worker)) is not None:
                    listener.on_refused(worker, reason)
            case ("exited", int(worker), int(code), int(at)):
                if (listener := self._listener_to(worker)) is not None:
                    listener.on_exited(worker, code, Instant(at))
            case ("swept", int(token), survivors, killed):
                self.listener.on_swept(token, tuple(survivors), dict(killed))
            case ("importing", str(name)):
                self.importing = name
            case ("unfit", str(reason)):
                self.unfit = reason
            case ("ready", int(), dict() as details):
                self._is_ready = True
                self._expect_answer()
                self.listener.on_ready(details)
            case _:
                raise RemoteProtocolError(
                    f"the {self.name} sent {message!r}, which is not expected here"
                )


class GuardianConnection(Connection):
    """The process that is the parent of all workers, and our connection to it."""

    def __init__(self, mark: str) -> None:
        """Start a guardian; `mark` goes into its environment and its workers'.

        Raises:
            SpawnFailed: the interpreter cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, *wire.program_arguments("guardian", _CONTROL_FD)],
                    {**os.environ, MARK_VARIABLE: mark},
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), _CONTROL_FD)],
                    setsid=True,
                )
            except OSError as error:
                ours.close()
                raise SpawnFailed(
                    f"the guardian process cannot be started with {sys.executable}: {error}",
                    hint=_TOO_MANY_PROCESSES if error.errno == errno.EAGAIN else None,
                ) from error
        super().__init__("guardian", ours)
        self.mark = mark
        self._is_reaped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up and wait until the guardian has killed what is left and has ended itself."""
        super().close()
        if not self._is_reaped:
            self._is_reaped = True
            with suppress(ChildProcessError):  # our program may reap all children by itself
                self._wait_for_end()
                os.waitpid(self.pid, 0)

    def _wait_for_end(self) -> None:
        """Wait for the guardian's end; one that does not end, since it is stopped, is killed."""
        try:
            death = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            waiting = select.poll()
            waiting.register(death, select.POLLIN)
            if not waiting.poll(GUARDIAN_PATIENCE / MILLISECOND):
                os.kill(self.pid, 9)
                waiting.poll()
                kill_marked(self.mark, KILL_PATIENCE)
        finally:
            os.close(death)


def kill_marked(mark: str, patience: Duration) -> None:
    """Kill every process whose environment carries a lost guardian's mark, and see them dead.

    The last resort: while a guardian lives, it finds all its descendants by itself. Looks again
    until a look finds none, since one may have forked during the look, or `patience` is over.
    """
    # Like `descendants`, but for strangers: there are no parents to tell a reused number by, and
    # the guardian's module is kept to what its start-up can afford.
    deadline = time.monotonic_ns() + patience
    while time.monotonic_ns() < deadline and (marked := _marked_processes(mark)):
        with ExitStack() as stack:
            for death in [pidfd for pid in marked if (pidfd := _kill(pid, stack)) is not None]:
                patience_ms = max(0, deadline - time.monotonic_ns()) // MILLISECOND
                waiting = select.poll()
                waiting.register(death, select.POLLIN)
                waiting.poll(patience_ms)


def _kill(pid: int, stack: ExitStack) -> int | None:
    """Kill a process; return a descriptor that tells of its death, or None if it is not ours."""
    try:
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return None  # it ended meanwhile, or belongs to another user
    return pidfd


def _marked_processes(mark: str) -> list[int]:
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue  # it ended meanwhile, or is not ours to look into
    return found
