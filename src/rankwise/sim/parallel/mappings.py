"""From what every rank has to what each has a part of, and back: forward only.

The names are Megatron's. Parts are along the last dimension. The result is a new tensor, but where
nothing has to be done.
"""

from rankwise.base.errors import ConfigError
from rankwise.sim.parallel.kernels import copy_columns_kernel
from rankwise.sim.parallel.parallel_groups import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from rankwise.sim.runtime.context import active_context
from rankwise.sim.runtime.tensor import Tensor

_BLOCK = 256


def copy_to_tensor_model_parallel_region(tensor: Tensor) -> Tensor:
    """Every rank has it already; the name marks where a gradient would be summed."""
    return tensor


def reduce_from_tensor_model_parallel_region(tensor: Tensor) -> Tensor:
    """The sum over the ranks that share the model, in place."""
    if get_tensor_model_parallel_world_size() > 1:
        active_context().distributed.all_reduce(tensor, group=get_tensor_model_parallel_group())
    return tensor


def scatter_to_tensor_model_parallel_region(tensor: Tensor) -> Tensor:
    """This rank's part of the last dimension."""
    size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    if size == 1:
        return tensor
    columns = tensor.shape[-1]
    part = divided(columns, size, "the last dimension")
    result = active_context().empty((*tensor.shape[:-1], part), dtype=tensor.kind)
    _copy_columns(tensor, result, part, source_start=rank * part)
    return result


def gather_from_tensor_model_parallel_region(tensor: Tensor) -> Tensor:
    """The parts of all ranks that share the model, side by side along the last dimension."""
    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return tensor
    context, part = active_context(), tensor.shape[-1]
    rows = tensor.numel() // part
    stacked = context.empty((size, *tensor.shape), dtype=tensor.kind)
    context.distributed.all_gather(stacked, tensor, group=get_tensor_model_parallel_group())
    result = context.empty((*tensor.shape[:-1], size * part), dtype=tensor.kind)
    for place in range(size):
        _copy_columns(
            stacked, result, part, source_start=place * rows * part, target_start=place * part
        )
    stacked.free()
    return result


def _copy_columns(
    source: Tensor, target: Tensor, columns: int, *, source_start: int, target_start: int = 0
) -> None:
    active_context().launch(
        copy_columns_kernel, target.numel() // target.shape[-1], source, target, columns,
        source.shape[-1], target.shape[-1], source_start, target_start, block=_BLOCK,
    )  # fmt: skip


def divided(length: int, parts: int, what: str) -> int:
    """One of `parts` equal parts of a length.

    Raises:
        ConfigError: there are no equal parts.
    """
    if length % parts:
        raise ConfigError(f"{what} of {length} cannot be cut into {parts} equal parts")
    return length // parts
