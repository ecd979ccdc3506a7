"""The task graph: in which order tasks may run, where they run, and what became of them.

Theory of operation
===================

A task is PENDING while it waits for producers, READY when only room is missing, RUNNING when it
is in a child's queue, and then COMPLETED, FAILED or SKIPPED. Which tasks it waits for follows from
the bytes that it touches (see `hazards`).

*Queues.* A child takes its words in order, one at a time, so a queue is a promise: what stands
behind something runs after it. Words are sent at once to a child that has nothing, and otherwise
in batches, for which they wait no longer than `hold`.

*Ahead.* A task whose unfinished producers are all in one child's queue goes there too, behind
them. If a producer fails, it must not run. So each child counts its *epoch*: words that
have raised and words that it has returned. A word that is sent ahead carries the epoch that
the graph knew of; the child returns it unless that is still the number. Returning counts too,
because what stands behind a returned word may depend on it. The counter has eight bits, and fewer
words than 256 can be in a queue, so no number is taken for an older one.

*Taint.* A producer that did not complete taints those that need its data; a tainted task is
skipped, but only when all its producers have ended, since others may rely on it for their place in
the order. Tasks that only wait for their turn are not tainted.

*Following.* When a task is queued, its consumers may have all their producers in that queue now,
and follow it; so a long chain flows through one child, as far ahead as a queue is deep.

*Balance.* While the caller waits and one child is idle, what another has not taken yet is
recalled and handed out again. The order is answered before anything else happens.

*Death.* A child counts what it has begun and done, where others can see it when it is dead. What
was done and not reported has completed (failures are reported before they are counted); what was
begun and not done is the task that it died in; the rest never ran, and goes elsewhere. Members of
a group are meant to run together, so a group does not survive the death of one of its children.

*Memory.* A slab of the heap is held by the scope in which it was made and by every unfinished
task that touches it (see `memory`).

Nothing here iterates over a set or asks a clock, so equal stimuli give equal effects.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.units import Instant, after
from rankwise.core.tree.admission import Ring, check_child, check_group, refuse_width
from rankwise.core.tree.hazards import Hazards
from rankwise.core.tree.heap import Heap
from rankwise.core.tree.held_memory import TaskMemory
from rankwise.core.tree.placement import TaskPlacement
from rankwise.core.tree.queues import Queues
from rankwise.core.tree.state import Child, GraphTask, TaskPhase, root_of
from rankwise.core.tree.vocabulary import (
    FAILED_BIT,
    Access,
    AllocationAbandoned,
    AllocationGranted,
    AllocationRequested,
    ChildDied,
    ChildJoined,
    ChildrenReported,
    DrainBegan,
    Drained,
    Effect,
    EndCause,
    GraphSpec,
    GroupSubmitted,
    RunAbandoned,
    ScopeClosed,
    ScopeOpened,
    SlotsRecalled,
    Stimulus,
    TaskSubmitted,
    Unfinished,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_PENDING, _READY, _RUNNING = TaskPhase.PENDING, TaskPhase.READY, TaskPhase.RUNNING
_COMPLETED, _FAILED, _SKIPPED = TaskPhase.COMPLETED, TaskPhase.FAILED, TaskPhase.SKIPPED
_SLOT_MASK = FAILED_BIT - 1
_NOBODY: tuple[Unfinished, ...] = ()
_NOTHING: "list[Effect]" = []
"""The effects of most facts; never changed."""


class TaskGraph:
    """The machine; one serves a worker for all its runs, one after the other."""

    def __init__(self, spec: GraphSpec) -> None:
        self.spec = spec
        self._effects: list[Effect] = []
        self._queues = Queues(spec, self._effects)
        self._teams = tuple(self._queues.teams.values())
        self._memory = TaskMemory(Heap(spec.heap_start, spec.heap_bytes), self._effects)
        self._hazards = Hazards()
        self._ring = Ring(spec.ring_depth)
        self._released: deque[GraphTask] = deque()
        """Tasks that wait for no other task, and for which room is to be found."""
        self._tainted: list[GraphTask] = []
        """Tasks that were tainted while they stood in a queue."""
        self._is_draining = False
        self._placement = TaskPlacement(self._queues, spec.depth, self._end_unrun)
        self._task_count = 0
        self._unfinished_count = 0
        self._not_completed: list[Unfinished] = []
        # A look-up, since a `match` tries its cases one by one, for each of many short tasks.
        self._handlers: dict[type, Callable[[Any, Instant], None]] = {
            TaskSubmitted: self._on_task,
            GroupSubmitted: self._on_group,
            ChildrenReported: self._on_report,
            SlotsRecalled: self._on_recalled,
            ChildDied: self._on_death,
            ChildJoined: self._on_join,
            ScopeOpened: lambda _, __: self._memory.open_scope(),
            ScopeClosed: lambda _, __: self._memory.close_scope(),
            AllocationRequested: self._on_allocation_requested,
            AllocationAbandoned: self._on_allocation_abandoned,
            DrainBegan: self._on_drain,
            RunAbandoned: self._on_abandoned,
        }

    # What a driver asks

    @property
    def next_deadline(self) -> Instant | None:
        """When words that are held back for others must be sent."""
        held_since = self._queues.held_since
        return None if held_since is None else after(held_since, self.spec.hold)

    @property
    def unfinished_count(self) -> int:
        """How many tasks of this run have not ended."""
        return self._unfinished_count

    @property
    def busy_children(self) -> list[int]:
        """Those in whose queues something is."""
        return [child.index for child in self._queues.children if child.queue]

    @property
    def next_slot(self) -> int:
        """The slot that the next task takes; -1 when the ring has no room at present."""
        free = self._ring.free  # asked for once per task, so without asking the ring
        return free[-1] if free else -1

    def next_slots(self, count: int = 1) -> list[int]:
        """The slots that the next submission of `count` members takes, one for each.

        Empty when the ring has no room at present: wait for reports, and ask again.
        """
        return self._ring.next_slots(count)

    def task_in(self, slot: int) -> tuple[int, str]:
        """Number and name of the task that has this slot."""
        task = self._ring.task_in(slot)
        return task.number, task.name

    def clock_of(self, slot: int) -> int:
        """The simulated instant at which all that this slot's task needs is there."""
        task = self._ring.task_in(slot)
        return task.clock if task.group is None else task.group.clock

    def child_of(self, slot: int) -> int:
        """The child in whose queue this slot is."""
        child = self._ring.task_in(slot).child
        if child is None:
            raise RemoteProtocolError(f"a child reported slot {slot}, which was in no queue")
        return child.index

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order.

        Raises:
            ConfigError: a task that no child could ever take was submitted. It was not taken in.
            LocalProtocolError: the driver broke the rules, or the caller did with scopes.
            RemoteProtocolError: a child reports what was not queued there.
        """
        self._handlers[type(stimulus)](stimulus, now)
        return self._orders() if self._effects else _NOTHING

    def tick(self, now: Instant) -> list[Effect]:
        """Send what has been held back for long enough."""
        deadline = self.next_deadline
        if deadline is not None and now >= deadline:
            self._queues.send_all()
        return self._orders()

    def _orders(self) -> list[Effect]:
        orders = self._effects[:]
        self._effects.clear()  # the parts hold this very list
        return orders

    # Submitting

    def _on_task(self, stimulus: TaskSubmitted, now: Instant) -> None:
        pool, pinned = stimulus.pool, stimulus.child
        if pinned is not None:
            check_child(pool, pinned, self._queues)
        elif not self._queues.teams[pool].children:
            refuse_width(pool, 1, self._queues)
        task = GraphTask(self._task_count, pool, stimulus.name, pinned)
        self._ring.enter(task)
        self._task_count += 1
        self._unfinished_count += 1
        producers = self._enter(task, stimulus.accesses) if stimulus.accesses else None
        if not producers:
            if pinned is None and task.tainted_by is None and not self._placement.is_abandoned:
                self._placement.place(task, self._queues.teams[pool])
            else:
                self._placement.make_ready(task)
            if self._released:
                self._settle()
        else:
            child = self._queues.common_child(task)
            if child is not None and not self._placement.is_abandoned:
                if not child.followers and len(child.queue) < self.spec.depth:
                    self._queues.append(child, task)
                else:
                    child.followers.append(task)
                    self._queues.has_followers = True
                    self._queues.follow(child)
        self._send(now)

    def _on_group(self, stimulus: GroupSubmitted, now: Instant) -> None:
        check_group(stimulus, self._queues, len(self._ring.free))
        group = GraphTask(self._task_count, stimulus.pool, stimulus.name, None)
        group.members = [
            GraphTask(self._task_count, stimulus.pool, stimulus.name, index)
            for index in stimulus.children
        ]
        for member in group.members:
            member.group = group
            self._ring.enter(member)
        self._task_count += 1
        self._unfinished_count += 1
        if not self._enter(group, stimulus.accesses):
            self._placement.make_ready(group)
            self._settle()
        self._send(now)

    def _enter(self, task: GraphTask, accesses: tuple[Access, ...]) -> dict[GraphTask, bool]:
        producers = self._hazards.enter(task, accesses)
        for producer, needs_data in producers.items():
            if producer.consumers is None:
                producer.consumers = []
            producer.consumers.append((task, needs_data))
        if producers:
            task.producers = tuple(producers)
            task.waiting_for = len(producers)
        if not self._memory.is_empty:
            task.slabs = self._memory.hold(accesses) or None
        return producers

    # From pending to a queue

    def _send(self, now: Instant) -> None:
        is_waited_for = self._is_draining or not self._ring.free
        if not is_waited_for and self._memory.wanted_bytes is None:
            self._queues.send_some(now)
            return
        self._queues.send_all()
        # One task alone leaves nothing to share.
        if self._unfinished_count > 1 and not self._placement.is_abandoned:
            for team in self._teams:
                if team.idle and not team.ready and len(team.children) > 1:
                    self._queues.balance(team)

    # From a queue to an end

    def _on_report(self, stimulus: ChildrenReported, now: Instant) -> None:
        if stimulus.clocks:
            self._set_clocks(stimulus.clocks)
        ring = self._ring
        for end in stimulus.ends:
            slot = end & _SLOT_MASK
            task = ring.task_in(slot)
            child = self._queues.take_first(task)
            if end < FAILED_BIT:
                if task.consumers is None and task.slabs is None and task.group is None:
                    # The result of `_end_run` for most tasks, in a third of the time.
                    task.state = _COMPLETED
                    task.producers = ()
                    ring.by_slot[slot] = None
                    ring.free.append(slot)
                    self._unfinished_count -= 1
                else:
                    self._end_run(task, None)
                continue
            child.epoch = (child.epoch + 1) % 256
            if end & FAILED_BIT:
                self._end_run(task, EndCause.RAISED)
                continue
            self._take_from_queue(task)
            # It will be queued again behind them, so they must not rely on its place.
            for other in self._queues.take_back_ahead(child):
                self._take_from_queue(other)
        self._settle()
        self._send(now)

    def _set_clocks(self, clocks: dict[int, int]) -> None:
        for slot, clock in clocks.items():
            task = self._ring.task_in(slot)
            task.clock = max(task.clock, clock)
            if task.group is not None:
                task.group.clock = max(task.group.clock, clock)

    def _take_from_queue(self, task: GraphTask) -> None:
        """Put a task that has left a queue without having run back among those that wait."""
        task.state = _PENDING
        task.child = None
        if task.waiting_for == 0:
            self._released.append(task)

    def _end_run(self, task: GraphTask, cause: EndCause | None) -> None:
        """End a task, or a member of a group, that was in a queue."""
        self._ring.leave(task)
        group = task.group
        if group is None:
            self._end(task, _COMPLETED if cause is None else _FAILED, cause)
            return
        task.state = _COMPLETED if cause is None else _FAILED
        if cause is not None and group.tainted_by is None:
            # The first member's failure is the group's, which ends when the last member has.
            group.tainted_by = group.number
            self._not_completed.append(_unfinished(group, cause, task.child))
        elif cause is EndCause.DIED:
            self._add_death(group, task.child)
        group.waiting_for -= 1
        if group.waiting_for == 0:
            self._end(group, _COMPLETED if group.tainted_by is None else _FAILED, None)

    def _add_death(self, group: GraphTask, child: Child | None) -> None:
        """Tell of a member's death after another one's failure, which may only follow from it."""
        assert child is not None, "it ended in the task"
        for place, told in enumerate(self._not_completed):
            if told.number == group.number:
                self._not_completed[place] = told._replace(deaths=(*told.deaths, child.index))

    def _end_unrun(self, task: GraphTask, cause: EndCause) -> None:
        """End a task that is in no queue."""
        task.child = None
        for member in task.members or [task]:
            self._ring.leave(member)
        self._end(task, _SKIPPED, cause)

    def _end(self, task: GraphTask, state: TaskPhase, cause: EndCause | None) -> None:
        self._unfinished_count -= 1
        task.state = state
        task.producers = ()
        if cause is not None:
            self._not_completed.append(_unfinished(task, cause, task.child))
        if task.slabs is not None:
            self._memory.let_go(task.slabs)
            task.slabs = None
        consumers, task.consumers = task.consumers, None
        for consumer, needs_data in consumers or ():
            if state is not _COMPLETED and needs_data and consumer.tainted_by is None:
                consumer.tainted_by = root_of(task)
                if consumer.state is _RUNNING:
                    self._tainted.append(consumer)
            consumer.clock = max(consumer.clock, task.clock)
            consumer.waiting_for -= 1
            if consumer.waiting_for == 0 and consumer.state is _PENDING:
                self._released.append(consumer)

    def _settle(self) -> None:
        """Let what has happened have its consequences, until there are no more."""
        while self._tainted or self._released:
            if self._tainted:
                # One that has been sent will be returned.
                task = self._tainted.pop()
                if self._queues.take_back_unsent(task):
                    self._take_from_queue(task)
            else:
                self._placement.make_ready(self._released.popleft())
        if self._unfinished_count:
            for team in self._teams:
                if team.ready or team.pinned_count:
                    self._placement.feed(team)
            if self._queues.has_followers and not self._placement.is_abandoned:
                self._queues.follow_on()
        if self._memory.wanted_bytes is not None:
            self._begin_history(self._memory.retry())
        if self._is_draining and not self._unfinished_count:
            self._finish()

    def _on_recalled(self, stimulus: SlotsRecalled, now: Instant) -> None:
        child = self._queues.children[stimulus.child]
        for task in self._queues.take_back(child, stimulus.slots):
            if task.group is None:
                self._take_from_queue(task)
            else:
                # Another member may have begun and wait for this one, even in an abandoned run.
                self._queues.append(child, task)
        self._settle()
        self._send(now)

    # Children that come and go

    def _on_death(self, stimulus: ChildDied, now: Instant) -> None:
        child = self._queues.children[stimulus.child]
        done = max(0, stimulus.done - child.ended)
        begun = max(done, stimulus.begun - child.ended)
        queue, sent_count = self._queues.empty(child)
        if begun > sent_count:
            raise RemoteProtocolError(f"child {child.index} began more than was queued there")
        child.is_alive = False
        child.is_awaited = stimulus.successor
        for place, task in enumerate(queue):
            if place < done:
                self._end_run(task, None)
            elif place < begun or task.group is not None:
                self._end_run(task, EndCause.DIED)
            else:
                self._take_from_queue(task)
        if not stimulus.successor:
            self._placement.give_up_waiting(child)
        self._settle()
        self._send(now)

    def _on_join(self, stimulus: ChildJoined, now: Instant) -> None:
        child = self._queues.children[stimulus.child]
        child.is_alive = True
        child.is_awaited = False
        self._queues.teams[child.pool].note_idle(child)
        self._settle()
        self._send(now)

    # Memory

    def _on_allocation_requested(self, stimulus: AllocationRequested, now: Instant) -> None:
        self._begin_history(self._memory.request(stimulus.size_bytes))
        self._send(now)

    def _begin_history(self, granted: AllocationGranted | None) -> None:
        """Forget the tasks that used these bytes before: they order no task that uses them now."""
        if granted is not None:
            self._hazards.forget(granted.address, granted.address + granted.size_bytes)

    def _on_allocation_abandoned(self, stimulus: AllocationAbandoned, now: Instant) -> None:
        del stimulus, now
        self._memory.wanted_bytes = None

    # The end of a run

    def _on_drain(self, stimulus: DrainBegan, now: Instant) -> None:
        del stimulus
        self._is_draining = True
        if self._released or not self._unfinished_count:
            self._settle()
        self._send(now)

    def _on_abandoned(self, stimulus: RunAbandoned, now: Instant) -> None:
        del stimulus, now
        self._is_draining = True
        self._placement.abandon()
        self._settle()

    def _finish(self) -> None:
        self._memory.free_all()
        unfinished = _NOBODY
        if self._not_completed:
            unfinished = tuple(sorted(self._not_completed, key=_by_number))
            self._not_completed = []
        self._effects.append(Drained(self._task_count, unfinished))
        self._hazards.forget_all()
        if self._queues.has_followers:
            self._queues.forget_followers()
        self._task_count = 0
        self._is_draining = self._placement.is_abandoned = False


def _unfinished(task: GraphTask, cause: EndCause, child: Child | None) -> Unfinished:
    because = task.tainted_by if cause is EndCause.SKIPPED else None
    where = None if child is None else child.index
    deaths = (where,) if where is not None and cause is EndCause.DIED else ()
    return Unfinished(task.number, task.name, cause, where, because, deaths)


def _by_number(unfinished: Unfinished) -> int:
    return unfinished.number
