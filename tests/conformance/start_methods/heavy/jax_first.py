"""jax before everything else."""

import jax
import numpy as np

print(jax.numpy.ones(3).sum(), np.ones(3).sum())
