"""Words for the life of tasks, and figures that programs of this kind ask for by name."""

from enum import IntEnum

import msgspec


class WorkerType(IntEnum):
    """Which queue a task waits in."""

    NEXT_LEVEL = 0
    SUB = 1


class TaskState(IntEnum):
    """Where in its life a task is."""

    FREE = 0
    PENDING = 1
    """It waits for the tasks whose results it needs."""
    READY = 2
    RUNNING = 3
    COMPLETED = 4
    CONSUMED = 5
    """Its scope and all who needed it have let go of it."""


class SubmitResult(msgspec.Struct, frozen=True):
    """What `submit` gives: which task it has become."""

    task_slot: int


MAILBOX_SIZE = 4096
"""Bytes of a mailbox of fixed size. The frames that travel here are as long as they need to be."""
MAILBOX_ERROR_MSG_SIZE = 256
MAILBOX_OFF_ERROR_MSG = MAILBOX_SIZE - MAILBOX_ERROR_MSG_SIZE
MAILBOX_ARGS_CAPACITY = MAILBOX_SIZE - 64 - MAILBOX_ERROR_MSG_SIZE
"""Bytes of arguments that such a mailbox holds: 94 tensors. Frames know no such limit."""
DEFAULT_HEAP_RING_SIZE = 1 << 30
MAX_RING_DEPTH = 4
MAX_SCOPE_DEPTH = 64
