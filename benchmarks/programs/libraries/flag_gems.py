"""FlagGems: operators of torch, most of them by its name.

SOURCES/FlagGems/src in PYTHONPATH, where SOURCES/FlagGems is a checkout
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, attention, first_of, found, named

os.environ.setdefault("GEMS_VENDOR", "nvidia")  # else it looks for the device


def gems(name: str) -> Any:
    return found(f"flag_gems.ops.{name}")


def fused(name: str) -> Any:
    return found(f"flag_gems.fused.{name}")


def operators() -> Iterator[Operator]:
    x, y = torch.randn(7, 65), torch.randn(7, 65)
    positive, small, b = x.abs() + 0.1, torch.rand(7, 65) * 1.8 - 0.9, x > 0
    i, j = torch.randint(-50, 50, (7, 65)), torch.randint(1, 50, (7, 65))
    vector, square = torch.randn(40), torch.randn(33, 40)

    def alike(names: str, *operands: Any) -> Iterator[Operator]:
        for name in names.split():
            yield Operator(name, gems(name), getattr(torch, name), operands, 2e-5)

    def special(name: str, ours: Any, reference: Any, *operands: Any) -> Operator:
        half = any(getattr(each, "dtype", None) == torch.float16 for each in operands)
        return Operator(name, ours, reference, operands, 2e-2 if half else 2e-5)

    yield from alike(
        "abs neg exp exp2 sin cos tanh sigmoid relu erf isnan isinf isfinite sum mean max min "
        "all any argmax argmin count_nonzero angle diag_embed", x
    )  # fmt: skip
    yield from alike("rsqrt reciprocal log sqrt prod", positive)
    yield from alike("atan", small)
    yield from alike("bitwise_not", i)
    yield from alike("floor_divide remainder eq ne isin", i, j)
    yield from alike("add sub mul maximum minimum lt le gt ge isclose", x, y)
    yield from alike("logical_and logical_or logical_xor", b, y > 0)
    yield from alike("logical_not nonzero", b)
    yield from alike("mm", square, torch.randn(40, 29))
    yield from alike("bmm", torch.randn(3, 17, 40), torch.randn(3, 40, 21))
    yield from alike("addmm", torch.randn(29), square, torch.randn(40, 29))
    yield from alike("mv", square, vector)
    yield from alike("dot vdot", vector, torch.randn(40))
    yield Operator("outer", named("flag_gems.outer"), torch.outer, ((9,), (12,)))
    yield from alike("triu", square)
    yield from alike("diag", vector)
    yield from alike("kron", torch.randn(3, 4), torch.randn(5, 6))
    yield from alike("polar", positive, x)
    yield from alike("addcmul addcdiv", x, y, positive)
    yield from alike("masked_select", x, b)
    for name in ("silu", "gelu", "elu", "celu", "softplus"):
        yield special(name, gems(name), getattr(functional, name), x)
    yield special("gelu_tanh", lambda t: gems("gelu")(t, approximate="tanh"),
                  lambda t: functional.gelu(t, approximate="tanh"), x)  # fmt: skip
    yield special("log_sigmoid", gems("log_sigmoid"), functional.logsigmoid, x)
    yield special("nan_to_num", gems("nan_to_num"), torch.nan_to_num, x.log())
    yield special("true_divide", gems("true_divide"), torch.div, x, positive)
    yield special("floor_divide_f32", gems("floor_divide"), torch.floor_divide, x, positive)
    yield special("remainder_f32", gems("remainder"), torch.remainder, x, positive)
    yield special("pow_tensor_tensor", gems("pow_tensor_tensor"), torch.pow, positive, y)
    yield special("pow_tensor_scalar", gems("pow_tensor_scalar"), torch.pow, x, 3)
    for name in ("bitwise_and", "bitwise_or"):
        yield special(name, gems(f"{name}_tensor"), getattr(torch, name), i, j)
    yield special("clamp", gems("clamp"), torch.clamp, x, -0.5, 0.5)
    yield special("where", gems("where_self"), torch.where, b, x, y)
    yield special("lerp", gems("lerp_scalar"), torch.lerp, x, y, 0.3)
    for name in ("max", "min"):
        yield special(f"{name}_dim", gems(f"{name}_dim"), getattr(torch, name), x, 1)
    for name in ("argmax", "argmin", "softmax", "log_softmax", "cumsum", "cummax", "cummin"):
        yield special(f"{name}_dim", gems(name), getattr(torch, name), x, 1)
    yield special("softmax_0", gems("softmax"), torch.softmax, x, 0)
    for name in ("sum", "mean"):
        yield special(f"{name}_dim", gems(f"{name}_dim"), getattr(torch, name), x, [1])
    yield special("amax", gems("amax"), torch.amax, x, [1])
    yield special("prod_dim", gems("prod_dim"), torch.prod, positive, 1)
    yield special("var_mean", gems("var_mean"), torch.var_mean, x, [1])
    yield special("std", gems("std"), torch.std, x, [1])
    yield special("vector_norm", gems("vector_norm"), torch.linalg.vector_norm, x, 2, [1])
    ones, zeros = torch.ones(65), torch.zeros(65)
    yield special("layer_norm", lambda *a: first_of(gems("layer_norm"), *a),
                  functional.layer_norm, x, [65], ones, zeros)  # fmt: skip
    yield special("rms_norm", gems("rms_norm"), functional.rms_norm, x, [65], ones)
    image = torch.randn(2, 4, 12, 12)
    yield special(
        "group_norm",
        lambda t: first_of(gems("group_norm"), t, torch.ones(4), torch.zeros(4), 2, 4, 144, 2),
        lambda t: functional.group_norm(t, 2), image,
    )  # fmt: skip
    yield special("embedding", gems("embedding"), lambda w, k: functional.embedding(k, w),
                  torch.randn(30, 16), torch.randint(0, 30, (5, 3)))  # fmt: skip
    yield special("gather", gems("gather"), torch.gather, x, 1, torch.randint(0, 65, (7, 9)))
    yield special("index_select", gems("index_select"), torch.index_select, x, 1,
                  torch.randint(0, 65, (9,)))  # fmt: skip
    places = torch.stack([torch.randperm(65)[:9] for _ in range(7)])
    yield special("scatter", gems("scatter"), torch.scatter, x, 1, places, torch.randn(7, 9))
    yield special("masked_fill", gems("masked_fill"), torch.masked_fill, x, b, 3.0)
    yield special("flip", gems("flip"), torch.flip, x, [1])
    for name in ("tile", "repeat"):
        yield special(name, gems(name), torch.tile, x, [2, 3])
    for name in ("cat", "stack"):
        yield special(name, lambda s, t, name=name: gems(name)([s, t], 1),
                      lambda s, t, name=name: getattr(torch, name)([s, t], 1), x, y)  # fmt: skip
    yield special("hstack", lambda *a: gems("hstack")(a), lambda *a: torch.hstack(a), x, y)
    yield special("vstack", lambda *a: gems("vstack")(a), lambda *a: torch.vstack(a), x, y)
    yield special("repeat_interleave", gems("repeat_interleave_self_int"),
                  torch.repeat_interleave, x, 3, 1)  # fmt: skip
    yield special("pad", lambda t: gems("pad")(t, (1, 2), "constant", 1.0),
                  lambda t: functional.pad(t, (1, 2), value=1.0), x)  # fmt: skip
    yield special("topk", gems("topk"), torch.topk, x, 5)
    yield special("sort", gems("sort"), torch.sort, x)
    yield special("unique", lambda t: first_of(gems("_unique2"), t, True), torch.unique, i)
    yield special("arange", gems("arange"), torch.arange, 40)
    yield special("linspace", gems("linspace"), torch.linspace, 0, 1, 33)
    yield special("full", gems("full"), torch.full, [3, 5], 2.5)
    yield special("eye", gems("eye"), torch.eye, 7)
    yield special("ones", gems("ones"), torch.ones, [9])
    yield special("upsample_nearest2d", gems("upsample_nearest2d"),
                  functional.interpolate, image, [24, 24])  # fmt: skip
    bicubic = torch.ops.aten._upsample_bicubic2d_aa  # noqa: SLF001
    yield special(
        "upsample_bicubic2d", gems("_upsample_bicubic2d_aa"), bicubic, image, [9, 9], False
    )
    yield special("conv2d", gems("conv2d"), functional.conv2d, image, torch.randn(8, 4, 3, 3),
                  None, 1, 1)  # fmt: skip
    yield special("conv1d", gems("conv1d"), functional.conv1d, torch.randn(2, 4, 20),
                  torch.randn(8, 4, 3), None, 1, 1)  # fmt: skip
    yield special(
        "conv_depthwise2d",
        lambda t, w: gems("_conv_depthwise2d")(t, w, (3, 3), None, (1, 1), (1, 1), (1, 1)),
        lambda t, w: functional.conv2d(t, w, None, 1, 1, groups=4), image, torch.randn(4, 1, 3, 3),
    )  # fmt: skip
    labels = torch.randint(0, 65, (7,))
    yield special("cross_entropy_loss", fused("cross_entropy_loss"), functional.cross_entropy,
                  x, labels)  # fmt: skip
    yield special("nll_loss", lambda *a: first_of(gems("nll_loss_forward"), *a, None, 1, -100),
                  functional.nll_loss, x, labels)  # fmt: skip
    yield special("mse_loss", gems("mse_loss"), lambda *a: functional.mse_loss(*a[:2]), x, y, 1)
    yield special("glu", gems("glu"), functional.glu, torch.randn(4, 32))
    yield special("dropout", lambda t: first_of(gems("dropout"), t, 0.0, True), torch.clone, x)
    heads = [torch.randn(1, 2, 128, 64).half() for _ in range(3)]
    yield special("sdpa", gems("scaled_dot_product_attention"), attention, *heads)
    yield special(
        "sdpa_causal", lambda *a: gems("scaled_dot_product_attention")(*a, is_causal=True),
        lambda *a: attention(*a, is_causal=True), *heads,
    )  # fmt: skip
    for name in ("silu", "gelu"):
        yield special(
            f"{name}_and_mul", fused(f"{name}_and_mul"),
            lambda s, t, name=name: getattr(functional, name)(s) * t, x, y,
        )  # fmt: skip
