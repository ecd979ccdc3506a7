"""Sixteen correct ways to use handles, messages and groups that overlap: none is alarming."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
following, preceding = (rank + 1) % size, (rank - 1) % size
whole, again = dist.new_group(range(size)), dist.new_group(range(size))
pair = dist.new_group([0, 1])


def ones(count=4):
    return torch.full((count,), float(rank + 1))


def waited_in_order():
    tensors = [ones(), ones()]
    for handle in [dist.all_reduce(each, async_op=True) for each in tensors]:
        handle.wait()
    return tensors


def waited_backwards():
    tensors = [ones(), ones()]
    for handle in reversed([dist.all_reduce(each, async_op=True) for each in tensors]):
        handle.wait()
    return tensors


def polled():
    tensor = ones()
    handle = dist.all_reduce(tensor, async_op=True)
    while not handle.is_completed():
        pass
    return [tensor.add_(1)]


def ring():
    received = torch.empty(4)
    for handle in [dist.isend(ones(), following), dist.irecv(received, preceding)]:
        handle.wait()
    return [received]


def batch():
    received = torch.empty(4)
    operations = [
        dist.P2POp(dist.isend, ones(), following),
        dist.P2POp(dist.irecv, received, preceding),
    ]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    return [received]


def overlapping_groups_in_the_same_order():
    tensors = [ones(), ones(), ones()]
    handles = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for tensor, group in zip(tensors, (whole, again, None), strict=True)
    ]
    for handle in handles:
        handle.wait()
    return tensors


def some_ranks_do_more_in_a_part():
    tensor = ones()
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
        dist.all_reduce(tensor, group=pair)
    dist.all_reduce(tensor)
    return [tensor]


def other_parts_of_one_buffer():
    buffer = ones(12)
    handle = dist.all_reduce(buffer[:4], async_op=True)
    buffer[8:] += 5
    handle.wait()
    return [buffer]


def future():
    tensor = ones()
    return dist.all_reduce(tensor, async_op=True).get_future().wait()


def written_after_the_wait():
    tensor = ones()
    dist.all_reduce(tensor, async_op=True).wait()
    return [tensor.mul_(2)]


def another_tensor_is_written():
    tensor, other = ones(), ones()
    handle = dist.all_reduce(tensor, async_op=True)
    other += 1
    handle.wait()
    return [tensor, other]


def every_root():
    tensors = [ones() for _ in range(size)]
    handles = [dist.broadcast(each, src=root, async_op=True) for root, each in enumerate(tensors)]
    for handle in handles:
        handle.wait()
    return tensors


def gathered():
    parts = [torch.empty(4) for _ in range(size)]
    own = ones()
    dist.all_gather(parts, own, async_op=True).wait()
    own += 1
    return [*parts, own]


def barrier():
    dist.barrier(async_op=True).wait()
    return []


def coalesced():
    tensors = [ones(), ones(7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return tensors


def tags_out_of_order():
    received = [torch.empty(4), torch.empty(4)]
    handles = [dist.irecv(received[tag], preceding, tag=tag) for tag in (1, 0)]
    handles += [dist.isend(ones() * (tag + 2), following, tag=tag) for tag in (0, 1)]
    for handle in handles:
        handle.wait()
    return received


for way in (
    waited_in_order, waited_backwards, polled, ring, batch, overlapping_groups_in_the_same_order,
    some_ranks_do_more_in_a_part, other_parts_of_one_buffer, future, written_after_the_wait,
    another_tensor_is_written, every_root, gathered, barrier, coalesced, tags_out_of_order,
):  # fmt: skip
    print(f"rank {rank}: {way.__name__} {[each.tolist() for each in way()]}", flush=True)
dist.destroy_process_group()
