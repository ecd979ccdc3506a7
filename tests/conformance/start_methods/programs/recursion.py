"""Needs a deep stack, and catches the end of it."""

import sys

import numpy as np

sys.setrecursionlimit(9000)


def deep(n):
    return 0 if n == 0 else 1 + deep(n - 1)


print(deep(8000), np.int64(1))
sys.setrecursionlimit(1000)
try:
    deep(5000)
except RecursionError as error:
    print(error)
