"""What `torch.distributed.tensor` keeps for a process, and each simulated rank for itself.

A DTensor finds a program's handlers of operators in one table for all: `loss_parallel` puts some in
and takes them out again, and a rank may stand inside of it while others do not.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.distributed.tensor import DTensor

from rankwise.sim.rehearsal.scheduler import Rank
from rankwise.sim.rehearsal.world import SimulatedWorld

_KEY = "dtensor handlers"


class HandlersOfRank:
    """Moves a rank's table of handlers in and out; a `Belongings`."""

    def __init__(self) -> None:
        self._dispatcher: Any = DTensor._op_dispatcher  # noqa: SLF001  # no other way to it
        self.home: dict[Any, Any] = self._dispatcher._custom_op_handlers  # noqa: SLF001  # the same

    def move_in(self, rank: Rank) -> None:
        """Let a rank find its handlers, or those that all begin with."""
        self.put(rank.belongings.get(_KEY) or dict(self.home))

    def move_out(self, rank: Rank) -> None:
        """Keep them."""
        rank.belongings[_KEY] = self._dispatcher._custom_op_handlers  # noqa: SLF001  # the same

    def put(self, handlers: dict[Any, Any]) -> None:
        """Let DTensors find these."""
        self._dispatcher._custom_op_handlers = handlers  # noqa: SLF001  # the same


def install(world: SimulatedWorld, device: str) -> Callable[[], None]:
    """Give each rank of a world its own handlers; returns what undoes it.

    On modelled CUDA devices, attention is sharded as on real ones.
    """
    stack = ExitStack()
    handlers = HandlersOfRank()
    world.belongings.add(handlers)
    stack.callback(handlers.put, handlers.home)
    if device == "cuda":
        from rankwise.sim.torch import attention_sharding  # noqa: PLC0415  # for these alone

        stack.callback(attention_sharding.shard_attention_of_cpu())
    return stack.close
