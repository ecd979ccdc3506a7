"""What torch would choose on CUDA, for tensors that it finds on the CPU (`dispatch.yaml`).

Attention, normalisation and dropout become the operators that CUDA has, forward and backward:
their shapes and what they keep for backward come from torch's kernels for meta tensors.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
import yaml
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim import optimizer
from torch.utils import _foreach_utils

from rankwise.simranks.torch.cuda_autocast import lowered, widened
from rankwise.simranks.torch.fused_kernels import (
    PLAIN_OR_NONE,
    are_distributed,
    rms_norm_of_locals,
)
from rankwise.simranks.torch.operations import ChargingMode, charging_mode

_attend = torch._C._nn.scaled_dot_product_attention  # noqa: SLF001  # `functional` may be patched
_rms_norm, _dropout = torch.rms_norm, torch.dropout
_FORWARD = torch.ops.aten._fused_rms_norm.default  # noqa: SLF001  # its name
_BACKWARD = torch.ops.aten._fused_rms_norm_backward.default  # noqa: SLF001  # the same
_TABLE = "dispatch.yaml"


@cache
def choices() -> dict[str, Any]:
    """The table of the version of torch that runs, or of the latest one."""
    table = yaml.safe_load(files("rankwise.simranks.torch").joinpath(_TABLE).read_text())
    version = ".".join(torch.__version__.split(".")[:2])
    found: dict[str, Any] = table.get(version) or table[max(table)]
    return found


def choose_as_cuda() -> Callable[[], None]:
    """Have torch choose the operators of CUDA; returns what undoes it."""
    stack = ExitStack()

    def replace(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    replace(F, "scaled_dot_product_attention", _scaled_dot_product_attention)
    replace(torch, "rms_norm", _fused_rms_norm)
    replace(torch, "dropout", _native_dropout)
    replace(F, "dropout", _functional_dropout)
    devices = [*choices()["foreach_devices"], "cpu"]
    for owner in (_foreach_utils, optimizer, torch.nn.utils.clip_grad):
        name = "_get_foreach_kernels_supported_devices"
        if hasattr(owner, name):
            replace(owner, name, lambda: devices)
    return stack.close


def is_plain(*tensors: Any) -> bool:
    """Whether a function of CUDA can take these; meta tensors choose for themselves."""
    return all(each is None or (isinstance(each, Tensor) and not each.is_meta) for each in tensors)


def _scaled_dot_product_attention(  # noqa: PLR0917  # torch's parameters
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # the same
    scale: float | None = None,
    enable_gqa: bool = False,  # the same
) -> Any:
    """Attend with the kernel that CUDA takes first of those that are allowed and fit."""
    query, key, value = (lowered(each) for each in (query, key, value))
    kernel = _kernel_of(query, attn_mask)
    if query.dim() != 4 or not kernel or not is_plain(query, key, value, attn_mask):
        return _attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001  # its name
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if attn_mask is not None:
        attn_mask = _as_bias(attn_mask, query, key)
    if kernel == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001  # its name
            query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:  # this kernel takes as many heads of keys as of queries
        key, value = (
            each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value)
        )
    return torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001  # its name
        query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
    )[0]


def _kernel_of(query: Tensor, mask: Tensor | None) -> str:
    """The first kernel that is allowed and takes such arguments; empty for the parts."""
    rules, cuda = choices()["attention"], torch.backends.cuda
    allowed = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled(),
    }
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        allowed["cudnn"] = False
    dtype = str(query.dtype).removeprefix("torch.")
    capability = list(torch.cuda.get_device_capability())
    for name in rules["order"]:
        rule = rules[name]
        fits = (
            dtype in rule["dtypes"]
            and query.shape[-1] <= rule["head_width_max"]
            and query.shape[-1] % rule.get("head_width_step", 1) == 0
            and ("capabilities" not in rule or capability in rule["capabilities"])
        )
        if allowed.get(name) and fits and (mask is None or rule["takes_masks"]):
            return str(name)
    return ""


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the kernel wants it: a number that is added to each score."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _fused_rms_norm(
    input: Tensor,  # noqa: A002  # torch's name
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if not choices()["fused_rms_norm"] or not is_plain(input, weight):
        return _rms_norm(input, normalized_shape, weight, eps)
    if are_distributed(input, weight):
        return rms_norm_of_locals(_fused_rms_norm, input, normalized_shape, weight, eps)
    mode = charging_mode()
    if mode is None or {type(input), type(weight)} - PLAIN_OR_NONE:
        return _rms_norm(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(widened(input), widened(weight), mode)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The kernels of CUDA. Torch for the CPU has none, and takes the operator apart."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, mode: ChargingMode) -> Tensor:
        normed = torch.empty_like(values)
        spread = values.new_empty((*values.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(values, weight, spread)
        mode.charge_as_one(_FORWARD, (values, weight), (normed, spread))
        return normed

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # the same
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight, spread = ctx.saved_tensors
        mode = charging_mode()
        assert mode is not None, "the thread of a rank has one"
        of_values = torch.empty_like(values)
        of_weight = None if weight is None else torch.empty_like(weight)
        mode.charge_as_one(_BACKWARD, (gradient, values, weight, spread), (of_values, of_weight))
        return of_values, of_weight, None


def _native_dropout(input: Tensor, p: float, train: bool) -> Any:  # noqa: A002  # torch's parameters
    if not choices()["fused_dropout"] or not train or not 0 < p < 1 or not is_plain(input):
        return _dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


_drop = F.dropout


def _functional_dropout(
    input: Tensor,  # noqa: A002  # torch's name
    p: float = 0.5,
    training: bool = True,  # the same
    inplace: bool = False,  # the same
) -> Any:
    if inplace:
        return _drop(input, p, training, inplace)
    return _native_dropout(input, p, training)


IN_GRAPHS = (
    _scaled_dot_product_attention, _fused_rms_norm, _native_dropout, _functional_dropout,
)  # fmt: skip
"""What dynamo calls from within a graph, as torch's functions for which they stand."""
