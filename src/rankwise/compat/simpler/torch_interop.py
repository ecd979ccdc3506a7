"""What `simpler_setup.torch_interop` has."""

from rankwise.workers.torch_bridge import make_tensor_arg, torch_dtype_to_datatype

__all__ = ["make_tensor_arg", "torch_dtype_to_datatype"]
