"""deepspeed's collectives and one step of its CPU engine's optimizer, after torch."""

import torch
import deepspeed

deepspeed.init_distributed("gloo")
tensor = torch.ones(2) * (deepspeed.comm.get_rank() + 1)
deepspeed.comm.all_reduce(tensor)
print(deepspeed.comm.get_rank(), tensor.tolist(), deepspeed.comm.get_world_size())
torch.distributed.destroy_process_group()
