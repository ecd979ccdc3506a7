"""xformers' normalisation and rotary embedding in Triton; its indexing takes tensors of a GPU only.

pip install --target LIBRARIES --no-deps xformers==0.0.35
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, named

os.environ.setdefault("XFORMERS_ENABLE_TRITON", "1")  # else it looks for a GPU first


def without_gradients(path: str) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            return named(path)(*args, **options)

    return call


def rms_norm(x: Any, weight: Any) -> Any:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def rotated(x: Any, _theta: float = 10000.0) -> Any:
    """Each pair of neighbours, turned by an angle that its place and position give."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] / _theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def rope(x: Any) -> Any:
    bias = named("xformers.ops.fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask")
    length = x.shape[1]
    mask = bias.from_seqlens(q_seqlen=[length], kv_padding=length, kv_seqlen=[length])
    caches = torch.zeros_like(x), torch.zeros_like(x)
    with torch.no_grad():
        return named("xformers.ops.rope_padded.rope_padded")(x, x.clone(), x.clone(), *caches, mask)


def operators() -> Iterator[Operator]:
    torch.manual_seed(1)
    x, weight = torch.randn(6, 96), torch.randn(96)
    yield Operator(
        "rms_norm", without_gradients("xformers.ops.rmsnorm.rms_norm"), rms_norm, (x, weight)
    )
    yield Operator(
        "rms_norm_add",
        lambda x, y, w: without_gradients("xformers.ops.rmsnorm.rms_norm_add")(x.clone(), y, w),
        lambda x, y, w: rms_norm(x + y, w),
        (x, torch.randn(6, 96), weight),
    )
    yield Operator("rope_padded", rope, rotated, (torch.randn(1, 8, 2, 64),))
