"""flash-linear-attention, with gradients.

pip install --target LIBRARIES --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, first_of, found


def by_heads(call: Callable[..., Any], *args: Any) -> Any:
    """Of what has the heads before the sequence."""
    result = call(*(each.transpose(1, 2) for each in args))
    return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)


def unit(x: Any) -> Any:
    return functional.normalize(x, dim=-1)


def fla(path: str) -> Any:
    return found(f"fla.{path}")


def loss_of_fla() -> Any:
    return import_module("fla.modules.fused_cross_entropy").FusedCrossEntropyLoss()


def operators() -> Iterator[Operator]:
    wide = (2, 16, 64)
    heads, gates = (1, 64, 2, 32), (1, 64, 2)
    labels = torch.randint(0, 97, (16,))
    gated, sigmoid = functional.logsigmoid, torch.sigmoid
    delta = fla("ops.delta_rule.chunk_delta_rule")
    recurrent_gla = fla("ops.gla.naive.naive_recurrent_gla")
    yield Operator(
        "layer_norm", fla("modules.layernorm.layer_norm"),
        lambda x, w, b: functional.layer_norm(x, (64,), w, b), (wide, (64,), (64,)),
    )  # fmt: skip
    yield Operator(
        "rms_norm", lambda x, w: fla("modules.layernorm.rms_norm")(x, w, None),
        lambda x, w: functional.rms_norm(x, (64,), w, 1e-5), (wide, (64,)),
    )  # fmt: skip
    yield Operator(
        "swiglu", fla("modules.activations.swiglu"),
        lambda a, b: functional.silu(a) * b, (wide, wide),
    )  # fmt: skip
    yield Operator("swish", fla("modules.activations.swish"), functional.silu, (wide,))
    yield Operator("logsigmoid", fla("modules.activations.logsigmoid"), gated, (wide,))
    yield Operator("l2norm", fla("modules.l2norm.l2norm"), unit, (wide,))
    yield Operator(
        "fused_cross_entropy",
        lambda x: loss_of_fla()(x.cuda(), labels.cuda()),  # it takes tensors of a GPU only
        lambda x: functional.cross_entropy(x, labels), ((16, 97),),
    )  # fmt: skip
    for name in ("fused_recurrent_gla", "chunk_gla"):
        yield Operator(
            name,
            lambda q, k, v, g, name=name: first_of(fla(f"ops.gla.{name}"), q, k, v, gated(g)),
            lambda q, k, v, g: recurrent_gla(q, k, v, gated(g))[0], (heads,) * 4, 1e-2,
        )  # fmt: skip
    yield Operator(
        "chunk_retention", partial(first_of, fla("ops.retention.chunk_retention")),
        partial(by_heads, fla("ops.retention.naive.naive_retention")), (heads,) * 3, 1e-2,
    )  # fmt: skip
    yield Operator(
        "chunk_delta_rule",
        lambda q, k, v, b: delta(*(x.bfloat16() for x in (q, unit(k), v, sigmoid(b))))[0].float(),
        lambda q, k, v, b: by_heads(
            fla("ops.delta_rule.naive.delta_rule_recurrence"), q, unit(k), v, sigmoid(b)
        ),
        (heads, heads, heads, gates), 3e-2,
    )  # fmt: skip
    yield Operator(
        "chunk_gated_delta_rule",
        lambda q, k, v, b, g: first_of(
            fla("ops.gated_delta_rule.chunk_gated_delta_rule"), q, unit(k), v, gated(g), sigmoid(b)
        ),
        lambda q, k, v, b, g: first_of(
            fla("ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule"),
            q, unit(k), v, sigmoid(b), gated(g),
        ),
        (heads, heads, heads, gates, gates), 3e-2,
    )  # fmt: skip
