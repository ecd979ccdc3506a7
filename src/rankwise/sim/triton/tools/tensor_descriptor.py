"""`triton.tools.tensor_descriptor`: descriptors made on the host."""

from rankwise.sim.triton.launch_arguments import TensorDescriptor

__all__ = ["TensorDescriptor"]
