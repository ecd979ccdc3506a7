"""The asking end of the control socket, for `rankwise ps`, `logs`, `stop`, `stacks`, `why`."""

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from select import POLLIN, poll
from typing import Any, NamedTuple

import msgspec

from rankwise.base.errors import RankwiseError
from rankwise.base.units import MICROSECOND, MILLISECOND, SECOND, Instant
from rankwise.drivers.real.proc import check_proc
from rankwise.drivers.real.process_work import is_present, is_stopped
from rankwise.launch.control.addresses import may_hide_id, parse_name, peer, socket_name
from rankwise.launch.control.server import ControlRequest, Question

Answer = dict[str, Any]

_ACCEPTS_CONNECTIONS = 0x10000  # __SO_ACCEPTCON, column Flags of /proc/net/unix

_DEATH_PATIENCE_MS = 1_000
"""How long a process may take to end after its sockets have."""


class RunUnreachable(RankwiseError):
    """A run did not answer: it has just ended, is stopped, or belongs to another user."""


class RunSuspended(RunUnreachable):
    """A run did not answer, since its agent is suspended, as by Ctrl-Z."""


class NotGenuine(RunUnreachable):
    """What answers to a run's name is a process of another user: there is no such run."""


class RunSummary(msgspec.Struct, frozen=True, order=True):
    """A run as its socket's name tells it.

    Attributes:
        run_id: the run's name; the first 60 bytes of a very long one.
        pid: of its agent.
        uid: of its agent.
        is_pool: whether it is a `rankwise.Pool`, which has workers in place of ranks.
    """

    run_id: str
    pid: int
    uid: int
    is_pool: bool = False


def list_runs(uid: int | None = None, table: Path = Path("/proc/net/unix")) -> list[RunSummary]:
    """The runs of a user (root: of all users) in this network namespace, ordered by name."""
    return _listed(uid, table, is_pool=False)


def list_pools(uid: int | None = None, table: Path = Path("/proc/net/unix")) -> list[RunSummary]:
    """The pools, in the same manner."""
    # A fork of the program keeps the name while it lives, and answers to it as little as the dead.
    return [pool for pool in _listed(uid, table, is_pool=True) if is_present(pool.pid)]


def _listed(uid: int | None, table: Path, *, is_pool: bool) -> list[RunSummary]:
    own = os.geteuid() if uid is None else uid
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        check_proc()
        raise
    runs = []
    for line in lines[1:]:
        columns = line.split(maxsplit=7)
        if len(columns) < 8 or not int(columns[3], 16) & _ACCEPTS_CONNECTIONS:
            continue
        named = parse_name(columns[7], is_pool=is_pool)
        if named is not None and own in (named[2], 0):
            runs.append(RunSummary(*named, is_pool))
    return sorted(runs)


def names_of(runs: Sequence[RunSummary], deadline: Instant) -> dict[RunSummary, str]:
    """What each run is called. One whose id others may not know tells it to its own user."""
    names = {run: run.run_id for run in runs}
    hidden = [run for run in runs if may_hide_id(run.run_id) and not is_suspended(run)]
    for reply in ask_all(hidden, "status", deadline):
        with suppress(RunUnreachable):
            for line in reply.lines()[:1]:
                names[reply.run] = line.get("run_id", reply.run.run_id)
    return names


class RunAnswer(NamedTuple):
    """What came of asking one run: its answer, or why there is none."""

    run: RunSummary
    answer: list[Answer] | RunUnreachable

    def lines(self) -> list[Answer]:
        """The answer; raises `RunUnreachable` if there is none."""
        if isinstance(self.answer, RunUnreachable):
            raise self.answer
        return self.answer


def ask_all(runs: Sequence[RunSummary], question: Question, deadline: Instant) -> list[RunAnswer]:
    """Put a question to several agents at once: a stopped one costs the others nothing.

    Answers are due in full before `deadline`, an instant of `time.monotonic_ns`.
    """
    lines: dict[RunSummary, list[Answer]] = {run: [] for run in runs}
    lost: dict[RunSummary, RunUnreachable] = {}
    for run, told in listen_to_all(runs, ControlRequest(question), deadline, to_the_end=True):
        if isinstance(told, RunUnreachable):
            lost[run] = told
        else:
            lines[run].append(told)
    return [RunAnswer(run, lost.get(run, lines[run])) for run in runs]


def listen(run: RunSummary, request: ControlRequest, deadline: Instant) -> Iterator[Answer]:
    """Put a request to a run's agent and hand out the lines of its answer as they come.

    The answer goes on for as long as the agent likes; only its first line is due by `deadline`.

    Raises:
        RunUnreachable: there is no such agent any more, it does not answer, or it refuses.
    """
    for _, told in listen_to_all([run], request, deadline):
        if isinstance(told, RunUnreachable):
            raise told
        yield told


def listen_to_all(
    runs: Sequence[RunSummary],
    request: ControlRequest,
    deadline: Instant,
    *,
    to_the_end: bool = False,
) -> Iterator[tuple[RunSummary, Answer | RunUnreachable]]:
    """Do so with several agents at once. An agent that falls silent gives its reason as a line.

    With `to_the_end` the whole of each answer is due by the deadline.
    """
    poller = poll()
    ears: dict[int, _Ear] = {}
    with ExitStack() as stack:
        for run in runs:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                _put(run, connection, request, deadline)
            except RunUnreachable as error:
                yield run, error
                continue
            ears[connection.fileno()] = _Ear(run, connection)
            poller.register(connection, POLLIN)
        while ears:
            due = [fd for fd, ear in ears.items() if to_the_end or not ear.has_answer]
            remaining = max(0, deadline - time.monotonic_ns())
            # Rounded up: with 0 ms it would poll without pause in the last millisecond.
            ready = [fd for fd, _ in poller.poll(-(-remaining // MILLISECOND) if due else None)]
            lost: dict[int, RunUnreachable] = {}
            for fd in ready:
                ear = ears[fd]
                for told in ear.lines():
                    if "error" in told:
                        lost[fd] = _refused(ear.run, told)
                        break
                    yield ear.run, told
            if not ready or not remaining:  # one that talks on must not hide that others are late
                late = (fd for fd in due if to_the_end or not ears[fd].has_answer)
                # A refusal says more than that the rest of the answer is late.
                lost = {fd: _late(ears[fd].run) for fd in late if not ears[fd].is_over} | lost
            for fd in [fd for fd, ear in ears.items() if ear.is_over or fd in lost]:
                poller.unregister(fd)
                ear = ears.pop(fd)
                if fd in lost:
                    yield ear.run, lost[fd]
                elif to_the_end and not ear.is_whole:
                    yield ear.run, _broken_off(ear.run)


class _Ear:
    """What has come from one agent, of which lines are made."""

    def __init__(self, run: RunSummary, connection: socket.socket) -> None:
        self.run = run
        self.has_answer = False
        self.is_over = False
        self._connection = connection
        self._begun = b""

    @property
    def is_whole(self) -> bool:
        """Whether what has come ends with a line."""
        return self.has_answer and not self._begun

    def lines(self) -> list[Answer]:
        """The lines that are whole now; a last one that breaks off is none."""
        try:
            piece = self._connection.recv(65536)
        except OSError:
            piece = b""  # it broke off, and what is missing will tell
        self.is_over = not piece
        *whole, self._begun = (self._begun + piece).split(b"\n")
        self.has_answer = self.has_answer or bool(whole)
        return [msgspec.json.decode(line, type=Answer) for line in whole]


def is_suspended(run: RunSummary) -> bool:
    """Whether its agent is suspended: it answers nothing until it is resumed."""
    return is_stopped(run.pid)


def resume(run: RunSummary) -> None:
    """Let a suspended agent go on, and its ranks with it, as `bg` does."""
    with suppress(ProcessLookupError, PermissionError):  # the next question tells
        os.kill(run.pid, signal.SIGCONT)


def expect_over(run: RunSummary) -> None:
    """After an answer that ends with the run: make sure that the run has ended, too.

    An agent gives its name up before it hangs up. One that was killed may do so a moment later.

    Raises:
        RunUnreachable: it goes on, and has hung up on us.
    """
    if run not in list_runs(run.uid):
        return
    with suppress(OSError):  # of a process that is gone
        death = os.pidfd_open(run.pid)
        try:
            poller = poll()
            poller.register(death, POLLIN)
            has_ended = bool(poller.poll(_DEATH_PATIENCE_MS))
        finally:
            os.close(death)
        if not has_ended and run in list_runs(run.uid):
            raise RunUnreachable(
                f"run {run.run_id!r} (pid {run.pid}) closed the connection, and still runs",
                hint="too many commands may have asked at once; try again",
            )


def _put(
    run: RunSummary, connection: socket.socket, request: ControlRequest, deadline: Instant
) -> None:
    if is_suspended(run):
        raise _late(run)  # it answers nothing until it is resumed
    try:
        _limit_sending(connection, deadline)
        connection.connect(socket_name(run.run_id, run.pid, run.uid, is_pool=run.is_pool))
        is_genuine = peer(connection) == (run.pid, run.uid)
        connection.sendall(msgspec.json.encode(request) + b"\n")
    except BlockingIOError:
        raise _late(run) from None
    except OSError as error:
        raise RunUnreachable(
            f"run {run.run_id!r} (pid {run.pid}) cannot be reached: {error}"
        ) from error
    if not is_genuine:
        raise NotGenuine(f"the name of run {run.run_id!r} is held by another process")


def _broken_off(run: RunSummary) -> RunUnreachable:
    return RunUnreachable(f"run {run.run_id!r} (pid {run.pid}) ended before it had answered")


def _refused(run: RunSummary, line: Answer) -> RunUnreachable:
    name = line.get("run_id", run.run_id)  # its own user may know what others may not
    return RunUnreachable(f"run {name!r} (pid {run.pid}) refused: {line['error']}")


def _limit_sending(connection: socket.socket, deadline: Instant) -> None:
    """Let connecting and sending block until `deadline`, then fail with EAGAIN.

    Python's own time limit makes the socket non-blocking, and connecting to a busy server then
    fails at once instead of waiting for its turn.
    """
    remaining = max(deadline - time.monotonic_ns(), MICROSECOND)
    seconds, nanoseconds = divmod(remaining, SECOND)
    limit = struct.pack("@ll", seconds, nanoseconds // MICROSECOND)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _late(run: RunSummary) -> RunUnreachable:
    if is_suspended(run):
        return RunSuspended(
            f"run {run.run_id!r} (pid {run.pid}) is suspended, as by Ctrl-Z",
            hint=f"resume it: `fg` in its terminal, or `kill -CONT {run.pid}`",
        )
    return RunUnreachable(
        f"run {run.run_id!r} (pid {run.pid}) has not answered in time",
        hint="its agent may be busy: try again",
    )
