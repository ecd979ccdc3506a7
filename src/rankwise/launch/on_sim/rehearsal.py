"""One run on simulated ranks, from its job to its outcome.

`Rehearsal.run` is what `Supervision.run` is on real processes: it runs the same agents, whose
processes are threads (`nodes`). It must run in the main thread for Ctrl-C and other signals to stop
the run.
"""

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.failure import (
    SIGNAL_NAMES,
    TIME_LIMIT_SIGNAL,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
    Stood,
    exit_in_program,
)
from rankwise.base.units import SECOND, Duration, format_duration
from rankwise.core.agent.vocabulary import Announcement
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.early_signals import usual
from rankwise.drivers.real.logs.console import Console
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.drivers.real.logs.tail import KEPT_LINES_MAX
from rankwise.drivers.real.proc import check_proc
from rankwise.launch.announcements import as_sigterm_line, passed_on_line, time_limit_line
from rankwise.launch.cluster.plan import plan_of
from rankwise.launch.commands import ensure_open_files
from rankwise.launch.failure_report.tracebacks import error_of_thread
from rankwise.launch.job import Executable, Function, Job, Streams
from rankwise.launch.journal_file import open_journal
from rankwise.launch.log_layout import LogLayout
from rankwise.launch.notices import notice
from rankwise.launch.on_sim.announcements import NodesAnnouncements
from rankwise.launch.on_sim.nodes import Setting, SimulatedNodes
from rankwise.launch.on_sim.output import Output, write_all
from rankwise.launch.on_sim.rank_records import RankRecords
from rankwise.launch.on_sim.ranks import VirtualClock
from rankwise.launch.on_sim.run_token_watch import RunTokenWatch
from rankwise.launch.private_places import remove_abandoned
from rankwise.launch.run_history import RunHistory, failure_command_of
from rankwise.launch.signal_effects import SignalEffect, effects_of
from rankwise.observe.records import RECORDER
from rankwise.sim.faults.vocabulary import FaultOfChip, FaultOfNode, FaultOfRank
from rankwise.sim.rehearsal.descriptors import STANDARD
from rankwise.sim.rehearsal.equals import Choice, Equals
from rankwise.sim.rehearsal.faults import FaultInjector
from rankwise.sim.rehearsal.first_import import FirstImport
from rankwise.sim.rehearsal.names_of_ranks import NAMES, NamesOfRanks
from rankwise.sim.rehearsal.patience import NOTICE_S
from rankwise.sim.rehearsal.places import place_of, places_of
from rankwise.sim.rehearsal.ranks import Rank
from rankwise.sim.rehearsal.schedules import Schedule
from rankwise.sim.rehearsal.world import SimulatedWorld, rank_of_thread

if TYPE_CHECKING:
    from rankwise.sim.prediction import Prediction

_HAND_OVER_S = 0.1
"""How long a rank that a signal ends has to hand the run token over, before it is given up."""
_CONSOLE_PATIENCE_MS = 3_000
"""How long a console that takes nothing is waited for when the run has been stopped."""
_STOPS_MAX = 2
"""One more signal ends this process, whatever it does."""
_STDERR_LINES = 60
_STDOUT_LINES = 10
_DESCRIPTORS_PER_RANK = 2
_SIMULATED_OF_EQUALS = 2
_PROBED_BYTES = 1 << 24
_OTHER_DESCRIPTORS = 64


class Rehearsal:
    """One run of a job on simulated ranks.

    Args:
        job: what each node runs.
        node_count: how many nodes of `job.gang.size` ranks run at most; as many as the rendezvous
            keeps in reserve (`spares`) come on top.
        rendezvous: how nodes that come and go meet; None has `node_count` of them all the time,
            unless a fault strikes one.
        console_fds: what stands for standard output and standard error.
        seed: what the ranks' random states begin from.
        schedule: decides what the run leaves open; None takes what comes first.
        faults: the faults of ranks and nodes.
        chip_faults: those of the machine: what errors call each, and the fault.
        device: `cuda` lets programs of torch find modelled CUDA devices.
        machine: a preset or a topology file, each device of which is a rank's; None: no time but
            what is slept.
        packages: installed packages that each rank imports for itself.
        keeps_log: keep what each rank does when, for `write_files` of the prediction.
        has_virtual_clock: let the clocks that ranks read tell virtual time alone.
        timing_only: let tensors have no data. Then ranks that do the same are simulated once.
        every_rank: simulate all ranks, even if they do the same.
        choice: those that are simulated then, if it is known that two are too few.
        records_values: keep the numbers that rank 0 asks for.
        values: what programs get then that ask for numbers; see `sim.prediction.values`.
        synthetic_data: let data loaders repeat their first batch then.
        tokens_per_step: of all ranks together; None counts them.

    Attributes:
        prediction: how long the ranks take on the machine, if one is given.
        places: where log files go, by rank.
        results: the result frame of each function rank, by number.
        caught_signal: the signal to this process that has stopped the run, if one did.
        failure_command: the command that is told of failures, if the job has one; of the end its
            owner tells it.

    Raises:
        ConfigError: this job cannot be simulated.
    """

    def __init__(
        self,
        job: Job,
        *,
        node_count: int = 1,
        rendezvous: RendezvousConfig | None = None,
        console_fds: tuple[int, int] = (1, 2),
        seed: int = 0,
        schedule: Schedule | None = None,
        faults: Sequence[FaultOfRank | FaultOfNode] = (),
        chip_faults: Sequence[tuple[str, FaultOfChip]] = (),
        device: str = "cpu",
        machine: str | None = None,
        packages: Sequence[str] = (),
        keeps_log: bool = False,
        has_virtual_clock: bool = False,
        timing_only: bool = False,
        every_rank: bool = False,
        choice: Choice | None = None,
        records_values: bool = False,
        values: str = "",
        synthetic_data: bool = False,
        tokens_per_step: int | None = None,
    ) -> None:
        if isinstance(job.program, Executable):
            raise ConfigError(
                f"{job.program.path} is not a Python program, and simulated ranks run in Python",
                hint="leave out --no-python, or --on sim",
            )
        self.size = node_count * job.gang.size
        self.prediction: Prediction | None = None
        if machine is not None:
            from rankwise.sim import prediction  # noqa: PLC0415  # only there
            from rankwise.sim.hardware.faults import checked_faults  # noqa: PLC0415  # the same
            from rankwise.sim.prediction.machines import open_machine  # noqa: PLC0415  # the same

            topology = open_machine(machine, node_count, job.gang.size)
            self.prediction = prediction.Prediction(
                topology.with_faults(checked_faults(chip_faults, topology)),
                self.size,
                keeps_log=keeps_log,
            )
            self.prediction.tokens_per_step = tokens_per_step
            self.prediction.has_synthetic_data = synthetic_data
        self._has_virtual_clock = has_virtual_clock
        self.equals: Equals | None = None
        if records_values and self.prediction is not None:
            from rankwise.sim.prediction.values import ValueRecord  # noqa: PLC0415  # only there

            self.prediction.record = ValueRecord()
        if timing_only and self.prediction is not None:
            from rankwise.sim.prediction.values import ValuePolicy  # noqa: PLC0415  # only there

            self.prediction.values = ValuePolicy(values, seed)
            device = "cuda"
            # A fault makes one rank, or its links, another one than those of its class.
            is_well = not (faults or chip_faults)
            if not every_rank and is_well and self.size > _SIMULATED_OF_EQUALS:
                self.equals = Equals(choice or Choice(), self.size, seed)
                self.equals.price = partial(_price, self.prediction)
                self.prediction.equals = self.equals
        self.failure_command = failure_command_of(job)
        self.job = job
        self.places = LogLayout(job.logs, size=self.size, run_id=job.run_id)
        self.results: Mapping[int, bytes] = {}
        self.missed_faults: list[str] = []
        self.caught_signal: int | None = None
        self._node_count = node_count + (0 if rendezvous is None else rendezvous.spares)
        self._rendezvous = rendezvous
        if rendezvous is None and any(isinstance(fault, FaultOfNode) for fault in faults):
            self._rendezvous = RendezvousConfig(
                nodes_min=node_count, nodes_max=node_count, policy=plan_of(job).rendezvous.policy
            )
        self._console_fds = self._outlets = console_fds
        self._seed = seed
        self._schedule = schedule
        self._device = device
        self._packages = packages
        self._faults = FaultInjector(faults, self._say) if faults else None
        self._output: Output | None = None
        self._clock = SystemClock()
        self._begun_at = self._clock.now()
        self._stops: list[int] = []
        self._stop_count = 0
        self._passed: list[int] = []
        self._signals_told: set[int] = set()
        self._passing_told: dict[int, tuple[list[int], list[int]]] = {}
        self._stuck = ""
        self._standstill: tuple[str, tuple[Stood, ...]] = ("", ())

    def following(self, outcome: Outcome) -> Choice | None:
        """Which ranks to run next, since these are too few for all; None if they are enough."""
        if self.equals is None or self.prediction is None:
            return None
        choice = self.equals.wanted
        is_whole = outcome.status is OutcomeStatus.SUCCEEDED  # a rank that fails ends earlier
        if choice is None and is_whole and not self.equals.difference:
            choice = self.prediction.following()
        if self.equals.difference:
            everyone = frozenset(range(self.size))
            why = f"ranks are not equal: {self.equals.difference}"
            choice = Choice(simulated=everyone, why=why)
        return choice

    @property
    def elapsed(self) -> Duration:
        """How long the run has lasted, in real time."""
        return Duration(self._clock.now() - self._begun_at)

    def run(self) -> Outcome:
        """Run the job to its end, in this thread and those of the ranks."""
        check_proc()
        ensure_open_files(_DESCRIPTORS_PER_RANK * self.size + _OTHER_DESCRIPTORS)
        with ExitStack() as stack:
            stdout, stderr = self._console_fds
            self._outlets = _copy(stdout, stack), _copy(stderr, stack)
            stack.callback(setattr, self, "_outlets", self._console_fds)
            stack.callback(self.places.discard)
            return self._run(stack)

    def _run(self, stack: ExitStack) -> Outcome:
        if not faulthandler.is_enabled():
            # A crash in C ends all ranks at once; its stack is all that can be told of it.
            faulthandler.enable(2, all_threads=False)
            stack.callback(faulthandler.disable)
        complaints = DiskComplaints(self._say)
        stdout, stderr = self._outlets
        console = Console(stdout_fd=stdout, stderr_fd=stderr, say=self._say)
        stack.callback(console.close)

        output = self._output = Output(
            self.job.logs,
            self.job.role,
            console,
            self._console_fds,
            complaints,
            now=lambda: world.scheduler.now,
            real_now=self._clock.now,
            writer=rank_of_thread,
            # The world is made below, with the streams of this output.
            is_own=lambda rank, number: world.descriptors.is_own(rank, number),  # noqa: PLW0108
        )
        stack.callback(setattr, self, "_output", None)
        stack.callback(output.leave_console)
        stack.callback(complaints.tell_losses)
        stack.callback(output.end_attempt)
        names = NamesOfRanks()
        world = stack.enter_context(
            SimulatedWorld(
                stdout=output.stdout,
                stderr=output.stderr,
                seed=self._seed,
                schedule=self._schedule,
                faults=self._faults,
                extensions={
                    "rankwise.drivers.real.windows.region": _follow_windows,
                    "torch": partial(_follow_torch, self._device),
                    "torch._dynamo.trace_rules": _follow_dynamo,
                    "torch._dynamo.convert_frame": partial(_follow_compilation, self._device),
                    "torch.distributed.checkpoint": _follow_checkpoint,
                    "torch.nn.attention.flex_attention": _follow_flexible_attention,
                    "torch.distributed.fsdp": partial(_follow_fsdp, self._device),
                    "torch.distributed._symmetric_memory": _follow_symmetric_memory,
                    **{module: partial(names.follow, module) for module in NAMES},
                    "torch.distributed.tensor": partial(_follow_dtensor, self._device, names),
                },
                prediction=self.prediction,
                packages=self._packages,
                has_virtual_clock=self._has_virtual_clock,
                equals=self.equals,
                timing_only=None if self.prediction is None else self.prediction.values,
                standard=STANDARD.union(self._console_fds),
            )
        )
        world.substitutes.pipes_for_children = output.pipes_for_children
        self._watch_for_triton(world, stack)
        clock = VirtualClock(world, self._clock.wall_ns)
        world.scheduler.patience.on_held = partial(self._tell_who_holds, world)
        hang_timeout = self.job.gang.hang_timeout
        patience = Duration(round(NOTICE_S * SECOND)) if hang_timeout is None else hang_timeout
        watch = RunTokenWatch(patience, self._clock, lambda: output.byte_count)
        world.scheduler.patience.gets_on = watch.gets_on
        self.places.prepare(0)
        if self.places.root is not None:
            remove_abandoned(self.places.root)
        records = RankRecords(self.job, world, output, self.places)
        plan = plan_of(self.job)
        announcements = NodesAnnouncements(
            self.job, plan, self._say, is_alone=self._rendezvous is None
        )
        history = RunHistory(clock.wall_ns, self.failure_command)

        def announce(host: str, announcement: Announcement) -> None:
            announcements.tell(host, announcement)
            history.note(announcement)

        host = socket.gethostname()
        journal = open_journal(self.job, self.places, complaints, stack, clock)
        if journal is not None:
            from rankwise.launch.recording import described_run  # noqa: PLC0415  # only then

            described = described_run(self.job.run_id, is_simulated=True)
            journal.record(RECORDER, described, clock.now())
        setting = Setting(
            job=self.job,
            world=world,
            records=records,
            clock=clock,
            journal=journal,
            describe=lambda failure, host: self._describe(failure, host, records, output),
            announce=announce,
            note_loss=announcements.note_loss,
            # Of nodes that never change, what is announced tells of failures.
            note_failures=_ignore if self._rendezvous is None else history.on_failures,
        )
        nodes = SimulatedNodes(
            setting,
            self.job.gang,
            node_count=self._node_count,
            rendezvous=self._rendezvous,
            policy=plan.rendezvous.policy,
            host=host,
            seed=self._seed,
            faults=self._faults,
        )
        with self._signals_caught(world), self._time_limited():
            nodes.start()
            self._run_nodes(world, nodes, records)
        outcome = nodes.outcome()
        if outcome.status is OutcomeStatus.STOPPED:
            awaited, stood = self._standstill
            outcome = msgspec.structs.replace(outcome, stood=stood, awaited=awaited)
        self.results = records.results
        self.missed_faults = [] if self._faults is None else self._faults.remarks()
        for remark in [] if isinstance(self.job.program, Function) else self.missed_faults:
            self._say(remark)  # to a caller in Python it is a warning: see `Simulation.run`
        for remark in world.remarks(is_success=outcome.status is OutcomeStatus.SUCCEEDED):
            self._say(remark)
        return msgspec.structs.replace(
            outcome,
            earlier=history.earlier,
            failures=tuple(
                msgspec.structs.replace(each, local_rank=records.local_rank(each.rank))
                for each in outcome.failures
            ),
        )

    def _watch_for_triton(self, world: SimulatedWorld, stack: ExitStack) -> None:
        """Have the ranks find the emulator of Triton when one of them imports that."""

        def find() -> None:
            from rankwise.sim.prediction.kernels import find_triton  # noqa: PLC0415  # only then

            stack.callback(find_triton(world, self._say))

        if "rankwise.sim.prediction.kernels" in sys.modules:
            find()  # what ranks share may have been imported in an earlier run
        else:
            stack.enter_context(FirstImport("triton", library="torch", then=find))

    def _run_nodes(
        self, world: SimulatedWorld, nodes: SimulatedNodes, records: RankRecords
    ) -> None:
        """Let ranks and nodes go on until the last agent has finished."""
        hang_timeout = self.job.gang.hang_timeout
        patience_s = None if hang_timeout is None else hang_timeout / SECOND
        grace = self.job.gang.grace
        while not nodes.is_over:
            stuck = nodes.run(self._patience_s_of_stop if self.caught_signal else patience_s)
            self._pass_signals_on(world)
            while self._stops:
                if self._stops[0] == TIME_LIMIT_SIGNAL:
                    awaited, stood = records.standstill(stuck)
                    if stuck is not None and len(stood) > 1:
                        awaited = awaited or _held_by(stuck)
                    self._standstill = awaited, stood
                nodes.stop(self._stops.pop(0))
            if stuck is not None and self.caught_signal:
                if stuck.exit_code == -signal.SIGKILL and self._stop_count == 1:
                    self._say(
                        f"rank {stuck.number} did not end within {format_duration(grace)}: killed"
                    )
            elif stuck is not None:
                self._stuck = _held_by(stuck, hang_timeout or Duration(0))
                nodes.find_stuck(stuck)
            nodes.go_on()

    @contextmanager
    def _signals_caught(self, world: SimulatedWorld) -> Iterator[None]:
        """Have signals to this process stop the run; the second one does not wait for ranks."""
        effects = self._effects

        def heed(number: int, _frame: FrameType | None) -> None:
            is_new = number not in self._signals_told
            self._signals_told.add(number)
            match effects[number]:
                case SignalEffect.STOPS:
                    stop(number)
                case SignalEffect.STOPS_AS_SIGTERM if is_new:
                    begins = not self._stop_count
                    line = as_sigterm_line(number, begins=begins)
                    self._say(line, "signal", signal=number)
                    if begins:
                        stop(signal.SIGTERM)
                case SignalEffect.PASSED_ON:
                    # Where no rank runs, as this thread may be in the middle of anything.
                    self._passed.append(number)
                    world.scheduler.call()
                case _:
                    pass

        def stop(number: int) -> None:
            self.caught_signal = self.caught_signal or number
            self._stops.append(number)
            self._stop_count += 1
            if self._output is not None and self._output.patience_ms is None:
                self._output.patience_ms = _CONSOLE_PATIENCE_MS
            told = signal.SIGTERM if number == TIME_LIMIT_SIGNAL else number
            grace_s = self.job.gang.grace / SECOND
            if _is_ended_at_once(world, told):
                world.scheduler.interrupt(min(_HAND_OVER_S, grace_s), signal=told)
            else:
                world.scheduler.interrupt(self._patience_s_of_stop)
            if self._stop_count > _STOPS_MAX:
                raise KeyboardInterrupt

        if not self.job.handle_signals or current_thread() is not main_thread():
            yield
            return
        before = {
            number: signal.signal(number, heed)
            for number in effects
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        }
        # What a rank forks finds what a program does, and not what the command has made of it.
        ours = before.keys() - {*self.job.signals} if self.job.heeds_all_signals else ()
        found = {number: usual(handler) for number, handler in before.items()}
        world.handlers_before = found | dict.fromkeys(ours, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _patience_s_of_stop(self) -> float:
        """How long ranks may take to end when the run is stopped; the second signal kills them."""
        grace_s = self.job.gang.grace / SECOND
        return grace_s if self._stop_count == 1 else min(_HAND_OVER_S, grace_s)

    @property
    def _effects(self) -> Mapping[int, SignalEffect]:
        """What signals do: a time limit is one that this process sends to itself."""
        effects = effects_of(self.job)
        if self.job.timeout is None:
            return effects
        return {**effects, TIME_LIMIT_SIGNAL: SignalEffect.STOPS}

    def _pass_signals_on(self, world: SimulatedWorld) -> None:
        """Let ranks take, when they run next, the signals that they catch."""
        while self._passed:
            number = self._passed.pop(0)
            living = [each for each in world.scheduler.ranks.values() if not each.is_over]
            reached = [each for each in living if callable(each.handlers.get(number))]
            for rank in reached:
                rank.signal(number)
            others = sorted(each.number for each in living if each not in reached)
            told = sorted(each.number for each in reached), others
            if self._passing_told.get(number) != told:
                self._passing_told[number] = told
                line = passed_on_line(number, *told)
                self._say(line, "signal", signal=number)

    @contextmanager
    def _time_limited(self) -> Iterator[None]:
        """Have the time limit stop the run, in real time.

        Raises:
            ConfigError: there is a limit, and this thread cannot be interrupted.
        """
        timeout = self.job.timeout
        if timeout is None:
            yield
            return
        if current_thread() is not main_thread():
            raise ConfigError(
                "timeout is given, and simulated ranks can be interrupted in the main thread only"
            )

        def strike() -> None:
            if self._stops:  # it is being stopped anyway, and twice would mean at once
                return
            self._say(time_limit_line(timeout, self.job.gang.grace), "timeout")
            signal.pthread_kill(main, TIME_LIMIT_SIGNAL)

        main = main_thread().ident or 0
        timer = Timer(timeout / SECOND, strike)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _describe(
        self, failure: Failure, host: str, records: RankRecords, output: Output
    ) -> Failure:
        """The same failure with what only this world knows of it."""
        rank, files = failure.rank, records.destinations
        is_hung = failure.cause is FailureCause.HUNG
        has_stacks = is_hung or failure.cause is FailureCause.OUT_OF_STEP
        error_file = files.error_files.get(rank, "")
        paths = (files.stdouts.get(rank, ""), files.stderrs.get(rank, ""))
        hang = self._stuck or records.hang
        return msgspec.structs.replace(
            failure,
            pid=None,
            host=host,
            role=self.job.role,
            wall_ns=failure.error.wall_ns if failure.error else self._clock.wall_ns(),
            detail=hang
            if is_hung
            else failure.detail or exit_in_program(failure, records.exits.get(rank, "")),
            signal_sender=self._sender_of_signal(failure),
            stacks=records.stacks.get(rank, "") if has_stacks else "",
            waits_for=records.waits.get(rank, "") if has_stacks else "",
            thread_error=error_of_thread(output.tail(rank, Streams.ERR, KEPT_LINES_MAX)),
            stderr_tail=output.tail(rank, Streams.ERR, _STDERR_LINES),
            stdout_tail=output.tail(rank, Streams.OUT, _STDOUT_LINES),
            log_paths=tuple(filter(None, paths)),
            error_file=error_file if failure.error and self.places.keep else "",
        )

    def _sender_of_signal(self, failure: Failure) -> str:
        """Who can have killed a simulated rank: nobody but a fault, or the program."""
        if failure.cause is not FailureCause.SIGNALED:
            return ""
        when = None if self._faults is None else self._faults.killed.get(failure.rank)
        return "the program itself" if when is None else f"a fault (--faults) {when}"

    def _tell_who_holds(self, world: SimulatedWorld, rank: Rank) -> None:
        where = "".join(f": it is at {place}" for place in places_of(rank.stack())[:1])
        if self.caught_signal is not None:
            name = SIGNAL_NAMES.get(self.caught_signal, "a signal")
            name = "time limit" if self.caught_signal == TIME_LIMIT_SIGNAL else name
            self._say(
                f"{name}: rank {rank.number} has not let the run stop{where}; it is killed after"
                f" {format_duration(self.job.gang.grace)}, or at once by another signal"
            )
            return
        if all(each is rank or each.is_over for each in world.scheduler.ranks.values()):
            return  # no other rank waits
        if world.timing_only is not None:
            self._say(
                f"rank {rank.number} has run for {NOTICE_S:.0f} s without a stop{where} (large"
                " models take minutes; if it blocks, --hang-timeout ends the run)"
            )
            return
        self._say(
            f"rank {rank.number} has let no other rank run for {NOTICE_S:.0f} s{where} (simulated"
            " ranks take turns; if it blocks, --hang-timeout ends the run)"
        )

    def _say(self, message: str, event: str = "notice", **fields: Any) -> None:
        if self.job.console:
            line = notice(self.job, message, event, **fields).encode("utf-8", "replace")
            if self._output is None:
                write_all(self._outlets[1], line)
            else:
                self._output.write_raw(Streams.ERR, line)


def _price(prediction: "Prediction", ranks: tuple[int, ...]) -> object:
    """What the links among some ranks give: the time of a collective, and of messages."""
    network = prediction.network
    messages = [network.message_time(*pair, _PROBED_BYTES) for pair in pairwise(ranks)]
    return network.time("all_reduce", _PROBED_BYTES, ranks), messages


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


def _follow_windows(world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.launch.on_sim import windows  # noqa: PLC0415  # only for programs that use them

    return windows.install(world)


def _follow_torch(device: str, world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.sim.torch import install  # noqa: PLC0415  # only for programs of torch

    stack = ExitStack()
    stack.callback(install(world, device))
    if world.equals is not None:
        from rankwise.sim.torch import rank_reads  # noqa: PLC0415  # only for predictions

        stack.callback(rank_reads.note_reads(world.equals))
    return stack.close


def _follow_dtensor(device: str, names: NamesOfRanks, world: SimulatedWorld) -> Callable[[], None]:
    stack = ExitStack()
    if device == "cuda":
        from rankwise.sim.torch import attention_sharding  # noqa: PLC0415  # for these alone

        stack.callback(attention_sharding.shard_attention_of_cpu())
    if world.equals is not None:
        from rankwise.sim.torch import uneven_shards  # noqa: PLC0415  # the same

        stack.callback(uneven_shards.note_shards_of_dtensor(world.equals))
    stack.callback(names.follow("torch.distributed.tensor", world))
    return stack.close


def _follow_dynamo(_world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.sim.torch import stay_out_of_graphs  # noqa: PLC0415  # only for programs of torch

    return stay_out_of_graphs()


def _follow_compilation(device: str, _world: SimulatedWorld) -> Callable[[], None]:
    if device != "cuda":
        return _nothing
    from rankwise.sim.torch import compile_for_cpu  # noqa: PLC0415  # the same

    return compile_for_cpu()


def _follow_checkpoint(world: SimulatedWorld) -> Callable[[], None]:
    if world.timing_only is None:
        return _nothing
    from rankwise.sim.torch.without_data import leave_checkpoints  # noqa: PLC0415  # rare

    return leave_checkpoints()


def _follow_flexible_attention(world: SimulatedWorld) -> Callable[[], None]:
    if world.timing_only is None:
        return _nothing
    from rankwise.sim.torch import flexible_attention  # noqa: PLC0415  # rare

    return flexible_attention.install()


def _follow_fsdp(device: str, world: SimulatedWorld) -> Callable[[], None]:
    if device != "cuda":
        return _nothing
    from rankwise.sim.torch import shard_on_cpu  # noqa: PLC0415  # the same

    stack = ExitStack()
    stack.callback(shard_on_cpu())
    if world.timing_only is not None:
        from rankwise.sim.torch.without_data import shard_on_device  # noqa: PLC0415  # rare

        stack.callback(shard_on_device())
    if world.equals is not None:
        from rankwise.sim.torch import uneven_shards  # noqa: PLC0415  # the same

        stack.callback(uneven_shards.note_shards_of_fsdp(world.equals))
    return stack.close


def _nothing() -> None:
    """Undo nothing."""


def _ignore(_failures: tuple[Failure, ...]) -> None:
    """Take no note."""


def _follow_symmetric_memory(_world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.sim.torch import share_memory  # noqa: PLC0415  # the same

    return share_memory()
