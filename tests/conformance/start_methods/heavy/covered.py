"""A program for coverage and debugpy."""

import numpy as np


def covered():
    return np.ones(3).sum()


print(covered())
