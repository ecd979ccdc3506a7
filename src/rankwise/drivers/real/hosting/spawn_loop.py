"""The loop of a process that makes workers on order: the guardian, and the fork servers.

It waits for three things at once, in one epoll: frames from the agent, children that end (SIGCHLD
wakes it through a pipe), and the status pipes of workers that are being made. It waits for nothing
else: replies that the agent does not read yet are kept, and a worker whose program lies on a slow
file system delays no other. One order is an exception, the guardian's sweep, which returns when all
are dead or cannot be killed for seconds: the agent asks for it when the gang is dead, so that there
is no worker left that the guardian could serve meanwhile.

**Making a worker** is a fork. The child sets itself up (own session, death with its parent,
default signals, descriptors, directory, CPUs, limits) and then becomes the worker. A status pipe
tells how that went: the child writes one sentence into it when something fails, and the pipe
closes without a word when the worker has begun, because an exec closes it. So `spawned` or
`refused` is always known before `exited`, and a refused worker never reports an exit.

**The agent ends** when its end of the socket closes, or when its process does: a child that the
agent has forked may hold a copy of the socket, so the loop watches the process as well.
"""

import _signal  # type: ignore[import-not-found]  # the core of `signal`, without its enums
import _socket
import os
import resource
import select
import time

from rankwise.drivers.real.hosting import prctl
from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS
from rankwise.drivers.real.hosting.wire import BadFrame, FrameReader, FrameWriter

TYPE_CHECKING = False  # `typing` would cost a third of the guardian's start-up
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    from rankwise.drivers.real.hosting.wire import Frame, Message

    Order = dict[str, Any]

    class Replies(Protocol):
        """What the loop tells goes in here."""

        @property
        def is_empty(self) -> bool:
            """Whether all is on its way."""

        def add(self, message: "Message") -> None:
            """Take a message."""

        def flush(self, sock: "_socket.socket") -> None:
            """Send what the other side takes now. Raises `OSError` if it is gone."""


_BATCH = 16
"""How many orders may be received before the first is carried out."""
_FILES_OF_BATCH = 1 / 16
"""The share of its limit of open files that the descriptors of a batch may take."""
_STATUS_BYTES = 4000
_PEER_CREDENTIALS_BYTES = 12


class SpawnRefused(Exception):
    """A worker cannot be made; the message is one sentence for people."""


class SpawnLoop:
    """Carries out the agent's orders until the agent ends.

    Attributes:
        workers: pids of the workers whose end has not been seen yet, by worker number.
        kept: the workers among them that a sweep spares.
        alarm_at: nanoseconds of CLOCK_MONOTONIC; None for never.
        inherited: in a child, what it has got of its parent's memory without wanting it.
    """

    def __init__(
        self,
        control: "_socket.socket",
        *,
        become: "Callable[[Order], None]",
        admit: "Callable[[], None]" = lambda: None,
        on_alarm: "Callable[[], object]" = lambda: None,
        orders: "Mapping[str, Callable[..., Message | None]] | None" = None,
        replies: "Replies | None" = None,
    ) -> None:
        """Take over the process's signals.

        Args:
            control: the socket to the agent.
            become: called last in the child of a fork; either it never returns (it execs), or
                the child comes out of `run`. It raises `SpawnRefused`.
            admit: called before a fork; raises `SpawnRefused` when there must be none.
            on_alarm: called at `alarm_at`, if the agent has not put it off by then.
            orders: what else the agent may ask for: functions of the rest of the message, which
                return the reply.
            replies: takes what there is to tell; by default frames on the control socket.
        """
        self.workers: dict[int, int] = {}
        self.kept: set[int] = set()
        self.inherited: list[Frame] = []
        self.alarm_at: int | None = None
        self._on_alarm = on_alarm
        self._become = become
        self._admit = admit
        self._orders = orders or {}
        self._numbers: dict[int, int] = {}
        self._starting: dict[int, tuple[int, int]] = {}
        self._reader = FrameReader()
        self._replies: Replies = FrameWriter() if replies is None else replies
        self._control = control
        self._interest = select.EPOLLIN
        self._agent_has_ended = False
        try:
            # A socket stays open while any copy of it does, as in a fork of the agent: its pidfd
            # does not.
            self._agent = _pidfd_of_peer(control)
        except ProcessLookupError:
            self._agent = None
            self._agent_has_ended = True
        self._epoll = select.epoll()
        self._wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors = [self._wakeup, wakeup_write]
        # A full socket must not hold up the reaping of workers, nor the alarm.
        self._control.setblocking(False)  # noqa: FBT003 - the standard library's signature
        # A signal of a terminal or a scheduler to all: the agent alone decides what it means. SLURM
        # (`--signal=USR1@60`) and mpirun send also others than those that end a job.
        for number in ENDING_SIGNALS:
            _signal.signal(number, _signal.SIG_IGN)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        _signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, _take_note)
        self._changed_signals = [
            number
            for number in range(1, _signal.NSIG)
            if _signal.getsignal(number) not in (_signal.SIG_DFL, None)
        ]
        self._epoll.register(self._control.fileno(), self._interest)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        if self._agent is not None:
            self._descriptors.append(self._agent)
            self._epoll.register(self._agent, select.EPOLLIN)

    def tell(self, message: "Message") -> None:
        """Send a message to the agent, as soon as it reads."""
        self._replies.add(message)

    def run(self) -> "Order | None":
        """Work until the agent ends; in a child that did not exec, return its order."""
        while not self._agent_has_ended and not self._reader.ended and self._flush():
            ready = self._wait()
            # An end must not overtake the beginning that it belongs to.
            for status in ready & self._starting.keys():
                self._settle(status)
            if self._wakeup in ready:
                _drain(self._wakeup)
                self._reap()
            if self._control.fileno() in ready:
                child = self._obey()
                if child is not None:
                    return child
            self._agent_has_ended = self._agent in ready
            # Last, since the agent may have put it off before it fell silent.
            if self.alarm_at is not None and time.monotonic_ns() >= self.alarm_at:
                self.alarm_at = None
                self._on_alarm()
        self._obey_last_orders()
        return None

    def _wait(self) -> set[int]:
        """Wait for those that have something to tell, until the alarm is due.

        A process that is stopped and continued after its deadline comes out of `poll` without
        having looked: orders that put off the alarm may have come meanwhile.
        """
        ready = self._epoll.poll(self._seconds_to_alarm()) or self._epoll.poll(0)
        return {fd for fd, _ in ready}

    def leave(self) -> None:
        """Let go, in a child, of everything that belongs to the loop and not to the worker."""
        _signal.set_wakeup_fd(-1)
        self._epoll.close()
        self._control.close()
        self._reader.close()
        for fd in (*self._descriptors, *self._starting):
            os.close(fd)

    def _seconds_to_alarm(self) -> float | None:
        if self.alarm_at is None:
            return None
        return max(0.0, (self.alarm_at - time.monotonic_ns()) / 1e9)

    def _obey(self) -> "Order | None":
        try:
            frames = self._receive_batch()
        except BadFrame:
            # Nothing that follows can be understood, which is as good as an agent that has died.
            self._reader.ended = True
            return None
        for position, (message, fds) in enumerate(frames):
            name, *rest = message
            if name == "spawn":
                child = self._spawn(rest[0], rest[1], fds)
                if child is not None:
                    _close_all(fd for _, later in frames[position + 1 :] for fd in later)
                    # Freeing it would write to it, and so copy the memory that forks share.
                    self.inherited = frames
                    return child
            elif name == "signal":
                self._signal(*rest)
            else:
                reply = self._orders[name](*rest)
                if reply is not None:
                    self.tell(reply)
        return None

    def _receive_batch(self) -> "list[Frame]":
        """Receive what has come, up to a batch.

        Code between two forks copies the pages that it writes to, so all is read before the
        first: 52 pages for each fork instead of 114, a third of this process's time.
        """
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * _FILES_OF_BATCH
        batch: list[Frame] = []
        while frames := self._reader.receive(self._control):
            batch += frames
            if len(batch) >= _BATCH or sum(len(fds) for _, fds in batch) > files_max:
                break
        return batch

    def _obey_last_orders(self) -> None:
        """Take in what the agent has sent before it ended; but workers are of no use any more."""
        control = self._control.fileno()
        while not self._reader.ended and control in {fd for fd, _ in self._epoll.poll(0)}:
            try:
                frames = self._reader.receive(self._control)
            except BadFrame:
                return
            for (name, *rest), fds in frames:
                _close_all(fds)
                if name in self._orders:
                    self._orders[name](*rest)

    def _spawn(self, worker: int, order: "Order", fds: list[int]) -> "Order | None":
        """Fork. In the parent return nothing; in the child the order, if it gets that far."""
        targets = order.get("fds", [])
        try:
            _check_descriptors(needed=len(targets), received=len(fds))
            self._admit()
            parent = os.getpid()
            status, status_write = os.pipe2(os.O_CLOEXEC)
            try:
                pid = os.fork()
            except OSError:
                os.close(status)
                os.close(status_write)
                raise
        except (SpawnRefused, OSError) as error:
            _close_all(fds)
            self.tell(("refused", worker, _explain(error)))
            return None
        if pid == 0:
            try:
                os.close(status)
                # A session of its own: the terminal's Ctrl-C reaches the agent alone, which
                # decides.
                os.setsid()
                prctl.die_with_parent(parent)
                # The defaults, also of what this process has inherited otherwise. A fork server
                # ignores what this process does from its first instruction on.
                for number in () if order.get("keep") else self._changed_signals:
                    _signal.signal(number, _signal.SIG_DFL)
                _set_up(order, dict(zip(targets, fds, strict=True)))
                self._become(order)
                os.close(status_write)
            except BaseException as error:  # noqa: BLE001 - told to the agent, whatever it is
                os.write(status_write, _explain(error).encode(errors="replace")[:_STATUS_BYTES])
                os._exit(127)
            return order
        os.close(status_write)
        _close_all(fds)
        self.workers[worker] = pid
        self._numbers[pid] = worker
        self._starting[status] = (worker, pid)
        if order.get("keep"):
            self.kept.add(worker)
        self._epoll.register(status, select.EPOLLIN)
        return None

    def _settle(self, status: int) -> None:
        """Tell how the start of a worker went; its status pipe has something to say or is shut."""
        worker, pid = self._starting.pop(status)
        complaint = os.read(status, _STATUS_BYTES)
        self._epoll.unregister(status)
        os.close(status)
        if not complaint:
            self.tell(("spawned", worker, pid))
            return
        self._forget(pid)
        self.tell(("refused", worker, complaint.decode(errors="replace")))

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            # The end that counts is here: the agent may read of it much later.
            instant = time.monotonic_ns()
            for status, (_, starting) in list(self._starting.items()):
                if starting == pid:
                    self._settle(status)
            worker = self._forget(pid)
            if worker is not None:
                code = os.waitstatus_to_exitcode(wait_status)
                self.tell(("exited", worker, code, instant))

    def _forget(self, pid: int) -> int | None:
        worker = self._numbers.pop(pid, None)
        if worker is not None:
            del self.workers[worker]
            self.kept.discard(worker)
        return worker

    def _signal(self, worker: int, signum: int, group: bool) -> None:
        pid = self.workers.get(worker)
        if pid is None:
            return
        try:
            if group and os.getpgid(pid) == pid:
                os.killpg(pid, signum)
            else:  # for a group: it has not made its own session yet, so there is only itself
                os.kill(pid, signum)
        except PermissionError:
            pass  # it has become another user, as a setuid program; its end is all we will see

    def _flush(self) -> bool:
        """Send what the agent takes now; return whether it is still there."""
        try:
            self._replies.flush(self._control)
        except OSError:
            return False
        interest = select.EPOLLIN if self._replies.is_empty else select.EPOLLIN | select.EPOLLOUT
        if interest != self._interest:
            self._interest = interest
            self._epoll.modify(self._control.fileno(), interest)
        return True


def _check_descriptors(*, needed: int, received: int) -> None:
    """Refuse a worker whose descriptors did not all fit into this process."""
    if received < needed:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise SpawnRefused(
            f"it needs {needed} descriptors, but only {received} fit under the limit of {limit} "
            "open files (raise `ulimit -n`)"
        )


def _set_up(order: "Order", fds: "dict[int | str, int]") -> None:
    """Give a forked child what the order wants it to have, all but environment and program.

    Descriptors that are found by a variable are left to the one that makes the environment, as
    `order["descriptors"]`. They are not inheritable yet.
    """
    descriptors: dict[str, int] = {}
    for target, fd in fds.items():
        if isinstance(target, int):
            os.dup2(fd, target)
            os.close(fd)
        else:
            descriptors[target] = fd
    order["descriptors"] = descriptors
    cwd = order.get("cwd")
    if cwd is not None:
        try:
            os.chdir(cwd)
        except OSError as error:
            raise SpawnRefused(f"working directory {cwd!r}: {error.strerror}") from None
    cpus = order.get("cpus")
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise SpawnRefused(f"cannot bind it to CPUs {sorted(cpus)}: {error.strerror}") from None
    nofile = order.get("nofile")
    if nofile:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, nofile)
        except (OSError, ValueError) as error:
            raise SpawnRefused(f"cannot set its limit of open files to {nofile}: {error}") from None


def _explain(error: BaseException) -> str:
    if isinstance(error, SpawnRefused):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot make a process for it: {error.strerror}"
    return f"cannot start it: {type(error).__name__}: {error}"


def _pidfd_of_peer(control: "_socket.socket") -> int | None:
    """Return a descriptor that becomes readable when the process at the other end has ended.

    None where the kernel cannot say; the end of the socket is then the only sign. Raises
    `ProcessLookupError` when the process has ended already.
    """
    packed = control.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER_CREDENTIALS_BYTES)
    try:
        return os.pidfd_open(memoryview(packed).cast("i")[0])
    except ProcessLookupError:
        raise
    except OSError:
        return None


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 512):
            pass
    except BlockingIOError:
        pass


def _close_all(fds: "Any") -> None:
    for fd in fds:
        os.close(fd)


def _take_note(signum: int, frame: object) -> None:
    """Exist: without a handler of Python's, a signal does not reach the wake-up pipe."""
