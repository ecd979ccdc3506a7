"""DTensor, tensor parallelism in a mesh of two dimensions, and pipeline schedules."""

import hashlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

warnings.simplefilter("ignore")


def told(name, *values):
    data = b"".join(value.detach().contiguous().numpy().tobytes() for value in values)
    print(f"rank {rank}: {name} {hashlib.sha256(data).hexdigest()[:16]}", flush=True)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))

torch.manual_seed(0)
whole = torch.randn(8, 12)
sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
told("shard", sharded.to_local())
told("redistributed", sharded.redistribute(mesh, [Shard(0), Shard(1)]).to_local())
told("product", (sharded @ distribute_tensor(whole.t(), mesh, [Replicate()] * 2)).full_tensor())

torch.manual_seed(0)
model = MLP()
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
parallelize_module(model, mesh["tensor"], plan)
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
for _ in range(4):
    loss = model(torch.randn(6, 12, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
told(f"tensor parallel {loss.item():.9f}", *[value.full_tensor() for value in model.parameters()])

head = nn.Linear(12, 8)
parallelize_module(head, mesh["tensor"], ColwiseParallel(use_local_output=False))
targets = torch.arange(6) % 8
with loss_parallel():  # ranks enter and leave it at moments of their own
    loss = nn.functional.cross_entropy(head(torch.randn(6, 12, generator=generator)), targets)
    loss.backward()
told("loss parallel", loss.full_tensor(), head.weight.grad.full_tensor())

for schedule_type in (ScheduleGPipe, Schedule1F1B):
    torch.manual_seed(rank)
    part = MLP()
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = schedule_type(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(5)
    x, y, losses = torch.randn(8, 12), torch.randn(8, 12), []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    told(f"{schedule_type.__name__}", *[value.grad for value in part.parameters()], *losses)
dist.destroy_process_group()
