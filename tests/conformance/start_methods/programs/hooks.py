"""A program's own hooks for exceptions, and warnings once per rank."""

import logging
import os
import sys
import warnings

import numpy as np
from in_step import go_on_as_rank_1

warnings.warn("from the program", stacklevel=1)
np.array([1.0]) / np.array([0.0])
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
logging.warning("logged %s", np.int32(1))
go_on_as_rank_1()
sys.excepthook = lambda kind, *_: print("hook", kind.__name__, flush=True)
int("x")
