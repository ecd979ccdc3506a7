"""A gradient by jax, which warns when its process is forked, beside numpy."""

import numpy as np
import jax
import jax.numpy as jnp

print(jax.grad(lambda x: jnp.sum(x**2))(jnp.asarray(np.arange(3.0))))
