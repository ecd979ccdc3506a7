"""Functions that CUDA computes in one kernel and the CPU in many: charged as the one.

`torch.rms_norm` is taken apart above autograd, so the mode that charges operations sees the parts
of its forward and of its backward. Here it is computed by the same parts, with the same bits, while
nothing is charged, and then one kernel is. What the parts keep for backward takes no memory of the
device: the kernel of CUDA keeps its arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rankwise.sim.torch.operations import charging_mode

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)})
_rms_norm = torch.rms_norm
_FORWARD = torch.ops.aten._fused_rms_norm.default  # noqa: SLF001  # its name
_BACKWARD = torch.ops.aten._fused_rms_norm_backward.default  # noqa: SLF001  # the same


def fuse_kernels() -> Callable[[], None]:
    """Charge such functions as one kernel; returns what undoes it."""
    torch.rms_norm = rms_norm

    def undo() -> None:
        torch.rms_norm = _rms_norm

    return undo


def rms_norm(
    input: Tensor,  # noqa: A002  # torch's name
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Stand in for `torch.rms_norm`."""
    is_plain = type(input) in _PLAIN and type(weight) in _PLAIN and not input.is_meta
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001  # no public way
    is_dual = forward_ad._current_level >= 0  # noqa: SLF001  # the same
    if charging_mode() is None or not is_plain or is_transformed or is_dual:
        return _rms_norm(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, weight, normalized_shape, eps)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
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
