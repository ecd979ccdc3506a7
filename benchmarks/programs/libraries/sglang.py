"""SGLang's kernels: attention, sampling, norms, quantisation.

pip install --target LIBRARIES --no-deps sglang==0.5.23  # and what it asks for when imported
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, first_of, found, without_start


def sglang(path: str) -> Any:
    return found(f"sglang.{path}")


def merged(prefix: Any, one: Any, suffix: Any, other: Any) -> Any:
    """Two parts of an attention by their logarithms of sums: tokens before heads."""
    weights = torch.softmax(torch.stack([one, other]), 0)[..., None]
    return weights[0] * prefix + weights[1] * suffix, torch.logaddexp(one, other)


def best(logits: Any, cap: float, width: int, offset: int) -> Any:
    value, place = (cap * torch.tanh(logits[:, :width] / cap)).max(-1)
    return torch.stack([value, (place + offset).float()], 1)


def operators() -> Iterator[Operator]:
    without_start("sglang")
    draw, ops = torch.randn, "kernels.ops"
    yield Operator("merge_state", sglang(f"{ops}.attention.merge_state.merge_state_triton"), merged,
                   (draw(6, 3, 32), draw(6, 3), draw(6, 3, 32), draw(6, 3)))  # fmt: skip
    yield Operator("rmsnorm_fp32", sglang(f"{ops}.layernorm.rmsnorm_fp32.rmsnorm_fp32"),
                   lambda x, w, eps: functional.rms_norm(x, [64], w, eps),
                   (draw(5, 64), draw(64), 1e-6))  # fmt: skip
    chances = torch.softmax(draw(4, 500), -1)

    def without_tail(p: Any, top: float) -> Any:
        ordered, places = p.sort(-1)
        kept = (ordered.cumsum(-1) >= 1 - top).gather(1, places.argsort(-1))
        return p * kept / (p * kept).sum(-1, keepdim=True)

    def largest(p: Any, k: int) -> Any:
        kept = p >= p.topk(k).values[:, -1:]
        return p * kept / (p * kept).sum(-1, keepdim=True)

    yield Operator("top_p_renorm", sglang(f"{ops}.sampling.renorm_triton.top_p_renorm_probs_triton"),
                   without_tail, (chances, 0.7))  # fmt: skip
    yield Operator("top_k_renorm", sglang(f"{ops}.sampling.renorm_triton.top_k_renorm_probs_triton"),
                   largest, (chances, 20))  # fmt: skip
    yield Operator(
        "temperature_softmax",
        sglang(f"{ops}.sampling.temperature_softmax.temperature_softmax"),
        lambda x, t: torch.softmax(x / t, -1), (draw(2, 40_000), torch.rand(2, 1) + 0.5),
    )  # fmt: skip
    yield Operator("softcap_row_argmax", sglang(f"{ops}.sampling.softcap_row_argmax.softcap_row_argmax"),
                   best, (draw(3, 5000), 5.0, 4700, 1000))  # fmt: skip
    yield Operator(
        "row_logsumexp", sglang("srt.layers.logsumexp.row_logsumexp"),
        lambda x: (x.amax(-1), x.logsumexp(-1) - x.amax(-1)), (draw(4, 777),),
    )  # fmt: skip
    yield Operator(
        "row_logsumexp_topk", lambda x: first_of(sglang("srt.layers.logsumexp.row_logsumexp_topk"), x, 8),
        lambda x: x.amax(-1), (draw(4, 777),),
    )  # fmt: skip
    yield Operator(
        "act_quant",
        lambda x: tuple(t.float() for t in sglang(f"{ops}.quantization.act_quant_triton.act_quant")(x)),
        lambda x: (
            (x.view(4, 2, 128) / (x.view(4, 2, 128).abs().amax(-1, keepdim=True) / 448))
            .to(torch.float8_e4m3fn).float().view(4, 256),
            x.view(4, 2, 128).abs().amax(-1) / 448,
        ),
        (draw(4, 256),), 0.1,
    )  # fmt: skip
