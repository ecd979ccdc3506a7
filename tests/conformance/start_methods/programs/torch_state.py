"""What torch says of itself at the start, what is random, data loaders that fork, and an error in autograd."""

import os

import torch
import torch.multiprocessing as mp
from in_step import go_on_as_rank_1
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index * index, os.getppid()])


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
batches = list(DataLoader(Squares(), 3, num_workers=2, multiprocessing_context="fork"))
parents = {int(parent) for batch in batches for parent in batch[:, 1]}
print(rank, [batch[:, 0].tolist() for batch in batches], parents == {os.getpid()})
go_on_as_rank_1()
(torch.ones(2, requires_grad=True) * 2).backward()
