"""Attention of DTensors on modelled CUDA devices, which the CPU's operator computes.

torch knows how to shard the operators of CUDA, and not the one that the CPU has in their place.
Batches and heads are independent of each other, in both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001  # its name
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001  # the same
_BATCH, _HEADS = 0, 1


def shard_attention_of_cpu() -> Callable[[], None]:
    """Let DTensors shard the CPU's attention; returns what undoes it."""
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs  # noqa: SLF001  # no other way to it
    added = [operator for operator in (_FORWARD, _BACKWARD) if operator not in strategies]
    for operator in added:
        rule = _forward if operator is _FORWARD else _backward
        register_sharding(operator)(rule)

    def undo() -> None:
        for operator in added:
            strategies.pop(operator, None)

    return undo


def _forward(
    _query: Any, _key: Any, _value: Any, *rest: Any, attn_mask: Any = None, scale: Any = None
) -> list[Any]:
    del scale
    return [
        ([each] * 2, [each] * 3 + [None] * len(rest) + _of_mask(attn_mask, each))
        for each in (Replicate(), Shard(_BATCH), Shard(_HEADS))
    ]


def _backward(*args: Any, attn_mask: Any = None, scale: Any = None) -> list[Any]:
    del scale
    tensors, rest = 6, len(args) - 6
    return [
        ([each] * 3, [each] * tensors + [None] * rest + _of_mask(attn_mask, each))
        for each in (Replicate(), Shard(_BATCH), Shard(_HEADS))
    ]


def _of_mask(mask: Any, placement: Any) -> list[Any]:
    """How a mask lies, if there is one: whole along what it is broadcast over."""
    if mask is None:
        return []
    shape = mask.shape
    is_split = isinstance(placement, Shard) and len(shape) == 4 and shape[placement.dim] != 1
    return [placement if is_split else Replicate()]
