"""Liger-Kernel, with gradients.

pip install --target LIBRARIES liger-kernel==0.8.5 transformers
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, first_of, found


def liger(path: str) -> Any:
    return found(f"liger_kernel.ops.{path}")


IN_PLACE = False
"""What some operators take last."""


def operators() -> Iterator[Operator]:
    normed = partial(functional.rms_norm, normalized_shape=(64,), eps=1e-6)
    labels, rows = torch.randint(0, 97, (16,)), torch.randint(0, 20, (4, 6))
    likely = torch.softmax(torch.randn(8, 64), -1)
    wide, flat = (4, 8, 64), (8, 64)

    def log_softmax(x: Any) -> Any:
        return torch.log_softmax(x, -1)

    def jensen_shannon(x: Any) -> Any:
        given, middle = log_softmax(x), torch.log((log_softmax(x).exp() + likely) / 2)
        divergence = partial(functional.kl_div, log_target=True, reduction="sum")
        return (divergence(middle, likely.log()) + divergence(middle, given)) / 16

    def sparse(x: Any) -> Any:
        ordered = torch.sort(x, -1, descending=True)[0]
        sums = ordered.cumsum(-1)
        count = (1 + torch.arange(1, 65) * ordered > sums).sum(-1, keepdim=True)
        return torch.clamp(x - (sums.gather(-1, count - 1) - 1) / count, min=0)

    def powers(x: Any, weight: Any, bias: Any) -> Any:
        parts = [x**power * torch.rsqrt((x ** (2 * power)).mean(-1, keepdim=True) + 1e-6)
                 for power in (3, 2, 1)]  # fmt: skip
        return sum(each * part for each, part in zip(weight, parts, strict=True)) + bias

    yield Operator(
        "rms_norm",
        lambda *a: liger("rms_norm.LigerRMSNormFunction")(*a, 1e-6, 0.0, "llama", IN_PLACE),
        lambda x, w: normed(x, weight=w), (wide, (64,)),
    )  # fmt: skip
    yield Operator(
        "layer_norm", lambda *a: liger("layer_norm.LigerLayerNormFunction")(*a, 1e-6),
        lambda x, w, b: functional.layer_norm(x, (64,), w, b, 1e-6), (wide, (64,), (64,)),
    )  # fmt: skip
    yield Operator(
        "fused_add_rms_norm",
        lambda *a: liger("fused_add_rms_norm.LigerFusedAddRMSNormFunction")(
            *a, 1e-6, 0.0, "llama", IN_PLACE
        ),
        lambda x, r, w: (normed(x + r, weight=w), x + r), (wide, wide, (64,)),
    )  # fmt: skip
    yield Operator(
        "swiglu", liger("swiglu.LigerSiLUMulFunction"),
        lambda a, b: functional.silu(a) * b, (wide, wide),
    )  # fmt: skip
    yield Operator(
        "geglu", liger("geglu.LigerGELUMulFunction"),
        lambda a, b: functional.gelu(a, approximate="tanh") * b, (wide, wide),
    )  # fmt: skip
    yield Operator(
        "relu_squared", liger("relu_squared.LigerReLUSquaredFunction"),
        lambda x: functional.relu(x) ** 2, (wide,),
    )  # fmt: skip
    yield Operator(
        "cross_entropy",
        lambda x: first_of(liger("cross_entropy.LigerCrossEntropyFunction"), x, labels, None),
        lambda x: functional.cross_entropy(x, labels), ((16, 97),),
    )  # fmt: skip
    yield Operator(
        "fused_linear_cross_entropy",
        lambda *a: first_of(
            liger("fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction"), *a, labels
        ),
        lambda x, w: functional.cross_entropy(x @ w.T, labels), ((16, 32), (97, 32)),
    )  # fmt: skip
    yield Operator(
        "kl_div",
        lambda x: liger("kl_div.LigerKLDivLossFunction")(
            log_softmax(x), likely, "batchmean", IN_PLACE
        ),
        lambda x: functional.kl_div(log_softmax(x), likely, reduction="batchmean"), (flat,),
    )  # fmt: skip
    yield Operator(
        "jsd", lambda x: liger("jsd.LigerJSDFunction")(log_softmax(x), likely.log(), None, 0.5),
        jensen_shannon, (flat,),
    )  # fmt: skip
    yield Operator(
        "tvd", lambda x: liger("tvd.LigerTVDLossFunction")(torch.softmax(x, -1), likely),
        lambda x: (torch.softmax(x, -1) - likely).abs().sum() / 16, (flat,),
    )  # fmt: skip
    yield Operator(
        "softmax", liger("softmax.LigerSoftmaxFunction"),
        lambda x: torch.softmax(x, -1), ((8, 200),),
    )  # fmt: skip
    yield Operator(
        "sparsemax",
        lambda x: liger("sparsemax.LigerSparsemaxFunction")(x, -1),
        sparse,
        (flat,),
    )
    yield Operator(
        "dyt", liger("dyt.LigerDyTFunction"),
        lambda x, a, g, b: g * torch.tanh(a * x) + b, (wide, (1,), (64,), (64,)),
    )  # fmt: skip
    yield Operator(
        "group_norm",
        lambda *a: liger("group_norm.LigerGroupNormFunction")(*a, 8, 2, 1e-5),
        lambda x, w, b: functional.group_norm(x, 2, w, b, 1e-5), ((3, 8, 4, 5), (8,), (8,)),
    )  # fmt: skip
    yield Operator(
        "embedding", lambda w: liger("experimental.embedding.LigerEmbeddingFunction")(w, rows),
        lambda w: functional.embedding(rows, w), ((20, 64),),
    )  # fmt: skip
    yield Operator(
        "poly_norm", lambda *a: liger("poly_norm.LigerPolyNormFunction")(*a, 1e-6),
        powers, (flat, (3,), ()),
    )  # fmt: skip
    angles = torch.arange(6)[:, None] * (1e4 ** (-torch.arange(0, 16, 2) / 16))
    cosines, sines = (torch.cat([each] * 2, -1)[None] for each in (angles.cos(), angles.sin()))

    def turned(x: Any) -> Any:
        return x * cosines[:, None] + torch.cat([-x[..., 8:], x[..., :8]], -1) * sines[:, None]

    yield Operator(
        "rope", lambda q, k: liger("rope.LigerRopeFunction")(q, k, cosines, sines),
        lambda q, k: (turned(q), turned(k)), ((2, 4, 6, 16), (2, 2, 6, 16)),
    )  # fmt: skip
