"""Simulated runs of task graphs: random graphs, mortal children, and a sequential reference.

The real task graph runs among simulated children, with a caller in virtual time. What a run must
come to is told by its reference: the same tasks, one after the other, without a machine. Which
tasks are killed or cancelled depends on time, so the reference is told; all else follows: a task
that reads bytes which somebody has failed to write is skipped, and every other one completes with
values that are known. A task reads its cells when it begins and writes them when it ends, each with
a digest of its number and of all that it has read, so two runs have the same values only if every
task saw in each cell what it should have seen.

`python tests/simulation/task_graph_worlds.py --seed 440` replays a seed: it prints the plan's
limits and the journal as JSON lines, and what was wrong, if anything was.
"""

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec

from rankwise.base.errors import Deadlock, SimulationError
from rankwise.base.seeds import derived_seed
from rankwise.base.units import MICROSECOND, Duration, Instant
from rankwise.core.tree.heap import ALIGNMENT
from rankwise.core.tree.machine import TaskGraph
from rankwise.core.tree.vocabulary import (
    FAILED_BIT,
    HOST,
    RETURNED_BIT,
    Access,
    AllocationGranted,
    AllocationRefused,
    AllocationRequested,
    ChildDied,
    ChildJoined,
    ChildPool,
    ChildrenReported,
    Discard,
    Dispatch,
    DrainBegan,
    Drained,
    Effect,
    EndCause,
    GraphSpec,
    GroupSubmitted,
    Recall,
    RunAbandoned,
    ScopeClosed,
    ScopeOpened,
    SlotsRecalled,
    Stimulus,
    TaskSubmitted,
)
from rankwise.drivers.feed import Door
from rankwise.drivers.virtual.agenda import Agenda, VirtualClock
from rankwise.drivers.virtual.invariants import InvariantBroken
from rankwise.drivers.virtual.journal import MemoryJournal
from rankwise.drivers.virtual.random_streams import happens, stream

CELL_BYTES = 8
CELL_COUNT = 24
HEAP_START = 64 * ALIGNMENT


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is submitted.

    Attributes:
        pool: who may take it.
        children: for each member the child that must take it; one member is a plain task.
        accesses: bytes of fixed memory that it touches.
        slabs: which of the allocations before it, counted from the latest, it reads and writes.
        takes: how long each member runs.
        raises: whether it raises.
    """

    pool: ChildPool
    children: tuple[int | None, ...] = (None,)
    accesses: tuple[Access, ...] = ()
    slabs: tuple[int, ...] = ()
    takes: tuple[Duration, ...] = (Duration(MICROSECOND),)
    raises: bool = False


class Allocate(msgspec.Struct, frozen=True):
    """The orchestration function asks for memory."""

    size_bytes: int


class OpenScope(msgspec.Struct, frozen=True):
    """The orchestration function opens a scope."""


class CloseScope(msgspec.Struct, frozen=True):
    """The orchestration function closes a scope."""


class Think(msgspec.Struct, frozen=True):
    """The orchestration function computes for a while."""

    takes: Duration


Step = PlannedTask | Allocate | OpenScope | CloseScope | Think


class Death(msgspec.Struct, frozen=True):
    """A child is killed, `takes` after it has begun its word number `word` of this life."""

    child: int
    life: int
    word: int
    takes: Duration


class TreePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a simulated run.

    Attributes:
        seed: of the rest that is left to chance: latencies.
        spec: the graph's.
        replaceable: for each child whether it gets a successor.
        runs: the steps of each run.
        deaths: which children die when.
        abandoned_after: how many steps of the last run happen before it is abandoned, or None.
        latency: what a word takes at most.
    """

    seed: int
    spec: GraphSpec
    replaceable: tuple[bool, ...]
    runs: tuple[tuple[Step, ...], ...]
    deaths: tuple[Death, ...]
    abandoned_after: int | None
    latency: Duration


def random_plan(seed: int) -> TreePlan:
    """The plan of a seed: the same in every process and on every machine."""
    chance = stream(seed, "tree")
    pools = (ChildPool.NEXT_LEVEL,) * chance.choice((0, 1, 2, 3)) + (
        ChildPool.SUB,
    ) * chance.choice((1, 2, 3))
    ring_depth = chance.choice((3, 4, 8, 16, 64))
    spec = GraphSpec(
        pools=pools,
        ring_depth=ring_depth,
        heap_start=HEAP_START,
        heap_bytes=ALIGNMENT * chance.choice((2, 4, 64)),
        batch=chance.choice((1, 2, 8, 32)),
        depth=chance.choice((32, 64, 192)),
        hold=Duration(chance.choice((0, 50, 500)) * MICROSECOND),
    )
    runs = tuple(_random_run(chance, spec) for _ in range(chance.choice((1, 2, 3))))
    return TreePlan(
        seed=seed,
        spec=spec,
        replaceable=tuple(pool is ChildPool.SUB or happens(chance, 30) for pool in pools),
        runs=runs,
        deaths=_random_deaths(chance, len(pools)),
        abandoned_after=chance.randrange(len(runs[-1]) + 1) if happens(chance, 10) else None,
        latency=Duration(chance.choice((1, 10, 200)) * MICROSECOND),
    )


def _random_deaths(chance: Random, child_count: int) -> tuple[Death, ...]:
    if happens(chance, 50):
        return ()
    return tuple(
        Death(
            child=chance.randrange(child_count),
            life=chance.choice((0, 0, 1)),
            word=chance.randrange(12),
            takes=Duration(chance.choice((0, 1, 5, 20)) * MICROSECOND),
        )
        for _ in range(chance.choice((1, 1, 2, 4)))
    )


def _random_run(chance: Random, spec: GraphSpec) -> tuple[Step, ...]:
    failing = chance.choice((0, 0, 3, 10))
    is_narrow = happens(chance, 30)
    steps: list[Step] = []
    depth = 0
    for _ in range(chance.choice((1, 5, 20, 60))):
        match chance.choices(("task", "think", "alloc", "open", "close"), (80, 6, 6, 4, 4))[0]:
            case "task":
                steps.append(_random_task(chance, spec, failing, is_narrow=is_narrow))
            case "think":
                steps.append(Think(Duration(chance.choice((1, 30, 300)) * MICROSECOND)))
            case "alloc":
                steps.append(Allocate(ALIGNMENT * chance.choice((1, 1, 2))))
            case "open":
                depth += 1
                steps.append(OpenScope())
            case _ if depth:
                depth -= 1
                steps.append(CloseScope())
            case _:
                pass
    return (*steps, *[CloseScope()] * depth)


def _random_task(chance: Random, spec: GraphSpec, failing: int, *, is_narrow: bool) -> PlannedTask:
    pool = chance.choice(spec.pools)
    own = [index for index, other in enumerate(spec.pools) if other is pool]
    width = min(chance.choice((1, 1, 1, 1, 2, 3)), len(own), spec.ring_depth)
    children: list[int | None] = [None] * width
    if happens(chance, 20):
        children = list(chance.sample(own, width))
    return PlannedTask(
        pool=pool,
        children=tuple(children),
        accesses=tuple(
            _random_access(chance, is_narrow=is_narrow)
            for _ in range(chance.choice((0, 1, 1, 2, 3)))
        ),
        slabs=tuple(sorted({chance.randrange(3) for _ in range(chance.choice((0, 0, 1, 2)))})),
        takes=tuple(
            Duration(chance.choice((1, 1, 3, 10, 100)) * MICROSECOND) for _ in range(width)
        ),
        raises=happens(chance, failing),
    )


def _random_access(chance: Random, *, is_narrow: bool) -> Access:
    """Some cells in a row; narrow graphs have few cells, and so long chains."""
    cell_count = 2 if is_narrow else CELL_COUNT
    first = chance.randrange(cell_count)
    count = min(chance.choice((1, 1, 2, 5)), cell_count - first)
    reads, writes = chance.choice(((True, False), (False, True), (True, True)))
    space = chance.choice((HOST, HOST, HOST, 0))
    return Access(space, first * CELL_BYTES, (first + count) * CELL_BYTES, reads, writes)


Cell = tuple[int, int]
"""The space and the address of a cell."""


def cells_of(access: Access) -> Iterable[Cell]:
    """The cells that an access touches."""
    return ((access.space, address) for address in range(access.start, access.end, CELL_BYTES))


class Cells:
    """All cells; what was never written is 0."""

    def __init__(self) -> None:
        self.values: dict[Cell, int] = {}

    def read(self, accesses: Sequence[Access]) -> list[int]:
        """What a task that begins sees."""
        return [
            self.values.get(cell, 0)
            for access in accesses
            if access.reads
            for cell in cells_of(access)
        ]

    def write(self, accesses: Sequence[Access], number: int, seen: list[int]) -> None:
        """What a task that ends leaves."""
        value = derived_seed(number, *seen)
        for access in accesses:
            if access.writes:
                for cell in cells_of(access):
                    self.values[cell] = value


UNFORESEEABLE = (EndCause.DIED, EndCause.LOST, EndCause.CANCELLED)


class SubmittedTask:
    """A task as it was submitted, with what has happened to it.

    Its accesses to slabs name the allocation as their space, since the same bytes may be given out
    several times.
    """

    __slots__ = ("accesses", "begun", "ended", "is_broken", "number", "raises", "seen", "width")

    def __init__(
        self, number: int, accesses: tuple[Access, ...], width: int, *, raises: bool
    ) -> None:
        self.number = number
        self.accesses = accesses
        self.width = width
        self.raises = raises
        self.begun = 0
        self.ended = 0
        self.seen: list[int] = []
        self.is_broken = False
        """Whether a member could not meet the others, because one of them died."""


def judge(tasks: Sequence[SubmittedTask], cells: Cells, drained: Drained) -> dict[Cell, int]:
    """Compare a run with the reference.

    Returns:
        The cells whose value is certain, with their values.

    Raises:
        InvariantBroken: a task ran twice, or not although it should, or saw wrong values.
    """
    if drained.task_count != len(tasks):
        raise InvariantBroken(f"{drained.task_count} tasks are told of {len(tasks)}")
    causes = {unfinished.number: unfinished.cause for unfinished in drained.unfinished}
    if len(causes) != len(drained.unfinished):
        raise InvariantBroken("a task is told twice")
    reference, tainted = _run_in_order(tasks, causes)
    for task in tasks:
        _judge_count(task, causes.get(task.number))
    for cell, value in reference.values.items():
        if cell not in tainted and cells.values.get(cell, 0) != value:
            raise InvariantBroken(f"cell {cell} has another value than it should")
    return {cell: value for cell, value in cells.values.items() if cell not in tainted}


def _run_in_order(
    tasks: Sequence[SubmittedTask], causes: Mapping[int, EndCause]
) -> tuple[Cells, set[Cell]]:
    cells, tainted = Cells(), set[Cell]()
    for task in tasks:
        told = causes.get(task.number)
        reads = [cell for a in task.accesses if a.reads for cell in cells_of(a)]
        writes = [cell for a in task.accesses if a.writes for cell in cells_of(a)]
        expected: EndCause | None = None
        if told in UNFORESEEABLE or (task.is_broken and told is EndCause.RAISED):
            expected = told
        elif any(cell in tainted for cell in reads):
            expected = EndCause.SKIPPED
        elif task.raises:
            expected = EndCause.RAISED
        if told is not expected:
            raise InvariantBroken(f"task {task.number} is told {told}, expected {expected}")
        if expected is not None:
            tainted.update(writes)
            continue
        seen = cells.read(task.accesses)
        if seen != task.seen:
            raise InvariantBroken(f"task {task.number} saw what it should not have seen")
        cells.write(task.accesses, task.number, seen)
        tainted.difference_update(writes)
    return cells, tainted


def _judge_count(task: SubmittedTask, cause: EndCause | None) -> None:
    match cause:
        case None:
            is_right = task.begun == task.ended == task.width
        case EndCause.SKIPPED:
            is_right = task.begun == 0
        case EndCause.RAISED:
            is_right = task.begun == task.width or task.is_broken
        case _:
            is_right = task.begun <= task.width
    if not is_right:
        raise InvariantBroken(
            f"task {task.number} began {task.begun} and ended {task.ended} of {task.width} times, "
            f"and is told {cause or 'completed'}"
        )


DEFERRED_MAX = 4
MEETING_TAKES = Duration(1000)


class Work:
    """What a slot stands for: one member of a task."""

    def __init__(self, task: SubmittedTask, planned: PlannedTask, member: int) -> None:
        self.task = task
        self.planned = planned
        self.member = member
        self.meeting: Meeting | None = None


class Meeting:
    """Members of a group wait for each other in the middle, which proves that they overlap."""

    def __init__(self, width: int) -> None:
        self.missing = width
        self.waiting: list[Callable[[bool], None]] = []
        self.is_broken = False

    def come(self, go_on: Callable[[bool], None]) -> None:
        """Wait for all others; `go_on` is told whether all are there."""
        self.missing -= 1
        self.waiting.append(go_on)
        if self.missing == 0 or self.is_broken:
            self._let_all_go(whole=not self.is_broken)

    def break_up(self) -> None:
        """A member has died: no other member may wait for it."""
        self.is_broken = True
        self._let_all_go(whole=False)

    def _let_all_go(self, *, whole: bool) -> None:
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on(whole)


@dataclass(frozen=True)
class Surroundings:
    """What all children share.

    Attributes:
        plan: their faults.
        agenda: what happens next.
        cells: the memory.
        work: what each slot stands for.
        post: takes the words that children write.
        post_death: takes the news that one has died, with what it had counted.
    """

    plan: TreePlan
    agenda: Agenda
    cells: Cells
    work: dict[int, Work]
    post: Callable[[int], None]
    post_death: Callable[[ChildDied], None]


class SimulatedChild:
    """One child, over several lives."""

    def __init__(self, index: int, chance: Random, surroundings: Surroundings) -> None:
        self.index = index
        self._chance = chance
        self._plan = surroundings.plan
        self._agenda = surroundings.agenda
        self._cells = surroundings.cells
        self._work = surroundings.work
        self._post = surroundings.post
        self._post_death = surroundings.post_death
        self.life = 0
        self.is_alive = True
        self._begin_life()

    def _begin_life(self) -> None:
        self.pipe: deque[tuple[int, bool, int]] = deque()
        self.begun = self.done = self.epoch = 0
        self._deferred: list[int] = []
        self._present: Work | None = None
        self._is_woken = False

    @property
    def present(self) -> SubmittedTask | None:
        """The task that it is running."""
        return None if self._present is None else self._present.task

    def rise(self) -> None:
        """Begin the next life."""
        self.life += 1
        self.is_alive = True
        self._begin_life()

    def take_in(self, order: Dispatch) -> None:
        """Words come into the pipe."""
        if not self.is_alive:
            self._break_up_meetings(order.slots)
        self.pipe.extend(
            (slot, ahead, order.epoch) for slot, ahead in zip(order.slots, order.ahead, strict=True)
        )
        self._wake()

    def give_back(self) -> list[int]:
        """What has not been taken yet leaves the pipe."""
        slots = [slot for slot, _, _ in self.pipe]
        self.pipe.clear()
        self._later(self._flush)
        return slots

    def _wake(self) -> None:
        if self.is_alive and self._present is None and not self._is_woken:
            self._is_woken = True
            self._later(self._take_next)

    def _later(self, action: Callable[[], None], takes: Duration | None = None) -> None:
        """Let something happen in this life, if it lasts."""
        if takes is None:
            takes = Duration(self._chance.randrange(1, self._plan.latency + 1))
        self._agenda.after(takes, partial(self._if_alive, self.life, action))

    def _if_alive(self, life: int, action: Callable[[], None]) -> None:
        if self.is_alive and self.life == life:
            action()

    def _take_next(self) -> None:
        self._is_woken = False
        if self._present is not None:
            return
        if not self.pipe:
            self._flush()
            return
        slot, ahead, epoch = self.pipe.popleft()
        word = self.begun
        if ahead and epoch != self.epoch % 256:
            # Told before it is counted: a reader of the count must find the word too.
            self._flush()
            self._post(slot | RETURNED_BIT)
            self.epoch += 1
            self.begun += 1
            self.done += 1
        else:
            self.begun += 1
            self._begin(slot)
        death = self._death_at(word)
        if death is not None:
            self._later(self.die, death.takes)
        self._wake()

    def _death_at(self, word: int) -> Death | None:
        for death in self._plan.deaths:
            if (death.child, death.life, death.word) == (self.index, self.life, word):
                return death
        return None

    def _begin(self, slot: int) -> None:
        work = self._present = self._work[slot]
        work.task.begun += 1
        if work.task.begun == 1:
            work.task.seen = self._cells.read(work.task.accesses)
        end = partial(self._end, slot, work)
        if work.meeting is None:
            self._later(partial(end, whole=True), work.planned.takes[work.member])
        else:
            work.meeting.come(lambda whole: self._later(partial(end, whole=whole), MEETING_TAKES))

    def _end(self, slot: int, work: Work, *, whole: bool) -> None:
        self._present = None
        work.task.is_broken |= not whole
        if work.planned.raises or not whole:
            self._flush()
            self._post(slot | FAILED_BIT)
            self.epoch += 1
        else:
            work.task.ended += 1
            if work.task.ended == work.task.width:
                self._cells.write(work.task.accesses, work.task.number, work.task.seen)
            self._deferred.append(slot)
        self.done += 1
        if len(self._deferred) >= DEFERRED_MAX or not self.pipe or self._chance.randrange(2):
            self._flush()
        self._wake()

    def _flush(self) -> None:
        for slot in self._deferred:
            self._post(slot)
        self._deferred.clear()

    def die(self) -> None:
        """Be killed; what was deferred is never told, but counted."""
        if not self.is_alive:
            return
        self.is_alive = False
        if self._present is not None and self._present.meeting is not None:
            self._present.meeting.break_up()
        self._break_up_meetings([slot for slot, _, _ in self.pipe])
        successor = self._plan.replaceable[self.index]
        self._post_death(ChildDied(self.index, self.begun, self.done, successor))

    def _break_up_meetings(self, slots: list[int]) -> None:
        for slot in slots:
            meeting = self._work[slot].meeting
            if meeting is not None:
                meeting.break_up()


FIRST_ALLOCATION = 1000


def _access(space: int, address: int) -> Access:
    return Access(space, address, address + 2 * CELL_BYTES, reads=True, writes=True)


class TreeWorld:
    """One simulated worker with its children; `run` is called once.

    Attributes:
        journal: every stimulus and effect, also when the run broke off.
        heard: every stimulus.
        outcomes: what became of each run.
        refusals: how often memory was refused.
    """

    def __init__(
        self, plan: TreePlan, make_graph: Callable[[GraphSpec], TaskGraph] = TaskGraph
    ) -> None:
        self._plan = plan
        self._clock = VirtualClock()
        self._agenda = Agenda(self._clock)
        self._chance = stream(plan.seed, "caller")
        self._graph = make_graph(plan.spec)
        self.journal = MemoryJournal()
        self._door: Door[Stimulus, Effect] = Door("graph", self._graph, self.journal)
        self._cells = Cells()
        self._work: dict[int, Work] = {}
        self._pipe: deque[int | Stimulus] = deque()
        surroundings = Surroundings(
            plan, self._agenda, self._cells, self._work, self._pipe.append, self._child_died
        )
        self._children = [
            SimulatedChild(index, stream(plan.seed, "child", index), surroundings)
            for index in range(len(plan.spec.pools))
        ]
        self._tasks: list[SubmittedTask] = []
        self._slabs: list[AllocationGranted] = []
        """What the caller may use, the latest last."""
        self._living: dict[int, AllocationGranted] = {}
        """What has been granted and not been discarded, by address."""
        self._spaces: dict[int, int] = {}
        """For each address the space by which the reference knows what was granted there last."""
        self._grant_count = 0
        self._answers: list[AllocationGranted | AllocationRefused] = []
        self.heard: list[Stimulus] = []
        self.outcomes: list[Drained] = []
        self.refusals = 0

    def run(self) -> None:
        """Live through all runs of the plan.

        Raises:
            InvariantBroken: the graph did what no graph may do.
            Deadlock: nothing is left to happen, but somebody waits.
        """
        for number, steps in enumerate(self._plan.runs):
            is_last = number == len(self._plan.runs) - 1
            self._run_once(steps, self._plan.abandoned_after if is_last else None)
        while self._agenda.next_instant is not None:
            self._agenda.run_next()
            self._on_messages()
        if len(self.outcomes) != len(self._plan.runs):
            raise InvariantBroken("a run ended twice")

    def _run_once(self, steps: tuple[Step, ...], abandoned_after: int | None) -> None:
        self._tasks, self._slabs = [], []
        run_count = len(self.outcomes)
        self._cells.values.clear()
        self._tell(ScopeOpened())
        depth = 1
        for place, step in enumerate(steps):
            if place == abandoned_after:
                break
            match step:
                case PlannedTask():
                    self._submit(step)
                case Allocate():
                    self._allocate(step.size_bytes)
                case OpenScope():
                    depth += 1
                    self._tell(ScopeOpened())
                case CloseScope():
                    depth -= 1
                    self._close_scope()
                case Think():
                    self._think_until(Instant(self._clock.now() + step.takes))
        for _ in range(depth):
            self._close_scope()
        self._tell(DrainBegan() if abandoned_after is None else RunAbandoned())
        self._wait_for(lambda: len(self.outcomes) > run_count)
        judge(self._tasks, self._cells, self.outcomes[-1])

    def _submit(self, planned: PlannedTask) -> None:
        width = len(planned.children)
        self._wait_for(lambda: bool(self._graph.next_slots(width)))
        slots = self._graph.next_slots(width)
        slabs = [self._slabs[-1 - back] for back in planned.slabs if back < len(self._slabs)]
        accesses = planned.accesses + tuple(_access(HOST, slab.address) for slab in slabs)
        known_as = planned.accesses + tuple(
            _access(self._spaces[slab.address], slab.address) for slab in slabs
        )
        task = SubmittedTask(len(self._tasks), known_as, width, raises=planned.raises)
        self._tasks.append(task)
        meeting = Meeting(width) if width > 1 else None
        for member, slot in enumerate(slots):
            self._work[slot] = Work(task, planned, member)
            self._work[slot].meeting = meeting
        name = f"task {task.number}"
        if width == 1:
            self._tell(TaskSubmitted(planned.pool, name, accesses, planned.children[0]))
        else:
            self._tell(GroupSubmitted(planned.pool, planned.children, name, accesses))
        if self._chance.randrange(4) == 0:
            self._on_messages()

    def _allocate(self, size_bytes: int) -> None:
        self._answers.clear()
        self._tell(AllocationRequested(size_bytes))
        self._wait_for(lambda: bool(self._answers))
        granted = self._answers[0]
        if isinstance(granted, AllocationRefused):
            self.refusals += 1
            return
        end = granted.address + granted.size_bytes
        for other in self._living.values():
            if granted.address < other.address + other.size_bytes and other.address < end:
                raise InvariantBroken(f"{granted} was given out while {other} was in use")
        self._living[granted.address] = granted
        self._spaces[granted.address] = FIRST_ALLOCATION + self._grant_count
        self._grant_count += 1
        self._slabs.append(granted)

    def _close_scope(self) -> None:
        self._tell(ScopeClosed())
        # What lay in it may be given out again, so nothing touches it any more.
        self._slabs = []

    def _think_until(self, instant: Instant) -> None:
        while (happens := self._agenda.next_instant) is not None and happens <= instant:
            self._agenda.run_next()
        self._clock.advance_to(instant)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._on_messages()
        while not condition():
            deadline, happening = self._graph.next_deadline, self._agenda.next_instant
            if happening is not None and (deadline is None or happening <= deadline):
                self._agenda.run_next()
            elif deadline is not None:
                self._clock.advance_to(max(deadline, self._clock.now()))
                self._carry_out(self._door.wake(self._clock.now()))
            else:
                left = self._graph.unfinished_count
                raise Deadlock(f"nothing is left to happen, but {left} tasks have not ended")
            if self._chance.randrange(3) or self._agenda.next_instant is None:
                self._on_messages()

    def _on_messages(self) -> None:
        """Read the pipe empty: runs of ends in one batch, everything else by itself."""
        ends: list[int] = []
        while self._pipe:
            item = self._pipe.popleft()
            if isinstance(item, int):
                ends.append(item)
                continue
            if ends:
                self._tell(ChildrenReported(ends))
                ends = []
            self._tell(item)
            if isinstance(item, ChildDied) and item.successor:
                # Not before the death is known here: the successor must not find its words.
                self._agenda.after(self._plan.latency, partial(self._rise, item.child))
        if ends:
            self._tell(ChildrenReported(ends))

    def _tell(self, stimulus: Stimulus) -> None:
        self.heard.append(stimulus)
        self._carry_out(self._door.tell(stimulus, self._clock.now()))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Dispatch():
                    self._children[effect.child].take_in(effect)
                case Recall():
                    slots = self._children[effect.child].give_back()
                    self._tell(SlotsRecalled(effect.child, slots))
                case AllocationGranted() | AllocationRefused():
                    self._answers.append(effect)
                case Drained():
                    self.outcomes.append(effect)
                case Discard():
                    self._discard(effect)

    def _discard(self, discard: Discard) -> None:
        """No task may be using what is discarded."""
        del self._living[discard.address]
        space = self._spaces[discard.address]
        for child in self._children:
            task = child.present if child.is_alive else None
            if task is not None and any(access.space == space for access in task.accesses):
                raise InvariantBroken(f"{discard} came while task {task.number} used it")

    def _child_died(self, death: ChildDied) -> None:
        self._agenda.after(self._plan.latency, partial(self._pipe.append, death))

    def _rise(self, child: int) -> None:
        self._children[child].rise()
        self._pipe.append(ChildJoined(child))


def command_for(seed: int) -> str:
    """The one command that shows again what a seed has shown."""
    return f"python tests/simulation/task_graph_worlds.py --seed {seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python tests/simulation/task_graph_worlds.py",
        description="Replay the simulated task graph of a seed, with all its faults.",
    )
    parser.add_argument("--seed", type=int, required=True, help="the plan's seed")
    plan = random_plan(parser.parse_args(arguments).seed)
    world = TreeWorld(plan)
    try:
        world.run()
    except SimulationError as error:
        verdict = f"{type(error).__name__}: {error}"
    else:
        verdict = ""
    sys.stdout.write(f"{plan.spec}\n{plan.deaths}\n{world.journal.lines().decode()}")
    sys.stdout.write(f"{verdict or 'every invariant held'}\n")
    return 1 if verdict else 0


if __name__ == "__main__":
    sys.exit(main())
