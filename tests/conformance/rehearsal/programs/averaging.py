"""Ways to average gradients and weights: compressed, in a hook of one's own, uneven, by EMA.

All gradients are in one bucket: PowerSGD's callbacks call collectives, and gloo's threads run those
of several buckets in any order, which differs between ranks.
"""

import contextlib
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def told(name: str, *tensors: Tensor) -> None:
    data = [
        each.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors
    ]
    print(rank, name, *(hashlib.sha256(each).hexdigest()[:12] for each in data))


def network() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return DistributedDataParallel(layers, gradient_as_bucket_view=True)


def loss_of(model: nn.Module, step: int) -> Tensor:
    batch = torch.randn(5, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(batch).square().mean()


def in_two_steps(_state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum, and divide when the sum is there."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda summed: summed.value()[0].div_(size))


def of_rank_1(state: powerSGD_hook.PowerSGDState | None = None) -> powerSGD_hook.PowerSGDState:
    return state or powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )


for name, state, hook in (
    ("halves", None, default_hooks.fp16_compress_hook),
    ("low rank", of_rank_1(), powerSGD_hook.powerSGD_hook),
    (
        "halves of low rank",
        of_rank_1(),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    ("own", None, in_two_steps),
):
    model = network()
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    told(name, *model.parameters())

model = network()
sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
with Join([model, sharded]):
    for step in range(2 + rank):  # the data are uneven
        loss_of(model, step).backward()
        sharded.step()
        sharded.zero_grad()
        average.update_parameters(model.module)
told("uneven", *model.parameters())
for step in range(2):
    for part in range(3):
        with model.no_sync() if part < 2 else contextlib.nullcontext():
            (loss_of(model, 10 * step + part) / 3).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    sharded.step()
    sharded.zero_grad()
    average.update_parameters(model.module)
    told("accumulated", norm)
told("in the end", *model.parameters(), *average.parameters())
sharded.consolidate_state_dict(0)
if rank == 0:
    kept = sharded.state_dict()["state"]
    told("kept", *(kept[index]["exp_avg"] for index in sorted(kept)))
dist.destroy_process_group()
