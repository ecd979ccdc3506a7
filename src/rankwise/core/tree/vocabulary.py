"""The facts that a task graph is told, and its orders.

Facts and orders come in batches, since a machine that is asked once per task would cost more than
the tasks. `child` is an index into the children that the graph was made with; `slot` is the place
of one unfinished task, or of one member of a group, in the ring.
"""

from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec

from rankwise.base.errors import TreeValueError
from rankwise.base.units import MICROSECOND, Duration


class ChildPool(IntEnum):
    """Which children may take a task."""

    NEXT_LEVEL = 0
    SUB = 1


HOST = -1
"""The memory that all processes of the tree share; other spaces are the children's own."""


class Access(msgspec.Struct, frozen=True):
    """Bytes that a task touches.

    Attributes:
        space: whose memory: `HOST`, or the child whose own memory it is.
        start: address of the first byte.
        end: address after the last byte.
        reads: whether the task needs what is there.
        writes: whether the task changes what is there.
    """

    space: int
    start: int
    end: int
    reads: bool
    writes: bool


class EndCause(StrEnum):
    """Why a task did not complete.

    It is of a task, not of a process: why a process failed, a `FailureCause` tells.
    """

    RAISED = "raised"
    DIED = "died"
    """The child ended in it."""
    LOST = "lost"
    """No child is left that could take it."""
    SKIPPED = "skipped"
    """A task that it needs did not complete."""
    CANCELLED = "cancelled"
    """The run was abandoned before it began."""


class Unfinished(NamedTuple):
    """A task that did not complete.

    Attributes:
        number: its place in the order of submission, from 0.
        name: what the submitter called it.
        cause: why.
        child: where it was, None when it never was anywhere.
        because: for a skipped task, the number of the first task that tainted it.
        deaths: the children that ended in it; of a group also after another member had failed.
    """

    number: int
    name: str
    cause: EndCause
    child: int | None = None
    because: int | None = None
    deaths: tuple[int, ...] = ()


# Stimuli


class GraphSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a graph.

    Attributes:
        pools: for each child the pool it belongs to.
        ring_depth: how many tasks (members of groups count each) may be unfinished at a time.
        heap_start: address of the heap, aligned to `heap.ALIGNMENT`.
        heap_bytes: its size.
        batch: how many words a child that has work is sent at a time.
        depth: how many words may be queued at a child; below 256, see `machine`.
        hold: how long a word may wait for others to be sent with.
        favourite: the child of its pool that is chosen first when it is idle; by default the one
            that became idle last.
    """

    pools: tuple[ChildPool, ...]
    ring_depth: int = 4096
    heap_start: int = 0
    heap_bytes: int = 0
    batch: int = 64
    depth: int = 192
    hold: Duration = Duration(200 * MICROSECOND)
    favourite: int | None = None

    def __post_init__(self) -> None:
        if self.ring_depth < 1:
            raise TreeValueError(f"ring_depth is {self.ring_depth}, expected at least 1")
        assert 1 <= self.batch <= self.depth < 256, "the counter of a word has eight bits"


class TaskSubmitted(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A task was handed in; it takes the slot that `next_slots` has named.

    Attributes:
        pool: the children that may take it.
        name: what to call it in reports.
        accesses: the bytes it touches.
        child: the one child that may take it, None for any of the pool.
    """

    pool: ChildPool
    name: str = ""
    accesses: tuple[Access, ...] = ()
    child: int | None = None


class GroupSubmitted(msgspec.Struct, frozen=True, tag=True):
    """A task of several members was handed in: each runs at another child, all at the same time.

    Attributes:
        pool: the children that may take members.
        children: for each member the child that must take it, or None.
        name: what to call it in reports.
        accesses: the bytes that any of them touches.
    """

    pool: ChildPool
    children: tuple[int | None, ...]
    name: str = ""
    accesses: tuple[Access, ...] = ()


FAILED_BIT, RETURNED_BIT = 1 << 24, 1 << 25


class ChildrenReported(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Children have told what became of what was queued at them, in this order.

    Attributes:
        ends: slots that have run well; with `FAILED_BIT` those that have raised; with
            `RETURNED_BIT` those that were queued ahead, and not begun because something before
            them had failed.
        clocks: for slots whose tasks ran in simulated time, when they ended.
    """

    ends: list[int]
    clocks: dict[int, int] = {}


class SlotsRecalled(msgspec.Struct, frozen=True, tag="Recalled"):
    """The orders that a child had not read yet were taken back from its queue."""

    child: int
    slots: list[int]


class ChildDied(msgspec.Struct, frozen=True, tag=True):
    """A child has ended.

    Attributes:
        child: which.
        begun: how many queued slots it had begun in its life.
        done: how many of those it had completed, raised or returned.
        successor: whether another process will take its place.
    """

    child: int
    begun: int
    done: int
    successor: bool


class ChildJoined(msgspec.Struct, frozen=True, tag=True):
    """The successor of a dead child is ready."""

    child: int


class ScopeOpened(msgspec.Struct, frozen=True, tag=True):
    """Begin a scope: allocations from now on live until it is closed.

    Around all of them is the run's own scope, which ends with the run.
    """


class ScopeClosed(msgspec.Struct, frozen=True, tag=True):
    """The innermost scope has let go of its memory."""


class AllocationRequested(msgspec.Struct, frozen=True, tag=True):
    """A request for bytes of the heap, which blocks its caller until it has them or is refused."""

    size_bytes: int


class AllocationAbandoned(msgspec.Struct, frozen=True, tag=True):
    """The request for bytes of the heap is withdrawn."""


class DrainBegan(msgspec.Struct, frozen=True, tag=True):
    """Nothing more will be submitted in this run."""


class RunAbandoned(msgspec.Struct, frozen=True, tag=True):
    """Tasks that have not begun must not begin any more."""


Stimulus = (
    TaskSubmitted
    | GroupSubmitted
    | ChildrenReported
    | SlotsRecalled
    | ChildDied
    | ChildJoined
    | ScopeOpened
    | ScopeClosed
    | AllocationRequested
    | AllocationAbandoned
    | DrainBegan
    | RunAbandoned
)


# Effects


class Dispatch(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Append to a child's queue.

    Attributes:
        child: whose.
        slots: what, in this order.
        ahead: for each slot, whether the child must return it if its counter is not `epoch`.
        epoch: how many failures and returns of this child are known here, modulo 256.
    """

    child: int
    slots: list[int]
    ahead: list[bool]
    epoch: int


class Recall(msgspec.Struct, frozen=True, tag=True):
    """Take back what a child has not taken, and tell with `SlotsRecalled`, before anything else.

    Comes after all other orders to this child.
    """

    child: int


class AllocationGranted(msgspec.Struct, frozen=True, tag=True):
    """The allocation that was asked for: `size_bytes` from `address` on."""

    address: int
    size_bytes: int


class AllocationRefused(msgspec.Struct, frozen=True, tag=True):
    """The allocation that was asked for can never be had; `reason` says who holds the memory."""

    reason: str


class Discard(msgspec.Struct, frozen=True, tag=True):
    """These bytes of the heap are not needed any more."""

    address: int
    size_bytes: int


class Drained(msgspec.Struct, frozen=True, tag=True):
    """The run is over: every task has ended.

    Attributes:
        task_count: how many tasks there were.
        unfinished: those that did not complete, in the order of submission.
    """

    task_count: int
    unfinished: tuple[Unfinished, ...]


Effect = Dispatch | Recall | AllocationGranted | AllocationRefused | Discard | Drained
