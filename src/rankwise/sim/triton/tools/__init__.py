"""`triton.tools`."""

from rankwise.sim.triton.tools import mxfp, tensor_descriptor

__all__ = ["mxfp", "tensor_descriptor"]
