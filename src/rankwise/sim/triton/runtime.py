"""The host's view of the device: `triton.runtime.driver.active`, and what programs ask of it."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rankwise.sim.triton import functions
from rankwise.sim.triton.constants import MAKE_CONSTANT, NEEDS_CONSTANT, plain
from rankwise.sim.triton.execution import KernelTypeError, place
from rankwise.sim.triton.jit import JITFunction
from rankwise.sim.triton.refusals import BINARIES, COMPILER, refusing
from rankwise.sim.triton.tensor import tensor
from rankwise.sim.triton.torch_on_cpu import NAMING

__all__ = ["JITFunction", "cdiv", "driver", "next_power_of_2", "set_allocator"]


def next_power_of_2(n: Any) -> Any:
    """The smallest power of two that is at least `n`."""
    n = plain(n)
    if isinstance(n, tensor):
        raise KernelTypeError(f"{place()}: next_power_of_2 {NEEDS_CONSTANT}", hint=MAKE_CONSTANT)
    return 1 if n <= 1 else 1 << (n - 1).bit_length()


def cdiv(x: Any, y: Any) -> Any:
    """The quotient rounded up."""
    return functions.cdiv(x, y)


def set_allocator(allocator: Callable[[int, int, Any], Any]) -> None:
    """Accepted and not needed: descriptors made in kernels take no memory here."""
    del allocator


__getattr__ = refusing(
    "triton.runtime",
    {
        "MockTensor": COMPILER,
        **dict.fromkeys(
            ("RedisRemoteCacheBackend", "RemoteCacheBackend", "build", "cache"), BINARIES
        ),
    },
)


class _Target:
    """What is being run on."""

    backend = "cpu"
    """Libraries take it for the name of the torch device that tensors have to be on."""
    arch = 0
    warp_size = 32


class _Driver:
    """Stands for a device driver, so that programs can choose their grid by its figures."""

    utils = SimpleNamespace(
        get_device_properties=lambda _device: {
            "multiprocessor_count": 32,
            "max_shared_mem": 228 * 1024,
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1_000_000,
            "mem_clock_rate": 1_000_000,
            "mem_bus_width": 1024,
        }
    )

    @staticmethod
    def is_active() -> bool:
        """Whether its device is here; libraries that find none switch their kernels off."""
        return True

    def get_active_torch_device(self) -> Any:
        """Where tensors say that they are. As torch's object if torch is there."""
        torch = sys.modules.get("torch")
        if torch is None:
            return "cpu"
        return torch.device("cuda", 0) if NAMING.is_done else torch.device("cpu")

    def get_current_target(self) -> _Target:
        """What is being run on."""
        return _Target()

    def get_current_device(self) -> int:
        """The device's number."""
        return 0

    def get_device_interface(self) -> Any:
        """A device's queue: everything in it is done when a launch returns."""
        return SimpleNamespace(synchronize=lambda: None)


driver = SimpleNamespace(active=_Driver())
backends = {"rankwise": SimpleNamespace(compiler=None, driver=_Driver)}
"""As `triton.backends.backends` has them."""
