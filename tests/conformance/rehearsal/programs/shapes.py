"""Which shapes each collective takes, and which it refuses before anything is sent."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, zeros

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group()


def each(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [zeros(*shape, dtype=dtype) for _ in range(size)]


def own(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def outcome(call: Callable[..., object]) -> str:
    try:
        call(group=group)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    results = (each for given in call.args for each in (given if type(given) is list else [given]))
    return str([result.tolist() for result in results if isinstance(result, Tensor)])


gathered, scattered = dist.all_gather_single, dist.reduce_scatter_single
double = torch.float64
for call in (
    partial(gathered, zeros(2 * size, 3), own(2, 3)),
    partial(gathered, zeros(size, 2, 3), own(2, 3)),
    partial(gathered, zeros(size * 6), own(2, 3)),
    partial(gathered, zeros(2 * size, 2), own(4)),
    partial(gathered, zeros(4 * size, dtype=double), own(4)),
    partial(gathered, zeros(size), own(1)[0]),
    partial(gathered, zeros(0), zeros(0)),
    partial(gathered, zeros(3 * size), own(4)),
    partial(scattered, zeros(2, 3), own(2 * size, 3)),
    partial(scattered, zeros(2, 3), own(size, 2, 3)),
    partial(scattered, zeros(2, 2), own(4 * size)),
    partial(scattered, zeros(2), own(2 * size, 1)),
    partial(scattered, zeros(4, dtype=double), own(4 * size)),
    partial(scattered, zeros(3), own(4 * size)),
    partial(dist.reduce_scatter, zeros(2, 2), [own(4) for _ in range(size)]),
    partial(dist.reduce_scatter, zeros(3), [own(4) for _ in range(size)]),
    partial(dist.reduce_scatter, zeros(3, rank + 1), [own(3, 1 + to) for to in range(size)]),
    partial(dist.all_gather, each(2, 2), own(4)),
    partial(dist.all_gather, each(3), own(4)),
    partial(dist.all_gather, [zeros(1 + of) for of in range(size)], own(rank + 1)),
    partial(dist.all_to_all, each(2, 3), [own(2, 3) for _ in range(size)]),
    partial(dist.all_to_all, each(3, 2), [own(2, 3) for _ in range(size)]),
    partial(dist.all_to_all, each(4), [own(4) if to else own(2, 2) for to in range(size)]),
    partial(dist.all_to_all_single, zeros(size, 2), own(2 * size)),
    partial(dist.broadcast, torch.eye(2).to_sparse(), 0),
):
    print(rank, call.func.__name__, outcome(call))

if rank == 0:  # the others would wait
    for call in (
        partial(dist.gather, own(4), each(2, 2)),
        partial(dist.gather, own(4), each(3)),
        partial(dist.gather, own(4), each(4, dtype=double)),
        partial(dist.scatter, zeros(2, 2), [own(4) for _ in range(size)]),
        partial(dist.scatter, zeros(3), [own(4) for _ in range(size)]),
        partial(dist.scatter, zeros(1), [own(1 + to) for to in range(size)]),
    ):
        print(rank, call.func.__name__, outcome(call))
dist.destroy_process_group()
