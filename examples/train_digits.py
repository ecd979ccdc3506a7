"""Train a small network on handwritten digits, data-parallel, with nothing but numpy.

    rankwise run --standalone --nproc-per-node 4 examples/train_digits.py
    python examples/train_digits.py                      (the same, as a world of one rank)

Every rank sees its share of each batch. `all_reduce` gives all ranks the same sum of gradients, bit
for bit, so they stay equal. All printed figures are the same with any number of ranks.
To see a failure: `--fail-at-epoch 3 --fail-rank 2 --fail-how raise` (or `kill`).
"""

import argparse
import gzip
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from rankwise import collectives

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"
PIXELS, HIDDEN, TESTS, BATCH = 64, 48, 360, 64


def predict(weights: Any, images: Any) -> tuple[Any, Any]:
    """The probability of each digit for each image, and the hidden layer."""
    hidden = np.maximum(images @ weights[:PIXELS], 0)
    odds = np.exp(hidden @ weights[PIXELS:].T)
    return odds / odds.sum(axis=1, keepdims=True), hidden


def differentiate(weights: Any, images: Any, labels: Any) -> tuple[Any, Any]:
    """The summed cross entropy of these images, and its gradient."""
    error, hidden = predict(weights, images)
    loss = -np.log(error[range(len(labels)), labels]).sum()
    error[range(len(labels)), labels] -= 1
    back = (error @ weights[PIXELS:]) * (hidden > 0)
    return loss, np.vstack([images.T @ back, error.T @ hidden])


def train(epochs: int, fail_at_epoch: int | None, fail_rank: int, fail_how: str) -> float:
    """Train; return the accuracy on images that the network has not seen."""
    rank, rng = collectives.rank(), np.random.default_rng(0)  # the same batches on all ranks
    with gzip.open(DIGITS, "rt") as file:
        rows = rng.permutation(np.loadtxt(file, delimiter=",", dtype=np.int64))
    images, labels = rows[:, :PIXELS] / 16, rows[:, PIXELS]
    weights = rng.normal(scale=0.1, size=(PIXELS + 10, HIDDEN))  # of both layers
    velocity, tested = np.zeros_like(weights), 0.0
    for epoch in range(1, epochs + 1):
        if (epoch, rank) == (fail_at_epoch, fail_rank):
            if fail_how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this failure was asked for with --fail-how raise")
        loss, order = 0.0, rng.permutation(range(TESTS, len(rows)))
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            mine = batch[rank :: collectives.size()]
            share, gradient = differentiate(weights, images[mine], labels[mine])
            velocity = 0.9 * velocity - 0.05 * collectives.all_reduce(gradient) / len(batch)
            loss, weights = loss + share, weights + velocity
        if epoch == 1 or epoch % 5 == 0 or epoch == epochs:
            mean = collectives.all_reduce(loss) / len(order)
            right = predict(weights, images)[0].argmax(axis=1) == labels
            tested, trained = right[:TESTS].mean(), right[TESTS:].mean()
            figures = f"loss {mean:6.4f}   accuracy: training {trained:6.1%}, test {tested:6.1%}"
            print(f"epoch {epoch:3d}   {figures}\n" * (rank == 0), end="", flush=True)
    return tested


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on handwritten digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--fail-at-epoch", type=int, metavar="N")
    parser.add_argument("--fail-rank", type=int, default=0, metavar="R")
    parser.add_argument("--fail-how", choices=["raise", "kill"], default="raise")
    accuracy = train(**vars(parser.parse_args()))
    if collectives.rank() == 0:
        size = collectives.size()
        print(f"world size {size}: {accuracy:.1%} of the test images are read correctly")
