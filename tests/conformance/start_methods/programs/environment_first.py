"""Sets a variable before the import that reads it: not covered, so nothing is imported before."""

import os

os.environ["OMP_NUM_THREADS"] = "3"
import numpy as np

print(os.environ["OMP_NUM_THREADS"], np.ones(2))
