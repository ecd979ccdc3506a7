"""Every operation of torch.distributed, with numbers that tell the order of additions."""

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def told(name, *tensors):
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    print(f"rank {rank}: {name} {shapes} {hashlib.sha256(data).hexdigest()[:16]}", flush=True)


def mine(*shape, dtype=torch.float32, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

for count in (1, 3, 7, 8, 1000, 300_001):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        tensor = mine(count)
        dist.all_reduce(tensor, op=op)
        told(f"all_reduce of {count} with {op}", tensor)
for dtype in (torch.float64, torch.float16, torch.bfloat16):
    tensor = mine(37, dtype=dtype)
    dist.all_reduce(tensor)
    told(f"all_reduce of {dtype}", tensor)
tensor = mine(37)
dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
told("all_reduce with AVG", tensor)
for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR, dist.ReduceOp.SUM):
    tensor = torch.arange(5) + 3 * rank
    dist.all_reduce(tensor, op=op)
    told(f"all_reduce of integers with {op}", tensor)
tensor = mine(6, 4).t()
dist.all_reduce(tensor.contiguous())
told("all_reduce of a copy leaves the tensor alone", tensor)

tensor = mine(5, 2)
dist.broadcast(tensor, src=1)
told("broadcast", tensor)
tensor = mine(11)
dist.reduce(tensor, dst=1)
if rank == 1:
    told("reduce", tensor)
gathered = [torch.empty(3) for _ in range(size)]
dist.all_gather(gathered, mine(3))
told("all_gather", *gathered)
whole = torch.empty(size * 3)
dist.all_gather_single(whole, mine(3))
told("all_gather_single", whole)
gathered = [torch.empty(2) for _ in range(size)] if rank == 1 else None
dist.gather(mine(2), gathered, dst=1)
if rank == 1:
    told("gather", *gathered)
part = torch.empty(4)
parts = [mine(4, salt=index) for index in range(size)] if rank == 0 else None
dist.scatter(part, parts, src=0)
told("scatter", part)
part = torch.empty(13)
dist.reduce_scatter_single(part, mine(13 * size))
told("reduce_scatter_single", part)
dist.reduce_scatter(part, [mine(13, salt=index) for index in range(size)])
told("reduce_scatter", part)
received = torch.empty(size * 2)
dist.all_to_all_single(received, mine(size * 2))
told("all_to_all_single", received)
sent = [rank + index + 1 for index in range(size)]
expected = [rank + index + 1 for index in range(size)]
received = torch.empty(sum(expected), 2)
dist.all_to_all_single(received, mine(sum(sent), 2), expected, sent)
told("all_to_all_single with uneven parts", received)
dist.barrier()
dist.monitored_barrier(timeout=timedelta(seconds=60))

following, preceding = (rank + 1) % size, (rank - 1) % size
if rank % 2:
    dist.send(mine(3), following)
    tensor = torch.empty(3)
    dist.recv(tensor, preceding)
else:
    tensor = torch.empty(3)
    dist.recv(tensor, preceding)
    dist.send(mine(3), following)
told("send and recv", tensor)
requests = [dist.isend(mine(3), following, tag=7), dist.irecv(tensor, preceding, tag=7)]
for request in requests:
    request.wait()
told("isend and irecv", tensor)
operations = [
    dist.P2POp(dist.isend, mine(3, salt=4), following),
    dist.P2POp(dist.irecv, tensor, preceding),
]
for request in dist.batch_isend_irecv(operations):
    request.wait()
told("batch_isend_irecv", tensor)
if rank == 0:
    total = torch.zeros(2)
    sources = []
    for _ in range(size - 1):
        sources.append(dist.recv(tensor := torch.empty(2)))
        total += tensor
    print(f"rank 0: recv from any rank: {sorted(sources)} {total.tolist()}", flush=True)
else:
    dist.send(torch.full((2,), float(rank)), 0)

objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "list": [rank] * rank})
print(f"rank {rank}: all_gather_object {objects}", flush=True)
objects = [{"from": rank}, rank * 2]
dist.broadcast_object_list(objects, src=1)
print(f"rank {rank}: broadcast_object_list {objects}", flush=True)
own = [None]
dist.scatter_object_list(own, [f"for {index}" for index in range(size)] if rank == 0 else None)
print(f"rank {rank}: scatter_object_list {own}", flush=True)
objects = [None] * size if rank == 0 else None
dist.gather_object((rank, "x"), objects)
print(f"rank {rank}: gather_object {objects}", flush=True)

even = dist.new_group([0, 2]) if size > 2 else dist.new_group([0])
tensor = mine(9)
if rank in (0, 2):
    dist.all_reduce(tensor, group=even)
    print(f"rank {rank}: is {dist.get_rank(even)} of {dist.get_world_size(even)}", flush=True)
told("all_reduce in a part", tensor)
backwards = dist.new_group(list(reversed(range(size))))
gathered = [torch.empty(1) for _ in range(size)]
dist.all_gather(gathered, torch.tensor([float(rank)]), group=backwards)
told("all_gather in another order", *gathered)

first, second = mine(5), mine(5, salt=1)
handles = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
for handle in reversed(handles):
    handle.wait()
told("async handles", first, second)
tensors = [mine(5), mine(7)]
with dist._coalescing_manager():
    for tensor in tensors:
        dist.all_reduce(tensor)
told("coalesced", *tensors)

told("functional all_reduce", funcol.all_reduce(mine(5), "sum", dist.group.WORLD).clone())
told("functional all_gather", funcol.all_gather_tensor(mine(2, 3), 0, dist.group.WORLD).clone())
told(
    "functional reduce_scatter",
    funcol.reduce_scatter_tensor(mine(2 * size, 3), "sum", 0, dist.group.WORLD).clone(),
)
told(
    "functional all_to_all",
    funcol.all_to_all_single(mine(size, 3), None, None, dist.group.WORLD).clone(),
)
dist.destroy_process_group()
