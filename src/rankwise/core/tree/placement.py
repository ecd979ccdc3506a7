"""Placement: at which child a task is queued once it waits for no other, and who waits for room.

A task that may go anywhere goes where there is room, or waits in the team's line; one that is bound
to a child waits for that one. The members of a group are queued all at once, in one order for all
children, so that two groups can never wait for each other. A task that has no child left that could
take it, or that is expected to, is lost.
"""

from collections import deque
from collections.abc import Callable

from rankwise.core.tree.queues import Queues, Team
from rankwise.core.tree.state import Child, GraphTask, TaskPhase
from rankwise.core.tree.vocabulary import EndCause


class TaskPlacement:
    """Finds children for tasks.

    Args:
        queues: where tasks go.
        depth: how many words may be queued at a child.
        end_unrun: ends a task that will never run.

    Attributes:
        is_abandoned: whether no task may begin any more.
    """

    def __init__(
        self, queues: Queues, depth: int, end_unrun: Callable[[GraphTask, EndCause], None]
    ) -> None:
        self._queues = queues
        self._depth = depth
        self._end_unrun = end_unrun
        self.is_abandoned = False

    def make_ready(self, task: GraphTask) -> None:
        """Find room for a task that waits for no other task."""
        if self.is_abandoned:
            self._end_unrun(task, EndCause.CANCELLED)
        elif task.tainted_by is not None:
            self._end_unrun(task, EndCause.SKIPPED)
        elif task.members is not None:
            self._place_group(task, task.members)
        elif task.pinned is not None:
            self._place_pinned(task, self._queues.children[task.pinned])
        else:
            self.place(task, self._queues.teams[task.pool])

    def place(self, task: GraphTask, team: Team) -> None:
        """Queue a task at any child of its team, or let it wait for one."""
        child = self._queues.choose(team)
        if child is not None:
            self._queues.append(child, task)
        elif team.has_hope:
            task.state = TaskPhase.READY
            team.ready.append(task)
        else:
            self._end_unrun(task, EndCause.LOST)

    def _place_pinned(self, task: GraphTask, child: Child) -> None:
        if child.is_alive and len(child.queue) < self._depth:
            self._queues.append(child, task)
        elif child.is_alive or child.is_awaited:
            task.state = TaskPhase.READY
            # Kept with the child, so that it does not block the team's queue for others.
            child.pinned_ready.append(task)
            self._queues.teams[child.pool].pinned_count += 1
        else:
            self._end_unrun(task, EndCause.LOST)

    def _place_group(self, group: GraphTask, members: list[GraphTask]) -> None:
        """Queue all members at once, so that two groups never wait for each other.

        Their words may exceed the depth: a group that waited for room would starve.
        """
        team = self._queues.teams[group.pool]
        pinned = [self._queues.children[m.pinned] for m in members if m.pinned is not None]
        others = sorted(
            (child for child in team.children if child.is_alive and child not in pinned),
            # Those with the shortest queues: all members wait for the slowest one.
            key=lambda child: len(child.queue),
        )
        if len(others) + len(pinned) < len(members) or not all(c.is_alive for c in pinned):
            if any(child.is_awaited for child in team.children):
                group.state = TaskPhase.READY
                team.ready.append(group)
            else:
                self._end_unrun(group, EndCause.LOST)
            return
        group.state = TaskPhase.RUNNING
        group.waiting_for = len(members)
        free = iter(others)
        for member in members:
            own = member.pinned
            self._queues.append(next(free) if own is None else self._queues.children[own], member)
        # None may be held back, or the others would wait for it in the middle.
        self._queues.send_all()

    def feed(self, team: Team) -> None:
        """Give waiting tasks to children that have room."""
        depth = self._depth
        for child in team.children if team.pinned_count else ():
            while child.pinned_ready and child.is_alive and len(child.queue) < depth:
                self._queues.append(child, child.pinned_ready.popleft())
                team.pinned_count -= 1
        for _ in range(len(team.ready)):
            task = team.ready.popleft()
            if task.members is not None:
                self._place_group(task, task.members)
                continue
            chosen = self._queues.choose(team)
            if chosen is None:
                # To the front: tasks begin in the order in which they were submitted.
                team.ready.appendleft(task)
                break
            self._queues.append(chosen, task)

    def give_up_waiting(self, child: Child) -> None:
        """End what only this child could have run, and everything when it was the last."""
        lost = list(child.pinned_ready)
        child.pinned_ready.clear()
        self._queues.teams[child.pool].pinned_count -= len(lost)
        team = self._queues.teams[child.pool]
        if not team.has_hope:
            # A group finds out by itself when it is placed.
            lost += [task for task in team.ready if task.members is None]
            team.ready = deque(task for task in team.ready if task.members is not None)
        for task in lost:
            self._end_unrun(task, EndCause.LOST)

    def abandon(self) -> None:
        """Let nothing begin any more: cancel who waits, and order back what is queued."""
        self.is_abandoned = True
        waiting: list[GraphTask] = []
        for team in self._queues.teams.values():
            waiting += team.ready
            team.ready.clear()
            team.pinned_count = 0
            for child in team.children:
                waiting += child.pinned_ready
                child.pinned_ready.clear()
                if child.is_alive and child.queue:
                    # A task that was sent and has not begun comes back, and is cancelled then.
                    self._queues.recall(child)
        for task in waiting:
            self._end_unrun(task, EndCause.CANCELLED)
