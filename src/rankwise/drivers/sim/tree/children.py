"""Simulated children: they take words in order, begin, end, raise, return, and are killed."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from rankwise.base.units import Duration
from rankwise.core.tree.vocabulary import FAILED_BIT, RETURNED_BIT, ChildDied, Dispatch
from rankwise.drivers.sim.agenda import Agenda
from rankwise.drivers.sim.tree.memory import Cells
from rankwise.drivers.sim.tree.plans import Death, PlannedTask, TreePlan
from rankwise.drivers.sim.tree.reference import SubmittedTask

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
