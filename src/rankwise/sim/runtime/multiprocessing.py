"""`spawn`: ranks as greenlets, each with a clock of its own.

A rank that waits resumes at the instant of its handle. The ranks that are due at an instant run, in
the order of the ranks, each to its next wait; then the simulation moves on to the next instant at
which the handle of a rank is complete, and to the end of that instant. So all ranks have submitted
what they can before any time passes, and the order of what completes at one instant does not count.

The signature is PyTorch's. There is no isolation: ranks share one process and its modules, and a
rank must not block on anything but the simulation.

A rank that raises ends the others: each gets `SystemExit` at its wait, so that its `finally` blocks
run; waiting again there raises `SystemExit` once more. Then `SpawnException` tells the root causes,
in the order that failures of processes have.
The other ranks that are due at that instant run first: failures at one instant are all root causes.
"""

import random
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from greenlet import getcurrent

from rankwise.base.errors import ConfigError, Deadlock, LocalProtocolError, SimulationError, Waiting
from rankwise.base.failure import ExitStatus, Failure, FailureCause, record_of, text_of
from rankwise.base.root_cause import root_cause_first
from rankwise.base.seeds import derived_seed
from rankwise.base.units import Instant
from rankwise.base.wording import ranks_in_words
from rankwise.sim.ccl.algorithm_modules import AlgorithmError
from rankwise.sim.hardware.commands import CommandHandle
from rankwise.sim.hardware.faults import Unreachable
from rankwise.sim.hardware.quantities import PICOSECONDS_PER_NANOSECOND
from rankwise.sim.kernel import Future, RankGreenlet, Steps
from rankwise.sim.kernel.places import (
    frames_of_stack,
    line_of,
    stack_in_text,
    traceback_in_text,
    users_lines_among,
    where_of,
)
from rankwise.sim.runtime.wall_limit import RealTimeLimit, wall_limit

if TYPE_CHECKING:
    from rankwise.sim.runtime.collective_calls import RankContribution
    from rankwise.sim.runtime.context import RuntimeContext

_FAILURES_SHOWN = 8
"""Where ranks failed in more ways than that, the message has the first."""
_COLLECTIVES_SHOWN = 16
"""Of more open collectives, the message has the first."""
_PATIENCE_WITH_ENDING = 64
"""How often a rank that is being ended may wait again in its `finally` blocks."""


class SpawnException(SimulationError):
    """Ranks failed.

    Attributes:
        errors: the exception of every rank that failed on its own, by rank.
        nprocs: how many ranks there were.
        failures: the same as values, the root cause first; ranks that others wait for are here too,
            and at the end those that were told to stop, since others had failed. Empty where no
            rank is to blame, but an algorithm, or a machine whose links have died.
    """

    def __init__(
        self,
        message: str,
        errors: dict[int, BaseException],
        failures: tuple[Failure, ...] = (),
        *,
        nprocs: int = 0,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.errors = errors
        self.nprocs = nprocs
        self.failures = failures


class RanksStuck(SpawnException, Deadlock):
    """Ranks wait for what cannot happen any more: for a rank that left, or for each other.

    Attributes:
        waiting: who waits for what, and where.
        stacks: every waiting rank's stack as text, by rank.
    """

    def __init__(
        self,
        message: str,
        waiting: tuple[Waiting, ...],
        stacks: dict[int, str],
        failures: tuple[Failure, ...] = (),
        *,
        nprocs: int = 0,
    ) -> None:
        errors: dict[int, BaseException] = dict.fromkeys(stacks, self)
        SpawnException.__init__(self, message, errors, failures, nprocs=nprocs)
        self.waiting = waiting
        self.stacks = stacks


def _drain_pending(ctx: "RuntimeContext") -> None:
    """Complete all deferred waits and all pending collectives, but those that are stuck so far."""
    ctx.drain_waits(with_collectives=True)


class DeviceSpawnContext:
    """What `spawn(join=False)` gives: ranks that run when they are joined."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._is_joined = False

    def join(self, timeout: float | None = None) -> bool:
        """Run the ranks to their end; raises what `spawn` would have. `timeout` has no meaning."""
        del timeout
        if not self._is_joined:
            self._is_joined = True
            self._run()
        return True


class Multiprocessing:
    """`torch.multiprocessing`, as far as it makes sense for ranks in one process."""

    SpawnException = SpawnException

    def __init__(self, context: "RuntimeContext") -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)

    def spawn(  # noqa: PLR0917 (the signature is torch's)
        self,
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
        *,
        schedule_seed: int | None = None,
        wall_limit_s: float | None = None,
    ) -> DeviceSpawnContext | None:
        """Call `fn(rank, *args)` once per rank, in ranks 0 to `nprocs` - 1.

        Args:
            fn: what each rank runs.
            args: what it is given after its rank.
            nprocs: how many ranks.
            join: run them to their end; else return something to join.
            daemon: accepted, and without meaning: there are no processes.
            start_method: the same.
            schedule_seed: permutes the order of ranks that resume at one instant; None: rank order.
            wall_limit_s: seconds of real time after which the ranks are ended, even one that never
                gives way; only in the main thread, because a signal does it.

        Raises:
            SpawnException: ranks raised; `.errors` has the root causes.
            RanksStuck: ranks wait for a rank that left, called different collectives, or began one
                that others never called. It is both a `SpawnException` and a `Deadlock`.
            TimeLimit: the wall limit is exceeded; names the rank and its line.
        """
        del daemon, start_method
        if not callable(fn):
            raise ConfigError(f"fn is {fn!r}, expected a function of (rank, *args)")
        if not isinstance(nprocs, SupportsIndex):
            raise ConfigError(f"nprocs is {nprocs!r}, expected a whole number of ranks")
        if nprocs < 1:
            raise LocalProtocolError(f"spawn was asked for {nprocs} ranks; expected 1 or more")
        if getcurrent().parent is not None:
            raise LocalProtocolError("spawn was called in a rank: ranks cannot have ranks")

        def run() -> None:
            with wall_limit(wall_limit_s):
                _RankRun(self._context, fn, tuple(args), nprocs, schedule_seed).run()

        if join:
            run()
            return None
        return DeviceSpawnContext(run)


class _RankRun:
    def __init__(
        self,
        context: "RuntimeContext",
        fn: Callable[..., object],
        args: tuple[Any, ...],
        nprocs: int,
        seed: int | None,
    ) -> None:
        self._context = context
        self._fn = fn
        self._args = args
        self._errors: dict[int, BaseException] = {}
        self._failures: list[Failure] = []
        self._interrupt: BaseException | None = None
        self._is_ending = False
        self._order = None if seed is None else random.Random(derived_seed(seed, "schedule"))  # noqa: S311 (a schedule, no secret)
        self._ranks = [RankGreenlet(rank, self._body) for rank in range(nprocs)]
        self._awaited: dict[int, CommandHandle] = {}
        """By rank, the command that it waits for. A rank that waits for others' calls has none."""
        self._done: list[int] = []
        """The ranks whose commands are complete, and that have not resumed."""
        self._idle: list[int] = []
        """The ranks that gave way without waiting for anything; they resume with the next."""
        self._resumption: Future | None = None

    def run(self) -> None:
        """Run all ranks to their end; what they leave when they fail is given up."""
        try:
            self._run()
        except BaseException:
            self._context.give_up()
            raise

    def _run(self) -> None:
        context, distributed = self._context, self._context.distributed
        _drain_pending(context)
        world_before = context.world_size
        context.world_size = len(self._ranks)
        try:
            context.device_of(0)  # refuses more ranks than there is room for, before any runs
            distributed.begin_ranks(self._ranks)
            if context.races is not None:
                context.races.meet(range(len(self._ranks)))
            context.on_deferral = self._awaits
            self._run_ranks()
        finally:
            context.on_deferral = None
            self._end_ranks()
            distributed.end_ranks()
            context._pending_worker_waits.clear()  # noqa: SLF001
            context._pending_collective_waits.clear()  # noqa: SLF001
            context.world_size = world_before
        if self._interrupt is not None:
            raise self._interrupt
        if self._errors:
            raise _spawn_exception(self._errors, root_cause_first(self._failures), len(self._ranks))

    def _run_ranks(self) -> None:
        due = self._ranks
        while due:
            self._let_run(due)
            if self._interrupt is not None or (self._errors and not self._done):
                return
            live = [rank for rank in self._ranks if not rank.dead]
            if not self._errors:
                self._refuse_deadlock(live, is_stuck=False)
            due = self._next_due(live)
        abandoned = self._context.distributed.pending_collectives.abandoned()
        if abandoned is not None and not self._errors:
            raise self._stuck([], abandoned.text, abandoned.blamed)

    def _let_run(self, due: list[RankGreenlet]) -> None:
        """Let ranks run, one after the other, each to its next wait."""
        order = due.copy()
        if self._order is not None:
            self._order.shuffle(order)
        pending_collectives = self._context.distributed.pending_collectives
        for rank in order:
            self._awaited.pop(rank.rank, None)
            rank.switch(rank.rank)
            if self._is_interrupted():
                return
            is_waiting = (
                rank.rank in self._awaited or pending_collectives.call_of(rank.rank) is not None
            )
            if not rank.dead and not is_waiting:
                self._idle.append(rank.rank)

    def _next_due(self, live: list[RankGreenlet]) -> list[RankGreenlet]:
        """Move on to the next instant at which a rank may resume; the ranks that do."""
        if live and not self._done:
            if self._awaited:
                self._move_on(live)
            elif not self._idle:
                self._refuse_deadlock(live, is_stuck=True)
                raise self._stuck(live, "every rank waits for another one", ())
        due, self._done = {*self._done, *self._idle}, []
        self._idle.clear()
        for rank in sorted(due):
            if rank in self._awaited:
                self._context.settle(self._awaited[rank])
        return [rank for rank in live if rank.rank in due]

    def _move_on(self, live: list[RankGreenlet]) -> None:
        first = next(iter(self._awaited.values()))
        self._resumption = self._context.engine.simulator.future(first.future.name)
        try:
            self._context.engine.simulator.run(self._resumption)
        except Deadlock as deadlock:
            raise self._stuck(live, str(deadlock), (), deadlock.waiting) from deadlock

    def _awaits(self, rank: int, handle: CommandHandle) -> None:
        """Note what a rank waits for: it resumes when that is complete."""
        self._awaited[rank] = handle
        if handle.is_done:
            self._done.append(rank)
        else:
            handle.future.add_callback(lambda _future: self._is_due(rank))

    def _is_due(self, rank: int) -> None:
        if self._is_ending:
            return  # what a rank that has failed has left behind is complete
        self._done.append(rank)
        if len(self._done) == 1:
            # Not from this wave: other handles may complete at this instant in the waves after it.
            self._context.engine.simulator.process(self._end_instant(), "the end of the instant")

    def _end_instant(self) -> Steps:
        while not self._context.engine.simulator.ends_instant():
            yield 0
        if self._resumption is not None and not self._resumption.is_done:
            self._resumption.succeed()

    def _is_interrupted(self) -> bool:
        """Whether the rank that ran last was interrupted: then no other one runs on."""
        return self._interrupt is not None

    def _body(self, rank: int) -> None:
        """What runs in a rank's greenlet."""
        try:
            self._fn(rank, *self._args)
        except SystemExit as leaving:
            if not self._is_ending and exit_code(leaving):
                self._note_failure(rank, leaving)
        except RealTimeLimit as limit:
            if not self._is_ending:
                self._interrupt = limit
        except Exception as error:  # noqa: BLE001 (a rank's own failure: told by SpawnException)
            if not self._is_ending:
                self._note_failure(rank, error)
        except BaseException as interrupt:  # noqa: BLE001 (raised again when the ranks have ended)
            if not self._is_ending:
                self._interrupt = interrupt

    def _note_failure(self, rank: int, error: BaseException) -> None:
        self._errors[rank] = error
        self._failures.append(failure_of(rank, error, self._context.now))

    def _end_ranks(self) -> None:
        """Raise `SystemExit` in every rank that is still there, until it has ended."""
        self._is_ending = True
        self._context._is_ending_ranks = True  # noqa: SLF001
        try:
            for rank in self._ranks:
                if rank:
                    self._failures.append(failure_of_ended(rank.rank, self._context.now))
                for _ in range(_PATIENCE_WITH_ENDING):
                    if not rank:  # it has not begun, or it has ended
                        break
                    rank.throw(SystemExit("this rank is ended, because another one has failed"))
        finally:
            self._context._is_ending_ranks = False  # noqa: SLF001

    def _refuse_deadlock(self, live: list[RankGreenlet], *, is_stuck: bool) -> None:
        """Report waits that cannot end: for ranks that have left, or that are elsewhere."""
        alive = {rank.rank for rank in live}
        pending_collectives = self._context.distributed.pending_collectives
        blame = pending_collectives.deadlock(alive, is_stuck=is_stuck)
        if blame is not None:
            raise self._stuck(live, blame.text, blame.blamed)

    def _stuck(
        self,
        live: list[RankGreenlet],
        reason: str,
        blamed: tuple[int, ...],
        others: tuple[Waiting, ...] = (),
    ) -> RanksStuck:
        now, lines = self._context.now, []
        waiting: dict[int, Waiting] = {}
        stacks: dict[int, str] = {}
        places: dict[int, str] = {}
        awaited_by: dict[int, str] = {}
        for rank in self._ranks:
            call = self._context.distributed.pending_collectives.call_of(rank.rank)
            if rank not in live:
                lines.append(f"rank {rank.rank} has returned{_after(self._context, rank.rank)}")
                continue
            frames = frames_of_stack(rank.gr_frame)
            where = where_of(frames)
            places[rank.rank] = stack_in_text(users_lines_among(frames))
            stacks[rank.rank] = "".join(traceback.format_stack(rank.gr_frame))
            if call is not None:
                lines.append(f"rank {rank.rank} is in {call}, at {where}")
                missing = self._context.distributed.pending_collectives.awaited_by(call)
                awaited = f"{call}"
                if missing:
                    awaited = f"{ranks_in_words(missing)} to call {call.describe_for(missing[0])}"
                awaited_by[rank.rank] = awaited
            else:
                command = self._context.awaited_by(rank.rank)
                name = getattr(getattr(command, "future", None), "name", "")
                awaited = "a command" + (f" ({name})" if name else "")
                awaited_by[rank.rank] = "a command"  # which one is among what waits on the machine
                lines.append(f"rank {rank.rank} is waiting for {awaited}, at {where}")
            waiting[rank.rank] = Waiting(f"rank {rank.rank}", awaited, now, where)
        head, *more = reason.splitlines()
        told = self._context.distributed.pending_collectives.open_in_words()
        collectives = [f"  {each}" for each in told]
        head = head.removesuffix(":")
        shown = [head, f"  {'; '.join(lines)}", *collectives[:_COLLECTIVES_SHOWN], *more]
        message, detail = "\n".join(shown), "\n".join([head, *more])
        failures = failures_of_stuck(detail, blamed, awaited_by, places, now)
        everything = (*waiting.values(), *others)
        return RanksStuck(message, everything, stacks, failures, nprocs=len(self._ranks))


def _after(context: "RuntimeContext", rank: int) -> str:
    last: RankContribution | None = context.distributed.pending_collectives.last_call_of(rank)
    return f" after {last}" if last is not None else " without calling any collective"


def _failure(error: BaseException) -> str:
    """What a rank failed with, and on which line of the user's code."""
    line = line_of(error)
    text = text_of(error)
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{what}, at {line}" if line and line.file not in text else what


def _listed(told: list[str]) -> str:
    """One failure behind the colon, several below each other."""
    return "\n  ".join(told) if len(told) > 1 else f" {told[0]}"


def _spawn_exception(
    errors: dict[int, BaseException], failures: tuple[Failure, ...], nprocs: int
) -> SpawnException:
    failed = dict(sorted(errors.items()))
    of_no_rank = (AlgorithmError, Unreachable)
    faulty = next((each for each in failed.values() if isinstance(each, of_no_rank)), None)
    if faulty is not None:
        line = line_of(faulty)
        message = f"{faulty}{f' (called at {line})' if line else ''}"
        # No failure of a rank is told of: all that any of them has done is to call a collective.
        exception = SpawnException(message, failed, nprocs=nprocs)
        exception.__cause__ = faulty
        return exception
    ranks: dict[str, list[int]] = {}
    for rank in [failure.rank for failure in failures if failure.rank in errors]:
        ranks.setdefault(_failure(errors[rank]), []).append(rank)
    told = [f"{ranks_in_words(which)}: {what}" for what, which in ranks.items()]
    if len(told) > 1:
        more = len(told) - _FAILURES_SHOWN
        told = ["", *told[:_FAILURES_SHOWN], *([f"... and {more} more (see .errors)"] * (more > 0))]
    message = f"{len(errors)} of {nprocs} ranks failed:{_listed(told)}"
    exception = SpawnException(message, failed, failures, nprocs=nprocs)
    exception.__cause__ = errors[failures[0].rank]
    return exception


def failure_of(rank: int, error: BaseException, now_ps: int) -> Failure:
    """The failure of a rank that has raised, or left with a code other than 0, as of a process.

    Times are those of the simulation, and nothing is of the machine that simulates: equal runs have
    equal failures.
    """
    at = Instant(now_ps // PICOSECONDS_PER_NANOSECOND)
    if isinstance(error, SystemExit):
        cause, exit_, record = FailureCause.EXITED, ExitStatus(exit_code(error)), None
    else:
        record = record_of(error, traceback_in_text(error), at)
        cause, exit_ = FailureCause.RAISED, ExitStatus(1)
    return _of_rank(rank, cause, now_ps, exit=exit_, error=record)


def failure_of_ended(rank: int, now_ps: int) -> Failure:
    """That of a rank that was ended since another one has failed."""
    return _of_rank(rank, FailureCause.STOPPED, now_ps, ended_by_us=True)


def exit_code(leaving: SystemExit) -> int:
    """The code that a process would have which is left so: 256 is 0, and a text is 1."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def failures_of_stuck(
    reason: str,
    blamed: tuple[int, ...],
    waiting: Mapping[int, str],
    stacks: Mapping[int, str],
    now_ps: int,
) -> tuple[Failure, ...]:
    """The failures of ranks that wait in vain, after those of the ranks that are to blame.

    `reason` is a sentence, and perhaps lines on what else waits. Ranks that wait were ended for
    those that are to blame; if none is, they have hung.
    """
    failures = []
    for rank in sorted({*blamed, *waiting}):
        is_blamed = rank in blamed
        waits = FailureCause.STOPPED if blamed else FailureCause.HUNG
        failures.append(
            _of_rank(
                rank,
                FailureCause.OUT_OF_STEP if is_blamed else waits,
                now_ps,
                detail=reason if is_blamed or not blamed else "",
                accused=blamed if is_blamed else (),
                ended_by_us=not is_blamed,
                stacks=stacks.get(rank, ""),
                waits_for=waiting.get(rank, ""),
            )
        )
    return root_cause_first(failures)


def _of_rank(rank: int, cause: FailureCause, now_ps: int, **known: Any) -> Failure:
    at = Instant(now_ps // PICOSECONDS_PER_NANOSECOND)
    return Failure(local_rank=rank, rank=rank, attempt=0, cause=cause, at=at, **known)
