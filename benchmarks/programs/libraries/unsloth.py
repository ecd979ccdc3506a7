"""unsloth's kernels, with gradients.

SOURCES/unsloth in PYTHONPATH, where SOURCES/unsloth is a checkout
pip install --target LIBRARIES --no-deps unsloth_zoo  # and transformers
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, found, without_start

os.environ.setdefault("UNSLOTH_ALLOW_CPU", "1")  # else it looks for the device


def kernels(path: str) -> Any:
    return found(f"unsloth.kernels.{path}")


def scaled(x: Any, block: int) -> tuple[Any, Any]:
    """Values in fp8, by blocks along the last axis, and their scales."""
    blocks = x.view(*x.shape[:-1], -1, block)
    scales = blocks.abs().amax(-1) / 448
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales


def operators() -> Iterator[Operator]:
    for package in ("unsloth", "unsloth.kernels", "unsloth_zoo"):
        without_start(package)
    vars(sys.modules["unsloth_zoo"]).update(DEVICE_TYPE="cuda", DEVICE_TYPE_TORCH="cuda")
    wide, gate = (2, 4, 64), (2, 4, 96)
    labels = torch.randint(0, 97, (2, 4))
    yield Operator(
        "cross_entropy",
        lambda x: kernels("cross_entropy_loss.fast_cross_entropy_loss")(x, labels),
        lambda x: functional.cross_entropy(x.view(-1, 97), labels.view(-1)), ((2, 4, 97),),
    )  # fmt: skip
    yield Operator(
        "cross_entropy_soft",
        lambda x: kernels("cross_entropy_loss.fast_cross_entropy_loss")(x, labels, 5.0),
        lambda x: functional.cross_entropy(5 * torch.tanh(x.view(-1, 97) / 5), labels.view(-1)),
        ((2, 4, 97),),
    )  # fmt: skip
    yield Operator(
        "rms_layernorm",
        lambda x, w: kernels("rms_layernorm.Fast_RMS_Layernorm")(x, w, 1e-6, False),
        lambda x, w: functional.rms_norm(x, [64], w.detach(), 1e-6) + 0 * w.sum(),
        (wide, torch.randn(64)),
    )  # fmt: skip
    yield Operator(
        "rms_layernorm_gemma",
        lambda x, w: kernels("rms_layernorm.Fast_RMS_Layernorm")(x, w, 1e-6, True),
        lambda x, w: functional.rms_norm(x, [64], w + 1, 1e-6), (wide, torch.randn(64)),
    )  # fmt: skip
    yield Operator(
        "layernorm", lambda x, w, b: kernels("layernorm.Fast_Layernorm")(x, w, b, 1e-6),
        lambda x, w, b: functional.layer_norm(x, [64], w, b, 1e-6),
        (wide, torch.randn(64), torch.randn(64)),
    )  # fmt: skip
    e, g = torch.randn(gate), torch.randn(gate)
    silu, gelu = functional.silu, functional.gelu
    yield Operator(
        "swiglu", kernels("swiglu.swiglu_fg_kernel"), lambda e, g: silu(e) * g, (e, g)
    )  # fmt: skip
    yield Operator("geglu_exact", kernels("geglu.geglu_exact_forward_kernel"),
                   lambda e, g: gelu(e) * g, (e, g))  # fmt: skip
    yield Operator("geglu_approx", kernels("geglu.geglu_approx_forward_kernel"),
                   lambda e, g: gelu(e, approximate="tanh") * g, (e, g))  # fmt: skip

    def backward_of(activation: Any) -> Any:
        def backward(dw: Any, e: Any, g: Any) -> Any:
            leaf = e.clone().requires_grad_()
            activation(leaf).backward(dw * g)
            return activation(e) * g, dw * activation(e), leaf.grad

        return backward

    flat = torch.randn(8, 96), torch.randn(8, 96), torch.randn(8, 96)
    for name, path, activation in (
        ("swiglu_backward", "swiglu.swiglu_DWf_DW_dfg_kernel", silu),
        ("geglu_exact_backward", "geglu.geglu_exact_backward_kernel", gelu),
        ("geglu_approx_backward", "geglu.geglu_approx_backward_kernel",
         lambda e: gelu(e, approximate="tanh")),
    ):  # fmt: skip
        yield Operator(name, kernels(path), backward_of(activation), flat)
    angles = torch.arange(6)[:, None] * (1e4 ** (-torch.arange(0, 16, 2) / 16))
    cosines, sines = (torch.cat([each] * 2, -1) for each in (angles.cos(), angles.sin()))

    def turned(x: Any) -> Any:
        return x * cosines + torch.cat([-x[..., 8:], x[..., :8]], -1) * sines

    yield Operator(
        "rope", lambda q, k: kernels("rope_embedding.fast_rope_embedding")(q, k, cosines, sines),
        lambda q, k: (turned(q), turned(k)),
        (torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)),
    )  # fmt: skip
    x, weight = torch.randn(6, 256), torch.randn(256, 256)
    yield Operator(
        "act_quant", lambda x: tuple(each.float() for each in kernels("fp8.act_quant")(x, 128)),
        lambda x: tuple(each.float() for each in scaled(x, 128)), (x,), 0.1,
    )  # fmt: skip
    coded, scales = weight.to(torch.float8_e4m3fn), torch.rand(2, 2)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    yield Operator("weight_dequant", kernels("fp8.weight_dequant_block"),
                   lambda w, _: (w.float() * spread).bfloat16(), (coded, scales), 1e-2)  # fmt: skip
    a, a_scales = scaled(x, 128)
    yield Operator(
        "w8a8_matmul", lambda *t: kernels("fp8.w8a8_block_fp8_matmul_triton")(*t, [128, 128]),
        lambda a, w, s, _: (a.float() * s.repeat_interleave(128, 1)) @ (w.float() * spread).T,
        (a, coded, a_scales, scales), 1e-2,
    )  # fmt: skip
