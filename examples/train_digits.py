"""Train a small network on handwritten digits, data-parallel, with nothing but numpy.

    rankwise run --standalone --nproc-per-node 4 examples/train_digits.py
    python examples/train_digits.py                      (the same, as a world of one rank)

Every rank holds the whole network and sees its share of each batch. The gradients of the shares
are summed over all ranks, and since `all_reduce` gives every rank the same bits, all ranks take
the same step and stay equal without ever exchanging parameters again.

How many ranks there are changes nothing but speed: the batches are the same, so the summed
gradient is the same up to rounding. (The order of a sum changes its last bits: with 1 and with 4
ranks all printed figures agree, and the parameters to about fifteen digits.)

To see what a failure looks like, let a rank fail on purpose:

    rankwise run --standalone --nproc-per-node 4 examples/train_digits.py \
        --fail-at-epoch 3 --fail-rank 2 --fail-how raise        (or kill, or hang)
"""

import argparse
import gzip
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankwise import collectives

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"
TEST_IMAGE_COUNT = 360
HIDDEN_COUNT = 48

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


class Network:
    """64 pixels, one hidden layer, 10 scores; all parameters in one flat array."""

    def __init__(self, rng: np.random.Generator) -> None:
        shapes = [(64, HIDDEN_COUNT), (HIDDEN_COUNT,), (HIDDEN_COUNT, 10), (10,)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.parameters = rng.normal(scale=0.1, size=sum(sizes))
        self.gradient = np.zeros_like(self.parameters)
        self.w1, self.b1, self.w2, self.b2 = self._cut(self.parameters, shapes, sizes)
        self.dw1, self.db1, self.dw2, self.db2 = self._cut(self.gradient, shapes, sizes)

    @staticmethod
    def _cut(flat: Array, shapes: list[tuple[int, ...]], sizes: list[int]) -> list[Array]:
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def predict(self, images: Array) -> Labels:
        """The most likely digit of each image."""
        hidden = np.maximum(images @ self.w1 + self.b1, 0)
        digits: Labels = np.argmax(hidden @ self.w2 + self.b2, axis=1)
        return digits

    def differentiate(self, images: Array, labels: Labels) -> float:
        """Fill in the gradient of the summed cross entropy of these images; return the sum."""
        hidden = np.maximum(images @ self.w1 + self.b1, 0)
        scores = hidden @ self.w2 + self.b2
        scores -= scores.max(axis=1, keepdims=True)
        odds = np.exp(scores)
        probabilities = odds / odds.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(probabilities[rows, labels]).sum()

        error = probabilities
        error[rows, labels] -= 1
        self.dw2[...], self.db2[...] = hidden.T @ error, error.sum(axis=0)
        back = (error @ self.w2.T) * (hidden > 0)
        self.dw1[...], self.db1[...] = images.T @ back, back.sum(axis=0)
        return float(loss)


def load_digits(rng: np.random.Generator) -> tuple[Array, Labels]:
    """All images with pixels from 0 to 1, and their digits, in an order chosen by `rng`."""
    with gzip.open(DIGITS, "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    rows = rng.permutation(rows)
    return rows[:, :64] / 16, rows[:, 64]


def fail(how: str) -> None:
    """Do what programs do when one does not want them to."""
    if how == "raise":
        raise RuntimeError("this failure was asked for with --fail-how raise")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def train(options: argparse.Namespace) -> float:
    """Train; return the accuracy on images that the network has not seen."""
    rank, size = collectives.rank(), collectives.size()
    rng = np.random.default_rng(options.seed)  # The same on all ranks: they agree on batches.
    images, labels = load_digits(rng)
    test_images, test_labels = images[:TEST_IMAGE_COUNT], labels[:TEST_IMAGE_COUNT]
    images, labels = images[TEST_IMAGE_COUNT:], labels[TEST_IMAGE_COUNT:]

    network = Network(rng)
    collectives.broadcast(network.parameters, root=0, out=network.parameters)
    velocity = np.zeros_like(network.parameters)

    accuracy = 0.0
    for epoch in range(1, options.epochs + 1):
        if epoch == options.fail_at_epoch and rank == options.fail_rank:
            fail(options.fail_how)
        loss = 0.0
        order = rng.permutation(len(images))
        for start in range(0, len(order), options.batch):
            batch = order[start : start + options.batch]
            mine = batch[rank::size]
            loss += network.differentiate(images[mine], labels[mine])
            collectives.all_reduce(network.gradient, out=network.gradient)
            velocity = 0.9 * velocity - options.lr * network.gradient / len(batch)
            network.parameters += velocity

        if epoch == 1 or epoch % 5 == 0 or epoch == options.epochs:
            mean_loss = collectives.all_reduce(loss) / len(images)
            accuracy = float(np.mean(network.predict(test_images) == test_labels))
            train_accuracy = np.mean(network.predict(images) == labels)
            if rank == 0:
                print(
                    f"epoch {epoch:3d}   loss {mean_loss:6.4f}   "
                    f"accuracy: training {train_accuracy:6.1%}, test {accuracy:6.1%}",
                    flush=True,
                )
    return accuracy


def main() -> None:
    """Read the options, train, and say how it went."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fail-at-epoch", type=int, default=None, metavar="N")
    parser.add_argument("--fail-rank", type=int, default=0, metavar="R")
    parser.add_argument("--fail-how", choices=["raise", "kill", "hang"], default="raise")
    start = time.perf_counter()
    accuracy = train(parser.parse_args())
    if collectives.rank() == 0:
        ranks = "1 rank" if collectives.size() == 1 else f"{collectives.size()} ranks"
        seconds = time.perf_counter() - start
        print(f"{ranks}, {seconds:.1f} s: {accuracy:.1%} of the test images are read correctly")


if __name__ == "__main__":
    main()
