"""Tasks and commands as frames; the layouts are those of `rankwise.core.tasks.calls`."""

from rankwise.core.tasks.calls import (
    ChipCallConfig,
    Command,
    ControlCode,
    decode_command,
    decode_task,
    decode_task_arguments,
    decode_task_tags,
    encode_command,
    encode_task,
)
from rankwise.workers.arguments import TaskArgs

__all__ = [
    "Command",
    "ControlCode",
    "decode_command",
    "encode_command",
    "pack_task",
    "unpack_arguments",
    "unpack_task",
]

_BARE_TASK = encode_task((), ())


def pack_task(args: TaskArgs | None, config: ChipCallConfig | None = None) -> bytes:
    """A task's frame: its configuration and arguments, however many."""
    if config is None and not args:
        return _BARE_TASK
    if args is None:
        return encode_task((), (), config)
    return encode_task(args.tensors, args.scalars, config, tags=args.tags)


def unpack_task(frame: bytes | bytearray | memoryview) -> tuple[TaskArgs, ChipCallConfig]:
    """Read a task's frame; tags, `child_memory` and all options are as they were.

    Raises:
        MailboxCorrupt: it was cut, comes from another release, or is no task.
    """
    if frame == _BARE_TASK:
        return TaskArgs(), ChipCallConfig()
    tensors, scalars, config = decode_task(frame)
    return TaskArgs.of(tensors, scalars, decode_task_tags(frame)), config


def unpack_arguments(frame: bytes | bytearray | memoryview) -> TaskArgs:
    """Read the arguments alone, for who has no configuration; see `unpack_task`."""
    return TaskArgs.of(*decode_task_arguments(frame), decode_task_tags(frame))
