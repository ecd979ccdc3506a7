"""Data loaders whose workers are spawned and come from a fork server of their own."""

import os

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index * index, os.getppid()])


if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        loader = DataLoader(Squares(), 3, num_workers=1, multiprocessing_context=method)
        batches = [batch[:, 0].tolist() for batch in loader]
        parents = {int(parent) for batch in loader for parent in batch[:, 1]}
        print(os.environ["RANK"], method, batches, parents == {os.getpid()})
