"""A rank exits with a code of its own."""

import os
import sys

import numpy as np
from in_step import go_on_as_rank_1

print(np.ones(2).sum(), flush=True)
go_on_as_rank_1()
sys.exit(3)
