"""Hangs in a function, for --timeout to end it."""

import os

import numpy as np


def wait_for_ever():
    print(np.ones(1), flush=True)
    os.read(os.pipe()[0], 1)


wait_for_ever()
