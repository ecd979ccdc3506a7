"""Operators of two public libraries of Triton kernels, with gradients, against torch on the CPU.

    pip install --target LIBRARIES liger-kernel==0.8.5 transformers
    pip install --target LIBRARIES --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops
    PYTHONPATH=LIBRARIES rankwise sim run --triton benchmarks/programs/public_kernels.py

With `--topology default` the kernels run on the simulated machine. What is not right is told with
the library's own words. The figures are in docs/sim/kernels.md.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.nn import functional

Tensors = Callable[..., Any]


class Operator(NamedTuple):
    """An operator, what it should be, the shapes of its operands, and how near it has to come."""

    name: str
    ours: Tensors
    reference: Tensors
    shapes: tuple[tuple[int, ...], ...]
    tolerance: float = 1e-3


def found(path: str) -> Any:
    """Something of a library, which is imported when it is called."""

    def call(*args: Any, **options: Any) -> Any:
        module, _, name = path.rpartition(".")
        function = getattr(import_module(module), name)
        return getattr(function, "apply", function)(*args, **options)

    return call


def first_of(call: Tensors, *args: Any, **options: Any) -> Any:
    return call(*args, **options)[0]


def by_heads(call: Tensors, *args: Any) -> Any:
    """Of what has the heads before the sequence."""
    result = call(*(each.transpose(1, 2) for each in args))
    return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)


def unit(x: Any) -> Any:
    return functional.normalize(x, dim=-1)


def liger(path: str) -> Any:
    return found(f"liger_kernel.ops.{path}")


def fla(path: str) -> Any:
    return found(f"fla.{path}")


IN_PLACE = False
"""What some operators take last."""


def of_liger() -> Iterator[Operator]:
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


def loss_of_fla() -> Any:
    return import_module("fla.modules.fused_cross_entropy").FusedCrossEntropyLoss()


def of_flash_linear_attention() -> Iterator[Operator]:
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
        lambda x: loss_of_fla()(x, labels),
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


def compare(operator: Operator) -> None:
    """Compare results and gradients; raises what is wrong."""
    drawn = [torch.randn(*shape) if shape else torch.tensor(0.3) for shape in operator.shapes]
    both = []
    for function in (operator.ours, operator.reference):
        operands = [each.clone().requires_grad_() for each in drawn]
        results = function(*operands)
        results = results if isinstance(results, tuple) else (results,)
        torch.manual_seed(1)
        torch.autograd.backward(results, [torch.randn(each.shape) for each in results])
        both.append(([each.detach() for each in results], [each.grad for each in operands]))
    (ours, gradients), (wanted, wanted_gradients) = both
    near = operator.tolerance
    torch.testing.assert_close(ours, wanted, atol=near, rtol=near)
    torch.testing.assert_close(gradients, wanted_gradients, atol=5 * near, rtol=5 * near)


def main() -> None:
    for library, operators in (
        ("Liger-Kernel", of_liger),
        ("flash-linear-attention", of_flash_linear_attention),
    ):
        torch.manual_seed(0)
        count = right = 0
        for operator in operators():
            count += 1
            try:
                compare(operator)
            except Exception as error:  # noqa: BLE001 (whatever it is, the others go on)
                print(f"{library}: {operator.name}: {type(error).__name__}: {error}")
            else:
                right += 1
        print(f"{library}: {right} of {count} right")


if __name__ == "__main__":
    main()
