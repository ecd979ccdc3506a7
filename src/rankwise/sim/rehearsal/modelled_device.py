"""The modelled CUDA device: of simulated ranks, and of a script of Triton that names one.

There is one description, so that a program takes the same way in both. Its tensors lie on the CPU,
and torch's own code goes on as on the CPU: the answer depends on the caller.
"""

from types import FrameType, SimpleNamespace

NAME = "modelled CUDA device"
MEMORY_BYTES = 80 << 30
CAPABILITY = 9, 0


def properties(
    memory_bytes: int = MEMORY_BYTES, capability: tuple[int, int] = CAPABILITY
) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` tells of it."""
    major, minor = capability
    return SimpleNamespace(
        name=NAME, gcnArchName="", total_memory=memory_bytes, major=major, minor=minor,
        multi_processor_count=132, warp_size=32,
    )  # fmt: skip


def is_asked_by(frame: FrameType, *packages: str) -> bool:
    """Whether the code that asks is of one of these packages."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in packages
