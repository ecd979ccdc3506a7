"""A world in which the real task graph has simulated children and a caller in virtual time."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rankwise.base.errors import Deadlock
from rankwise.base.units import Instant
from rankwise.core.tree.machine import TaskGraph
from rankwise.core.tree.vocabulary import (
    HOST,
    Access,
    AllocationRequested,
    ChildDied,
    ChildJoined,
    ChildrenReported,
    Discard,
    Dispatch,
    DrainBegan,
    Drained,
    Effect,
    Granted,
    GraphSpec,
    GroupSubmitted,
    Recall,
    Recalled,
    Refused,
    RunAbandoned,
    ScopeClosed,
    ScopeOpened,
    Stimulus,
    TaskSubmitted,
)
from rankwise.drivers.feed import Door
from rankwise.drivers.sim.agenda import Agenda, VirtualClock
from rankwise.drivers.sim.invariants import InvariantBroken
from rankwise.drivers.sim.journal import MemoryJournal
from rankwise.drivers.sim.streams import stream
from rankwise.drivers.sim.tree.children import Meeting, SimulatedChild, Surroundings, Work
from rankwise.drivers.sim.tree.memory import Cells
from rankwise.drivers.sim.tree.plans import (
    CELL_BYTES,
    Allocate,
    CloseScope,
    OpenScope,
    PlannedTask,
    Step,
    Think,
    TreePlan,
)
from rankwise.drivers.sim.tree.reference import SubmittedTask, judge

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
        self._slabs: list[Granted] = []
        """What the caller may use, the latest last."""
        self._living: dict[int, Granted] = {}
        """What has been granted and not been discarded, by address."""
        self._spaces: dict[int, int] = {}
        """For each address the space by which the reference knows what was granted there last."""
        self._grant_count = 0
        self._answers: list[Granted | Refused] = []
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
            self._hear_all()
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
            self._hear_all()

    def _allocate(self, size_bytes: int) -> None:
        self._answers.clear()
        self._tell(AllocationRequested(size_bytes))
        self._wait_for(lambda: bool(self._answers))
        granted = self._answers[0]
        if isinstance(granted, Refused):
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
        self._hear_all()
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
                self._hear_all()

    def _hear_all(self) -> None:
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
                    self._tell(Recalled(effect.child, slots))
                case Granted() | Refused():
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
