"""FSDP2 and FSDP1 on a small network, activation checkpointing and a distributed checkpoint."""

import hashlib
import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def train(model, name, steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(6, 16, generator=generator)
        y = torch.randint(0, 5, (6,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank}: {name} loss {loss.item():.9f}", flush=True)


def told(name, values):
    data = b"".join(value.detach().clone().numpy().tobytes() for value in values)
    print(f"rank {rank}: {name} {hashlib.sha256(data).hexdigest()[:16]}", flush=True)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
model = Network()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, "FSDP2")
told("shards", [value.to_local() for value in model.parameters()])
told("whole", [value.full_tensor() for value in model.parameters()])

folder = os.environ["CHECKPOINT"]
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
torch.manual_seed(1)
other = Network()
fully_shard(other, mesh=mesh)
state = {"model": get_model_state_dict(other)}
dcp.load(state, checkpoint_id=folder)
set_model_state_dict(other, state["model"])
told("loaded", [value.full_tensor() for value in other.parameters()])

torch.manual_seed(0)
old = FullyShardedDataParallel(Network(), device_id=torch.device("cpu"), use_orig_params=True)
train(old, "FSDP1")
with FullyShardedDataParallel.summon_full_params(old):
    told("FSDP1", old.parameters())
dist.destroy_process_group()
