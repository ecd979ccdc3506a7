"""flash-attention's operators in Triton, with gradients where it has them.

SOURCES/flash-attention in PYTHONPATH, where SOURCES/flash-attention is a checkout
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, attention, first_of, found, without_start


def flash(path: str) -> Any:
    return found(f"flash_attn.{path}")


def operators() -> Iterator[Operator]:
    for package in ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton"):
        without_start(package)
    flat, wide = (8, 64), (64,)
    labels = torch.randint(0, 100, (9,))
    yield Operator(
        "layer_norm", flash("ops.triton.layer_norm.layer_norm_fn"),
        lambda x, w, b: functional.layer_norm(x, [64], w, b), (flat, wide, wide),
    )  # fmt: skip
    yield Operator(
        "rms_norm", lambda x, w: flash("ops.triton.layer_norm.rms_norm_fn")(x, w, None, eps=1e-5),
        lambda x, w: functional.rms_norm(x, [64], w, 1e-5), (flat, wide),
    )  # fmt: skip
    yield Operator(
        "cross_entropy",
        lambda x: first_of(flash("ops.triton.cross_entropy.cross_entropy_loss"), x, labels),
        lambda x: functional.cross_entropy(x, labels, reduction="none"), ((9, 100),),
    )  # fmt: skip
    x, angles = torch.randn(2, 16, 3, 32), torch.randn(16, 16)
    cosines, sines = angles.cos()[None, :, None], angles.sin()[None, :, None]
    for name, interleaved in (("rotary", False), ("rotary_interleaved", True)):

        def turned(x: Any, interleaved: bool = interleaved) -> Any:
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            both = a * cosines - b * sines, a * sines + b * cosines
            return torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)

        yield Operator(
            name,
            lambda x, interleaved=interleaved: flash("ops.triton.rotary.apply_rotary")(
                x, angles.cos(), angles.sin(), interleaved=interleaved
            ),
            turned, (x,),
        )  # fmt: skip
    yield Operator(
        "linear_gelu",
        lambda *a: flash("ops.triton.linear.triton_linear_act")(*a, activation="gelu"),
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
        (torch.randn(64, 64), torch.randn(64, 64), torch.randn(64)), 5e-3,
    )  # fmt: skip
    for name, causal in (("attention", False), ("attention_causal", True)):
        yield Operator(
            name,
            lambda *a, causal=causal: flash("flash_attn_triton.flash_attn_func")(
                *(each.half() for each in a), None, causal
            ).float(),
            lambda *a, causal=causal: attention(
                *(each.transpose(1, 2) for each in a), is_causal=causal
            ).transpose(1, 2),
            ((1, 128, 2, 64),) * 3, 1e-2,
        )  # fmt: skip
