"""What torch would choose on CUDA, for tensors that it finds on the CPU (`dispatch.yaml`).

Attention, normalisation and dropout become the operators that CUDA has, forward and backward:
their shapes and what they keep for backward come from torch's kernels for meta tensors.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
import yaml
from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

_attend = torch._C._nn.scaled_dot_product_attention  # noqa: SLF001  # `functional` may be patched
_rms_norm, _dropout = torch.rms_norm, torch.dropout
_TABLE = "dispatch.yaml"


@cache
def choices() -> dict[str, Any]:
    """The table of the version of torch that runs, or of the latest one."""
    table = yaml.safe_load(files("rankwise.sim.torch").joinpath(_TABLE).read_text())
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
    kernel = _kernel_of(query, key, attn_mask)
    if query.dim() != 4 or not kernel or not is_plain(query, key, value, attn_mask):
        return _attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001  # its name
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:  # this kernel takes as many heads of keys as of queries
        key, value = (
            each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value)
        )
    if attn_mask is not None:
        attn_mask = _as_bias(attn_mask, query, key)
    keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001  # its name
        query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
    )[0]


def _kernel_of(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """The first kernel that is allowed and takes such arguments; empty for the parts."""
    del key
    rules, cuda = choices()["attention"], torch.backends.cuda
    allowed = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
    }
    dtype = str(query.dtype).removeprefix("torch.")
    for name in rules["order"]:
        rule = rules[name]
        fits = dtype in rule["dtypes"] and query.shape[-1] <= rule["head_width_max"]
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
    return torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]  # noqa: SLF001  # its name


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
