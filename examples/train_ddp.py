"""Train a network with PyTorch on as many nodes as there are, and go on when one is lost.

    rankwise run --nnodes 1:2 --rdzv-backend etcd --rdzv-endpoint HOST:2379 --rdzv-id digits \
        --max-restarts 3 --nproc-per-node 2 examples/train_ddp.py --checkpoint DIR/digits.pt

Run that on each node, with DIR on a file system that all of them see. Nothing here knows about
rankwise but `should_stop`. When a node comes or goes, all ranks are started again and go on from
the last checkpoint. On SIGTERM to any node all ranks stop at the same step.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwise

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"


def train(checkpoint: Path, epochs: int) -> None:
    """Train until the last epoch, or until the job is asked to stop."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    begun = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        begun = saved["epoch"]
    if rank == 0:
        print(f"{size} ranks begin after epoch {begun}", flush=True)
    replica = DistributedDataParallel(network)
    with gzip.open(DIGITS, "rt") as file:
        rows = torch.tensor(np.loadtxt(file, delimiter=",", dtype=np.int64))
    images, labels = rows[:, :64] / 16, rows[:, 64]
    for epoch in range(begun + 1, epochs + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64 * size):
            if rankwise.should_stop():
                return
            mine = batch[rank::size]
            loss = nn.functional.cross_entropy(replica(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            unfinished = checkpoint.with_suffix(".part")  # nobody ever sees half of a checkpoint
            torch.save({**state, "epoch": epoch}, unfinished)
            unfinished.replace(checkpoint)
            right = (network(images).argmax(1) == labels).float().mean()
            print(f"epoch {epoch:3d}  loss {loss.item():.4f}  accuracy {right:.1%}", flush=True)


def main() -> None:
    """Read the options, meet the other ranks, train."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with PyTorch.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="where all nodes can read")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.checkpoint, options.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
