"""Scripts for a GPU on a machine without one: torch's CUDA device is the CPU.

While the mode is entered, `device="cuda"`, `.cuda()` and `.to("cuda")` give tensors on the CPU,
which say of themselves that they are on a GPU (`is_cuda`), since scripts assert that. Autocasting
for CUDA is that of the CPU, to float16 if no type is given.

Questions about the device are answered for one like the emulator's, that can do nothing special,
until the program names CUDA's. From then on it has the modelled one of simulated ranks, and all
tensors are on it (`x.device`), also those made before: a library that gets gradients from autograd
compares devices, and nothing tells from where these came. torch's own code still finds the CPU.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from rankwise.sim.triton import modelled_device


def _nothing(*_args: Any, **_options: Any) -> None:
    """Do nothing: there is no device to wait for."""


_EMULATOR = SimpleNamespace(
    name="rankwise's emulator",
    gcnArchName="",  # asked by torch.compile where torch was built without CUDA
    major=0,
    minor=0,
    multi_processor_count=32,
    total_memory=16 << 30,
    warp_size=32,
)


class _Naming:
    """Whether the program has named a device of CUDA.

    Attributes:
        is_done: it has.
    """

    def __init__(self) -> None:
        self.is_done = False

    def note(self, value: Any) -> None:
        """Note a device that the program names; anything else is none of CUDA's."""
        self.is_done = self.is_done or _on_cpu(value) is not value

    def properties(self) -> SimpleNamespace:
        """What the device of the program is."""
        return modelled_device.properties() if self.is_done else _EMULATOR

    def sees_device(self, frame: Any) -> bool:
        """Whether the code that asks finds the modelled device."""
        return self.is_done and not modelled_device.is_asked_by(frame, "torch", "rankwise")


NAMING = _Naming()
"""Of this process, in which one script runs."""


def _capability(_device: Any = None) -> tuple[int, int]:
    found = NAMING.properties()
    return found.major, found.minor


def _is_available() -> bool:
    return NAMING.sees_device(sys._getframe(1))  # noqa: SLF001  # no other way to the caller


class _OnDevice(nullcontext[None]):
    """`torch.cuda.device(…)`: on the one device there is."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.device = device
        self.idx = self.prev_idx = 0


ANSWERS: dict[str, Any] = {
    "_DeviceGuard": _OnDevice,
    "current_device": lambda: 0,
    "device": _OnDevice,
    "device_count": lambda: 1,
    "get_device_capability": _capability,
    "get_device_name": lambda _device=None: NAMING.properties().name,
    "get_device_properties": lambda _device=None: NAMING.properties(),
    "is_available": _is_available,
    "synchronize": _nothing,
}
"""What answers instead of functions of `torch.cuda`."""


@contextmanager
def cuda_on_cpu(torch: ModuleType) -> Iterator[None]:
    """The mode, and autocasting for CUDA, which is that of the CPU then."""
    tensor = torch.Tensor
    is_cuda, is_cpu, device_of = (
        each.__get__ for each in (tensor.is_cuda, tensor.is_cpu, tensor.device)
    )
    begin = torch.autocast.__init__

    def autocast(
        self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any
    ) -> None:
        if _on_cpu(device_type) != device_type:
            dtype = dtype or torch.float16
        begin(self, _on_cpu(device_type), dtype, *args, **options)

    class CudaOnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func == is_cuda:
                return True
            if func in answers:
                sees_device = NAMING.sees_device(sys._getframe(1))  # noqa: SLF001  # no other way to the caller
                return answers[func] if sees_device else func(*args)
            if func is tensor.cuda:
                NAMING.is_done = True
                return args[0]
            kwargs = dict(kwargs or {})
            if func is torch.device:  # a program may name one, and give it later
                device = func(*args, **kwargs)
                NAMING.note(device)
                return device
            if "device" in kwargs:
                NAMING.note(kwargs["device"])
                kwargs["device"] = _on_cpu(kwargs["device"])
            if func is tensor.to:
                for each in args[1:]:
                    NAMING.note(each)
                args = (args[0], *map(_on_cpu, args[1:]))
            return func(*args, **kwargs)

    answers = {is_cpu: False, device_of: torch.device("cuda", 0), tensor.get_device: 0}

    engine = torch.autograd._engine_run_backward  # noqa: SLF001

    def run_backward(*args: Any, **options: Any) -> Any:
        with CudaOnCpu():  # no mode is entered below `Tensor.backward`
            return engine(*args, **options)

    with ExitStack() as stack:
        for owner, name, answer in (
            (torch.autocast, "__init__", autocast),
            (torch, "is_autocast_enabled", _of_cpu(torch.is_autocast_enabled)),
            (torch, "get_autocast_dtype", _of_cpu(torch.get_autocast_dtype)),
            (torch, "get_autocast_gpu_dtype", torch.get_autocast_cpu_dtype),
            (torch.autograd, "_engine_run_backward", run_backward),
            (torch._C, "_cuda_getCurrentRawStream", lambda _device: 0),  # noqa: SLF001
        ):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, answer)
        stack.enter_context(CudaOnCpu())
        stack.callback(setattr, NAMING, "is_done", False)  # noqa: FBT003  # `setattr` has no names
        yield


def _of_cpu(question: Any) -> Any:
    """A question about a kind of device, which is CUDA unless another is named."""
    return lambda device="cuda": question(_on_cpu(device))


def _on_cpu(value: Any) -> Any:
    """The CPU for a device that is CUDA's, by name or as a `torch.device`; else the same."""
    is_device = type(value).__name__ == "device"
    name = value.type if is_device else value if isinstance(value, str) else ""
    return "cpu" if name.partition(":")[0] == "cuda" else value
