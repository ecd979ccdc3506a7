"""`triton.tools.tensor_descriptor`: descriptors made on the host."""

from rankwise.sim.triton.host import TensorDescriptor

__all__ = ["TensorDescriptor"]
