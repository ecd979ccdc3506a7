"""vLLM's kernels: attention over pages, sampling, quantised products, norms.

pip install --target LIBRARIES --no-deps vllm==0.33.0  # and what it asks for when imported
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, attention, found, without_start

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where AWQ has the eight nibbles of a word."""


def vllm(path: str) -> Any:
    return found(f"vllm.{path}")


def filled(call: Any, out: Any, *args: Any, **options: Any) -> Any:
    """What a function has stored in its output."""
    call(out, *args, **options)
    return out


def merged(prefix: Any, one: Any, suffix: Any, other: Any) -> Any:
    """Two parts of an attention, by their logarithms of sums: heads before tokens."""
    weights = torch.softmax(torch.stack([one, other]), 0).transpose(1, 2)[..., None]
    return weights[0] * prefix + weights[1] * suffix


def over_pages(q: Any, keys: Any, values: Any, pages: Any, lengths: Any) -> Any:
    out, sums = torch.empty_like(q), torch.empty(q.shape[:2])
    vllm("v1.attention.ops.triton_decode_attention.decode_attention_fwd")(
        q, keys, values, out, sums, pages, lengths,
        torch.empty(*q.shape[:2], 4, q.shape[2] + 1), 4, q.shape[2] ** -0.5, 4,
    )  # fmt: skip
    return out


def over_rows(q: Any, keys: Any, values: Any, pages: Any, lengths: Any) -> Any:
    results = []
    for row, own, length in zip(q, pages, lengths.tolist(), strict=True):
        places = (own[:, None] * 4 + torch.arange(4)).view(-1)[:length]
        k, v = (each.view(-1, *each.shape[-2:])[places].transpose(0, 1) for each in (keys, values))
        shared = q.shape[1] // k.shape[0]
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        results.append(attention(row[:, None], k, v)[:, 0])
    return torch.stack(results)


STARTS, LENGTHS = torch.tensor([0, 20]), torch.tensor([20, 44])


def prefill(q: Any, k: Any, v: Any) -> Any:
    out = torch.empty_like(q)
    vllm("v1.attention.ops.triton_prefill_attention.context_attention_fwd")(
        q, k, v, out, STARTS, LENGTHS, 44
    )
    return out


def prefill_by_rows(q: Any, k: Any, v: Any) -> Any:
    return torch.cat([
        attention(*(each[a : a + n].transpose(0, 1) for each in (q, k, v)), is_causal=True
                  ).transpose(0, 1)
        for a, n in zip(STARTS.tolist(), LENGTHS.tolist(), strict=True)
    ])  # fmt: skip


def nibbles(words: Any) -> Any:
    """Eight numbers of four bits from each word, in AWQ's order."""
    shifts = 4 * torch.tensor(ORDER)
    return (words[..., None].long() >> shifts & 15).view(words.shape[0], -1)


def awq(words: Any, scales: Any, zeros: Any) -> Any:
    groups = words.shape[0] // scales.shape[0]
    level = nibbles(zeros).repeat_interleave(groups, 0)
    return (nibbles(words) - level) * scales.repeat_interleave(groups, 0)


def eight_bits(x: Any, width: int) -> Any:
    blocks = x.view(*x.shape[:-1], -1, width)
    scales = blocks.abs().amax(-1) / 127
    return (blocks / scales[..., None]).view(x.shape), scales


def dequantised(call: Any, width: int) -> Any:
    """What is left of values that were quantised: within half a step of each."""

    def there_and_back(x: Any) -> Any:
        coded, scales = call(x)
        blocks = coded.float().view(*x.shape[:-1], -1, width) * scales[..., None]
        return (blocks.view(x.shape) - x).abs() < scales.amax()

    return there_and_back


def operators() -> Iterator[Operator]:
    without_start("vllm")
    draw, layers = torch.randn, "model_executor.layers"
    parts = draw(6, 3, 32), draw(3, 6), draw(6, 3, 32), draw(3, 6)
    yield Operator(
        "merge_attn_states",
        lambda *a: filled(vllm("v1.attention.ops.triton_merge_attn_states.merge_attn_states"),
                          torch.empty(6, 3, 32), *a),
        merged, parts,
    )  # fmt: skip
    pages, lengths = torch.randperm(16).view(2, 8).int(), torch.tensor([30, 7], dtype=torch.int32)
    for name, heads in (("decode_attention", 4), ("decode_attention_grouped", 2)):
        cached = draw(16, 4, heads, 32), draw(16, 4, heads, 32)
        yield Operator(name, over_pages, over_rows, (draw(2, 4, 32), *cached, pages, lengths), 1e-2)
    yield Operator("prefill_attention", prefill, prefill_by_rows,
                   tuple(draw(64, 2, 32) for _ in range(3)), 1e-2)  # fmt: skip
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (128, 8), dtype=torch.int32)
    zeros = torch.randint(-(1 << 31), (1 << 31) - 1, (2, 8), dtype=torch.int32)
    scales = torch.rand(2, 64)
    yield Operator("awq_dequantize", vllm(f"{layers}.quantization.awq_triton.awq_dequantize_triton"),
                   awq, (words, scales, zeros))  # fmt: skip
    yield Operator(
        "awq_gemm", vllm(f"{layers}.quantization.awq_triton.awq_gemm_triton"),
        lambda x, words, scales, zeros, _: x @ awq(words, scales, zeros),
        (draw(16, 128), words, scales, zeros, 2), 1e-2,
    )  # fmt: skip
    for name, width, options in (
        ("per_token_quant_int8", 128, ()),
        ("per_token_group_quant_int8", 32, (32,)),
    ):
        yield Operator(
            name,
            dequantised(
                lambda x, name=name, options=options: vllm(
                    f"{layers}.quantization.utils.int8_utils.{name}"
                )(x, *options), width,
            ),
            lambda x: torch.ones_like(x).bool(), (draw(4, 128),),
        )  # fmt: skip
    a, b = (torch.randint(-9, 9, size, dtype=torch.int8) for size in ((33, 64), (64, 48)))
    one, other = torch.rand(33, 1), torch.rand(48, 1)
    yield Operator(
        "scaled_mm", lambda *t: vllm(
            f"{layers}.quantization.compressed_tensors.triton_scaled_mm.triton_scaled_mm"
        )(*t, torch.float32),
        lambda a, b, one, other: (a.float() @ b.float()) * one * other.T, (a, b, one, other),
    )  # fmt: skip
    yield Operator(
        "rms_norm_gated",
        lambda x, w, z: vllm(f"{layers}.mamba.ops.layernorm_gated.rms_norm_gated")(x, w, None, z),
        lambda x, w, z: functional.rms_norm(x, [64], w, 1e-6) * functional.silu(z),
        (draw(8, 64), draw(64), draw(8, 64)),
    )  # fmt: skip
    same = "model_executor.determinism.batch_invariant"
    yield Operator("matmul_persistent", vllm(f"{same}.matmul_persistent"), torch.matmul,
                   (draw(70, 64), draw(64, 40)), 1e-2)  # fmt: skip
    yield Operator("log_softmax", vllm(f"{same}.log_softmax"), lambda x: x.log_softmax(-1),
                   (draw(5, 77),))  # fmt: skip
    yield Operator("mean_dim", vllm(f"{same}.mean_dim"), torch.mean, (draw(5, 7, 9), 1))
    yield Operator("rms_norm", vllm(f"{same}.rms_norm_batch_invariant"),
                   lambda x, w: functional.rms_norm(x, [64], w, 1e-6), (draw(3, 5, 64), draw(64)))  # fmt: skip
    rows = torch.arange(5, dtype=torch.int32)
    warm, least = torch.rand(5) + 0.5, torch.rand(5) / 4
    yield Operator("temperature", lambda *a: filled(vllm("v1.worker.gpu.sample.gumbel.apply_temperature"), *a),
                   lambda x, _, t: x / t[:, None], (draw(5, 300), rows, warm))  # fmt: skip
    yield Operator(
        "min_p", lambda *a: filled(vllm("v1.worker.gpu.sample.min_p.apply_min_p"), *a),
        lambda x, _, p: x.masked_fill(x < x.amax(-1, keepdim=True) + p.log()[:, None], -torch.inf),
        (draw(5, 300), rows, least),
    )  # fmt: skip
    most = torch.tensor([3, 300, 17, 1, 40])
    yield Operator(
        "top_k", lambda x, k: vllm("v1.sample.ops.topk_topp_triton.apply_top_k_top_p_triton")(x, k, None),
        lambda x, k: x.masked_fill(
            x < x.sort(-1, descending=True)[0].gather(1, k[:, None] - 1), -torch.inf
        ),
        (draw(5, 300), most),
    )  # fmt: skip
