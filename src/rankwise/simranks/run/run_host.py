"""The agents of all simulated nodes and their ranks, their output, and the loop they turn in.

Ranks pass a run token in virtual time, and nodes go on whenever it comes back (`nodes`). A signal's
handler runs in this thread while a rank computes: it takes the token back, and what it asks for is
done at the next turn. `--timeout` is real time: a timer sends this process a signal, which takes
the same way. Both need the main thread.
"""

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import (
    SIGNAL_NAMES,
    TIME_LIMIT_SIGNAL,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
)
from rankwise.base.units import SECOND, Duration, format_duration
from rankwise.core.agent.vocabulary import Announcement
from rankwise.drivers.real.early_signals import usual
from rankwise.drivers.real.logs.console import Console
from rankwise.launch.run.job import Function, Streams
from rankwise.launch.run.open_files import ensure_open_files
from rankwise.launch.run.private_places import remove_abandoned
from rankwise.launch.run.session import Session
from rankwise.launch.telling.failure_description import RankEvidence
from rankwise.observe.records import RECORDER
from rankwise.simranks.run.announcements import NodesAnnouncements
from rankwise.simranks.run.extensions import extensions_of
from rankwise.simranks.run.nodes import Setting, SimulatedNodes
from rankwise.simranks.run.output import Output, write_all
from rankwise.simranks.run.rank_records import RankRecords
from rankwise.simranks.run.ranks import WorldClock
from rankwise.simranks.run.run_token_watch import RunTokenWatch
from rankwise.simranks.world.descriptors import STANDARD
from rankwise.simranks.world.faults import FaultInjector
from rankwise.simranks.world.first_import import FirstImport
from rankwise.simranks.world.patience import NOTICE_S
from rankwise.simranks.world.places import place_of, places_of
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import SimulatedWorld, rank_of_thread

if TYPE_CHECKING:
    from rankwise.simranks.run.rehearsal import Rehearsal

_HAND_OVER_S = 0.1
"""How long a rank that a signal ends has to hand the run token over, before it is given up."""
_CONSOLE_PATIENCE_MS = 3_000
"""How long a console that takes nothing is waited for when the run has been stopped."""
_STOPS_MAX = 2
"""One more signal ends this process, whatever it does."""
_DESCRIPTORS_PER_RANK = 2
_OTHER_DESCRIPTORS = 64


class SimulatedRunHost:
    """Where simulated nodes and their ranks live; a `rankwise.launch.run.session.RunHost`.

    Args:
        session: of the run.
        stack: takes everything down.
        simulation: what is simulated, and how.
        console_fds: what stands for standard output and standard error.

    Raises:
        SpawnFailed: there are too few open files.
    """

    def __init__(
        self,
        session: Session,
        stack: ExitStack,
        simulation: "Rehearsal",
        *,
        console_fds: tuple[int, int],
    ) -> None:
        # First of all: a rank that finds no descriptor would fail with an error of its own.
        ensure_open_files(_DESCRIPTORS_PER_RANK * simulation.size + _OTHER_DESCRIPTORS)
        self._session = session
        self._simulation = simulation
        self._stops: list[int | None] = []
        self._passed: list[int] = []
        self._stuck = ""
        self._outcome: Outcome | None = None
        self._output = output = self._open_output(stack, console_fds)
        self._faults = FaultInjector(simulation.faults, session.say) if simulation.faults else None
        self._world = world = stack.enter_context(self._make_world(STANDARD.union(console_fds)))
        world.patches.pipes_for_children = output.pipes_for_children
        self._watch_for_triton(stack)
        clock = WorldClock(world, session.clocks.limits.wall_ns)
        session.clocks = session.clocks._replace(agents=clock)
        self._watch_the_token()
        session.places.prepare(0)
        if session.places.root is not None:
            remove_abandoned(session.places.root)
        self._records = RankRecords(session.job, world, output, session.places)
        self._nodes = self._make_nodes(stack, clock)
        self._turning = stack.enter_context(ExitStack())
        """Catches signals and limits time while agents and ranks turn."""

    @property
    def outcome(self) -> Outcome | None:
        """What became of the run, once the last agent has finished."""
        return self._outcome

    def begin(self) -> None:
        """Let the nodes start, each at its time.

        Raises:
            ConfigError: there is a time limit, and this thread cannot be interrupted.
        """
        self._catch_signals()
        self._limit_time()
        self._nodes.start()
        self._note_end()

    def turn(self) -> None:
        """Let ranks go on until a node has something to do, and do what signals have asked for."""
        session, nodes = self._session, self._nodes
        hang_timeout, grace = session.job.gang.hang_timeout, session.job.gang.grace
        patience_s = None if hang_timeout is None else hang_timeout / SECOND
        stuck = nodes.run(self._patience_s_of_stop if session.stops_asked else patience_s)
        self._pass_signals_on()
        while self._stops:
            if self._stops[0] == TIME_LIMIT_SIGNAL:
                awaited, stood = self._records.standstill(stuck)
                if stuck is not None and len(stood) > 1:
                    awaited = awaited or _held_by(stuck)
                session.note_stand(awaited, stood)
            nodes.stop(self._stops.pop(0))
        if stuck is not None and session.stops_asked:
            if stuck.exit_code == -signal.SIGKILL and session.stops_asked == 1:
                session.say(
                    f"rank {stuck.number} did not end within {format_duration(grace)}: killed"
                )
        elif stuck is not None:
            self._stuck = _held_by(stuck, hang_timeout or Duration(0))
            nodes.find_stuck(stuck)
        nodes.go_on()
        self._note_end()

    def _note_end(self) -> None:
        if self._nodes.is_over:
            self._turning.close()
            self._outcome = self._nodes.outcome()

    def finish(self, outcome: Outcome) -> Outcome:
        """Say what the simulation has to remark; failures get their numbers on their nodes."""
        session, records = self._session, self._records
        missed = [] if self._faults is None else self._faults.remarks()
        self._simulation.missed_faults = missed
        # To a caller in Python it is a warning: see `Simulation.run`.
        for remark in [] if isinstance(session.job.program, Function) else missed:
            session.say(remark)
        for remark in self._world.remarks(is_success=outcome.status is OutcomeStatus.SUCCEEDED):
            session.say(remark)
        return msgspec.structs.replace(
            outcome,
            failures=tuple(
                msgspec.structs.replace(each, local_rank=records.local_rank(each.rank))
                for each in outcome.failures
            ),
        )

    def on_outcome_shown(self, outcome: Outcome) -> None:
        """Do nothing: no other terminal can ask about simulated ranks."""

    def stop(self, signum: int | None) -> None:
        """All agents are asked to stop, as soon as the rank that computes hands the token over.

        Callable from a signal handler.
        """
        # Carried out by `turn`: a handler may have interrupted this thread inside of an agent.
        self._stops.append(signum)
        if self._output.patience_ms is None:
            # A pager that is not scrolled takes nothing, and would hold the stop up for ever.
            self._output.patience_ms = _CONSOLE_PATIENCE_MS
        told = signal.SIGTERM if signum is None or signum == TIME_LIMIT_SIGNAL else signum
        grace_s = self._session.job.gang.grace / SECOND
        scheduler = self._world.scheduler
        if _is_ended_at_once(self._world, told):
            # A process would be gone by now. The thread gets only the time that a hand-over takes.
            scheduler.interrupt(min(_HAND_OVER_S, grace_s), signal=told)
        else:
            scheduler.interrupt(self._patience_s_of_stop)
        if self._session.stops_asked > _STOPS_MAX:
            # Neither the grace nor the kill was enough: something of this process itself is stuck.
            raise KeyboardInterrupt

    def pass_on(self, signum: int) -> None:
        """Let ranks take, when they run next, a signal that they catch."""
        # Where no rank runs, as this thread may be in the middle of anything.
        self._passed.append(signum)
        self._world.scheduler.call()

    def post(self, call: Callable[[], None]) -> None:
        """Call it at once: what it does may be done in a signal handler, so also beside ranks."""
        call()

    def has_root_cause(self, outcome: Outcome) -> bool:  # noqa: ARG002  # the protocol's
        """All agents live here."""
        return True

    def end_well_on_signals(self) -> bool:
        """Signals have their usual effect again."""
        return False

    def pids(self) -> dict[int, int]:
        """Simulated ranks are threads of this process."""
        return {}

    def results(self) -> Mapping[int, bytes]:
        """The result frame of each function rank, by number."""
        return self._records.results

    def _open_output(self, stack: ExitStack, console_fds: tuple[int, int]) -> Output:
        session = self._session
        # At descriptors that no rank can replace.
        stdout, stderr = _copy(console_fds[0], stack), _copy(console_fds[1], stack)
        stack.callback(setattr, session, "write", partial(write_all, console_fds[1]))
        session.write = partial(write_all, stderr)
        stack.callback(session.places.discard)
        if not faulthandler.is_enabled():
            # A crash in C ends all ranks at once; its stack is all that can be told of it.
            faulthandler.enable(2, all_threads=False)
            stack.callback(faulthandler.disable)
        console = Console(stdout_fd=stdout, stderr_fd=stderr, say=session.say)
        stack.callback(console.close)
        output = Output(
            session.job.logs,
            session.job.role,
            console,
            console_fds,
            session.complaints,
            now=lambda: self._world.scheduler.now,
            real_now=session.clocks.limits.now,
            writer=rank_of_thread,
            # The world is made after its streams.
            is_own=lambda rank, number: self._world.descriptors.is_own(rank, number),  # noqa: PLW0108
        )
        stack.callback(setattr, session, "write", partial(write_all, stderr))
        session.write = partial(output.write_raw, Streams.ERR)
        stack.callback(output.leave_console)
        stack.callback(session.complaints.tell_losses)
        stack.callback(output.end_attempt)
        return output

    def _make_world(self, standard: frozenset[int]) -> SimulatedWorld:
        simulation = self._simulation
        return SimulatedWorld(
            stdout=self._output.stdout,
            stderr=self._output.stderr,
            seed=simulation.options.seed,
            schedule=simulation.schedule,
            faults=self._faults,
            extensions=extensions_of(simulation.device),
            prediction=simulation.prediction,
            packages=simulation.options.import_per_rank,
            has_virtual_clock=simulation.options.virtual_clock,
            equals=simulation.equals,
            timing_only=None if simulation.prediction is None else simulation.prediction.values,
            standard=standard,
        )

    def _watch_the_token(self) -> None:
        """Report a rank that keeps the run token; return whether it makes progress all the same."""
        output, token_patience = self._output, self._world.scheduler.patience
        token_patience.on_held = self._tell_who_holds
        hang_timeout = self._session.job.gang.hang_timeout
        patience = Duration(round(NOTICE_S * SECOND)) if hang_timeout is None else hang_timeout
        limits = self._session.clocks.limits
        token_patience.makes_progress = RunTokenWatch(
            patience, limits, lambda: output.byte_count
        ).makes_progress

    def _make_nodes(self, stack: ExitStack, clock: WorldClock) -> SimulatedNodes:
        session, simulation = self._session, self._simulation
        job, plan = session.job, session.job.plan
        is_alone = simulation.rendezvous is None
        announcements = NodesAnnouncements(job, plan, session.say, is_alone=is_alone)

        def announce(host: str, announcement: Announcement) -> None:
            announcements.tell(host, announcement)
            session.history.note(announcement)

        journal = session.open_journal(stack)
        if journal is not None:
            from rankwise.launch.looking.rank_records import described_run  # noqa: PLC0415  # only then

            described = described_run(job.run_id, is_simulated=True)
            # First in the journal: a reader must know that times are virtual before it reads one.
            journal.record(RECORDER, described, clock.now())
        setting = Setting(
            job=job,
            world=self._world,
            records=self._records,
            clock=clock,
            journal=journal,
            describe=lambda failure, host: session.describe(
                (failure,), partial(self._gather, host)
            )[0],
            announce=announce,
            note_loss=announcements.note_loss,
            # Of nodes that never change, what is announced tells of failures.
            note_failures=_ignore if is_alone else session.history.on_failures,
        )
        return SimulatedNodes(
            setting,
            job.gang,
            node_count=simulation.node_count,
            rendezvous=simulation.rendezvous,
            policy=plan.rendezvous.policy,
            host=socket.gethostname(),
            seed=simulation.options.seed,
            faults=self._faults,
        )

    def _watch_for_triton(self, stack: ExitStack) -> None:
        """Have the ranks find the emulator of Triton when one of them imports that."""

        def find() -> None:
            from rankwise.simranks.prediction.kernel_times import find_triton  # noqa: PLC0415  # only then

            stack.callback(find_triton(self._world, self._session.say))

        if "rankwise.simranks.prediction.kernel_times" in sys.modules:
            find()  # what ranks share may have been imported in an earlier run
        else:
            stack.enter_context(FirstImport("triton", library="torch", then=find))

    def _catch_signals(self) -> None:
        """Have signals to this process stop the run; the second one does not wait for ranks."""
        session, job = self._session, self._session.job
        if not job.handle_signals or current_thread() is not main_thread():
            return
        numbers = {*session.effects}
        if job.timeout is not None:
            numbers.add(TIME_LIMIT_SIGNAL)
        before = {
            number: signal.signal(number, self._on_signal)
            for number in numbers
            # A signal that the caller ignores, as nohup does, must not stop the run either.
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        }
        # A process that a rank forks finds the handlers of a program, not those of the command.
        ours = before.keys() - {*job.signals} if job.heeds_all_signals else ()
        found = {number: usual(handler) for number, handler in before.items()}
        self._world.handlers_before = found | dict.fromkeys(ours, signal.SIG_DFL)
        for number, handler in before.items():
            self._turning.callback(signal.signal, number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == TIME_LIMIT_SIGNAL and self._session.job.timeout is not None:
            # This process has sent it to itself. A stop that was asked for since then goes on.
            if self._session.is_time_limit_due:
                self._session.request_stop(number)
        else:
            self._session.on_signal(number)

    @property
    def _patience_s_of_stop(self) -> float:
        """How long ranks may take to end when the run is stopped; the second signal kills them."""
        grace_s = self._session.job.gang.grace / SECOND
        return grace_s if self._session.stops_asked == 1 else min(_HAND_OVER_S, grace_s)

    def _pass_signals_on(self) -> None:
        """Let ranks take, when they run next, the signals that they catch."""
        while self._passed:
            number = self._passed.pop(0)
            living = [each for each in self._world.scheduler.ranks.values() if not each.is_over]
            reached = [each for each in living if callable(each.handlers.get(number))]
            for rank in reached:
                rank.signal(number)
            others = sorted(each.number for each in living if each not in reached)
            self._session.tell_passed_on(number, sorted(each.number for each in reached), others)

    def _limit_time(self) -> None:
        """Have the time limit stop the run, in real time."""
        timeout = self._session.job.timeout
        if timeout is None:
            return
        if current_thread() is not main_thread():
            raise ConfigError(
                "timeout is given, and simulated ranks can be interrupted in the main thread only"
            )

        def strike() -> None:
            if self._session.is_time_limit_due:
                self._session.tell_time_limit()
                # As Ctrl-C: the main thread waits while ranks run, and only its handler stops them.
                signal.pthread_kill(main, TIME_LIMIT_SIGNAL)

        main = main_thread().ident or 0
        timer = Timer(timeout / SECOND, strike)
        timer.daemon = True
        timer.start()
        # Cancelled first, as callbacks run in reverse: a timer that strikes is waited for.
        self._turning.callback(timer.join)
        self._turning.callback(timer.cancel)

    def _gather(self, host: str, failure: Failure) -> RankEvidence:
        """What only this world knows of a failure."""
        output, records = self._output, self._records
        rank, hang = failure.rank, self._stuck or records.hang
        is_hung = failure.cause is FailureCause.HUNG
        has_stacks = is_hung or failure.cause is FailureCause.OUT_OF_STEP
        return RankEvidence(
            host=host,
            wall_ns=self._session.clocks.limits.wall_ns(),
            stderr=partial(output.tail, rank, Streams.ERR),
            stdout=partial(output.tail, rank, Streams.OUT),
            destinations=records.destinations,
            file_key=rank,
            detail=hang if is_hung else failure.detail,
            exit_place=records.exits.get(rank, ""),
            hang_stacks=records.stacks.get(rank, ""),
            waits_for=records.waits.get(rank, "") if has_stacks else "",
            signal_sender=self._sender_of_signal(failure),
        )

    def _sender_of_signal(self, failure: Failure) -> str:
        """What can have killed a simulated rank: a fault, or the program."""
        if failure.cause is not FailureCause.SIGNALED:
            return ""
        when = None if self._faults is None else self._faults.killed.get(failure.rank)
        return "the program itself" if when is None else f"a fault (--faults) {when}"

    def _tell_who_holds(self, rank: Rank) -> None:
        session, world = self._session, self._world
        where = "".join(f": it is at {place}" for place in places_of(rank.stack())[:1])
        if session.stops_asked:
            name = SIGNAL_NAMES.get(session.stop_signal or 0, "a signal")
            name = "time limit" if session.is_out_of_time else name
            session.say(
                f"{name}: rank {rank.number} has not let the run stop{where}; it is killed after"
                f" {format_duration(session.job.gang.grace)}, or at once by another signal"
            )
            return
        if all(each is rank or each.is_over for each in world.scheduler.ranks.values()):
            return  # no other rank waits
        if world.timing_only is not None:
            session.say(
                f"rank {rank.number} has run for {NOTICE_S:.0f} s without a stop{where} (large"
                " models take minutes; if it blocks, --hang-timeout ends the run)"
            )
            return
        session.say(
            f"rank {rank.number} has let no other rank run for {NOTICE_S:.0f} s{where} (simulated"
            " ranks take turns; if it blocks, --hang-timeout ends the run)"
        )


def _is_ended_at_once(world: SimulatedWorld, number: int) -> bool:
    """Whether a signal would end the rank with the run token at once, as it ends a process."""
    rank = world.scheduler.current
    return rank is not None and rank.number not in world.steps and rank.is_ended_by(number)


def _held_by(rank: Rank, patience: Duration | None = None) -> str:
    """What is said of a rank that was given up."""
    waited = "" if patience is None else f" for {format_duration(patience)}"
    return f"rank {rank.number} has let no other rank run{waited}{_where_it_is(rank)}"


def _where_it_is(rank: Rank) -> str:
    """The end of a verdict, as of real processes: `: it is at loader.py:31, in read`."""
    place = place_of(rank.stack())
    if place is None:
        return ""
    function = place.code.co_name
    inside = "" if function == "<module>" else f", in {function}"
    return f": it is at {os.path.basename(place.code.co_filename)}:{place.line}{inside}"


def _copy(descriptor: int, stack: ExitStack) -> int:
    """Another descriptor for the same file, which no rank can know; itself if it is closed."""
    try:
        outlet = os.dup(descriptor)
    except OSError:
        return descriptor
    stack.callback(os.close, outlet)
    return outlet


def _ignore(_failures: tuple[Failure, ...]) -> None:
    """Take no note."""
