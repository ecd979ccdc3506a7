"""Try many parameters, spread over ranks that are forked from one warm interpreter."""

import itertools

import numpy as np

import rankwise

GRID = list(itertools.product([0.01, 0.1, 0.5, 1.5, 2.5], [10, 100]))  # learning rate, steps


def evaluate() -> list[tuple[float, float, int]]:
    """The losses of this rank's share of the grid."""
    found = []
    for rate, steps in GRID[rankwise.rank() :: rankwise.world_size()]:
        place = np.array([4.0, -2.0])
        for _ in range(steps):
            place -= rate * place  # the gradient of half of the squared distance from 0
        found.append((float(place @ place), rate, steps))
    return found


if __name__ == "__main__":
    with rankwise.ForkServer(preload=["numpy"]) as server:  # pays for a second sweep, too
        found = rankwise.run(evaluate, nprocs=4, server=server)
    loss, rate, steps = min(itertools.chain.from_iterable(found))
    print(f"best of {len(GRID)}: rate {rate}, {steps} steps, loss {loss:.1g}")
