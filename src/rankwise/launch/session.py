"""One run while it lasts: its parts, the loop that turns them, and their end.

A `Session` puts the parts together (reactor, guardian, gang machine, process host, logs, signals,
control socket), lets the reactor turn until the gang has finished and every line is out, and takes
everything down again in reverse order, on every path. What each part does when another one dies is
told in docs/development/architecture.md. `Supervision` makes one, in whatever thread the run is to
live.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rankwise.base.failure import (
    NO_RANK,
    TIME_LIMIT_SIGNAL,
    Outcome,
    OutcomeStatus,
    signal_name,
)
from rankwise.base.units import SECOND, Duration, Instant, after, between
from rankwise.core.gang.vocabulary import StoodStill, StopRequested
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.hosting.hosting import Hosting
from rankwise.drivers.real.interrupts import gate_here
from rankwise.drivers.real.logs.console import Console
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.drivers.real.logs.flow import LogFlow
from rankwise.drivers.real.loopback import LOOPBACK, loopback_address
from rankwise.drivers.real.proc import check_proc, may_have_gpus
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.signals import SignalPipe, end_well, is_default, stop_self
from rankwise.launch.cluster.agent_runner import AgentRunner
from rankwise.launch.cluster.plan import plan_of
from rankwise.launch.commands import ensure_open_files
from rankwise.launch.control.answers import ControlAnswers
from rankwise.launch.control.server import ControlServer
from rankwise.launch.decoration import FailureDecorator, stood_of
from rankwise.launch.fork_server import hosting_for
from rankwise.launch.job import Job
from rankwise.launch.journal_file import open_journal
from rankwise.launch.log_layout import LogPlaces
from rankwise.launch.master_port import ReservedPort
from rankwise.launch.node_ranks import NodeRanks
from rankwise.launch.notices import notice
from rankwise.launch.planning import JobPlanner
from rankwise.launch.private_places import new_private_path, remove_abandoned, remove_tree
from rankwise.launch.run_history import RunHistory
from rankwise.launch.run_parts import RunParts
from rankwise.launch.signal_effects import STOPPING, SignalEffect, effects_of
from rankwise.launch.watches import Watches

if TYPE_CHECKING:
    from rankwise.core.ledger import Delay
    from rankwise.launch.failure_command import FailureCommand
    from rankwise.launch.recording import RunRecorder

SIGTERM, SIGCONT, SIGSTOP, SIGTSTP = 15, 18, 19, 20
STRAY_PATIENCE = Duration(1 * SECOND)
"""How long output is awaited from processes that survived the sweep and hold a pipe open."""
CONSOLE_PATIENCE = Duration(3 * SECOND)
"""How long a console that takes nothing is waited for when the run has been stopped."""
STOP_NOTICE = Duration(1 * SECOND)
"""How long a stop that was asked for may take before we say that we wait for ranks."""
DESCRIPTORS_PER_WORKER = 8
"""Four pipes, a log file for each stream, the process, and the line of one that recovers."""


class Session:
    """The parts of a run while it lasts; `stack` owns them, in the order of their making.

    Args:
        job: what to run.
        stack: takes everything down; the caller closes it.
        places: where log files go.
        hosting: a warm guardian and fork server to borrow; None makes one for this run.
        started: one that was started for this run; it ends with it.
        clock: tells the time to all parts.
        on_begun: is called once every worker's process has been made.
        failure_command: is told of attempts that fail.

    Attributes:
        caught_signal: the signal to this process that has stopped the run, if one did.
        late_signals: those that came when the gang had finished, complete when `stack` is closed.

    Raises:
        ConfigError: the job cannot be run as it is described.
        SpawnFailed: not even the guardian could be started.
    """

    def __init__(
        self,
        job: Job,
        stack: ExitStack,
        *,
        places: LogPlaces,
        console_fds: tuple[int, int],
        hosting: Hosting | None,
        started: Hosting | None,
        clock: SystemClock,
        on_begun: Callable[[], None],
        failure_command: "FailureCommand | None" = None,
    ) -> None:
        check_proc()  # first of all: whatever reads there would fail in a way of its own
        job = _with_own_loopback(job)
        self.caught_signal: int | None = None
        self._caught_as = 0
        self.late_signals: list[int] = []
        self._job = job
        self._places = places
        self._clock = clock
        self._on_begun: Callable[[], None] | None = on_begun
        self._is_interrupted = False
        self._is_cut_short = False
        self._signals_caught = 0
        self._signals_told: set[int] = set()
        self._passed_told: dict[int, tuple[list[int], list[int]]] = {}
        """Which ranks a signal was passed on to, and which others there were, as was last told."""
        self._stops_asked = 0
        self._stop_asked_at: Instant | None = None
        self._is_asked_by_ranks = False
        self._effects = effects_of(job)
        # Before and after everything else, so that no signal meets half a session.
        self._signals = signals = self._catch_signals(stack)
        ensure_open_files(DESCRIPTORS_PER_WORKER * job.gang.size)
        # First of all, since it starts on another core while we go on here.
        hosting = hosting or stack.enter_context(started or hosting_for(job))
        self.reactor = stack.enter_context(Reactor(clock))
        self._gate = gate_here()
        self._gate.waker = partial(self.reactor.post, _nothing)
        stack.callback(setattr, self._gate, "waker", None)
        stdout_fd, stderr_fd = console_fds
        self._console = Console(stdout_fd=stdout_fd, stderr_fd=stderr_fd, say=self._say)
        stack.callback(self._console.close)
        self._complaints = DiskComplaints(self._say)
        stack.callback(places.discard)
        self._nested_runs = new_private_path()
        stack.callback(remove_tree, self._nested_runs)
        self._planner = stack.enter_context(
            JobPlanner(
                job,
                layout=places,
                console=self._console,
                complaints=self._complaints,
                mark=hosting.guardian.mark,
                nested_runs=self._nested_runs,
                ranks=_ranks_alone(job, stack),
            )
        )
        self._watches = Watches(
            job,
            self._planner,
            self.reactor,
            clock,
            say=self._say,
            recorder=lambda: self._recorder,
            starting_server=lambda: hosting.starting_server,
        )
        self._host = RealProcessHost(
            reactor=self.reactor,
            clock=clock,
            guardian=hosting.guardian,
            spawner=hosting.spawner,
            planner=self._planner,
            flow=LogFlow(self.reactor, self._console, clock),
            deliver=lambda fact: self._dispatch.on_rank(fact),  # noqa: PLW0108  # it is made later
            last_progress=self._watches.last_progress,
            on_hang=self._on_hang,
            on_calls=self._watches.on_calls,
            on_ledger_off=self._watches.on_ledger_off,
            on_recorded=self._watches.on_recorded,
            on_preload_failure=self._on_preload_failure,
            abandon_spawns=partial(self._abandon_spawns, hosting),
            renew_spawner=partial(self._renew_spawner, hosting),
            keeps_children=job.keep_children,
        )
        stack.callback(self._host.close)
        self._guard_files(hosting)
        # Now, so that a log directory which cannot be made stops us before any worker exists.
        self._planner.prepare_attempt(0)
        self._decorator = FailureDecorator(
            job,
            self._host,
            self._planner,
            clock.wall_ns() - clock.now(),
            keeps_files=places.keep,
        )
        self._plan = plan_of(job)
        self._journal = open_journal(job, places, self._complaints, stack, clock)
        parts = RunParts(
            job=job,
            stack=stack,
            clock=clock,
            reactor=self.reactor,
            host=self._host,
            planner=self._planner,
            decorator=self._decorator,
            journal=self._journal,
            watches=self._watches,
            history=RunHistory(clock.wall_ns, failure_command),
            say=self._say,
        )
        self._dispatch = AgentRunner(self._plan, parts)
        self._watches.attach(self._host, self._dispatch)
        if may_have_gpus():
            self._watch_gpus(stack)
        hosting.on_unfit = self._on_unfit_server
        hosting.attach(self.reactor, self._host)
        stack.callback(self._leave, hosting)
        if signals is not None:
            self.reactor.watch_readable(signals.fileno(), lambda: self._on_signals(signals.take()))
            stack.callback(self.reactor.unwatch_readable, signals.fileno())
        self.reactor.watch_readable(self._planner.stop_fd, self._on_ranks_ask)
        stack.callback(self.reactor.unwatch_readable, self._planner.stop_fd)
        if job.timeout is not None:
            self._limit_time(job.timeout)
        self._answers = ControlAnswers(parts, self._dispatch, places, self._on_stop_command)
        self._open_control(stack, self._answers)

    def run(self) -> Outcome:
        """Turn until the gang has finished and all that was written is out."""
        self._dispatch.begin()
        self._turn_until(lambda: self._dispatch.outcome is not None)
        outcome = self._dispatch.outcome
        assert outcome is not None, "the loop above ends with an outcome"
        if outcome.status is OutcomeStatus.SUCCEEDED and self.caught_signal is not None:
            # It came when all ranks had ended, before the gang knew that it had succeeded.
            self._is_interrupted = True
            # As it was sent: the program may handle SIGALRM, of which SIGTERM is only our reading.
            self.late_signals.append(self._caught_as)
        if outcome.status is OutcomeStatus.SUCCEEDED and self._host.left_behind:
            from rankwise.launch.announcements import left_behind_line  # noqa: PLC0415  # rare

            kept = self._job.keep_children
            line = left_behind_line(self._host.left_behind, are_kept=kept)
            self._say(line, "kept-children" if kept else "left-behind")
        lateness = self._watches.take_last_look()
        if lateness is not None and self._decorator.gpus is not None:
            delay, text = lateness
            slow = self._decorator.gpus.throttling(delay.rank)
            lateness = delay, "; ".join((text, *slow))
        self._read_to_the_end(outcome, lateness)
        told = self._decorator.decorate_outcome(outcome, "" if lateness is None else lateness[1])
        self._answers.tell_end(told)
        if self._signals is not None and not self._plan.is_alone:
            self._signals.on_arrival = self._tell_that_it_is_over
        return told

    def _tell_that_it_is_over(self, signum: int) -> None:
        """Answer a signal while nodes that are slower than this one hear of the end."""
        if self._effects.get(signum) not in STOPPING:
            return  # it asks for no end, such as Ctrl-Z
        assert self._signals is not None, "it has caught one"
        self._signals.on_arrival = None  # once is enough
        self._say(f"{signal_name(signum)}: the run is over; this node ends when the others know it")

    def end_well_on_signals(self) -> bool:
        """After a success, have signals end this process as a success; tell whether they do.

        They do not if one of them has kept output from being written.
        """
        outcome = self._dispatch.outcome
        if outcome is None or outcome.status is not OutcomeStatus.SUCCEEDED or self._is_cut_short:
            return False
        if self._signals is not None:
            ending = [each for each, effect in self._effects.items() if effect in STOPPING]
            self._signals.leave(end_well, (SIGTSTP, *ending))
        return True

    def has_root_cause(self, outcome: Outcome) -> bool:
        """Whether the run failed because of this node; the first node answers where none did."""
        here, failures = self._planner.ranks, outcome.failures
        if outcome.status is OutcomeStatus.STOPPED:
            failures = ()  # those were told to stop
        if failures and failures[0].rank == NO_RANK:
            return True  # no node knows which others are left to tell of it
        ranks = range(here.first_rank, here.first_rank + self._job.gang.size)
        return failures[0].rank in ranks if failures else here.node_rank == 0

    def pids(self) -> dict[int, int]:
        """The processes of the present attempt; callable from any thread."""
        return self._host.pids()

    def results(self) -> Mapping[int, bytes | bytearray]:
        """What the function workers have sent."""
        return {rank: link.result for rank, link in self._host.links.items()}

    def _turn_until(self, is_done: Callable[[], bool], deadline: Instant | None = None) -> None:
        """Let the reactor turn, and the gang's deadlines take effect, until `is_done`."""
        while not is_done():
            # Handlers of signals that are not ours to catch: one that raises ends the run.
            self._gate.run_due()
            candidates = (self._dispatch.next_deadline, deadline)
            self.reactor.run_once(min((c for c in candidates if c is not None), default=None))
            self._dispatch.wake()
            self._note_begun()
            if deadline is not None and self._clock.now() >= deadline:
                return

    def _note_begun(self) -> None:
        if self._on_begun is None:
            return
        links = self._host.links
        if len(links) < self._job.gang.size:
            return
        # The last first: it is the one that is missing, and this is asked at every turn.
        if all(links[local_rank].pid is not None for local_rank in reversed(links)):
            on_begun, self._on_begun = self._on_begun, None
            on_begun()
            remove_abandoned(self._nested_runs)

    def _read_to_the_end(self, outcome: Outcome, lateness: "tuple[Delay, str] | None") -> None:
        """Read what the workers have written and write it where it belongs, all of it.

        Everybody who could still write is dead, so the pipes end by themselves. A console that
        takes nothing, such as a pager, is waited for; a signal ends that. After a stop the wait has
        an end of its own.
        """
        now = self._clock.now()
        was_stopped = outcome.status is OutcomeStatus.STOPPED
        patience = after(now, CONSOLE_PATIENCE) if was_stopped else None
        writers_live = self._job.keep_children and bool(self._host.left_behind)
        if not writers_live:
            self._turn_until(
                lambda: self._host.is_drained or self._is_interrupted,
                after(now, STRAY_PATIENCE) if self._host.has_survivors else patience,
            )
        is_drained = self._host.is_drained or writers_live
        if writers_live:
            from rankwise.drivers.real.hosting.drain import discard_output  # noqa: PLC0415  # rare

            discard_output(self._host.unread_streams())
        self._host.close()
        self._complaints.tell_losses()
        has_report = outcome.status is OutcomeStatus.FAILED and self._job.log_format != "json"
        if lateness is not None and not has_report:  # which tells it
            delay, text = lateness
            waited_s = delay.waited / SECOND
            self._say(text, "lateness", rank=delay.rank, last=delay.last, waited_s=waited_s)
        self._turn_until(lambda: not self._console.wants_write or self._is_interrupted, patience)
        self._is_cut_short = self._is_interrupted and not (
            is_drained and not self._console.wants_write
        )

    def _leave(self, hosting: Hosting) -> None:
        """Leave a hosting that others may use as we have found it: without workers."""
        if self._dispatch.outcome is None:  # something of ours has broken in the middle of the run
            hosting.detach_broken()
        else:
            hosting.detach()

    def _catch_signals(self, stack: ExitStack) -> SignalPipe | None:
        if not self._job.handle_signals:
            return None
        self._pauses = SIGTSTP not in self._job.signals and is_default(SIGTSTP)
        pausing = (SIGTSTP,) if self._pauses else ()
        signals = SignalPipe((*self._effects, *pausing))
        stack.callback(lambda: self.late_signals.extend(signals.late))
        stack.enter_context(signals)
        return signals if signals.is_active else None

    def _on_signals(self, numbers: list[int]) -> None:
        for number in numbers:
            if number == SIGTSTP and self._pauses:
                self._stand_still()
                continue
            signum = self._heed(number)
            if signum is None:
                continue
            if self._dispatch.outcome is None:
                if self.caught_signal is None:
                    self.caught_signal, self._caught_as = signum, number
                self._signals_caught += 1
                # An agent among others says itself what follows.
                if self._signals_caught == 1 and self._plan.is_alone:
                    notice_at = after(self._clock.now(), STOP_NOTICE)
                    self.reactor.call_at(notice_at, partial(self._tell_who_is_awaited, signum))
            else:
                self._is_interrupted = True
                self.late_signals.append(number)
            # That ranks got it too, and were heard of first, does not make it the second request.
            if not self._is_asked_by_ranks or self._signals_caught != 1:
                self.request_stop(signum)

    def _heed(self, signum: int) -> int | None:
        """Do what a signal asks for; the one by which it stops the run, if it does."""
        effect, is_new = self._effects[signum], signum not in self._signals_told
        self._signals_told.add(signum)
        match effect:
            case SignalEffect.STOPS:
                return signum
            case SignalEffect.STOPS_AS_SIGTERM:
                # Once: the kernel repeats SIGXCPU every second. It only begins a stop: a batch
                # system sends it beside SIGTERM, and ranks that save are to go on saving.
                begins = not self._stops_asked
                if is_new and self._dispatch.outcome is None:
                    from rankwise.launch.announcements import as_sigterm_line  # noqa: PLC0415  # rare

                    self._say(as_sigterm_line(signum, begins=begins), "signal", signal=signum)
                return SIGTERM if is_new and begins else None
            case SignalEffect.PASSED_ON:
                if self._dispatch.outcome is None:
                    self._host.pass_on(signum, partial(self._tell_passed_on, signum))
            case SignalEffect.OUTLIVED:
                pass
        return None

    def _tell_passed_on(self, signum: int, reached: list[int], others: list[int]) -> None:
        """Say which ranks were sent a signal, unless that is what the last line said of it."""
        if self._passed_told.get(signum) != (reached, others):
            self._passed_told[signum] = reached, others
            from rankwise.launch.announcements import passed_on_line  # noqa: PLC0415  # rare

            rank = self._planner.ranks.rank
            line = passed_on_line(signum, [*map(rank, reached)], [*map(rank, others)])
            self._say(line, "signal", signal=signum)

    def _stand_still(self) -> None:
        """Ctrl-Z: stop with all ranks until a shell lets this process go on; then let them go on.

        They are in sessions of their own, where no key of the terminal reaches them, and where
        SIGTSTP does nothing.
        """
        if not self._plan.is_alone:
            from rankwise.launch.announcements import suspension_line  # noqa: PLC0415  # rare

            self._say(suspension_line(self._plan.rendezvous.lease_ttl), "suspended")
        since = self._clock.now()
        self._host.signal_all(SIGSTOP)
        stop_self()
        self._host.signal_all(SIGCONT)
        until = self._clock.now()
        stood = between(since, until)
        self.reactor.postpone(stood)
        self._watches.stand_still(since, until)
        self._dispatch.deliver(StoodStill(stood))

    def _limit_time(self, timeout: Duration) -> None:
        """Stop the run when it has taken that long, unless something has ended it before."""
        from rankwise.launch.time_limit import TimeLimit  # noqa: PLC0415  # rare

        TimeLimit(
            timeout,
            host=self._host,
            reactor=self.reactor,
            clock=self._clock,
            watches=self._watches,
            is_needed=lambda: self._dispatch.outcome is None and not self._stops_asked,
            stop=partial(self._on_time_limit, timeout),
        )

    def _on_time_limit(
        self, timeout: Duration, verdict: str, waits: Mapping[int, str], stacks: Mapping[int, str]
    ) -> None:
        from rankwise.launch.announcements import time_limit_line  # noqa: PLC0415  # rare

        self._decorator.remember_stand(verdict, waits, stacks)
        if self._plan.is_alone:  # an agent among others says itself what follows
            self._say(time_limit_line(timeout, self._job.gang.grace), "timeout")
        self.request_stop(TIME_LIMIT_SIGNAL)

    def _on_stop_command(self, at_once: bool) -> None:  # the only argument
        """`rankwise stop`: as SIGTERM does; a second command does not kill, unless it says so."""
        if self._dispatch.outcome is not None:
            return
        if not self._stops_asked:
            self.request_stop(SIGTERM)
        if at_once:
            self.request_stop(SIGTERM)

    def _on_ranks_ask(self) -> None:
        """A rank that asks `should_stop` was sent SIGTERM, so all have to stop."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._planner.stop_fd)
        if not self._is_asked_by_ranks and not self._stops_asked:
            self._is_asked_by_ranks = True
            self.request_stop(SIGTERM)

    def _tell_who_is_awaited(self, signum: int) -> None:
        """Say that ranks take their time to end, and what the user can do about it."""
        rest = Duration(self._job.gang.grace - STOP_NOTICE)
        alive = sum(not link.is_over for link in self._host.links.values())
        if self._dispatch.outcome is None and self._signals_caught == 1 and alive and rest > 0:
            from rankwise.launch.announcements import stopping_line  # noqa: PLC0415  # rare

            self._say(stopping_line(signum, alive, rest), "stop", signal=signum)

    def _abandon_spawns(self, hosting: Hosting) -> None:
        """Have no more ranks made; say what has held them up, unless the user did not want them."""
        module = hosting.importing
        self._decorator.remember_import(module)
        if module and self.caught_signal is None:
            self._say(f"no rank could start: the fork server is still importing {module}")
        hosting.abandon_spawns()

    def _renew_spawner(self, hosting: Hosting) -> None:
        """Have a fork server that can make ranks, and watch it while it imports."""
        hosting.replace_server()
        self._watches.begin_start()

    def _on_unfit_server(self, reason: str, is_lasting: bool) -> None:  # a callback
        """Remember why ranks get interpreters of their own: the next run need not find out."""
        from rankwise.launch.automatic_start import interpreters_line, remember  # noqa: PLC0415  # rare

        told = f"the import of {', '.join(self._job.preload or ())} {reason}"
        if is_lasting:
            remember(self._job, told)
        if self._job.verbose:
            self._say(interpreters_line(told), "start")

    def _on_preload_failure(self, module: str, error: str) -> None:
        """Tell of an import that the user has asked for; one that we have chosen is our affair."""
        if self._job.preload is not None and module in self._job.preload:
            self._say(f"the fork server could not import {module}: {error}")

    def _guard_files(self, hosting: Hosting) -> None:
        """Have the guardian remove private directories, yet to be made, if we are killed."""
        paths = [self._nested_runs]
        if self._places.root is not None and not self._places.keep:
            paths.append(self._places.root)
        hosting.guardian.guard(paths)

    def _watch_gpus(self, stack: ExitStack) -> None:
        """Have reports tell what the GPUs of this node did."""
        from rankwise.launch.gpu_watch import GpuWatch  # noqa: PLC0415  # few machines have them

        def leaders() -> dict[int, int]:
            rank = self._planner.ranks.rank
            return {rank(local_rank): pid for local_rank, pid in self._host.living().items()}

        self._decorator.gpus = watch = GpuWatch(self.reactor, self._clock, self._say, leaders)
        stack.callback(watch.close)

    def _open_control(self, stack: ExitStack, answers: ControlAnswers) -> None:
        with suppress(OSError):  # a sandbox without unix sockets: the run is a run all the same
            control = stack.enter_context(ControlServer(self._shown_id, answers.on_request))
            self.reactor.watch_readable(control.fileno(), control.on_readable)
            stack.callback(self.reactor.unwatch_readable, control.fileno())

    @cached_property
    def _recorder(self) -> "RunRecorder | None":
        """Records in the journal what the ranks do; loaded while the first one is starting."""
        if self._journal is None:
            return None
        from rankwise.launch.recording import RunRecorder  # noqa: PLC0415  # only with a journal

        return RunRecorder(
            self._journal, self._host, self._planner, self.reactor, self._clock,
            name=self._shown_id, gpus=self._decorator.gpus,
        )  # fmt: skip

    @property
    def _shown_id(self) -> str:
        """What others may know of the run's id."""
        from rankwise.launch.control.addresses import shown_id  # noqa: PLC0415  # see above

        return shown_id(self._job.run_id, is_secret=self._plan.is_id_secret)

    def request_stop(self, signum: int | None) -> None:
        """Ask the gang to end; the second time it is killed."""
        self._stops_asked += 1
        self._stop_asked_at = self._stop_asked_at or self._clock.now()
        self._host.note_ends()  # so that a run which is done by now stays done
        self._dispatch.deliver(StopRequested(signum))

    @property
    def grace_left(self) -> Duration:
        """How much of the time is left that this node has to end once it is told to stop."""
        asked_at = self._stop_asked_at or self._clock.now()
        return Duration(max(0, after(asked_at, self._job.gang.grace) - self._clock.now()))

    def _on_hang(self, stacks: dict[int, str]) -> None:
        """Show where every rank stands, before anything is killed."""
        from rankwise.launch.announcements import hang_line, stacks_of_rank  # noqa: PLC0415  # rare

        here, is_for_machines = self._planner.ranks, self._job.log_format == "json"
        self._decorator.remember_stacks(stacks)
        gang = self._dispatch.gang
        if gang is not None and any(worker.blame for worker in gang.workers):
            return  # it has not hung: the report tells who is to blame, and where that one is
        verdict, waits = self._watches.explain_hang()
        self._decorator.remember_waits(verdict, waits)
        stood = stood_of(waits, stacks, here.rank)
        has_report = self._plan.is_alone or is_for_machines
        line = hang_line(self._job.gang.hang_timeout, stood, has_report=has_report)
        self._say(line, "hang")
        for each in stood if is_for_machines else ():
            if not each.stacks:
                continue
            self._say(stacks_of_rank(each.rank, each.stacks), "stacks", rank=each.rank)

    def _say(self, message: str, event: str = "notice", **fields: Any) -> None:
        """Tell the user something, between the workers' lines and never inside one."""
        if self._job.console:
            line = notice(self._job, message, event, **fields)
            self._console.stderr.write(line.encode("utf-8", "replace"))


def _nothing() -> None:
    """Posted to end the reactor's sleep."""


def _with_own_loopback(job: Job) -> Job:
    """The job with the loopback address that this machine has, where it means the usual one."""
    if job.master_bind != LOOPBACK or (own := loopback_address()) == LOOPBACK:
        return job
    from rankwise.launch.cluster.addresses import interface_environment  # noqa: PLC0415  # rare

    cluster = job.cluster
    if cluster is not None and cluster.is_alone:
        cluster = replace(cluster, address=own)
    master = own if job.master_addr == LOOPBACK else job.master_addr
    return replace(
        job,
        master_addr=master,
        master_bind=own,
        cluster=cluster,
        environment={**interface_environment(own, os.environ), **job.environment},
    )


def _ranks_alone(job: Job, stack: ExitStack) -> NodeRanks:
    """All ranks are this node's; one that meets others is told which, before its workers begin."""
    port = job.master_port
    if port is None and (job.cluster is None or job.cluster.is_alone):
        port = stack.enter_context(ReservedPort(job.master_bind)).number
    return NodeRanks(size=job.gang.size, master_addr=job.master_addr, master_port=port or 0)
