"""CPU time of operations of torch, in microseconds: add_, add, a product, a view, a small step."""

import time
from collections.abc import Callable

import torch

REPETITIONS = 3_000
one, other, matrix = torch.ones(64), torch.ones(64), torch.ones(16, 16)
layer, batch = torch.nn.Linear(16, 16), torch.ones(4, 16)


def microseconds(operation: Callable[[], object]) -> float:
    operation()
    begun = time.thread_time()
    for _ in range(REPETITIONS):
        operation()
    return 1e6 * (time.thread_time() - begun) / REPETITIONS


def step() -> None:
    layer(batch).sum().backward()


with torch.no_grad():
    figures = [
        microseconds(operation)
        for operation in (
            lambda: one.add_(other),
            lambda: one + other,
            lambda: matrix @ matrix,
            lambda: one.view(8, 8),
        )
    ]
print(*figures, microseconds(step), flush=True)
