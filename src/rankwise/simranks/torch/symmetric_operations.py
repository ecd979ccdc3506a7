"""`torch.ops.symm_mem` between simulated ranks, and the names of torch's module.

An operation meets like a collective, and takes on a modelled machine the time of the collective
that does the same.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from rankwise.base.errors import LocalProtocolError
from rankwise.simranks.torch.loads import Loads
from rankwise.simranks.torch.rank_store import OF_RANK
from rankwise.simranks.torch.symmetric_memory import (
    RehearsedSymmetricMemory,
    allocation_of,
    handles_of_rank,
)


def install() -> Callable[[], None]:
    """Let torch's module and operations be those of simulated ranks; returns what undoes it."""
    stack = ExitStack()
    for name, value in (
        ("_SymmetricMemory", RehearsedSymmetricMemory),
        ("_should_use_implicit_mempool", lambda: False),
        ("put_signal", lambda src, hdl, peer: hdl.put(src, peer)),
        ("wait_signal", lambda hdl, peer: hdl.wait_signal(peer)),
    ):
        stack.callback(setattr, symm_mem, name, getattr(symm_mem, name))
        setattr(symm_mem, name, value)
    library = torch.library.Library("symm_mem", "IMPL")
    stack.callback(library._destroy)  # noqa: SLF001  # torch has no public name
    for name, function in _operations().items():
        library.impl(name, function, "CPU")
    return stack.close


def _operations() -> dict[str, Callable[..., Any]]:
    """`torch.ops.symm_mem`: those that torch has for CUDA devices of one machine."""
    shot, in_place = _one_shot, _in_place
    return {
        "one_shot_all_reduce": partial(shot, "one_shot_all_reduce"),
        "one_shot_all_reduce_out": partial(shot, "one_shot_all_reduce_out"),
        "one_shot_all_reduce_copy": _one_shot_copy,
        "one_shot_all_reduce_copy_out": _one_shot_copy,
        "two_shot_all_reduce_": partial(in_place, "two_shot_all_reduce_"),
        "two_shot_all_reduce_out": partial(shot, "two_shot_all_reduce_out"),
        "multimem_all_reduce_": partial(in_place, "multimem_all_reduce_"),
        "multimem_one_shot_all_reduce": partial(shot, "multimem_one_shot_all_reduce"),
        "multimem_one_shot_all_reduce_out": partial(shot, "multimem_one_shot_all_reduce_out"),
        "multimem_all_gather_out": _all_gather_out,
        "reduce_scatter_out": _reduce_scatter_out,
        "get_remote_tensors": _get_remote_tensors,
        "memset32_": _memset,
        "stream_write_value32_": lambda words, offset, value: _memset(words, offset, value, 1),
        "fused_all_gather_matmul": symm_mem._fused_all_gather_matmul_fallback,  # noqa: SLF001  # torch has no public name
        "fused_all_gather_scaled_matmul": symm_mem._fused_all_gather_scaled_matmul_fallback,  # noqa: SLF001  # the same
        "fused_matmul_reduce_scatter": symm_mem._fused_matmul_reduce_scatter_fallback,  # noqa: SLF001  # the same
        "fused_scaled_matmul_reduce_scatter": symm_mem._fused_scaled_matmul_reduce_scatter_fallback,  # noqa: SLF001  # the same
    }


def _one_shot(
    name: str,
    source: Tensor,
    reduce_op: str,
    group_name: str,
    out: Tensor | None = None,
) -> Tensor:
    """The sum over all ranks, in the order of ranks, as torch's kernel adds."""
    result = torch.empty_like(source) if out is None else out
    _reduce(name, source, result, reduce_op, group_name)
    return result


def _one_shot_copy(
    symm_buffer: Tensor,
    local_input: Tensor,
    reduce_op: str,
    group_name: str,
    out: Tensor | None = None,
) -> Tensor:
    part = symm_buffer.reshape(-1)[: local_input.numel()].view(local_input.shape)
    part.copy_(local_input)
    return _one_shot("one_shot_all_reduce_copy", part, reduce_op, group_name, out)


def _in_place(name: str, source: Tensor, reduce_op: str, group_name: str) -> Tensor:
    _reduce(name, source, source, reduce_op, group_name)
    return source


def _reduce(name: str, source: Tensor, result: Tensor, reduce_op: str, group_name: str) -> None:
    if reduce_op != "sum":
        raise LocalProtocolError(f"symm_mem.{name} has reduce_op={reduce_op!r}; it can do 'sum'")
    if result.shape != source.shape or result.dtype != source.dtype:
        raise LocalProtocolError(
            f"symm_mem.{name}: the result has {tuple(result.shape)} {result.dtype}, and the input"
            f" {tuple(source.shape)} {source.dtype}"
        )

    def carry_out(loads: Loads) -> None:
        whole = _summed([each for _, each in loads])
        for own, _ in loads:
            own.copy_(whole)

    _handle(name, source, group_name).meet(name, source, (result, source), carry_out)


def _all_gather_out(source: Tensor, group_name: str, out: Tensor) -> Tensor:
    def carry_out(loads: Loads) -> None:
        whole = torch.cat([each.reshape(-1) for _, each in loads])
        for own, _ in loads:
            own.copy_(whole.view(own.shape))

    name = "multimem_all_gather_out"
    _handle(name, out, group_name).meet(name, source, (out, source), carry_out)
    return out


def _reduce_scatter_out(
    source: Tensor,
    group_name: str,
    split_last_dim: bool,
    output: Tensor,
) -> Tensor:
    name = "reduce_scatter_out"
    handle = _handle(name, source, group_name)

    def carry_out(loads: Loads) -> None:
        whole = _summed([each for _, each in loads])
        parts = whole.chunk(len(loads), dim=-1 if split_last_dim else 0)
        for (own, _), part in zip(loads, parts, strict=True):
            own.copy_(part.reshape(own.shape))

    handle.meet(name, source, (output, source), carry_out)
    return output


def _get_remote_tensors(x: Tensor, group_name: str) -> list[Tensor]:
    handle = symm_mem.rendezvous(x, group_name)
    return [handle.get_remote_tensor(rank, x.shape, x.dtype) for rank in range(handle.world_size)]


def _memset(words: Tensor, offset: int, value: int, count: int) -> Tensor:
    """Write words of a pad, or of any memory; those who wait for a signal are woken."""
    words[offset : offset + count] = value
    address = words.data_ptr() + offset * words.itemsize
    for handle in list(handles_of_rank().handles.values()):
        handle.wake(address, count)
    return words


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    whole = tensors[0].clone()
    for each in tensors[1:]:
        whole += each
    return whole


def _handle(name: str, tensor: Tensor, group_name: str) -> RehearsedSymmetricMemory:
    """The handle of a tensor that has been shared in a group."""
    allocation = allocation_of(name, tensor)
    handle = allocation.handles.get(group_name)
    if handle is None:
        raise LocalProtocolError(
            f"symm_mem.{name} of a tensor that has had no rendezvous in group"
            f" {group_name.partition(OF_RANK)[0]!r}",
            hint="call symm_mem.rendezvous(tensor, group) on every rank before",
        )
    return handle
