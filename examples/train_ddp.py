"""Train a network with PyTorch on as many nodes as there are, and go on when one is lost.

    pip install torch numpy
    rankwise run --nnodes 1:2 --rdzv-backend etcd --rdzv-endpoint HOST:2379 --rdzv-id digits \
        --max-restarts 3 --nproc-per-node 2 examples/train_ddp.py --checkpoint DIR/digits.pt

Run that on each node, with DIR on a file system that all of them see. Nothing here knows about
rankwise but `should_stop`: DistributedDataParallel over gloo, as every PyTorch program does it.
When a node comes or goes, all ranks are started again and go on from the last checkpoint; so the
loss that is printed goes on falling. On SIGTERM to any node all ranks stop at the same step, and
save what they have.
"""

import argparse
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwise

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"
TEST_IMAGE_COUNT = 360


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All images with pixels from 0 to 1, and their digits, in the same order on every rank."""
    with gzip.open(DIGITS, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    rows = np.random.default_rng(0).permutation(rows)
    return torch.tensor(rows[:, :64] / 16, dtype=torch.float32), torch.tensor(rows[:, 64])


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that nobody ever sees half of one."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(state, unfinished)
    unfinished.replace(path)


def train(options: argparse.Namespace) -> None:
    """Train until the last epoch, or until the job is asked to stop."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    epoch = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch = saved["epoch"]
    if rank == 0:
        print(f"{size} ranks begin after epoch {epoch}", flush=True)
    replica = DistributedDataParallel(network)
    images, labels = load_digits()
    test_images, test_labels = images[:TEST_IMAGE_COUNT], labels[:TEST_IMAGE_COUNT]
    images, labels = images[TEST_IMAGE_COUNT:], labels[TEST_IMAGE_COUNT:]
    while epoch < options.epochs:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(1)
        for batch in order.split(options.batch):
            if rankwise.should_stop():
                return
            mine = batch[rank::size]
            loss = nn.functional.cross_entropy(replica(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(mine)
        dist.all_reduce(total)
        epoch += 1
        if rank == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            save(options.checkpoint, {**state, "epoch": epoch})
            with torch.no_grad():
                right = (network(test_images).argmax(1) == test_labels).float().mean()
            mean = float(total) / len(images)
            print(
                f"epoch {epoch:3d}  loss {mean:.4f}  test accuracy {float(right):.1%}", flush=True
            )


def main() -> None:
    """Read the options, meet the other ranks, train."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with PyTorch.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="where all nodes can read")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
