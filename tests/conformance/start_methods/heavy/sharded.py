"""FSDP2, tensor parallelism and a pipeline on the same two ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


sharded = fully_shard(mlp(), mesh=mesh)
loss = sharded(torch.ones(2, 4)).sum()
loss.backward()
print(rank, "FSDP2", round(loss.item(), 5), tuple(sharded[0].weight.grad.to_local().shape))

parallel = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
print(rank, "TP", round(parallel(torch.ones(2, 4)).sum().item(), 5))

parts = mlp()
stage = PipelineStage(parts[:2] if rank == 0 else parts[2:], rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2)
outcome = schedule.step(torch.ones(4, 4)) if rank == 0 else schedule.step()
print(rank, "PP", None if outcome is None else round(outcome.sum().item(), 5))
dist.destroy_process_group()
