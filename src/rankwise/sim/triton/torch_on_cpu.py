"""Scripts for a GPU on a machine without one: torch's CUDA device is the CPU.

While the mode is entered, `device="cuda"`, `.cuda()` and `.to("cuda")` give tensors on the CPU,
which say of themselves that they are on a GPU (`is_cuda`), since scripts assert that. Questions
about the device are answered for one like the emulator's, that can do nothing special.
"""

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any


def _nothing(*_args: Any, **_options: Any) -> None:
    """Do nothing: there is no device to wait for."""


_DEVICE = SimpleNamespace(
    name="rankwise's emulator",
    gcnArchName="",  # asked by torch.compile where torch was built without CUDA
    major=0,
    minor=0,
    multi_processor_count=32,
    total_memory=16 << 30,
    warp_size=32,
)


class _OnDevice(nullcontext[None]):
    """`torch.cuda.device(…)`: on the one device there is."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device


ANSWERS: dict[str, Any] = {
    "_DeviceGuard": _OnDevice,
    "current_device": lambda: 0,
    "device": _OnDevice,
    "device_count": lambda: 1,
    "get_device_capability": lambda _device=None: (0, 0),
    "get_device_properties": lambda _device=None: _DEVICE,
    "synchronize": _nothing,
}
"""What answers instead of functions of `torch.cuda`."""


def cuda_on_cpu(torch: ModuleType) -> Any:
    """The mode: a context manager."""
    tensor = torch.Tensor
    is_cuda = tensor.is_cuda.__get__

    def on_cpu(value: Any) -> Any:
        is_device = isinstance(value, torch.device)
        name = value.type if is_device else value if isinstance(value, str) else ""
        return "cpu" if name.partition(":")[0] == "cuda" else value

    class CudaOnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func == is_cuda:
                return True
            if func is tensor.cuda:
                return args[0]
            kwargs = dict(kwargs or {})
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            if func is tensor.to:
                args = (args[0], *map(on_cpu, args[1:]))
            return func(*args, **kwargs)

    return CudaOnCpu()
