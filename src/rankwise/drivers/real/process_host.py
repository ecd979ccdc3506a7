"""The real process host: a gang's orders become processes, pipes and signals.

The guardian (or the fork server) owns the processes; this object owns the agent's ends of their
pipes. A `WorkerLink` is one worker of one attempt: its number at the guardian, its pipes, and what
came through them. Links of an attempt outlive its workers until every pipe has been read to its
end, so that nothing that was written is lost.

Order is kept where it matters: before a worker's exit is handled, its report, result and output
pipes are emptied first, so the gang learns what a worker reported before it learns that the worker
has ended.

A message on a worker's line is handled before the failure of another: it may have offered to be
called again, and the failure would end it otherwise.

- A worker dies: the guardian says so; see above.
- Its parent does not say so, since it is stopped: the agent sees it by itself, and how it ended.
- The guardian dies: `GuardianLost`. Its workers died with it (`hosting.py` sees to that).
- A child of a worker keeps a pipe open after the worker's end: the pipe is read on until the sweep
  has killed the child.
"""

import _socket
import os
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwise.base.failure import ErrorRecord, ExitStatus
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    GuardianLost,
    ProgressLooked,
    RecoveryMessageSent,
    RecoveryOrder,
    StacksDumped,
    Stimulus,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.drivers.real.hosting.connection import Connection, GuardianConnection
from rankwise.drivers.real.logs.flow import LogFlow
from rankwise.drivers.real.logs.pump import open_stream_pipe
from rankwise.drivers.real.process_work import is_stopped
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.recall_line import LINE_VARIABLE, AgentWord, new_line, take_words, tell
from rankwise.drivers.real.report_pipe import (
    CallsBegin,
    ErrorReported,
    Exiting,
    LedgerOff,
    Ready,
    Recorded,
    RecorderReady,
    WorkerReport,
)
from rankwise.drivers.real.stacks_collection import StacksCollection
from rankwise.drivers.real.worker.bootstrap import STACKS_SIGNAL
from rankwise.drivers.real.worker_link import WorkerLink, WorkerPlanner, WorkerStream
from rankwise.drivers.real.worker_process import Ends, WorkerProcess
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    import socket

PEER_NOTICE = Duration(50 * MILLISECOND)
"""How long a failure is kept from the ranks that wait for the failed one, see `_tell_peers`."""
EXIT_NEWS_PATIENCE = Duration(1 * SECOND)
"""How long a parent may take to tell of a worker's end, before we look ourselves."""
PARENT_PATIENCE = Duration(10 * SECOND)
"""How long, where we cannot see how it ended, before its parent is given up."""
PIPE_CHUNK_BYTES = 1 << 18
SMALL_RESULT_BYTES = 1 << 15
LARGE_CHUNK_BYTES = 1 << 20
"""What is read at once of a large result, whose pipe is made to hold as much."""
SIGINT, SIGKILL, SIGTERM, SIGCONT = 2, 9, 15, 18


class RealProcessHost:
    """Makes, signals and sweeps the processes of one gang through a guardian.

    Args:
        reactor: waits for everything.
        clock: tells when a fact arrives.
        guardian: the parent of all processes.
        spawner: whom to ask for workers: the guardian, or a fork server beneath it.
        planner: knows what to run.
        flow: keeps the output streams moving.
        deliver: takes the stimuli.
        last_progress: tells when any worker last made progress.
        on_hang: is shown where every rank stands, before the gang gets the look at it.
        on_calls: is told that a rank enters its calls in its call record from now on.
        on_ledger_off: is told why a rank cannot enter its calls, or not all.
        on_recorded: is told what the recorder of torch has in a worker, by its local rank.
        on_preload_failure: is told of a module that a fork server could not import, and why.
        abandon_spawns: takes back orders for workers that have not been made yet.
        renew_spawner: makes a spawner that was lost by that as good as new, before the next order.
        keeps_children: whether what workers have left running lives on when all have ended well.
    """

    def __init__(
        self,
        *,
        reactor: Reactor,
        clock: Clock,
        guardian: GuardianConnection,
        spawner: Connection,
        planner: WorkerPlanner,
        flow: LogFlow,
        deliver: Callable[[Stimulus], None],
        last_progress: Callable[[], Instant],
        on_hang: Callable[[dict[int, str]], None],
        on_calls: Callable[[], None],
        on_ledger_off: Callable[[str], None],
        on_recorded: Callable[[int, Recorded], None],
        on_preload_failure: Callable[[str, str], None],
        abandon_spawns: Callable[[], None],
        renew_spawner: Callable[[], None],
        keeps_children: bool = False,
    ) -> None:
        self.has_survivors = False
        """Whether a process that cannot be killed, or found, may hold a pipe open for ever."""
        self.left_behind: Mapping[int, str] = {}
        """What the last sweep has found alive, and killed or kept: command lines by pid."""
        self.errors: dict[int, ErrorRecord] = {}
        """The first exception of which each worker of the latest attempt has told.

        Not in its link, which all that waits for its pipes gets.
        """
        self.is_stopping = False
        """Whether the attempt was asked to stop: what is left then is killed in any case."""
        self._reactor = reactor
        self._clock = clock
        self._guardian = guardian
        self._spawner = spawner
        self._planner = planner
        self._flow = flow
        self._deliver = deliver
        self._ends: Ends[int] | None = None  # with the first process: files may be few
        self._last_progress = last_progress
        self._on_hang = on_hang
        self._on_calls = on_calls
        self._on_ledger_off = on_ledger_off
        self._on_recorded = on_recorded
        self._on_preload_failure = on_preload_failure
        self._abandon_spawns = abandon_spawns
        self._renew_spawner = renew_spawner
        self._keeps_children = keeps_children
        self._links: dict[int, WorkerLink] = {}
        self._current: dict[int, WorkerLink] = {}
        self._stacks = StacksCollection(reactor, clock, self._current, self._ask_for_stacks)
        self._sweeps: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._unpassed: list[tuple[int, Callable[[list[int], list[int]], None]]] = []
        """Signals to be passed on, and who is told which workers have got them."""

    @property
    def links(self) -> dict[int, WorkerLink]:
        """The links of the latest attempt, by local rank."""
        return self._current

    def pids(self) -> dict[int, int]:
        """The processes of the latest attempt, by local rank; callable from any thread."""
        links = dict(self._current)
        return {rank: link.pid for rank, link in links.items() if link.pid is not None}

    def living(self) -> dict[int, int]:
        """Those of them that have not ended."""
        return {rank: pid for rank, pid in self.pids().items() if not self._current[rank].is_over}

    @property
    def is_drained(self) -> bool:
        """Whether every worker's pipes have been read to their ends."""
        return not self._links

    def spawn(self, local_rank: int, attempt: int) -> None:
        """Make a worker's process; see ports.processes."""
        try:
            self._renew_spawner()
            link = self._open_link(local_rank, attempt)
        except Exception as error:  # noqa: BLE001  # it must not end the agent of the other workers
            self._deliver(WorkerRefused(local_rank, attempt, str(error) or repr(error)))
            return
        self._current[local_rank] = link
        self.errors.pop(local_rank, None)

    def signal(self, local_rank: int, attempt: int, signal: int) -> None:
        """Signal a worker's process group; see ports.processes."""
        link = self._current.get(local_rank)
        if link is not None and link.attempt == attempt and not link.is_over:
            if signal == SIGINT and _is_starting(link):
                # Python swallows a Ctrl-C at some instants of its start, and goes on.
                signal = SIGKILL
            if not link.is_signalled:
                link.is_signalled = True
                link.was_stopped = link.pid is not None and is_stopped(link.pid)
            if signal == SIGTERM and _is_dying(link):
                self._deliver(DumpsLooked(attempt, (local_rank,)))
            # The rest of the group is swept. A kill of all would take along the resource tracker of
            # multiprocessing, which has yet to remove the worker's shared memory.
            self._signal(link, signal, group=signal != SIGKILL)
            if signal != SIGKILL:
                # A process that is stopped (SIGSTOP, a debugger) takes it only when it goes on.
                self._signal(link, SIGCONT, group=True)
            link.is_killed |= signal == SIGKILL

    def signal_all(self, signum: int) -> None:
        """Send a signal to every worker, and to its process group."""
        for link in self._current.values():
            if not link.is_over:
                self._signal(link, signum, group=True)

    def pass_on(self, signum: int, on_passed: Callable[[list[int], list[int]], None]) -> None:
        """Send a signal to the workers that catch it, and not to what they have started.

        A worker that has been ordered may run before its process is known here. So the signal waits
        until each order has an answer.

        Args:
            signum: the signal.
            on_passed: is told the local ranks of those, and of the others that live.
        """
        self._unpassed.append((signum, on_passed))
        self._pass_on_all()

    def _pass_on_all(self) -> None:
        """Pass on the signals that wait, unless a worker's process is still unknown."""
        if not self._unpassed or any(
            link.pid is None and not link.is_over for link in self._current.values()
        ):
            return
        unpassed, self._unpassed = self._unpassed, []
        for signum, on_passed in unpassed:
            reached: list[int] = []
            others: list[int] = []
            for local_rank, link in sorted(self._current.items()):
                if link.is_over or link.process is None:
                    continue
                if link.process.catches(signum):
                    link.process.signal(signum, group=False)
                    reached.append(local_rank)
                else:
                    others.append(local_rank)
            on_passed(reached, others)

    def look_for_progress(self, attempt: int) -> None:
        """Find out when a worker last made progress; see ports.processes."""
        self._deliver(ProgressLooked(attempt, self._last_progress()))

    def look_for_dumps(self, attempt: int) -> None:
        """Find out whose core the kernel is writing; see ports.processes."""
        dying = [rank for rank, link in self._current.items() if _is_dying(link)]
        self._deliver(DumpsLooked(attempt, tuple(sorted(dying))))

    def ask_recorders(self, ask: int) -> frozenset[int]:
        """Ask workers for what torch has recorded; those of them that can be asked, by local rank.

        The answers have that number, from 0 to 255. A worker that holds the interpreter in C has
        none.
        """
        asked = set()
        for local_rank, link in self._current.items():
            if link.recorder_thread and not link.is_over and link.report_fd >= 0:
                with suppress(OSError):  # it has died, or left many questions unread
                    # The pipe is a socket pair, and the thread that reads it sleeps in C until
                    # then.
                    os.write(link.report_fd, bytes([ask]))
                    asked.add(local_rank)
        return frozenset(asked)

    def dump_stacks(self, attempt: int) -> None:
        """Make every living worker print its stacks; see ports.processes."""

        def on_done(stacks: dict[int, str]) -> None:
            self._on_hang(stacks)
            self._deliver(StacksDumped(attempt))

        self.collect_stacks(on_done)

    def collect_stacks(self, on_done: Callable[[dict[int, str]], None]) -> None:
        """Ask all workers that can answer for their stacks; call back with text by local rank."""
        self._stacks.collect(on_done)

    def stopped(self) -> tuple[int, ...]:
        """The local ranks of the workers that a signal such as SIGSTOP, or a debugger, has stopped.

        They make no progress, and show no stacks.
        """
        return tuple(rank for rank, pid in sorted(self.living().items()) if is_stopped(pid))

    def note_ends(self) -> None:
        """Note which workers have ended by now, though their exits are handled only later."""
        for number in () if self._ends is None else self._ends.take():
            self._on_end_seen(self._links[number])

    def fence(self, at: Instant | None) -> None:
        """Let the guardian kill all workers at that instant, however this process fares then."""
        self._guardian.fence(at)

    def tell(self, local_rank: int, attempt: int, word: RecoveryOrder) -> None:
        """Say a word to a worker that can be recovered; see ports.processes."""
        link = self._current.get(local_rank)
        if link is None or link.is_over or link.line is None:
            return
        if word is not RecoveryOrder.AGAIN:
            tell(link.line, AgentWord(word, peers=tuple(self.pids().values())))
            return
        # Its process is the same, so facts about it carry the new number from here on.
        link.attempt = attempt
        try:
            plan = self._planner.call_again(local_rank, attempt)
        except OSError:  # as of memory: a new process would need more, and its refusal tells why
            self._signal(link, SIGKILL, group=False)
            return
        descriptors = plan.descriptors | plan.gives
        named = AgentWord(word, plan.environment, descriptors=tuple(descriptors))
        tell(link.line, named, tuple(descriptors.values()))
        for given in plan.gives.values():
            os.close(given)

    def sweep(self, attempt: int, spares: Sequence[int] = ()) -> None:
        """Kill whatever the attempt left behind; see ports.processes."""
        # A token of its own: a warm guardian may still owe an answer to an earlier gang.
        if any(link.pid is None and not link.is_over for link in self._links.values()):
            self._abandon_spawns()
        token = self._guardian.next_number()
        self._sweeps[token] = attempt, tuple(spares)
        spared = (self._current[local_rank].pid for local_rank in spares)
        self._guardian.sweep(token, [pid for pid in spared if pid is not None], self._manner)

    @property
    def _manner(self) -> str:
        """What becomes of the processes that the workers have left running."""
        ends = [link.exit_code for link in self._current.values()]
        if self.is_stopping or any(code != 0 for code in ends):
            return "kill"
        return "keep" if self._keeps_children else "tell"

    def unread_streams(self) -> list[int]:
        """The pipes into which processes that were kept still write."""
        streams = [stream for link in self._links.values() for stream in link.streams]
        return [stream.pump.fd for stream in streams if not stream.is_over]

    def close(self) -> None:
        """Close every pipe, read to its end or not."""
        for link in list(self._links.values()):
            self._close_report(link)
            self._close_result(link)
            self._close_line(link)
            self._close_process(link)
            for stream in link.streams:
                self._flow.finish(stream.pump)
        self._links.clear()
        if self._ends is not None:
            self._reactor.unwatch_readable(self._ends.fileno())
            self._ends.close()
            self._ends = None

    def on_spawned(self, worker: int, pid: int) -> None:
        """A process exists: its parent says so, or it does itself, if that has been stopped."""
        link = self._links.get(worker)
        if link is not None and link.pid is None and not link.is_over:
            link.pid = pid
            with suppress(OSError):  # it has ended already; or without, its parent will do it all
                link.process = WorkerProcess(pid)
                self._watch_end(link.process, link)
            self._deliver(WorkerSpawned(link.local_rank, link.attempt, pid))
            self._pass_on_all()

    def on_refused(self, worker: int, reason: str) -> None:
        """A process could not be made."""
        link = self._links.get(worker)
        if link is not None:
            self._on_over(link)
            self._deliver(WorkerRefused(link.local_rank, link.attempt, reason))
            self._pass_on_all()

    def on_exited(self, worker: int, code: int, at: Instant) -> None:
        """A process has ended."""
        link = self._links.get(worker)
        if link is not None and not link.is_over:
            # The guardian reports in turn; this process may have seen the end earlier by its
            # pidfd.
            ended_at = at if link.end_seen_at is None else min(at, link.end_seen_at)
            link.exit_code = code
            for speaker in list(self._current.values()) if code != 0 else ():
                # Earlier messages of workers may explain this exit, and must reach the gang first.
                self._on_recovery_message(speaker)
            self._on_over(link)
            exiting = self._word_of_exit(link, code)
            if exiting is not None:
                code, ended_at = exiting.code, min(ended_at, Instant(exiting.at))
            is_ours = link.is_killed and code == -SIGKILL
            exited = WorkerExited(
                link.local_rank, link.attempt, ExitStatus(code), ended_at, was_killed_by_us=is_ours
            )
            self._deliver(exited)
            self._tell_peers(link, has_failed=code != 0)

    def _word_of_exit(self, link: WorkerLink, code: int) -> Exiting | None:
        """When and how a worker's program ended, if that explains more than its process's end.

        Peers saw its connections close then, and it may have been told to stop since. But where
        another one has died without a word, it may have ended because of that.
        """
        exiting, ours = link.exiting, (-SIGTERM, -SIGKILL) if link.is_killed else (-SIGTERM,)
        if exiting is None or code not in (exiting.code, *ours):
            return None
        others = (other for other in self._current.values() if other is not link)
        return None if any(other.has_died_in_silence for other in others) else exiting

    def on_swept(self, token: int, survivors: tuple[int, ...], killed: Mapping[int, str]) -> None:
        """Nothing is left of an attempt, but perhaps for processes stuck in the kernel."""
        attempt, spares = self._sweeps.pop(token, (None, ()))
        if attempt is None:
            return
        self.has_survivors = bool(survivors)
        self.left_behind = killed
        # All that could write are dead: this is all, and the next attempt begins with nothing old.
        spared = {self._current[local_rank].number for local_rank in spares}
        for link in [link for link in self._links.values() if link.number not in spared]:
            link.is_over = True
            self._close_line(link)
            self._close_process(link)
            self._empty_pipes(link)
            self._forget_if_done(link)
        self._pass_on_all()  # before another attempt has workers that are not known here
        self._deliver(Swept(attempt, survivors, spares))

    def on_ready(self, details: Mapping[str, Any]) -> None:
        """Tell of imports that failed. Nothing waits for this: orders queue in the socket."""
        for module, error in details.get("failed", {}).items():
            self._on_preload_failure(module, error)

    def on_lost(self, reason: str) -> None:
        """The guardian is gone, and the workers with it."""
        self.has_survivors = True  # without a guardian, orphans can be found only by their mark
        for link in list(self._links.values()):
            self._on_over(link)
        self._pass_on_all()
        self._deliver(GuardianLost(reason))

    def _open_link(self, local_rank: int, attempt: int) -> WorkerLink:
        link = _ordered_worker(local_rank, attempt, self._planner, self._spawner)
        self._links[link.number] = link
        for stream in link.streams:
            self._flow.add(stream.pump, partial(self._on_stream_over, link, stream))
        if link.report_fd >= 0:
            self._reactor.watch_readable(link.report_fd, partial(self._read_report, link))
        if link.result_fd >= 0:
            self._reactor.watch_readable(link.result_fd, partial(self._read_result, link))
        if link.line is not None:
            self._reactor.watch_readable(
                link.line.fileno(), partial(self._on_recovery_message, link)
            )
        return link

    def _on_recovery_message(self, link: WorkerLink) -> None:
        if link.line is None:
            return
        words, has_ended = take_words(link.line)
        if has_ended:
            self._close_line(link)
        for each in words:
            said = RecoveryMessageSent(
                link.local_rank, link.attempt, each.word, each.recall_timeout
            )
            self._deliver(said)

    def _close_line(self, link: WorkerLink) -> None:
        if link.line is not None:
            self._reactor.unwatch_readable(link.line.fileno())
            link.line.close()
            link.line = None

    def _signal(self, link: WorkerLink, signum: int, *, group: bool) -> None:
        """Send a signal ourselves, since the worker's parent may be stopped or busy."""
        if link.process is not None:
            link.process.signal(signum, group=group)
        else:
            self._spawner.signal(link.number, signum, group=group)

    def _ask_for_stacks(self, link: WorkerLink) -> None:
        """Signal a thread of ours where there is one: in the main one, that ends a sleep of C."""
        thread = link.recorder_thread
        if not (thread and link.process and link.process.signal_thread(thread, STACKS_SIGNAL)):
            self._signal(link, STACKS_SIGNAL, group=False)

    def _watch_end(self, process: WorkerProcess, link: WorkerLink) -> None:
        if self._ends is None:
            self._ends = Ends()
            self._reactor.watch_readable(self._ends.fileno(), self.note_ends)
        self._ends.watch(process, link.number)

    def _on_end_seen(self, link: WorkerLink) -> None:
        """A worker has ended: its parent will tell how; if it does not, find out."""
        link.end_seen_at = ended_at = self._clock.now()

        def find_out() -> None:
            if link.is_over:
                return
            code = None if link.process is None else link.process.exit_code()
            if code is not None:
                self.on_exited(link.number, code, ended_at)
            else:
                self._reactor.call_at(after(ended_at, PARENT_PATIENCE), give_up)

        def give_up() -> None:
            if not link.is_over:
                self.on_lost(f"the exit status of process {link.pid} was not reported")

        self._reactor.call_at(after(ended_at, EXIT_NEWS_PATIENCE), find_out)

    def _on_over(self, link: WorkerLink) -> None:
        """Take what a worker that has ended left in its pipes, before its end is passed on."""
        link.is_over = True
        self._close_line(link)
        self._close_process(link)
        self._empty_pipes(link)
        if self._current.get(link.local_rank) is link:
            self._stacks.on_over(link.local_rank)
        self._forget_if_done(link)

    def _tell_peers(self, link: WorkerLink, *, has_failed: bool) -> None:
        """Wake the ranks that wait for a worker which has ended.

        After a failure they are being told to stop already. Those that obey must not first raise
        an exception each about a peer that died; those that have something to save learn it soon.
        """

        def tell() -> None:
            if self._current.get(link.local_rank) is link:
                self._planner.on_worker_over(link.local_rank)

        if has_failed:
            self._reactor.call_at(after(self._clock.now(), PEER_NOTICE), tell)
        else:
            tell()

    def _empty_pipes(self, link: WorkerLink) -> None:
        """Take what is in a worker's pipes at this moment."""
        while self._read_report(link) or self._read_result(link):
            pass
        for stream in link.streams:
            if not stream.is_over:
                self._flow.drain(stream.pump)

    def _on_stream_over(self, link: WorkerLink, stream: WorkerStream) -> None:
        stream.is_over = True
        self._forget_if_done(link)

    def _read_report(self, link: WorkerLink) -> bool:
        """Read one chunk of reports; tell whether there may be more at this moment."""
        if link.report_fd < 0:
            return False
        try:
            data = os.read(link.report_fd, PIPE_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""  # it has died with a question unread
        if not data:
            self._close_report(link)
            self._on_records(link, link.reports.finish())
            self._forget_if_done(link)
            return False
        self._on_records(link, link.reports.feed(data))
        if self._current.get(link.local_rank) is link:
            self._stacks.on_report(link.local_rank)
        return True

    def _on_records(self, link: WorkerLink, records: list[WorkerReport]) -> None:
        for record in records:
            match record:
                case Ready():
                    link.is_ready = True
                    self.on_spawned(link.number, record.pid)
                case CallsBegin():
                    self._on_calls()
                case LedgerOff():
                    self._on_ledger_off(record.why)
                case RecorderReady():
                    link.recorder_thread = record.thread
                case Recorded():
                    self._on_recorded(link.local_rank, record)
                case Exiting():
                    link.exiting = record
                case ErrorReported():
                    link.has_raised = True
                    if self._current.get(link.local_rank) is link:
                        self.errors.setdefault(link.local_rank, record.error)
                    self._deliver(WorkerReported(link.local_rank, link.attempt, record.error))

    def _read_result(self, link: WorkerLink) -> bool:
        """Read a chunk (a large result must not hold up others); tell if there may be more."""
        if link.result_fd < 0:
            return False
        try:
            data = os.read(link.result_fd, LARGE_CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_result(link)
            self._forget_if_done(link)
            return False
        if not link.result and len(data) > SMALL_RESULT_BYTES:
            with suppress(OSError):  # the user's other pipes have used up the allowance
                fcntl(link.result_fd, F_SETPIPE_SZ, LARGE_CHUNK_BYTES)
        link.result += data
        return True

    def _forget_if_done(self, link: WorkerLink) -> None:
        if link.is_over and link.is_read:
            self._links.pop(link.number, None)

    def _close_report(self, link: WorkerLink) -> None:
        if link.report_fd >= 0:
            self._reactor.unwatch_readable(link.report_fd)
            os.close(link.report_fd)
            link.report_fd = -1
            # It may have become another program, which STACKS_SIGNAL would kill.
            link.is_ready = False

    def _close_process(self, link: WorkerLink) -> None:
        if link.process is not None:
            if self._ends is not None:
                self._ends.forget(link.process)
            link.process.close()
            link.process = None

    def _close_result(self, link: WorkerLink) -> None:
        if link.result_fd >= 0:
            self._reactor.unwatch_readable(link.result_fd)
            os.close(link.result_fd)
            link.result_fd = -1


def _is_dying(link: WorkerLink) -> bool:
    """Whether a signal is ending a worker whose exit has not arrived yet."""
    return not link.is_over and link.process is not None and link.process.is_dying


def _is_starting(link: WorkerLink) -> bool:
    """Whether a worker of Python has not come to its program: it has not said a word yet."""
    if link.report_fd < 0 or link.is_ready:
        return False
    unread = select.poll()
    unread.register(link.report_fd, select.POLLIN)
    return not unread.poll(0)


def _ordered_worker(
    local_rank: int, attempt: int, planner: WorkerPlanner, spawner: Connection
) -> WorkerLink:
    """Order a worker, with new pipes, of which the link has our ends.

    Raises:
        OSError, RankwiseError: it cannot be had; nothing of it is left.
    """
    plan = planner.plan(local_rank, attempt)
    ours: list[int] = []
    theirs = [*plan.gives.values()]  # closed here when the worker has copies of them
    line: socket.socket | None = None

    def keep_one_end(ends: tuple[int, int]) -> tuple[int, int]:
        ours.append(ends[0])
        theirs.append(ends[1])
        return ends

    try:
        stdout_fd, stdout_end = keep_one_end(open_stream_pipe(plan.stream_count))
        stderr_fd, stderr_end = keep_one_end(open_stream_pipe(plan.stream_count))
        descriptors: dict[int | str, int] = {1: stdout_end, 2: stderr_end, **plan.descriptors}
        descriptors.update(plan.gives)
        report_fd = result_fd = -1
        if plan.reports:
            one, other = _socket.socketpair()  # the agent asks on it, too
            ends = keep_one_end((one.detach(), other.detach()))
            report_fd, descriptors["RANKWISE_REPORT_FD"] = ends
            os.set_blocking(report_fd, False)
        if plan.returns:
            result_fd, descriptors["RANKWISE_RESULT_FD"] = keep_one_end(os.pipe2(os.O_CLOEXEC))
            os.set_blocking(result_fd, False)
        if plan.recovers:
            line, end_of_line = new_line()
            descriptors[LINE_VARIABLE] = end_of_line.detach()
            theirs.append(descriptors[LINE_VARIABLE])
        number = spawner.next_number()
        spawner.spawn(number, {**plan.order, "fds": list(descriptors)}, list(descriptors.values()))
        stdout, stderr = planner.make_pumps(local_rank, stdout_fd, stderr_fd)
    except BaseException:
        for fd in ours:
            os.close(fd)
        if line is not None:
            line.close()
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    return WorkerLink(local_rank, attempt, number, stdout, stderr, report_fd, result_fd, line)
