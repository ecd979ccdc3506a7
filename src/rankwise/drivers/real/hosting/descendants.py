"""Killing every descendant of this process, whatever it does to get away.

A descendant may have made its own session, ignore signals, be stopped, or fork faster than one
looks. As this process adopts orphans, whatever is left of a tree whose middle has been killed
becomes its own child, so looking again finds it.

**Looking.** Not every kernel offers `/proc/PID/task/TID/children`, so a look reads the parent out
of every `/proc/PID/stat`, about 15 us for each process of the machine. A look is not one instant: a
process can fork and end while the others are read, and its child is not in the list. But such a
process leaves a trace, a dead child of ours that had not been reaped before. So it is over when a
look sees no process alive, and none dead that the look before it has not seen.

A process without a child, alive or dead, has no descendant, and never will: the kernel says that at
once, and at the end of most runs no look is needed.

**Killing.** A process that is found to be a descendant is killed at that moment and not when the
look is over, the youngest first, since a process that forks and ends all the time is among them.
Then whole process groups: that is the only kill that no fork escapes, and a group of a descendant
has no strangers in it, since every worker begins a session. Chains of thousands that have died are
reaped as we go, since they would make each look slower than the one before.

**Trackers last.** multiprocessing's resource tracker removes the shared memory of programs that
could not do so themselves, as soon as all of them have ended. It is given the time for that. It is
known by its command line, and a process that is just becoming another program has none for a
moment: such a newcomer may be a tracker, and is looked at again before it is killed.

**Helpers.** After a success, what is killed is told of, and so the processes are waited for that
libraries have started and that end with their program: pools and servers of multiprocessing, the
compilers of torch. Those that do not end have been left behind as any others.

**Keeping.** `left_descendants` kills none, and lists them, for a run that lets them live.
"""

import _signal  # type: ignore[import-not-found]  # the core of `signal`, without its enums
import os
import select
import time

TYPE_CHECKING = False  # `typing` would cost a third of the guardian's start-up
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

TRACKER_PATIENCE_NS = 3_000_000_000
"""How long a resource tracker may take once all whom it served have ended. It takes 20 ms; but one
that is only starting, on a machine with too much to do, took more than half a second."""
NEWCOMER_PATIENCE_NS = 500_000_000
"""How long a sweep spares processes that have no command line; later ones have none for good."""
_NEWCOMER_PAUSE_NS = 5_000_000
"""After how long a newcomer is looked at again: nothing tells when it has got its command line."""
_TRACKER_MARK = b"from multiprocessing.resource_tracker import main"
_HELPER_MARKS = (
    b"from multiprocessing.forkserver import",
    b"from multiprocessing.spawn import",
    b"torch/_inductor/compile_worker",
    b"torch._inductor.compile_worker",
)
"""Processes of libraries: they end some 10 ms after their program, unless they have work to do."""
HELPER_PATIENCE_NS = 1_000_000_000
"""How long they may take, where it is told who was left behind."""
_WATCHED_MAX = 200
"""How many deaths are waited for at a time: each needs a descriptor meanwhile."""
_NANOSECONDS_PER_MILLISECOND = 1_000_000


def kill_descendants(
    patience_ns: int,
    *,
    spared: "Collection[int]" = (),
    spared_trees: "Collection[int]" = (),
    awaited: "Collection[int]" = (),
    killed: "dict[int, str] | None" = None,
    awaits_helpers: bool = False,
) -> list[int]:
    """Kill all descendants of this process and wait until they are dead.

    Children are reaped, but for those `awaited` elsewhere; no other code may reap meanwhile.
    `spared` processes are left alone, but their descendants are not. Leaders of sessions among
    `spared_trees` are left alone with their descendants, and with orphans of their sessions.
    `killed` is filled with the command lines of those that were killed, by pid, but for resource
    trackers. With `awaits_helpers` helpers of libraries may end by themselves before. Returns the
    pids of those that are still alive after `patience_ns`, or cannot be killed.
    """
    began = time.monotonic_ns()
    deadline = began + patience_ns
    immune: set[int] = set()
    left_before = None
    spares_trackers = True
    while has_children():
        look = _KillPass(
            spared,
            spared_trees,
            immune,
            spares_trackers=spares_trackers,
            spares_helpers=awaits_helpers,
            spares_newcomers=time.monotonic_ns() < began + NEWCOMER_PATIENCE_NS,
        )
        for group in look.groups:
            _kill_group(group)
        if killed is not None:
            killed.update(look.left)
        reaped = _reap(look.dead - set(awaited))
        left = look.dead - reaped
        left_alone = look.trackers | look.newcomers | look.helpers
        if not look.living.keys() - immune - left_alone:
            if not left_alone and not reaped and left == left_before:
                return sorted(look.living)
            left_before = left
        if time.monotonic_ns() >= deadline:
            # With none alive: the last that was seen of one that forks faster than the looks.
            return sorted(look.living) or sorted(look.dead)[-1:]
        _wait_for_deaths(look.dying, deadline)
        if look.newcomers:
            pause_end = min(deadline, time.monotonic_ns() + _NEWCOMER_PAUSE_NS)
            _wait_for_deaths(_open_all(look.newcomers), pause_end)
        elif look.helpers and not look.living.keys() - immune - left_alone:
            last_call = min(deadline, began + HELPER_PATIENCE_NS)
            _wait_for_deaths(_open_all(look.helpers), last_call)
            awaits_helpers = time.monotonic_ns() < last_call
        elif look.trackers and not look.living.keys() - immune - look.trackers:
            last_call = min(deadline, time.monotonic_ns() + TRACKER_PATIENCE_NS)
            _wait_for_deaths(_open_all(look.trackers), last_call)
            spares_trackers = False
    return []


def left_descendants(
    *, spared: "Collection[int]", spared_trees: "Collection[int]", awaited: "Collection[int]"
) -> "tuple[dict[int, str], set[int]]":
    """Find all living descendants of this process, and kill none.

    Returns the command lines of those that no library will end, by pid; and all pids and sessions
    that are needed to spare them from now on. See `kill_descendants` for the arguments.
    """
    deadline = time.monotonic_ns() + HELPER_PATIENCE_NS
    while True:
        look = _KillPass(
            spared,
            spared_trees,
            set(),
            spares_trackers=True,
            spares_helpers=time.monotonic_ns() < deadline,
            spares_newcomers=False,
            kills=False,
        )
        _reap(look.dead - set(awaited))
        if not look.helpers:
            return look.left, {*look.living, *look.sessions}
        _wait_for_deaths(_open_all(look.helpers), deadline)


def has_children() -> bool:
    """Whether this process has a child, alive or dead; without one it has no descendant."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class _KillPass:
    """One pass over all processes, which kills our descendants as it finds them.

    Attributes:
        living: those that were alive, and are not spared.
        dead: our own children that have ended and are not reaped.
        groups: the process groups of all of them, none of which is that of a spared one.
        trackers: the resource trackers among the living, which have been left alone.
        newcomers: those among the living who have no command line; the same.
        helpers: those of libraries among the living; the same.
        left: the command lines of those that were killed, or would have been.
        sessions: the sessions of the living.
        dying: pidfds of those that were killed, or of some of them.
    """

    def __init__(
        self,
        spared: "Collection[int]",
        spared_trees: "Collection[int]",
        immune: "set[int]",
        *,
        spares_trackers: bool,
        spares_helpers: bool,
        spares_newcomers: bool,
        kills: bool = True,
    ) -> None:
        self.living: dict[int, int] = {}
        self.dead: set[int] = set()
        self.groups: set[int] = set()
        self.trackers: set[int] = set()
        self.newcomers: set[int] = set()
        self.helpers: set[int] = set()
        self.left: dict[int, str] = {}
        self.sessions: set[int] = set()
        self.dying: list[int] = []
        self._myself = os.getpid()
        self._spared = spared
        self._spared_trees = spared_trees
        self._immune = immune
        self._spares_trackers = spares_trackers
        self._spares_helpers = spares_helpers
        self._spares_newcomers = spares_newcomers
        self._kills = kills
        self._groups_with_others = {os.getpgrp()}
        # Whether a process is a descendant, for all that have been read.
        self._is_ours = {0: False, 1: False, self._myself: True}
        self._is_ours.update(dict.fromkeys(spared_trees, False))
        for pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc"))), reverse=True):
            self._climb(pid)
        self.groups -= self._groups_with_others

    def _climb(self, pid: int) -> None:
        """Find out whether a process is a descendant, and so for all its ancestors."""
        path: list[tuple[int, int, int, int, bool]] = []
        while pid not in self._is_ours:
            self._is_ours[pid] = False  # until we know better; and no circle goes on for ever
            parent, group, session, is_alive = _read(pid)
            if session in self._spared_trees:
                return  # nor are those whom we came from
            path.append((pid, parent, group, session, is_alive))
            pid = parent
        if self._is_ours[pid]:
            for descendant, parent, group, session, is_alive in reversed(path):
                self._is_ours[descendant] = True
                if is_alive and descendant not in self._spared:
                    self.sessions.add(session)
                self._take(descendant, parent, group, is_alive=is_alive)

    def _take(self, pid: int, parent: int, group: int, *, is_alive: bool) -> None:
        """Note a descendant, and kill it."""
        if pid in self._spared:
            self._groups_with_others.add(group)
        elif not is_alive:
            if parent == self._myself:
                self.dead.add(pid)
                self.groups.add(group)
        else:
            self.living[pid] = parent
            command_line = _command_line(pid)
            if self._spares_trackers and _is_tracker(command_line):
                self.trackers.add(pid)
                self._groups_with_others.add(group)
            elif self._spares_newcomers and command_line == b"":
                self.newcomers.add(pid)
                self._groups_with_others.add(group)
            elif self._spares_helpers and _is_helper(command_line):
                self.helpers.add(pid)
                self._groups_with_others.add(group)
            elif not self._kills:
                self.left[pid] = _words(command_line)
            else:
                self.groups.add(group)
                is_killed = pid not in self._immune and self._kill(pid, parent)
                # A process without a command line is at its end, or has not become what it will be.
                if is_killed and command_line and not _is_tracker(command_line):
                    self.left[pid] = _words(command_line)

    def _kill(self, pid: int, parent: int) -> bool:
        """Kill a descendant, unless it has ended by itself or may not be killed."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        # Since it was read, the number may have been given to a stranger, whose parent is another.
        if _read(pid)[0] in (parent, self._myself):
            try:
                _signal.pidfd_send_signal(pidfd, _signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
            except PermissionError:
                self._immune.add(pid)  # it runs as another user
            else:
                if len(self.dying) < _WATCHED_MAX:
                    self.dying.append(pidfd)
                else:
                    os.close(pidfd)
                return True
        os.close(pidfd)
        return False


def _read(pid: int) -> tuple[int, int, int, bool]:
    """Return a process's parent (0 if there is none), group, session, and whether it is alive."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, 0, 0, False
    try:
        # The name stands in parentheses and may hold anything, parentheses included.
        fields = os.read(fd, 1024).rpartition(b")")[2].split()
    except ProcessLookupError:
        return 0, 0, 0, False
    finally:
        os.close(fd)
    # A main thread may end and leave others running: a zombie with threads is alive.
    is_alive = fields[0] not in b"ZX" or int(fields[17]) > 1
    return int(fields[1]), int(fields[2]), int(fields[3]), is_alive


def _command_line(pid: int) -> bytes | None:
    """Return the beginning of a process's command line, None if it cannot be read."""
    try:
        fd = os.open(f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, 4096)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)


def _is_tracker(command_line: bytes | None) -> bool:
    return _TRACKER_MARK in (command_line or b"")


def _is_helper(command_line: bytes | None) -> bool:
    """Whether a process was made by a library, which usually ends it with its program."""
    return any(mark in (command_line or b"") for mark in _HELPER_MARKS)


def _words(command_line: bytes | None) -> str:
    """Return a command line for people."""
    return (command_line or b"?").rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def _kill_group(group: int) -> None:
    try:  # noqa: SIM105 - `contextlib` is not worth its import
        os.killpg(group, _signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # none in it is alive, or may be killed, which the next look will show


def _reap(children: "Iterable[int]") -> set[int]:
    """Reap children that have ended; return those that have."""
    reaped = set()
    for pid in children:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                reaped.add(pid)
        except ChildProcessError:
            continue
    return reaped


def _open_all(pids: "Iterable[int]") -> list[int]:
    """Return descriptors that tell of the ends of these processes, as far as they are there."""
    pidfds = []
    for pid in pids:
        try:
            pidfds.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    return pidfds


def _wait_for_deaths(pidfds: list[int], deadline: int) -> None:
    """Wait until all these processes have ended, or until the deadline; close the descriptors."""
    dying = set(pidfds)
    deaths = select.poll()
    for pidfd in dying:
        deaths.register(pidfd, select.POLLIN)
    while dying:
        patience = (deadline - time.monotonic_ns()) / _NANOSECONDS_PER_MILLISECOND
        dead = deaths.poll(patience) if patience > 0 else []
        for pidfd in [fd for fd, _ in dead] or list(dying):
            deaths.unregister(pidfd)
            dying.discard(pidfd)
            os.close(pidfd)
