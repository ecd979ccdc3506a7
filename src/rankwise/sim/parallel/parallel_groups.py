"""Which ranks share a model, and which share data.

Ranks that are neighbours in number are a tensor-parallel group: with 8 ranks and a size of 2, the
groups are (0, 1), (2, 3), (4, 5), (6, 7), and the data-parallel ones (0, 2, 4, 6) and (1, 3, 5, 7).

The functions take no context: they are about the one that is open. Their records of it are kept in
a weak registry, so a context that is closed and forgotten by everyone else is gone.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.sim.runtime.context import RuntimeContext, active_context
from rankwise.sim.runtime.process_groups import ProcessGroup


class _RankGroups(NamedTuple):
    """One rank's groups, and the world of ranks that they are of."""

    generation: int
    tensor: ProcessGroup
    data: ProcessGroup


_BY_CONTEXT: "WeakKeyDictionary[RuntimeContext, dict[int, _RankGroups]]" = WeakKeyDictionary()


def initialize_model_parallel(tensor_model_parallel_size: int = 1) -> None:
    """Make the groups; every rank calls it, with the same size.

    Raises:
        ConfigError: the number of ranks is not a multiple of the size.
        LocalProtocolError: it was called before, and `destroy_model_parallel` was not.
    """
    context = active_context()
    distributed, size = context.distributed, tensor_model_parallel_size
    world = distributed.get_world_size()
    if size < 1 or world % size:
        raise ConfigError(
            f"{world} ranks cannot be cut into tensor-parallel groups of {size}",
            hint="the number of ranks has to be a multiple of tensor_model_parallel_size",
        )
    if model_parallel_is_initialized():
        raise LocalProtocolError(
            "initialize_model_parallel was called twice", hint="call destroy_model_parallel first"
        )
    rank = distributed.get_rank()
    tensor = [distributed.new_group(range(first, first + size)) for first in range(0, world, size)]
    data = [distributed.new_group(range(place, world, size)) for place in range(size)]
    groups = _RankGroups(distributed.generation, tensor[rank // size], data[rank % size])
    _BY_CONTEXT.setdefault(context, {})[rank] = groups


def destroy_model_parallel() -> None:
    """Forget this rank's groups."""
    context = active_context()
    _BY_CONTEXT.get(context, {}).pop(context.rank, None)


def model_parallel_is_initialized() -> bool:
    """Whether this rank has groups."""
    return _found() is not None


def get_tensor_model_parallel_group() -> ProcessGroup:
    """The ranks that share the model with this one."""
    return _groups().tensor


def get_tensor_model_parallel_rank() -> int:
    """This rank's place among those that share the model with it."""
    return _groups().tensor.rank()


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share the model."""
    return _groups().tensor.size()


def get_data_parallel_group() -> ProcessGroup:
    """The ranks that have the same part of the model as this one."""
    return _groups().data


def get_data_parallel_rank() -> int:
    """This rank's place among those that have the same part of the model."""
    return _groups().data.rank()


def get_data_parallel_world_size() -> int:
    """How many ranks have the same part of the model."""
    return _groups().data.size()


def _found() -> _RankGroups | None:
    context = active_context()
    groups = _BY_CONTEXT.get(context, {}).get(context.rank)
    # Ranks that have ended do not leave their groups to the next ones.
    if groups is None or groups.generation != context.distributed.generation:
        return None
    return groups


def _groups() -> _RankGroups:
    groups = _found()
    if groups is None:
        raise LocalProtocolError(
            "model parallelism is not initialized on this rank",
            hint="call initialize_model_parallel(tensor_model_parallel_size=...) first",
        )
    return groups
