"""Packages with an operator or a few: scans, attention of 8 bits, a loss with locks, Lion.

pip install --target LIBRARIES --no-deps accelerated-scan==0.3.1 lion-pytorch==0.2.5 \
    sageattention==1.0.6 cut-cross-entropy==25.1.1
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, attention, found


def scanned(gates: Any, tokens: Any) -> Any:
    state, states = torch.zeros_like(tokens[..., 0]), []
    for gate, token in zip(gates.unbind(-1), tokens.unbind(-1), strict=True):
        state = gate * state + token
        states.append(state)
    return torch.stack(states, -1)


def lion(p: Any, grad: Any, average: Any) -> Any:
    copies = p.clone().cuda(), grad.cuda(), average.clone().cuda()
    found("lion_pytorch.triton.update_fn")(*copies, 0.1, 0.01, 0.9, 0.99)
    return copies[0], copies[2]


def lion_of_torch(p: Any, grad: Any, average: Any) -> Any:
    step = torch.sign(0.9 * average + 0.1 * grad)
    return p * (1 - 0.1 * 0.01) - 0.1 * step, 0.99 * average + 0.01 * grad


def in_half(function: Any, **options: Any) -> Any:
    def call(*args: Any) -> Any:
        halves = (each.half().cuda() for each in args)
        return function(*halves, **options).float()

    return call


def loss(hidden: Any, weight: Any, labels: Any) -> Any:
    # Where the blocks of its own choice are no larger than the operands: gradients take locks.
    return found("cut_cross_entropy.linear_cross_entropy")(
        hidden, weight, labels, filter_eps=None
    ).float()


def operators() -> Iterator[Operator]:
    torch.manual_seed(4)
    # Shorter sequences than a block are read beyond their end, by gradients of scans, and by causal
    # attention of 8 bits: both are refused here.
    gates, tokens = torch.rand(1, 2, 2048), torch.randn(1, 2, 2048)
    leaf = gates.requires_grad_(), tokens.requires_grad_()
    yield Operator("scan", found("accelerated_scan.scalar.scan"), scanned, leaf)
    turns = torch.polar(torch.rand(2, 3, 64), 6 * torch.rand(2, 3, 64))
    yield Operator(
        "complex_scan", found("accelerated_scan.complex.scan"), scanned,
        (turns, torch.randn(2, 3, 64, dtype=torch.complex64)),
    )  # fmt: skip
    yield Operator("lion", lion, lion_of_torch, tuple(torch.randn(3, 1000)))
    for size in (64, 96):
        for is_causal in (False, True):
            yield Operator(
                f"sage_{size}{'_causal' if is_causal else ''}",
                in_half(found("sageattention.sageattn"), is_causal=is_causal),
                lambda q, k, v, is_causal=is_causal: attention(q, k, v, is_causal=is_causal),
                tuple(torch.randn(3, 1, 2, 256, size)), 1e-1,
            )  # fmt: skip
    labels = torch.randint(0, 130, (40,))
    hidden, weight = torch.randn(40, 32), torch.randn(130, 32)
    yield Operator(
        "cut_cross_entropy",
        lambda x, w: loss(x.bfloat16(), w.bfloat16(), labels),
        lambda x, w: functional.cross_entropy(
            x.bfloat16().float() @ w.bfloat16().float().T, labels
        ),
        (hidden.requires_grad_(), weight.requires_grad_()), 1e-2,
    )  # fmt: skip
