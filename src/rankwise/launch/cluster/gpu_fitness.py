"""`--node-check gpu`: whether the GPUs of this node can be used, as a program of its own.

It looks at what NVML tells (memory in use, slow clocks, memory errors, where the extra `gpu` is
installed), and has torch multiply matrices with a known answer on each GPU, where it is installed.
A GPU that hangs keeps this process, not the agent: the agent kills it after a minute.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.base.units import format_bytes
from rankwise.base.wording import counted
from rankwise.drivers.real.gpus import GpuReading, require_gpus

FREE_SHARE_MIN = 0.5
"""Memory that is in use before a round began belongs to another job, or was left behind."""
SIZES = (1024, 4096)
_MODULUS = 7


def main() -> int:
    """Check all GPUs; returns 0, or 1 after one line that says what is wrong."""
    trouble = _trouble()
    if trouble:
        print(trouble)  # noqa: T201  # a program
    return 1 if trouble else 0


def _trouble() -> str:
    try:
        readings = require_gpus().read()
    except ConfigError as error:
        return f"{error.message}: {error.hint}"
    return next(trouble_of(readings), "") or _trouble_of_products()


def trouble_of(readings: Iterable[GpuReading]) -> Iterator[str]:
    """What is wrong with GPUs by what NVML tells; a sentence each."""
    readings = tuple(readings)
    if not readings:
        yield "no GPU was found: nvidia-smi tells whether the driver works"
    for each in readings:
        used, total = each.memory_bytes, each.memory_bytes_max
        if used is not None and total and total - used < FREE_SHARE_MIN * total:
            pids = ", ".join(map(str, each.processes)) or "processes that NVML does not tell"
            yield (
                f"GPU {each.index} has {format_bytes(total - used)} of {format_bytes(total)} free; "
                f"it is in use by {pids}"
            )
        if each.ecc_errors:
            errors = counted(each.ecc_errors, "uncorrectable memory error")
            yield f"GPU {each.index} has had {errors}: reset it"
        if slow := [why for why in each.throttled_by if why != "power cap"]:
            yield f"GPU {each.index} is throttled ({', '.join(slow)}): check its cooling and power"


def _trouble_of_products() -> str:
    try:
        import torch  # noqa: PLC0415  # large, and this process is for it
    except ImportError:
        return ""
    if not torch.cuda.is_available():
        return "torch finds no GPU: is it a build for CUDA?"
    for index in range(torch.cuda.device_count()):
        try:
            wrong = wrong_products(torch, torch.device("cuda", index))
        except RuntimeError as error:
            return f"GPU {index}: {str(error).splitlines()[0]}"
        if wrong:
            return f"GPU {index} computes wrongly: {wrong}"
    return ""


def wrong_products(torch: Any, device: Any) -> str:
    """Multiply matrices of small integers, whose product is exact; tell what differs, if any."""
    for size in SIZES:
        numbers = torch.arange(size, device=device)
        left = ((numbers[:, None] * 3 + numbers) % _MODULUS).to(torch.float32)
        right = ((numbers[:, None] + numbers * 5) % _MODULUS).to(torch.float32)
        # Sums of the product by two other ways; all values are integers below 2 ** 24.
        expected = left.double() @ right.double().sum(1, keepdim=True)
        for dtype in (torch.float32, torch.bfloat16):
            product = left.to(dtype) @ right.to(dtype)
            found = product.double().sum(1, keepdim=True)
            slack = 0.0 if dtype is torch.float32 else 1e-2
            distance = float(((found - expected).abs() / expected.clamp(min=1)).max())
            if not distance <= slack:
                return f"a product of {size} x {size} {dtype} is off by {distance:.2g}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
