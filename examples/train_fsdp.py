"""Shard a model over the ranks with FSDP2, lose one, and go on from a sharded checkpoint.

    rankwise run --nproc-per-node 4 --max-restarts 1 examples/train_fsdp.py CHECKPOINT_FOLDER

Rank 1 fails on purpose in the first life of the job.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import rankwise

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
if done:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / str(done))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
torch.manual_seed(rank)  # each rank has data of its own
inputs = torch.randn(256, 32)
targets = inputs.sum(dim=1, keepdim=True)
for step in range(done + 1, 41):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step))
    if step == 25 and rank == 1 and rankwise.restart_count() == 0:
        raise RuntimeError("the first life ends here")
if rank == 0:
    print(f"began at step {done}, ended at step {step} with loss {loss.item():.2f}")
dist.destroy_process_group()
