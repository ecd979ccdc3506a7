"""Functions of `torch.distributed` take a turn, in a thread that a simulated rank has started.

What they find, torch's record of groups first of all, is then that of the thread's rank. They are
replaced by name in all of `torch.distributed`, which imports them from one module to the other.
"""

import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch.distributed.distributed_c10d as c10d

from rankwise.sim.rehearsal.world import taking_turns

_PRIVATE = (
    "_find_pg_by_ranks_and_tag", "_get_default_group", "_get_default_store", "_get_group_tag",
    "_get_process_group_name", "_resolve_process_group",
)  # fmt: skip
"""Functions that other parts of torch call for a group."""
# `isinstance` would ask objects that torch has deprecated, which warn.
_PACKAGE = "torch.distributed"
_COMPILED = "traceable_collective_remaps"
"""torch's table of what `torch.compile` puts in place of a collective."""

# One for each function, whichever world asks: modules that are imported meanwhile keep it.
_taking_turns = cache(taking_turns)


def install() -> Callable[[], None]:
    """Let the functions take turns; returns what undoes it."""
    names = [name for name in (*c10d.__all__, *_PRIVATE) if name in vars(c10d)]
    functions = [each for each in map(vars(c10d).get, names) if type(each) is FunctionType]
    substitutes: dict[Any, Any] = {each: _taking_turns(each) for each in functions}
    _replace(substitutes)
    return lambda: _replace({mine: each for each, mine in substitutes.items()})


def _replace(substitutes: dict[Any, Any]) -> None:
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(f"{_PACKAGE}."):
            continue
        for key, value in list(vars(module).items()):
            if type(value) is FunctionType and value in substitutes:
                setattr(module, key, substitutes[value])
    compiled = getattr(sys.modules.get(f"{_PACKAGE}._functional_collectives"), _COMPILED, {})
    for function, traced in list(compiled.items()):
        if function in substitutes:
            compiled[substitutes[function]] = traced
