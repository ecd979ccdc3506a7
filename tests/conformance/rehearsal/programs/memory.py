"""After each operation, `del` frees what it took and gave, on every rank."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.multiprocessing.reductions import StorageWeakRef

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
following, preceding = (rank + 1) % size, (rank - 1) % size
is_real = "RANKWISE_SIMULATED" not in os.environ


class Kept:
    """Makes tensors, and knows which of their storages live."""

    def __init__(self):
        self.references = []

    def note(self, tensor):
        self.references.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def ones(self, count=size):
        return self.note(torch.ones(count))

    def list(self):
        return [self.ones(1) for _ in range(size)]

    def live(self):
        # gloo's own thread lets go of a work a moment after it has said that it is done.
        patience = time.monotonic() + 20 * is_real
        while any(not each.expired() for each in self.references):
            if time.monotonic() >= patience:
                break
        return sum(not each.expired() for each in self.references)


def batch(kept, async_too=True):
    sent, received = kept.ones(), kept.ones()
    ends = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, preceding)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()


def messages(kept):
    if rank % 2 == 0:
        dist.send(kept.ones(), following)
        dist.recv(kept.ones(), preceding)
    else:
        dist.recv(kept.ones(), preceding)
        dist.send(kept.ones(), following)


def any_source(kept):
    work = dist.isend(kept.ones(), following)
    dist.recv(kept.ones())
    work.wait()


def coalesced(kept):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(kept.ones())
        dist.all_reduce(kept.ones())
    manager.wait()


def waited(call):
    def run(kept):
        work = call(kept)
        work.wait()

    return run


def polled(kept):
    work = dist.all_reduce(kept.ones(), async_op=True)
    while not work.is_completed():
        pass
    work.wait()


def future(kept):
    kept.note(dist.all_reduce(kept.ones(), async_op=True).get_future().wait()[0])


def objects(kept):
    kept.note(torch.ones(1))
    told = [{"of": kept.ones()} if rank == 0 else None]
    dist.broadcast_object_list(told, 0)
    kept.note(told[0]["of"])
    gathered = [None] * size
    dist.all_gather_object(gathered, kept.ones())
    for each in gathered:
        kept.note(each)


def functionally(kept):
    summed = functional.all_reduce(kept.ones(), "sum", list(range(size)))
    kept.note(summed.wait() if hasattr(summed, "wait") else summed + 0)
    gathered = functional.all_gather_tensor(kept.ones(), 0, list(range(size)))
    kept.note(gathered.wait() if hasattr(gathered, "wait") else gathered + 0)


def ddp(kept):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(size, 1))
    model(kept.ones()).sum().backward()
    for each in model.parameters():
        kept.note(each)
        kept.note(each.grad)


OPERATIONS = {
    "all_reduce": lambda kept: dist.all_reduce(kept.ones()),
    "all_reduce, async": waited(lambda kept: dist.all_reduce(kept.ones(), async_op=True)),
    "all_reduce, future": future,
    "all_reduce, polled": polled,
    "all_reduce_coalesced": lambda kept: dist.all_reduce_coalesced([kept.ones(), kept.ones()]),
    "reduce": lambda kept: dist.reduce(kept.ones(), 1),
    "broadcast": lambda kept: dist.broadcast(kept.ones(), 1),
    "broadcast, async": waited(lambda kept: dist.broadcast(kept.ones(), 1, async_op=True)),
    "all_gather": lambda kept: dist.all_gather(kept.list(), kept.ones(1)),
    "all_gather_into_tensor": lambda kept: dist.all_gather_into_tensor(kept.ones(), kept.ones(1)),
    "gather": lambda kept: dist.gather(kept.ones(1), kept.list() if rank == 1 else None, 1),
    "scatter": lambda kept: dist.scatter(kept.ones(1), kept.list() if rank == 1 else None, 1),
    "reduce_scatter": lambda kept: dist.reduce_scatter(kept.ones(1), kept.list()),
    "reduce_scatter_tensor": lambda kept: dist.reduce_scatter_tensor(kept.ones(1), kept.ones()),
    "all_to_all_single": lambda kept: dist.all_to_all_single(kept.ones(), kept.ones()),
    "barrier": lambda _kept: dist.barrier(),
    "messages": messages,
    "any source": any_source,
    "batch_isend_irecv": batch,
    "objects": objects,
    "functional": functionally,
    "DDP": ddp,
}

for name, operation in OPERATIONS.items():
    kept = Kept()
    operation(kept)
    print(rank, name, kept.live(), "of", len(kept.references), "live")
dist.barrier()
dist.destroy_process_group()
