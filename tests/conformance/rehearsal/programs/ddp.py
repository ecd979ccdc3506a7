"""DistributedDataParallel with accumulation, a buffer, a hook, uneven inputs."""

import hashlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def fingerprint(module):
    values = [value.detach().numpy().tobytes() for value in module.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 5)
    )


def batches(count):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        images = torch.randn(8, 20, generator=generator)
        yield images, torch.randint(0, 5, (8,), generator=generator)


def train(model, optimizer, count, *, accumulate=1, name):
    torch.manual_seed(rank)
    loss = torch.zeros(())
    for step, (images, labels) in enumerate(batches(count)):
        is_last = (step + 1) % accumulate == 0
        with nullcontext() if is_last else model.no_sync():
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {rank}: {name} {fingerprint(model)} {loss.item():.9f}", flush=True)


dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()

model = DistributedDataParallel(network())
train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 5, name="plain")
model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
train(model, torch.optim.Adam(model.parameters()), 6, accumulate=2, name="no_sync, small buckets")
model = DistributedDataParallel(
    network(), find_unused_parameters=True, gradient_as_bucket_view=True
)
model.register_comm_hook(None, fp16_compress_hook)
train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, name="comm hook")
model = DistributedDataParallel(network(), static_graph=True)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
train(model, optimizer, 4, name="ZeroRedundancyOptimizer")
model = DistributedDataParallel(network()[0])
with model.join():
    for images, _ in batches(2 + rank):
        model(images).sum().backward()
print(f"rank {rank}: join {model.module.weight.grad.sum().item():.9f}", flush=True)
dist.destroy_process_group()
