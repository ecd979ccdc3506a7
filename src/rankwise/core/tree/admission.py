"""What may be submitted: what some children could take some day, while the ring has room for it."""

from rankwise.base.errors import LocalProtocolError, RemoteProtocolError, TreeValueError
from rankwise.core.tree.queues import Queues
from rankwise.core.tree.state import GraphTask
from rankwise.core.tree.vocabulary import ChildPool, GroupSubmitted

_POOL_NAMES = {ChildPool.NEXT_LEVEL: "next-level worker", ChildPool.SUB: "sub worker"}


def check_group(stimulus: GroupSubmitted, queues: Queues, room: int) -> None:
    """Refuse a group that can never run, or for which the ring has no room.

    Raises:
        ConfigError: it is empty or too wide, or names children that are not there or not distinct.
        LocalProtocolError: the driver has not waited for room.
    """
    width = len(stimulus.children)
    if width == 0:
        raise TreeValueError("a group has no members", hint="give one TaskArgs per member")
    if width > len(queues.teams[stimulus.pool].children):
        refuse_width(stimulus.pool, width, queues)
    pinned = [index for index in stimulus.children if index is not None]
    for index in pinned:
        check_child(stimulus.pool, index, queues)
    if len(set(pinned)) != len(pinned):
        raise TreeValueError(
            f"two members of a group are for the same child: {pinned}",
            hint="members run at the same time, so each needs a child of its own",
        )
    if room < width:
        raise LocalProtocolError("a group was submitted although the ring has no room for it")


def check_child(pool: ChildPool, index: int, queues: Queues) -> None:
    """Refuse a child that is not there, or of another kind."""
    children = queues.children
    if not 0 <= index < len(children) or children[index].pool is not pool:
        raise TreeValueError(f"child {index} is not a {_POOL_NAMES[pool]}")


def refuse_width(pool: ChildPool, width: int, queues: Queues) -> None:
    """Say that there are not so many children."""
    count = len(queues.teams[pool].children)
    what = f"a group of {width} members" if width > 1 else "a task"
    raise TreeValueError(
        f"{what} for {_POOL_NAMES[pool]}s can never run: this worker has {count} of them",
        hint="start more of them, or submit fewer at a time",
    )


class Ring:
    """The ring of slots: each unfinished task, or member of a group, has one.

    Attributes:
        by_slot: the task in each slot, None in those that are free.
        free: unused slots; the last one is taken next.
    """

    def __init__(self, depth: int) -> None:
        self.by_slot: list[GraphTask | None] = [None] * depth
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

    def enter(self, task: GraphTask) -> None:
        """Give a task the next slot."""
        if not self.free:
            raise LocalProtocolError("a task was submitted although the ring is full")
        task.slot = slot = self.free.pop()
        self.by_slot[slot] = task

    def leave(self, task: GraphTask) -> None:
        """Take a task's slot back."""
        self.by_slot[task.slot] = None
        self.free.append(task.slot)

    def task_in(self, slot: int) -> GraphTask:
        """The task that has a slot which a child has named."""
        task = self.by_slot[slot] if 0 <= slot < len(self.by_slot) else None
        if task is None:
            raise RemoteProtocolError(f"a child reported slot {slot}, which is free")
        return task
