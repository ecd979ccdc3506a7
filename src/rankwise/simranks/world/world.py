"""A world of simulated ranks in this process: `with SimulatedWorld(...) as world`.

It puts the parts together: the scheduler of the ranks, what each of them has for itself, and what
the process's functions do for them meanwhile. One world lives at a time in a process.
"""

import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, Self, TextIO

from rankwise.base.errors import LocalProtocolError
from rankwise.simranks.world import environments, turn_takers
from rankwise.simranks.world.changes import Changes
from rankwise.simranks.world.collective_groups import CollectiveGroup, Conditions
from rankwise.simranks.world.descriptors import STANDARD, RankDescriptors
from rankwise.simranks.world.equals import Equals, NotEqual
from rankwise.simranks.world.faults import FaultInjector
from rankwise.simranks.world.per_rank_state import ProcessState, RankProcess
from rankwise.simranks.world.process_patches import ProcessPatches
from rankwise.simranks.world.rank_time import RankTime
from rankwise.simranks.world.ranks import Rank, not_for_threads
from rankwise.simranks.world.scheduler import Scheduler
from rankwise.simranks.world.schedules import Schedule

_CPU_FIELD = 36
"""Where `/proc/thread-self/stat` tells the core, counted after the name of the program."""


_serials = itertools.count()


SIMULATED_VARIABLE = "RANKWISE_SIMULATED"
"""Set in the environment of simulated ranks: worth looking for the rank that runs."""


class SimulatedWorld:
    """The ranks of one run, and what they share.

    Args:
        stdout, stderr: what all ranks write to; they ask `running_rank` whose words it is.
        seed: what the ranks' random states begin from.
        schedule: decides what the run leaves open; None takes what comes first.
        faults: the faults of the ranks, if anything does.
        extensions: for shared modules, what follows their import; it returns what undoes it.
        prediction: the time of the ranks on a modelled machine, a `simranks.prediction.Prediction`;
            None lets nothing but sleeping take time.
        packages: installed packages that each rank imports for itself, beside
            `modules.PACKAGES_OF_RANKS`.
        has_virtual_clock: whether the functions of `time` tell a rank nothing but virtual time.
        timing_only: a `simranks.prediction.values.ValuePolicy`: tensors have no data, and it
            answers for them; None computes.
        equals: which ranks run the program, if the others do the same; None runs all.
        standard: the numbers of the descriptors that a rank may replace for itself.

    Attributes:
        scheduler: runs the ranks.
        own_state: what each rank has for itself.
        patches: what the process's functions do meanwhile.
        descriptors: which standard ones ranks have replaced.
        size: how many ranks the present attempt has.
        steps: how many steps each rank has begun that counts them.
        serial: the number of the present attempt among those of all worlds of this process.
        sections: how many sections ranks have begun or ended.
        shared: other values that ranks share, by name.
        changes: the ranks that wait for memory to change.
        last_step: the one after which all of them stop; None until they are asked to stop.
        handlers_before: by signal, what the process did with it before the run took it over.
    """

    def __init__(
        self,
        *,
        stdout: TextIO,
        stderr: TextIO,
        seed: int = 0,
        schedule: Schedule | None = None,
        faults: FaultInjector | None = None,
        extensions: "Mapping[str, Extension] | None" = None,
        prediction: Any = None,
        packages: Sequence[str] = (),
        has_virtual_clock: bool = False,
        timing_only: Any = None,
        equals: Equals | None = None,
        standard: frozenset[int] = STANDARD,
    ) -> None:
        cpus = os.sched_getaffinity(0)  # before the ranks' threads are pinned to one of them
        self._extensions = {
            "numpy.random": _follow_numpy, "pdb": _follow_pdb, **(extensions or {}),
        }  # fmt: skip
        self.own_state = ProcessState(
            stdout,
            stderr,
            after={name: partial(self._extend, name) for name in self._extensions},
            packages=packages,
        )
        self.scheduler = Scheduler(
            choose=None if schedule is None else schedule.choose,
            own_state=self.own_state,
            cpu=_present_cpu(cpus),
        )
        self.prediction = prediction
        self.has_virtual_clock = has_virtual_clock
        self.timing_only = timing_only
        time = RankTime(self.scheduler, prediction, is_virtual=has_virtual_clock)
        self.descriptors = RankDescriptors(self.own_state, standard)
        self.patches = ProcessPatches(self.scheduler, self.own_state, seed, cpus, time)
        self.patches.is_own = self.descriptors.is_own
        self._conditions = Conditions(schedule, faults)
        self.equals = self._conditions.equals = equals
        if faults is not None:
            faults.prediction = prediction
        self.size = 0
        self.steps: dict[int, int] = {}
        self.sections = 0
        self.last_step: int | None = None
        self.handlers_before: Mapping[int, Any] = {}
        self.shared: dict[str, Any] = {}
        self.changes = Changes()
        self._at_end_of_ranks: list[Callable[[Rank], None]] = [self.descriptors.give_back]
        self.scheduler.on_given_up = self._end_rank
        self.serial = 0
        self._collection = gc.get_threshold()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        global _world  # noqa: PLW0603  # a process has one set of names to replace
        if _world is not None:
            raise LocalProtocolError(
                "this process has a simulated world already",
                hint="a simulated rank cannot simulate others; run them one after the other",
            )
        _world = self
        self._stack.callback(_forget)
        self._stack.callback(gc.set_threshold, *self._collection)
        self._stack.enter_context(self.scheduler)
        self.own_state.begin()
        self._stack.callback(self.own_state.end)
        self.patches.install(*self.descriptors.functions)
        self._stack.callback(self.patches.uninstall)
        self._stack.callback(turn_takers.end)
        self._stack.callback(environments.end)
        self._stack.callback(self.descriptors.end)
        if self._conditions.schedule is not None:
            self.scheduler.on_idle = self._match_messages
            self.patches.yield_at_files()
        # `own_state` finds later imports of ranks; this module was there before them.
        for name in self._extensions:
            if name in sys.modules:
                self._extend(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def spawn(self, number: int, process: RankProcess, program: Callable[[], int]) -> Rank:
        """Make a rank; see `Scheduler.spawn`."""

        def live() -> int:
            if self.equals is not None and number not in self.equals.simulated:
                return 0  # its time is that of another rank
            if self.equals is not None:
                environments.watch(self.equals.note_read)
            try:
                if (faults := self._conditions.faults) is not None:
                    faults.begin(rank)
                try:
                    code = program()
                except NotEqual:  # the run begins anew, with all ranks
                    self._let_all_stop()
                    return 0
                self.patches.join_threads(rank)
                self.patches.run_exit_functions(rank)
            finally:
                if not rank.is_given_up:
                    self._end_rank(rank)
            return code

        rank = self.scheduler.spawn(number, process, live)
        return rank

    def _let_all_stop(self) -> None:
        """Let ranks that wait find out that they are not equal."""
        difference = "" if self.equals is None else self.equals.difference
        for group in self.groups.values():
            group.fail_all(NotEqual(difference))

    def _end_rank(self, rank: Rank) -> None:
        for function in self._at_end_of_ranks:
            function(rank)

    def group(self, name: str, ranks: tuple[int, ...]) -> CollectiveGroup:
        """The group of this name; the first of its members to ask makes it."""
        group = self.groups.get(name)
        if group is None:
            group = CollectiveGroup(self.scheduler, name, ranks, self._conditions)
            self._conditions.add(group)
        return group

    @property
    def groups(self) -> dict[str, CollectiveGroup]:
        """Those of the ranks that meet, by name."""
        return self._conditions.groups

    @property
    def marks(self) -> tuple[int, ...]:
        """How far the ranks have come: any change is progress."""
        ranks = self.scheduler.ranks.values()
        over = sum(rank.is_over for rank in ranks)
        return self._conditions.calls, self.sections, sum(self.steps.values()), over, len(ranks)

    def remarks(self, *, is_success: bool) -> list[str]:
        """What the user should know at the end of a run, each in a line.

        Faults that never occurred are left out: see `FaultInjector.remarks`.
        """
        remarks = self._conditions.alarms.remarks(is_success=is_success)
        if self._conditions.faults is not None:
            remarks += self._conditions.waits.remarks()
        return remarks

    def _match_messages(self) -> bool:
        return any(group.match_any_source() for group in list(self.groups.values()))

    def at_end_of_ranks(self, function: Callable[[Rank], None]) -> None:
        """Have a function called for each rank that ends: in its thread, unless it was given up."""
        self._at_end_of_ranks.append(function)

    def seed_of(self, rank: Rank) -> int:
        """A seed for random states of this rank."""
        return self.patches.seed_of(rank)

    def begin_attempt(self, size: int) -> None:
        """Forget what belongs to an attempt that is over; there are `size` ranks to come."""
        assert all(
            rank.is_over or rank.is_between_worlds for rank in self.scheduler.ranks.values()
        ), "ranks of the previous attempt still run"
        self.scheduler.ranks.clear()
        self.size = size
        self.serial = next(_serials)
        # Each rank may allocate as much between two collections as a process of its own.
        first, *others = self._collection
        gc.set_threshold(first * max(size, 1), *others)
        self._conditions.begin_attempt()
        self.steps = {}
        self.shared = {}
        self.last_step = None
        if self.prediction is not None:
            self.prediction.begin_attempt(size)

    def rejoin(self, rank: Rank, number: int, process: RankProcess) -> None:
        """A rank that has lived on belongs to the present attempt, with this number."""
        rank.number, rank.process, rank.is_between_worlds = number, process, False
        self.scheduler.ranks[number] = rank
        if self.prediction is not None:
            self.prediction.rejoin(rank)

    def begin_step(self, rank: int) -> bool:
        """A rank begins a step; whether it must stop instead."""
        self.steps[rank] = self.steps.get(rank, 0) + 1
        return self.last_step is not None and self.steps[rank] > self.last_step

    def _extend(self, module: str) -> None:
        if _world is self:  # an import may have begun in an earlier world
            self._stack.callback(self._extensions[module](self))


Extension = Callable[[SimulatedWorld], Callable[[], None]]
"""What follows an import in a world; returns what undoes it."""


def _follow_numpy(world: SimulatedWorld) -> Callable[[], None]:
    world.patches.follow_numpy()
    return _nothing


def _follow_pdb(world: SimulatedWorld) -> Callable[[], None]:
    world.patches.follow_pdb()
    return _nothing


def _nothing() -> None:
    """Undo what the patches undo themselves."""


_world: SimulatedWorld | None = None


def running_rank() -> Rank | None:
    """The simulated rank whose thread calls this; None elsewhere."""
    return None if _world is None else _world.patches.running()


def refuse_threads(call: str) -> None:
    """Refuse a call that simulated ranks make in their main threads only.

    Raises:
        LocalProtocolError: a thread that a rank has started calls this.
    """
    if _world is not None and (strand := _world.scheduler.helpers.get(get_ident())) is not None:
        raise not_for_threads(strand, call)


def present_world() -> SimulatedWorld:
    """The world of the rank that calls this."""
    assert _world is not None, "asked by a simulated rank"
    return _world


def note_section() -> None:
    """A section begins or ends, perhaps of a process that is no rank."""
    if _world is not None:
        _world.sections += 1


def rank_of_thread() -> Rank | None:
    """The simulated rank that started the calling thread; otherwise the one with the run token."""
    return None if _world is None else _world.patches.owner() or _world.scheduler.current


def _forget() -> None:
    global _world  # noqa: PLW0603  # see above
    _world = None


_held = threading.local()
"""The signals that a thread blocks, and where its child will write, while it forks."""
_dup2 = os.dup2  # as below
_sigmask = signal.pthread_sigmask  # a rank finds one that is about its own signals


def _prepare_fork() -> None:
    """Make the pipes for the output of a rank's child, and hold signals.

    One that reached the child before it has handlers of its own would be lost.
    """
    if _world is not None and (rank := rank_of_thread()) is not None:
        _held.pipes = _world.patches.pipes_for_children(rank.number)
    if _world is not None and _world.handlers_before:
        _held.mask = _sigmask(signal.SIG_BLOCK, [*_world.handlers_before])


def _release_signals() -> None:
    if (mask := vars(_held).pop("mask", None)) is not None:
        _sigmask(signal.SIG_SETMASK, mask)


def _leave_in_child() -> None:
    """A forked child is a process of its own: it finds everything as it was, and all its cores.

    It takes signals as its rank does: the run's own handlers would keep it from ending.
    """
    if _world is None:
        return
    rank = rank_of_thread()
    if rank is not None:
        _world.own_state.settle(rank)
    if (pipes := vars(_held).pop("pipes", None)) is not None:
        for number, pipe in zip((1, 2), pipes, strict=True):
            if not _world.descriptors.is_own(rank, number):
                _dup2(pipe, number)
    handlers = {**_world.handlers_before, **({} if rank is None else rank.handlers)}
    environments.end()
    _world.patches.uninstall()
    _world.patches.unpin()
    _world.scheduler.holder = None  # what it has of the patches is to take it for no rank
    _world.scheduler.helpers.clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _release_signals()


os.register_at_fork(
    before=_prepare_fork, after_in_parent=_release_signals, after_in_child=_leave_in_child
)


def _present_cpu(cpus: set[int]) -> int | None:
    """The core that this thread runs on: the kernel has found it idle."""
    try:
        words = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
        cpu = int(words[_CPU_FIELD])
    except (OSError, ValueError, IndexError):
        return None
    return cpu if cpu in cpus else None
