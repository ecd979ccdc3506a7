"""Where a program asks torch for the number of its rank, other than to construct groups."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rankwise.simranks.world.equals import Equals
from rankwise.simranks.world.places import place_of_caller
from rankwise.simranks.world.world import running_rank

_INTERFACE = ("/distributed_c10d.py", "/torch/utils/data/distributed.py")
"""A sampler of a program gives each rank data of its own; other files of torch construct groups."""


def note_reads(equals: Equals) -> Callable[[], None]:
    """Have the lines noted that call `get_rank`; returns what undoes it."""
    owners = [import_module(f"torch.distributed{name}") for name in ("", ".distributed_c10d")]
    original: Any = vars(owners[0])["get_rank"]

    def get_rank(group: Any = None) -> Any:
        if running_rank() is not None and (place := place_of_caller(_INTERFACE)) is not None:
            equals.note_read("get_rank", place)
        return original(group)

    def put(function: Any) -> None:
        for owner in owners:
            vars(owner)["get_rank"] = function

    put(get_rank)
    return lambda: put(original)
