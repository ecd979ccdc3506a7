"""conch, kernels of perception and of serving, most of them against its own references in torch.

pip install --target LIBRARIES --no-deps conch-triton-kernels==1.3
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, found


def on_copies(path: str, *names: int, **options: Any) -> Any:
    """A function that writes into its arguments: those by number are its results."""

    def call(*args: Any) -> Any:
        copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        found(path)(*copies, **options)
        return tuple(copies[each] for each in names)

    return call


def halves(x: Any) -> Any:
    return x.chunk(2, -1)


def normed(x: Any, weight: Any) -> Any:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def quantized(_out: Any, x: Any, scale: Any) -> Any:
    return (torch.clamp(x / scale, -128, 127).to(torch.int8),)


def turned(positions: Any, query: Any, key: Any, size: int, cache: Any) -> Any:
    cos, sin = cache[positions][:, None].chunk(2, -1)

    def one(x: Any) -> Any:
        first, second = x.view(len(positions), -1, size).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).view_as(x)

    return one(query), one(key)


def kept(boxes: Any, scores: Any, threshold: float) -> Any:
    """The boxes that no better one overlaps by more than the threshold, best first."""
    chosen: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        low = torch.maximum(boxes[chosen, :2], boxes[index, :2])
        high = torch.minimum(boxes[chosen, 2:], boxes[index, 2:])
        common = (high - low).clamp(min=0).prod(-1)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
        if not (common / (area[chosen] + area[index] - common) > threshold).any():
            chosen.append(index)
    return torch.tensor(chosen)


def pooled(features: Any, cells: Any, starts: Any, lengths: Any, *sizes: int) -> Any:
    out = torch.zeros(*sizes, features.shape[1])
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        row, column, deep, batch = cells[start].tolist()
        out[batch, deep, row, column] = features[start : start + length].sum(0)
    return out


def operators() -> Iterator[Operator]:
    torch.manual_seed(2)
    x, weight, residual = torch.randn(6, 64), torch.randn(64), torch.randn(6, 64)
    yield Operator(
        "silu_and_mul", found("conch.ops.activation.silu_and_mul.silu_and_mul"),
        lambda x: functional.silu(halves(x)[0]) * halves(x)[1], (x,),
    )  # fmt: skip
    yield Operator(
        "gelu_tanh_and_mul", found("conch.ops.activation.gelu_tanh_and_mul.gelu_tanh_and_mul"),
        lambda x: functional.gelu(halves(x)[0], approximate="tanh") * halves(x)[1], (x,),
    )  # fmt: skip
    normalization = "conch.ops.normalization"
    yield Operator(
        "rms_norm", lambda *a: found(f"{normalization}.rms_norm.rms_norm")(*a, 1e-6), normed,
        (x, weight),
    )  # fmt: skip
    yield Operator(
        "fused_add_rms_norm",
        lambda *a: found(f"{normalization}.rms_norm.fused_add_rms_norm")(*a, 1e-6),
        lambda x, r, w: (normed(x + r, w), x + r), (x, residual, weight),
    )  # fmt: skip
    yield Operator(
        "gemma_rms_norm",
        lambda *a: found(f"{normalization}.gemma_rms_norm.gemma_rms_norm")(*a, 1e-6),
        lambda x, w: normed(x, 1 + w), (x, weight),
    )  # fmt: skip
    yield Operator(
        "scaled_int8_quant", on_copies("conch.ops.quantization.int8.static_scaled_int8_quant", 0),
        quantized, (torch.zeros(6, 64, dtype=torch.int8), x, torch.tensor([0.013])),
    )  # fmt: skip
    angles = torch.arange(16)[:, None] / 1e4 ** (torch.arange(0, 32, 2) / 32)
    yield Operator(
        "rotary_embedding",
        on_copies("conch.ops.embedding.rotary_embedding.rotary_embedding", 1, 2), turned,
        (torch.tensor([3, 0, 7, 15, 4]), torch.randn(5, 64), torch.randn(5, 32), 32,
         torch.cat([angles.cos(), angles.sin()], -1)),
    )  # fmt: skip
    corners = torch.rand(40, 2) * 20
    yield Operator(
        "nms", found("conch.ops.vision.nms.nms"), kept,
        (torch.cat([corners, corners + 1 + 9 * torch.rand(40, 2)], -1), torch.rand(40), 0.4),
    )  # fmt: skip
    places = torch.tensor([[0, 1, 0, 0], [2, 1, 1, 0], [3, 0, 1, 1]])
    cells = places.repeat_interleave(torch.tensor([4, 1, 5]), 0).int()
    pool = "conch.ops.vision.bev_pool"
    starts, lengths = torch.tensor([0, 4, 5]).int(), torch.tensor([4, 1, 5]).int()
    yield Operator(
        "bev_pool", found(f"{pool}.bev_pool"), pooled,
        (torch.randn(10, 16), cells, starts, lengths, 2, 2, 4, 2),
    )  # fmt: skip
    yield Operator(
        "bev_pool_backward", found(f"{pool}.bev_pool_backward"),
        lambda g, at, *_: torch.stack([g[each[3], each[2], each[0], each[1]] for each in at.long()]),
        (torch.randn(2, 2, 4, 2, 16), cells, starts, lengths),
    )  # fmt: skip
    keys, values, new = torch.randn(4, 8, 2, 16), torch.randn(4, 8, 2, 16), torch.randn(2, 3, 2, 16)
    slots = torch.tensor([9, 0, 31])

    def cached(key: Any, value: Any, keys: Any, values: Any, slots: Any) -> Any:
        keys, values = keys.clone(), values.clone()
        keys.view(-1, 2, 16)[slots], values.view(-1, 2, 16)[slots] = key, value
        return keys, values

    yield Operator(
        "reshape_and_cache",
        on_copies("conch.ops.vllm.reshape_and_cache.reshape_and_cache", 2, 3), cached,
        (new[0], new[1], keys, values, slots),
    )  # fmt: skip
    scored = partial(functional.scaled_dot_product_attention, enable_gqa=True)

    def attended(query: Any, keys: Any, values: Any, table: Any, lengths: Any) -> Any:
        rows = []
        for one, blocks, length in zip(query, table.long(), lengths.tolist(), strict=True):
            k, v = (each[blocks].flatten(0, 1)[:length].transpose(0, 1) for each in (keys, values))
            rows.append(scored(one[:, None], k, v)[:, 0])
        return torch.stack(rows)

    yield Operator(
        "paged_attention", found("conch.ops.attention.paged_attention.paged_attention"), attended,
        (torch.randn(2, 4, 32), torch.randn(6, 16, 2, 32), torch.randn(6, 16, 2, 32),
         torch.tensor([[4, 1], [0, 5]]).int(), torch.tensor([23, 9]).int()), 2e-3,
    )  # fmt: skip
