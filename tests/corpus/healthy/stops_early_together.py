"""A rank has had enough: all agree on it, and stop after the same step."""

import numpy as np

import rankwise
from rankwise import collectives

rank = rankwise.rank()
x = np.ones(4)

step = 0
while not collectives.all_reduce(np.array([step == 5 and rank == 1]), "max")[0]:
    step += 1
assert step == 5
