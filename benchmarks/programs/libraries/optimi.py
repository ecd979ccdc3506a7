"""optimi's optimisers, three steps each, against its own without Triton; AdamW against torch's, too.

pip install --target LIBRARIES --no-deps torch-optimi==0.3.3
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from libraries import Operator, named

NAMES = ("SGD", "Adam", "AdamW", "Lion", "StableAdamW", "RAdam", "Ranger", "Adan")


def three_steps(kind: Callable[[], Any], **options: Any) -> Callable[..., Any]:
    def call(start: Any, gradients: Any) -> Any:
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind()([parameter], lr=0.05, **options)
        for each in gradients:
            parameter.grad = each.clone()
            optimizer.step()
        return parameter.detach()

    return call


def operators() -> Iterator[Operator]:
    torch.manual_seed(3)
    start, gradients = torch.randn(9, 150, device="cuda"), torch.randn(3, 9, 150, device="cuda")
    for name in NAMES:
        kind, option = (lambda name=name: named(f"optimi.{name}")), {"weight_decay": 0.01}
        yield Operator(
            name,
            three_steps(kind, **option, triton=True),
            three_steps(kind, **option, triton=False, foreach=False),
            (start, gradients),
        )
    yield Operator(
        "AdamW_of_torch",
        three_steps(lambda: named("optimi.AdamW"), weight_decay=0.01, triton=True, eps=1e-8,
                    betas=(0.9, 0.999)),
        three_steps(lambda: torch.optim.AdamW, weight_decay=0.01),
        (start, gradients),
    )  # fmt: skip
