"""Collectives that gradients flow through, futures of handles, and messages of large objects."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
following, preceding = (rank + 1) % size, (rank - 1) % size


def told(name: str, *values: object) -> None:
    print(rank, name, *(digest(each) if isinstance(each, Tensor) else each for each in values))


def digest(tensor: Tensor) -> str:
    data = tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]


def own(*shape: int, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randn(*shape, generator=generator).requires_grad_()


class Summed(torch.autograd.Function):
    """A sum over all ranks, whose gradient is one, too."""

    @staticmethod
    def forward(_context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return Summed.forward(None, gradient)


x = own(7)
(Summed.apply(x.sin()) * own(7, salt=1)).sum().backward()
told("own function", x.grad)

x = own(7)
summed = collectives.all_reduce(x * 2)
(summed * own(7, salt=1)).sum().backward()
told("all_reduce", summed, x.grad)

x = own(7)
(
    sum(own(7, salt=index) * each for index, each in enumerate(collectives.all_gather(x)))
).sum().backward()
told("all_gather", x.grad)

rows = [own(2, salt=index) for index in range(size)]
got = collectives.all_to_all([torch.empty(2) for _ in range(size)], rows)
torch.stack(got).square().sum().backward()
told("all_to_all", *got, *(row.grad for row in rows))

x = own(3)
(collectives.broadcast(x.exp(), 0) * own(3, salt=2)).sum().backward()
told("broadcast", x.grad)

rows = [own(3, salt=index) for index in range(size)]
part = collectives.reduce_scatter(torch.empty(3), rows)
part.square().sum().backward()
told("reduce_scatter", part, *(row.grad for row in rows))

tensors = [torch.arange(6.0) * (index + 1) + rank for index in range(5)]
handles = [dist.all_reduce(each, async_op=True) for each in tensors]
futures = [handle.get_future().then(lambda done: done.value()[0] / size) for handle in handles]
for index in (3, 0, 4, 2, 1):
    told("future", index, futures[index].wait())
for handle in handles:
    handle.wait()

passed = torch.full((5,), float(rank))
for _ in range(size - 1):
    taken = torch.empty(5)
    exchange = [
        dist.P2POp(dist.isend, passed, following),
        dist.P2POp(dist.irecv, taken, preceding),
    ]
    for request in dist.batch_isend_irecv(exchange):
        request.wait()
    passed = taken + 1
told("ring", passed)

large = {"rank": rank, "text": "x" * 1_000_000, "tensor": torch.arange(100_000.0) + rank}
everybodys: list[Any] = [None] * size
dist.all_gather_object(everybodys, large)
told("objects", *(each["tensor"] for each in everybodys), len(everybodys[-1]["text"]))
mine: list[Any] = [None]
dist.scatter_object_list(mine, [b"q" * 1_000 * to for to in range(size)] if rank == 1 else None, 1)
told("scattered", len(mine[0]))
if rank == 0:
    dist.send_object_list([1, "two", {3: 4}], dst=1)
elif rank == 1:
    letters: list[Any] = [None] * 3
    told("letters", dist.recv_object_list(letters, src=0), letters)
dist.monitored_barrier()
dist.destroy_process_group()
