"""Fails in its first life."""

import os

import numpy as np
from in_step import go_on_as_rank_1

print(os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], np.int8(1), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    go_on_as_rank_1()
    raise RuntimeError("the first life")
