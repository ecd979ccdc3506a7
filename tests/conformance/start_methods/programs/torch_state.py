"""What torch says of itself at the start, what is random, and an error in autograd."""

import os

import torch
import torch.multiprocessing as mp
from in_step import go_on_as_rank_1

rank = os.environ["RANK"]
print(rank, torch.get_default_dtype())
print(rank, mp.get_start_method(), mp.get_sharing_strategy(), torch.is_grad_enabled())


print(rank, torch.cuda.is_available(), torch.cuda.is_initialized())
parallel = torch.ones(1 << 16, requires_grad=True)
parallel.exp().sum().backward()
print(rank, round(parallel.grad[0].item(), 4))
queue = mp.get_context("fork").SimpleQueue()
child = mp.get_context("fork").Process(target=queue.put, args=(torch.arange(3).tolist(),))
child.start()
print(rank, queue.get(), child.join(), child.exitcode)
go_on_as_rank_1()
(torch.ones(2, requires_grad=True) * 2).backward()
