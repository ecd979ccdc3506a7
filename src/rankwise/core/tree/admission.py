"""What may be submitted at all: tasks and groups that some children could take some day."""

from rankwise.base.errors import LocalProtocolError, TreeValueError
from rankwise.core.tree.queues import Queues
from rankwise.core.tree.vocabulary import GroupSubmitted, Pool

_POOL_NAMES = {Pool.NEXT_LEVEL: "next-level worker", Pool.SUB: "sub worker"}


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


def check_child(pool: Pool, index: int, queues: Queues) -> None:
    """Refuse a child that is not there, or of another kind."""
    children = queues.children
    if not 0 <= index < len(children) or children[index].pool is not pool:
        raise TreeValueError(f"child {index} is not a {_POOL_NAMES[pool]}")


def refuse_width(pool: Pool, width: int, queues: Queues) -> None:
    """Say that there are not so many children."""
    count = len(queues.teams[pool].children)
    what = f"a group of {width} members" if width > 1 else "a task"
    raise TreeValueError(
        f"{what} for {_POOL_NAMES[pool]}s can never run: this worker has {count} of them",
        hint="start more of them, or submit fewer at a time",
    )
