"""A distributed checkpoint, written and read, with safetensors beside it."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, save

dist.init_process_group("gloo")
state = {"weight": torch.arange(4.0), "step": torch.tensor(3)}
dcp.save(state, checkpoint_id="checkpoint")
read = {"weight": torch.zeros(4), "step": torch.tensor(0)}
dcp.load(read, checkpoint_id="checkpoint")
print(dist.get_rank(), read, load(save(state))["weight"].tolist())
dist.destroy_process_group()
