"""Attention of DTensors on modelled CUDA devices, which the CPU's operator computes.

torch knows how to shard the operators of CUDA, and not the one that the CPU has in their place.
Batches and heads are independent of each other, in both. Context parallelism splits sequences: it
carries the operators of CUDA out on a ring of ranks, and gets the same for the CPU's here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001  # its name
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001  # the same
_BATCH, _HEADS, _SEQUENCE = 0, 1, 2


def shard_attention_of_cpu() -> Callable[[], None]:
    """Let DTensors shard the CPU's attention; returns what undoes it."""
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs  # noqa: SLF001  # no other way to it
    added = [operator for operator in (_FORWARD, _BACKWARD) if operator not in strategies]
    for operator in added:
        rule = _forward if operator is _FORWARD else _backward
        register_sharding(operator)(rule)
    rings = {_FORWARD: _forward_on_ring, _BACKWARD: _backward_on_ring}
    context_parallel.custom_ops.update(rings)

    def undo() -> None:
        for operator in added:
            strategies.pop(operator, None)
        for operator in rings:
            context_parallel.custom_ops.pop(operator, None)

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


def _forward_on_ring(_operator: Any, args: Any, options: dict[str, Any]) -> Any:
    """What a rank of context parallelism attends to: keys and values come by."""
    (query, key, value), rest = args[:3], args[3:]
    _refuse_mask(options)
    results = context_parallel._templated_ring_attention(  # noqa: SLF001  # as it does for CUDA
        query.device_mesh.get_group(), _SEQUENCE, _FORWARD,
        *(each.to_local() for each in (query, key, value)),
        **_plain_options(rest), scale=options.get("scale"),
    )  # fmt: skip
    return _like(results, [query, query])


def _backward_on_ring(_operator: Any, args: Any, options: dict[str, Any]) -> Any:
    """The same of the gradients; those of keys and values go round with them."""
    tensors, rest = args[:6], args[6:]
    _refuse_mask(options)
    gradient, query, key, value, out, logsumexp = (each.to_local() for each in tensors)
    results = context_parallel._templated_ring_attention_backward(  # noqa: SLF001  # the same
        tensors[1].device_mesh.get_group(), _SEQUENCE, _BACKWARD,
        grad_out=gradient, grad_out_name="grad_out", query=query, key=key, value=value,
        out=out, logsumexp=logsumexp, **_plain_options(rest), scale=options.get("scale"),
    )  # fmt: skip
    return _like(results, tensors[1:4])


def _plain_options(rest: Any) -> dict[str, Any]:
    """The arguments behind the tensors; the dispatcher leaves out what is as by default."""
    given = dict(zip(("dropout_p", "is_causal"), rest, strict=False))
    return {"dropout_p": 0.0, "is_causal": False, **given}


def _refuse_mask(options: dict[str, Any]) -> None:
    if options.get("attn_mask") is not None:
        raise NotImplementedError("attn_bias is not supported yet")  # in torch's words for CUDA


def _like(parts: Any, wholes: Any) -> tuple[DTensor, ...]:
    pairs = zip(parts, wholes, strict=True)
    return tuple(
        DTensor.from_local(part, whole.device_mesh, whole.placements, run_check=False)
        for part, whole in pairs
    )
