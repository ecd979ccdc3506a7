"""Functions that CUDA computes in one kernel and the CPU in many: charged as the one.

`torch.rms_norm` is taken apart above autograd, so the mode that charges operations sees the parts
of its forward and of its backward. Here it is computed by the same parts, with the same bits, while
nothing is charged, and then one kernel is. Tensors that the parts keep for backward take no memory
of the device: the kernel of CUDA keeps its arguments.

The same holds for attention with dropout, for which the CPU has no kernel. As on CUDA, its gradient
has none.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from rankwise.simranks.torch.operations import charging_mode

PLAIN_OR_NONE = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)})
_rms_norm = torch.rms_norm
_FORWARD = torch.ops.aten._fused_rms_norm.default  # noqa: SLF001  # its name
_BACKWARD = torch.ops.aten._fused_rms_norm_backward.default  # noqa: SLF001  # the same
_attend = torch._C._nn.scaled_dot_product_attention  # noqa: SLF001  # `functional` may be patched
_ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001  # its name
_ATTEND_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001  # the same


def fuse_kernels() -> Callable[[], None]:
    """Charge such functions as one kernel; returns what undoes it."""
    stack = ExitStack()
    for owner, function in ((torch, rms_norm), (F, scaled_dot_product_attention)):
        name = function.__name__
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)
    return stack.close


def _is_charged(*tensors: Any) -> bool:
    """Whether these are tensors of a thread whose operations are charged, and nothing else."""
    is_plain = all(
        type(each) in PLAIN_OR_NONE and not (each is not None and each.is_meta) for each in tensors
    )
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001  # no public way
    is_dual = forward_ad._current_level >= 0  # noqa: SLF001  # the same
    return charging_mode() is not None and is_plain and not is_transformed and not is_dual


def rms_norm(
    input: Tensor,  # noqa: A002  # torch's name
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Replace `torch.rms_norm`."""
    if are_distributed(input, weight):
        return rms_norm_of_locals(rms_norm, input, normalized_shape, weight, eps)
    if not _is_charged(input, weight):
        return _rms_norm(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, weight, normalized_shape, eps)


def are_distributed(values: Any, weight: Any) -> bool:
    """Whether they are DTensors, whose local parts are charged."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or type(values) is not kind:
        return False
    locals_ = [each._local_tensor for each in (values, weight) if type(each) is kind]  # noqa: SLF001  # `to_local` is an operation
    return _is_charged(*locals_) and (weight is None or len(locals_) == 2)


def rms_norm_of_locals(
    norm: Callable[..., Any], values: Any, shape: Any, weight: Any, eps: float | None
) -> Any:
    """The kernel of CUDA on each rank's part; what is normalised must lie on one rank, as there."""
    from torch.distributed.tensor import (  # noqa: PLC0415  # it is imported: there are DTensors
        DTensor,
        Partial,
        Replicate,
    )

    mesh = values.device_mesh
    axis = values.dim() - (1 if isinstance(shape, int) else len(shape))
    placements = [
        Replicate() if each.is_partial() or (each.is_shard() and each.dim >= axis) else each
        for each in values.placements
    ]
    values = values.redistribute(mesh, placements)
    own = None
    if weight is not None:
        whole = weight.redistribute(mesh, [Replicate()] * mesh.ndim)
        # A rank that has some of the rows has some of the sum that is the gradient.
        of_gradient = [Partial() if each.is_shard() else each for each in placements]
        own = whole.to_local(grad_placements=of_gradient)
    normed = norm(values.to_local(grad_placements=placements), shape, own, eps)
    return DTensor.from_local(
        normed, mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
    )


def scaled_dot_product_attention(  # noqa: PLR0917  # torch's parameters
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Replace `torch.nn.functional.scaled_dot_product_attention`."""
    tensors, cuda = (query, key, value, attn_mask), torch.backends.cuda
    is_fused = (
        cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    )
    is_whole = query.dim() == 4  # batch, heads, sequence, width: others are rare
    if not dropout_p or not is_fused or not is_whole or not _is_charged(*tensors):
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return _Attention.apply(*tensors, dropout_p, is_causal, options)


class _FusedRmsNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, shape: Any, eps: Any) -> Tensor:
        mode = charging_mode()
        assert mode is not None, "looked at before"
        ctx.save_for_backward(values, weight)
        ctx.words = shape, eps
        return mode.compute_as_one(
            _FORWARD, lambda: _rms_norm(values, shape, weight, eps), (values, weight)
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight = ctx.saved_tensors
        shape, eps = ctx.words
        wanted = [each for each in (values, weight) if each is not None and each.requires_grad]

        def gradients(inputs: list[Tensor], *, is_kept: bool) -> Any:
            with torch.enable_grad():
                normed = _rms_norm(inputs[0], shape, *inputs[1:] or [None], eps)
            needed = [each for each in inputs if each.requires_grad]
            return torch.autograd.grad(normed, needed, gradient, create_graph=is_kept)

        mode, given = charging_mode(), [each for each in (values, weight) if each is not None]
        if mode is None or torch.is_grad_enabled():  # of gradients, too: its parts are known
            found = gradients(given, is_kept=torch.is_grad_enabled())
        else:
            leaves = [each.detach().requires_grad_(each.requires_grad) for each in given]
            found = mode.compute_as_one(
                _BACKWARD,
                lambda: gradients(leaves, is_kept=False),
                (gradient, values, weight),
            )
        by_input = dict(zip(map(id, wanted), found, strict=True))
        return by_input.get(id(values)), by_input.get(id(weight)), None, None


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, *words: Any) -> Tensor:
        *tensors, dropout, is_causal, options = words
        mode = charging_mode()
        assert mode is not None, "looked at before"
        ctx.random, ctx.words = torch.get_rng_state(), (dropout, is_causal, options)

        def attend() -> Any:
            return _attend(*tensors, dropout, is_causal, **options)

        attended = mode.compute_as_one(_ATTEND, attend, tensors[:3])
        ctx.save_for_backward(*tensors, attended)
        return attended

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is untyped here
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *tensors, attended = ctx.saved_tensors
        dropout, is_causal, options = ctx.words
        leaves = [
            None if each is None else each.detach().requires_grad_(each.requires_grad)
            for each in tensors
        ]
        needed = [each for each in leaves if each is not None and each.requires_grad]

        def gradients() -> Any:
            # The parts would keep the scores for backward; the kernel computes them again.
            random = torch.get_rng_state()
            torch.set_rng_state(ctx.random)
            with torch.enable_grad():
                again = _attend(*leaves, dropout, is_causal, **options)
            torch.set_rng_state(random)
            return torch.autograd.grad(again, needed, gradient)

        mode = charging_mode()
        if mode is None:
            found = gradients()
        else:
            args = (gradient, *tensors[:3], attended)
            found = mode.compute_as_one(_ATTEND_BACKWARD, gradients, args)
        by_leaf = dict(zip(map(id, needed), found, strict=True))
        return *(by_leaf.get(id(each)) for each in leaves), None, None, None
