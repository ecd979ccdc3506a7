"""What a task graph remembers of a task and of a child."""

from collections import deque
from enum import IntEnum

from rankwise.core.tree.vocabulary import ChildPool


class TaskPhase(IntEnum):
    """Where in its life a task is. All from `COMPLETED` on have ended."""

    PENDING = 0
    READY = 1
    RUNNING = 2
    """In a child's queue, or on its way there."""
    COMPLETED = 3
    FAILED = 4
    SKIPPED = 5


class GraphTask:
    """One task, or one member of a group, or a group as a whole (which is in no queue).

    Most tasks never need most attributes, so these have their first value in the class: making a
    task is a good part of what a small one costs.
    """

    slot = -1
    state = TaskPhase.PENDING
    clock = 0
    """When its producers ended, and then when it ended, on the chips' simulated clock."""
    waiting_for = 0
    """Producers, and for a group that runs members, that have not ended."""
    producers: "tuple[GraphTask, ...]" = ()
    """The tasks that it waits for, or has waited for; forgotten when it ends."""
    consumers: "list[tuple[GraphTask, bool]] | None" = None
    """The tasks that wait for this one, and whether for its data or only for its place."""
    child: "Child | None" = None
    group: "GraphTask | None" = None
    members: "list[GraphTask] | None" = None
    slabs: "list[Slab] | None" = None
    tainted_by: int | None = None

    def __init__(self, number: int, pool: ChildPool, name: str, pinned: int | None) -> None:
        self.number = number
        self.pool = pool
        self.name = name
        self.pinned = pinned

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<task {self.number}{name} {self.state.name}>"


class Child:
    """One child's queue, as far as the graph knows.

    `queue` begins with what the child may have begun; its last `len(unsent)` entries have not been
    ordered yet.
    """

    __slots__ = (
        "ended", "epoch", "followers", "index", "is_alive", "is_awaited", "is_listed_idle",
        "pinned_ready", "pool", "queue", "recalled_at", "sent_at", "unsent",
    )  # fmt: skip

    def __init__(self, index: int, pool: ChildPool) -> None:
        self.index = index
        self.pool = pool
        self.queue: deque[GraphTask] = deque()
        self.unsent: list[GraphTask] = []
        self.pinned_ready: deque[GraphTask] = deque()
        self.followers: deque[GraphTask] = deque()
        """Tasks that may be queued ahead here when there is room; some may have gone elsewhere."""
        self.epoch = 0
        self.ended = 0
        """How many queued slots have been reported in this child's life."""
        self.is_alive = True
        self.is_awaited = False
        """Whether a successor is on its way."""
        self.sent_at = -(1 << 62)
        """When it was last sent something because it had nothing to do."""
        self.is_listed_idle = False
        self.recalled_at = -1
        """What `ended` was at the last recall: another one before it moves would bring nothing."""


class Slab:
    """Bytes of the heap, held by a scope and by unfinished tasks."""

    __slots__ = ("address", "holders", "scope_depth", "size_bytes")

    def __init__(self, address: int, size_bytes: int, scope_depth: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.scope_depth = scope_depth
        """The depth of the scope that holds it, 0 when that was closed."""
        self.holders = 0


def root_of(task: GraphTask) -> int:
    """The number of the first task that tainted this one, or its own."""
    return task.number if task.tainted_by is None else task.tainted_by
