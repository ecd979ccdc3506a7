"""The processes of a run on this machine, their agent, their output, and the reactor they turn in.

A `ProcessRunHost` puts the parts together (reactor, guardian, gang machine, process host, logs,
signals, control socket), lets the reactor turn, and reads to the end what was written. What each
part does when another one dies is told in docs/development/architecture.md.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rankwise.base.failure import (
    NO_RANK,
    TIME_LIMIT_SIGNAL,
    Failure,
    Outcome,
    OutcomeStatus,
    Stood,
    signal_name,
)
from rankwise.base.units import SECOND, Duration, Instant, after, between
from rankwise.core.gang.vocabulary import StopRequested, Suspended
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.hosting.hosting import Hosting
from rankwise.drivers.real.interrupts import gate_here
from rankwise.drivers.real.logs.console import Console
from rankwise.drivers.real.logs.flow import LogFlow
from rankwise.drivers.real.loopback import LOOPBACK, loopback_address
from rankwise.drivers.real.proc import may_have_gpus
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.signals import SignalPipe, end_well, is_default, stop_self
from rankwise.launch.cluster.agent_runner import AgentRunner
from rankwise.launch.control.server import ControlRequest, ControlServer, Reply
from rankwise.launch.fork_server import hosting_for
from rankwise.launch.looking.process_evidence import ProcessEvidence
from rankwise.launch.looking.watches import Watches
from rankwise.launch.run.job import Job
from rankwise.launch.run.master_port import ReservedPort
from rankwise.launch.run.node_ranks import NodeRanks
from rankwise.launch.run.open_files import ensure_open_files
from rankwise.launch.run.planning import JobPlanner
from rankwise.launch.run.private_places import new_private_path, remove_abandoned, remove_tree
from rankwise.launch.run.run_parts import RunParts
from rankwise.launch.run.session import Session
from rankwise.launch.run.signal_effects import STOPPING

if TYPE_CHECKING:
    from rankwise.core.ledger import Delay
    from rankwise.launch.control.answers import ControlAnswers
    from rankwise.launch.looking.rank_records import RunRecorder

SIGCONT, SIGSTOP, SIGTSTP = 18, 19, 20
STRAY_PATIENCE = Duration(1 * SECOND)
"""How long output is awaited from processes that survived the sweep and hold a pipe open."""
CONSOLE_PATIENCE = Duration(3 * SECOND)
"""How long a console that takes nothing is waited for when the run has been stopped."""
STOP_NOTICE = Duration(1 * SECOND)
"""How long a stop that was asked for may take before we say that we wait for ranks."""
DESCRIPTORS_PER_WORKER = 8
"""Four pipes, a log file for each stream, the process, and the line of one that recovers."""


class ProcessRunHost:
    """Where the agent of this node and its processes live; a `rankwise.launch.run.session.RunHost`.

    Args:
        session: of the run.
        stack: takes everything down.
        console_fds: what stands for standard output and standard error.
        hosting: a warm guardian and fork server to borrow; None makes one for this run.
        started: one that was started for this run; it ends with it.
        clock: tells the time to all parts.
        on_begun: is called once every worker's process has been made.
    """

    def __init__(
        self,
        session: Session,
        stack: ExitStack,
        *,
        console_fds: tuple[int, int],
        hosting: Hosting | None,
        started: Hosting | None,
        clock: SystemClock,
        on_begun: Callable[[], None],
    ) -> None:
        stack.enter_context(gate_here().used())  # what a handler tears could not be taken down
        self._session = session
        self._say = session.say
        self._job = job = _with_own_loopback(session.job)
        self._places = places = session.places
        self._clock = clock
        self._began_at = clock.now()
        self._on_begun: Callable[[], None] | None = on_begun
        self._is_cut_short = False
        # Before and after everything else, so that no signal meets half a session.
        self._signals = signals = self._catch_signals(stack)
        ensure_open_files(DESCRIPTORS_PER_WORKER * job.gang.size)
        # First of all, since it starts on another core while we go on here.
        hosting = hosting or stack.enter_context(started or hosting_for(job))
        self._reactor = stack.enter_context(Reactor(clock))
        self._gate = gate_here()
        # A handler that must wait for this thread would find it asleep in the reactor.
        self._gate.waker = partial(self._reactor.post, _nothing)
        stack.callback(setattr, self._gate, "waker", None)
        stdout_fd, stderr_fd = console_fds
        self._console = Console(stdout_fd=stdout_fd, stderr_fd=stderr_fd, say=self._say)
        session.write = self._console.stderr.write
        stack.callback(self._console.close)
        stack.callback(places.discard)
        self._nested_runs = new_private_path()
        stack.callback(remove_tree, self._nested_runs)
        self._planner = stack.enter_context(
            JobPlanner(
                job,
                layout=places,
                console=self._console,
                complaints=session.complaints,
                mark=hosting.guardian.mark,
                nested_runs=self._nested_runs,
                ranks=_ranks_alone(job, stack),
            )
        )
        self._watches = Watches(
            job.gang.hang_timeout,
            self._planner,
            self._reactor,
            clock,
            say=self._say,
            recorder=lambda: self._recorder,
            starting_server=lambda: hosting.starting_server,
        )
        self._host = RealProcessHost(
            reactor=self._reactor,
            clock=clock,
            guardian=hosting.guardian,
            spawner=hosting.spawner,
            planner=self._planner,
            flow=LogFlow(self._reactor, self._console, clock),
            deliver=lambda fact: self._agent.on_rank(fact),  # noqa: PLW0108  # it is made later
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
        # Before there are any: this process may be killed at any time.
        self._guard_files(hosting)
        # Now, so that a log directory which cannot be made stops us before any worker exists.
        self._planner.prepare_attempt(0)
        # Once: a calendar that is set during the run must not move failures against each other.
        self._evidence = ProcessEvidence(self._host, self._planner, clock.wall_ns() - clock.now())
        self._plan = job.plan
        self._journal = session.open_journal(stack)
        parts = RunParts(
            job=job,
            stack=stack,
            clock=clock,
            reactor=self._reactor,
            host=self._host,
            planner=self._planner,
            evidence=self._evidence,
            describe=self._describe,
            journal=self._journal,
            recorder=lambda: self._recorder,
            watches=self._watches,
            history=session.history,
            say=self._say,
        )
        self._agent = AgentRunner(self._plan, parts)
        self._watches.attach(self._host, self._agent)
        if may_have_gpus():
            self._watch_gpus(stack)
        hosting.on_unfit = self._on_unfit_server
        hosting.attach(self._reactor, self._host)
        stack.callback(self._leave, hosting)
        if signals is not None:
            self._reactor.watch_readable(signals.fileno(), lambda: self._on_signals(signals.take()))
            stack.callback(self._reactor.unwatch_readable, signals.fileno())
        self._reactor.watch_readable(self._planner.stop_fd, self._on_ranks_ask)
        stack.callback(self._reactor.unwatch_readable, self._planner.stop_fd)
        if job.timeout is not None:
            self._limit_time(job.timeout)
        self._parts = parts
        # Last: a question may come at once, and is answered from all of these parts.
        self._open_control(stack)

    @property
    def outcome(self) -> Outcome | None:
        """What became of the run, once the agent's life is over."""
        return self._agent.outcome

    def begin(self) -> None:
        """Let the agent begin its life."""
        self._agent.begin()

    def turn(self) -> None:
        """Let the reactor turn once, and deadlines take effect."""
        self._turn(None)

    def finish(self, outcome: Outcome) -> Outcome:
        """Read all that was written, and find out what is known at the end."""
        if outcome.status is OutcomeStatus.SUCCEEDED and self._host.left_behind:
            from rankwise.launch.telling.announcements import left_behind_line  # noqa: PLC0415  # rare

            kept = self._job.keep_children
            line = left_behind_line(self._host.left_behind, are_kept=kept)
            self._say(line, "kept-children" if kept else "left-behind")
        lateness = self._watches.take_last_look()
        if lateness is not None and self._evidence.gpus is not None:
            delay, text = lateness
            slow = self._evidence.gpus.throttling(delay.rank)
            lateness = delay, "; ".join((text, *slow))
        self._read_to_the_end(outcome, lateness)
        told = "" if lateness is None else lateness[1]
        # Those that were stopped for the others' failures; the agent has had its own described.
        return replace(outcome, failures=self._describe(outcome.failures), lateness=told)

    def on_outcome_shown(self, outcome: Outcome) -> None:
        """Answer those who wait for the end; among nodes, tell signals that it is over."""
        if "_answers" in vars(self):  # there was a question
            self._answers.tell_end(outcome)
        if self._signals is not None and not self._plan.is_alone:
            self._signals.on_arrival = self._tell_that_it_is_over

    def stop(self, signum: int | None) -> None:
        """The agent is asked to stop."""
        self._host.note_ends()  # so that a run which is done by now stays done
        self._agent.deliver(StopRequested(signum))

    def pass_on(self, signum: int) -> None:
        """Send a signal to the ranks that catch it."""

        def tell(reached: list[int], others: list[int]) -> None:
            rank = self._planner.ranks.rank
            self._session.tell_passed_on(signum, [*map(rank, reached)], [*map(rank, others)])

        self._host.pass_on(signum, tell)

    def post(self, call: Callable[[], None]) -> None:
        """Have something called in the reactor's thread."""
        self._reactor.post(call)

    def _describe(self, failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
        return self._session.describe(failures, self._evidence.gather)

    def _tell_that_it_is_over(self, signum: int) -> None:
        """Answer a signal while nodes that are slower than this one learn of the end."""
        if self._session.effects.get(signum) not in STOPPING:
            return  # it asks for no end, such as Ctrl-Z
        assert self._signals is not None, "it has caught one"
        self._signals.on_arrival = None  # once is enough
        self._say(f"{signal_name(signum)}: the run is over; this node ends when the others know it")

    def end_well_on_signals(self) -> bool:
        """After a success, have signals end this process as a success; tell whether they do.

        They do not if one of them has kept output from being written.
        """
        outcome = self._agent.outcome
        if outcome is None or outcome.status is not OutcomeStatus.SUCCEEDED or self._is_cut_short:
            return False
        if self._signals is not None:
            ending = [each for each, effect in self._session.effects.items() if effect in STOPPING]
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

    def _turn(self, deadline: Instant | None) -> None:
        # Handlers of signals that are not ours to catch: one that raises ends the run.
        self._gate.run_due()
        candidates = (self._agent.next_deadline, deadline)
        self._reactor.run_once(min((c for c in candidates if c is not None), default=None))
        self._agent.wake()
        self._note_begun()

    def _turn_until(self, is_done: Callable[[], bool], deadline: Instant | None) -> None:
        """Let the reactor turn, and deadlines take effect, until `is_done` or the deadline."""
        while not is_done():
            self._turn(deadline)
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

        All processes that could still write are dead, so the pipes end by themselves. A console
        that takes nothing, such as a pager, is waited for; a signal ends that. After a stop the
        wait has an end of its own.
        """
        now = self._clock.now()
        was_stopped = outcome.status is OutcomeStatus.STOPPED
        patience = after(now, CONSOLE_PATIENCE) if was_stopped else None
        writers_live = self._job.keep_children and bool(self._host.left_behind)
        if not writers_live:
            self._turn_until(
                lambda: self._host.is_drained or self._session.is_interrupted,
                after(now, STRAY_PATIENCE) if self._host.has_survivors else patience,
            )
        is_drained = self._host.is_drained or writers_live
        if writers_live:
            from rankwise.drivers.real.hosting.drain import discard_output  # noqa: PLC0415  # rare

            discard_output(self._host.unread_streams())
        self._host.close()
        self._session.complaints.tell_losses()
        has_report = outcome.status is OutcomeStatus.FAILED and self._job.log_format != "json"
        if lateness is not None and not has_report:  # which tells it
            delay, text = lateness
            waited_s = delay.waited / SECOND
            self._say(text, "lateness", rank=delay.rank, last=delay.last, waited_s=waited_s)
        self._turn_until(
            lambda: not self._console.wants_write or self._session.is_interrupted, patience
        )
        self._is_cut_short = self._session.is_interrupted and not (
            is_drained and not self._console.wants_write
        )

    def _leave(self, hosting: Hosting) -> None:
        """Leave a hosting that others may use as we have found it: without workers."""
        if self._agent.outcome is None:  # something of ours has broken in the middle of the run
            hosting.detach_broken()
        else:
            hosting.detach()

    def _catch_signals(self, stack: ExitStack) -> SignalPipe | None:
        if not self._job.handle_signals:
            return None
        self._pauses = SIGTSTP not in self._job.signals and is_default(SIGTSTP)
        pausing = (SIGTSTP,) if self._pauses else ()
        signals = SignalPipe((*self._session.effects, *pausing))
        stack.callback(lambda: self._session.late_signals.extend(signals.late))
        stack.enter_context(signals)
        return signals if signals.is_active else None

    def _on_signals(self, numbers: list[int]) -> None:
        session = self._session
        for number in numbers:
            if number == SIGTSTP and self._pauses:
                self._suspend()
                continue
            caught_before = session.signals_caught
            session.on_signal(number)
            is_first = (caught_before, session.signals_caught) == (0, 1)
            # An agent among others says itself what follows.
            if is_first and self._plan.is_alone and session.caught_signal is not None:
                notice_at = after(self._clock.now(), STOP_NOTICE)
                tell = partial(self._tell_who_is_awaited, session.caught_signal)
                self._reactor.call_at(notice_at, tell)

    def _suspend(self) -> None:
        """Ctrl-Z: stop with all ranks until a shell lets this process go on; then let them go on.

        They are in sessions of their own, where no key of the terminal reaches them, and where
        SIGTSTP does nothing.
        """
        if not self._plan.is_alone:
            from rankwise.launch.telling.announcements import suspension_line  # noqa: PLC0415  # rare

            self._say(suspension_line(self._plan.rendezvous.lease_ttl), "suspended")
        since = self._clock.now()
        self._host.signal_all(SIGSTOP)
        stop_self()
        self._host.signal_all(SIGCONT)
        until = self._clock.now()
        stood = between(since, until)
        self._reactor.postpone(stood)
        self._watches.on_suspended(since, until)
        self._agent.deliver(Suspended(stood))

    def _limit_time(self, timeout: Duration) -> None:
        """Stop the run when it has taken that long, unless something has ended it before."""
        from rankwise.launch.run.time_limit import RunTimeLimit  # noqa: PLC0415  # rare

        RunTimeLimit(
            timeout,
            host=self._host,
            reactor=self._reactor,
            clock=self._clock,
            watches=self._watches,
            is_needed=lambda: self._session.is_time_limit_due,
            stop=self._on_time_limit,
        )

    def _on_time_limit(
        self, verdict: str, waits: Mapping[int, str], stacks: Mapping[int, str]
    ) -> None:
        self._session.note_stand(verdict, stood_of(waits, stacks, self._planner.ranks.rank))
        if self._plan.is_alone:  # an agent among others says itself what follows
            self._session.tell_time_limit()
        self._session.request_stop(TIME_LIMIT_SIGNAL)

    def _on_ranks_ask(self) -> None:
        """A rank that asks `should_stop` was sent SIGTERM, so all have to stop."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._planner.stop_fd)
        self._session.stop_for_ranks()

    def _tell_who_is_awaited(self, signum: int) -> None:
        """Say that ranks take their time to end, and what the user can do about it."""
        rest = Duration(self._job.gang.grace - STOP_NOTICE)
        alive = sum(not link.is_over for link in self._host.links.values())
        if not self._session.is_over and self._session.signals_caught == 1 and alive and rest > 0:
            from rankwise.launch.telling.announcements import stopping_line  # noqa: PLC0415  # rare

            self._say(stopping_line(signum, alive, rest), "stop", signal=signum)

    def _abandon_spawns(self, hosting: Hosting) -> None:
        """Have no more ranks made; say what has held them up, unless the user did not want them."""
        module = hosting.importing
        self._evidence.remember_import(module)
        if module and self._session.caught_signal is None:
            self._say(f"no rank could start: the fork server is still importing {module}")
        hosting.abandon_spawns()

    def _renew_spawner(self, hosting: Hosting) -> None:
        """Have a fork server that can make ranks, and watch it while it imports."""
        hosting.replace_server()
        self._watches.begin_start()

    def _on_unfit_server(self, reason: str, is_lasting: bool) -> None:  # a callback
        """Remember why ranks get interpreters of their own: the next run need not find out."""
        from rankwise.launch.run.automatic_start import interpreters_line, remember  # noqa: PLC0415  # rare

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
        from rankwise.launch.looking.gpu_watch import GpuWatch  # noqa: PLC0415  # few machines have them

        def leaders() -> dict[int, int]:
            rank = self._planner.ranks.rank
            return {rank(local_rank): pid for local_rank, pid in self._host.living().items()}

        self._evidence.gpus = watch = GpuWatch(self._reactor, self._clock, self._say, leaders)
        stack.callback(watch.close)

    @cached_property
    def _answers(self) -> "ControlAnswers":
        """Loaded with the first question: most runs are not asked."""
        from rankwise.launch.control.answers import ControlAnswers  # noqa: PLC0415  # see above

        return ControlAnswers(
            self._parts, self._agent, self._places, self._session.stop_on_command, self._began_at
        )

    def _on_question(self, request: ControlRequest, reply: Reply) -> None:
        self._answers.on_request(request, reply)

    def _open_control(self, stack: ExitStack) -> None:
        with suppress(OSError):  # a sandbox without unix sockets: the run is a run all the same
            control = stack.enter_context(ControlServer(self._shown_id, self._on_question))
            self._reactor.watch_readable(control.fileno(), control.on_readable)
            stack.callback(self._reactor.unwatch_readable, control.fileno())

    @cached_property
    def _recorder(self) -> "RunRecorder | None":
        """Records in the journal what the ranks do; loaded while the first one is starting."""
        if self._journal is None:
            return None
        from rankwise.launch.looking.rank_records import RunRecorder  # noqa: PLC0415  # only with a journal

        return RunRecorder(
            self._journal, self._host, self._planner, self._reactor, self._clock,
            name=self._shown_id, gpus=self._evidence.gpus,
        )  # fmt: skip

    @property
    def _shown_id(self) -> str:
        """What others may know of the run's id."""
        from rankwise.launch.control.addresses import shown_id  # noqa: PLC0415  # see above

        return shown_id(self._job.run_id, is_secret=self._plan.is_id_secret)

    def _on_hang(self, stacks: dict[int, str]) -> None:
        """Show where every rank stands, before anything is killed."""
        from rankwise.launch.telling.announcements import hang_line, stacks_of_rank  # noqa: PLC0415  # rare

        here, is_for_machines = self._planner.ranks, self._job.log_format == "json"
        self._evidence.remember_stacks(stacks)
        gang = self._agent.gang
        if gang is not None and any(worker.blame for worker in gang.workers):
            return  # it has not hung: the report tells who is to blame, and where that one is
        found, waits = self._watches.explain_hang()
        self._evidence.remember_waits(found.text, waits)
        stood = stood_of(waits, stacks, here.rank)
        has_report = self._plan.is_alone or is_for_machines
        line = hang_line(self._job.gang.hang_timeout, stood, has_report=has_report)
        self._say(line, "hang")
        for each in stood if is_for_machines else ():
            if not each.stacks:
                continue
            self._say(stacks_of_rank(each.rank, each.stacks), "stacks", rank=each.rank)


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


def stood_of(
    waits: Mapping[int, str], stacks: Mapping[int, str], rank_of: Callable[[int], int]
) -> tuple[Stood, ...]:
    """Where each rank stood, from what it waited for and its stacks, by local rank."""
    return tuple(
        Stood(
            rank=rank_of(local_rank),
            waits_for=waits.get(local_rank, ""),
            stacks=stacks.get(local_rank, ""),
        )
        for local_rank in sorted(waits.keys() | stacks.keys())
    )


def _ranks_alone(job: Job, stack: ExitStack) -> NodeRanks:
    """All ranks are this node's; one that meets others is told which, before its workers begin."""
    port = job.master_port
    if port is None and (job.cluster is None or job.cluster.is_alone):
        port = stack.enter_context(ReservedPort(job.master_bind)).number
    return NodeRanks(size=job.gang.size, master_addr=job.master_addr, master_port=port or 0)
