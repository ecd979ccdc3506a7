"""The ring of slots: each unfinished task, or member of a group, has one."""

from rankwise.base.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    TreeValueError,
)
from rankwise.core.tree.state import Task


class Ring:
    """Who has which slot.

    Attributes:
        by_slot: the task in each slot, None in those that are free.
        free: unused slots; the last one is taken next.
    """

    def __init__(self, depth: int) -> None:
        self.by_slot: list[Task | None] = [None] * depth
        self.free = list(range(depth - 1, -1, -1))

    def next_slots(self, count: int) -> list[int]:
        """The slots that the next `count` tasks take; none when there is no room at present."""
        depth = len(self.by_slot)
        if count > depth:
            raise TreeValueError(
                f"a group has {count} members, more than the ring's {depth} slots",
                hint="make the group smaller, or the ring deeper: ring_depth=…",
            )
        return self.free[: -count - 1 : -1] if len(self.free) >= count else []

    def enter(self, task: Task) -> None:
        """Give a task the next slot."""
        if not self.free:
            raise LocalProtocolError("a task was submitted although the ring is full")
        task.slot = slot = self.free.pop()
        self.by_slot[slot] = task

    def leave(self, task: Task) -> None:
        """Take a task's slot back."""
        self.by_slot[task.slot] = None
        self.free.append(task.slot)

    def task_in(self, slot: int) -> Task:
        """The task that has a slot which a child has named."""
        task = self.by_slot[slot] if 0 <= slot < len(self.by_slot) else None
        if task is None:
            raise RemoteProtocolError(f"a child reported slot {slot}, which is free")
        return task
