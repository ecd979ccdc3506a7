"""`triton.tools`."""

from rankwise.sim.triton.tools import tensor_descriptor

__all__ = ["tensor_descriptor"]
