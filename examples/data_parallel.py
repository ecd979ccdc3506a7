"""Fit a line to data that is spread over the ranks: numpy, and one all_reduce for each step."""

import numpy as np

import rankwise
from rankwise import collectives

random = np.random.default_rng(seed=rankwise.rank())  # each rank has data of its own
x = random.uniform(-1, 1, 1000)
y = 3 * x + 2 + random.normal(scale=0.1, size=1000)

slope, offset = 0.0, 0.0
for _ in range(200):
    error = slope * x + offset - y
    gradient = np.array([np.mean(error * x), np.mean(error)])
    gradient = collectives.all_reduce(gradient, op="mean")  # the same bits on every rank
    slope, offset = slope - 0.5 * gradient[0], offset - 0.5 * gradient[1]

if rankwise.rank() == 0:
    print(f"y = {slope:.1f} x + {offset:.1f}, from {1000 * rankwise.world_size()} points")
