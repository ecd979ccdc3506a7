"""Functions of `torch.distributed` take a turn, in a thread that a simulated rank has started.

What they find, torch's record of groups first of all, is then that of the thread's rank.
"""

from types import FunctionType

import torch.distributed.distributed_c10d as c10d

from rankwise.simranks.world.turn_takers import taking_turns

_PRIVATE = (
    "_find_pg_by_ranks_and_tag", "_get_default_group", "_get_default_store", "_get_group_tag",
    "_get_process_group_name", "_resolve_process_group",
)  # fmt: skip
"""Functions that other parts of torch call for a group."""
# `isinstance` would ask objects that torch has deprecated, which warn.


def take_turns() -> None:
    """Let the functions take turns, from when a rank has threads."""
    for function in map(vars(c10d).get, (*c10d.__all__, *_PRIVATE)):
        if type(function) is FunctionType:
            taking_turns(function)
