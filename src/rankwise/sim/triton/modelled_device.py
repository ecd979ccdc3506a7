"""The modelled CUDA device: of simulated ranks, and of a script of Triton that names one.

There is one description, so that a program takes the same way in both. Its tensors lie on the CPU,
and torch's own code goes on as on the CPU: the answer depends on the caller.
"""

from types import FrameType, SimpleNamespace
from typing import NamedTuple

MEMORY_BYTES = 80 << 30


class DeviceIdentity(NamedTuple):
    """What CUDA tells of a kind of device, whichever machine it is in.

    Attributes:
        capability: the generation, which decides what torch chooses (`dispatch.yaml`).
        sms: how many multiprocessors it has.
    """

    name: str = "modelled CUDA device"
    capability: tuple[int, int] = (9, 0)
    sms: int = 132


UNNAMED = DeviceIdentity()
"""A device of no machine that exists."""


def properties(
    memory_bytes: int = MEMORY_BYTES, identity: DeviceIdentity = UNNAMED
) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` tells of it."""
    major, minor = identity.capability
    return SimpleNamespace(
        name=identity.name, gcnArchName="", total_memory=memory_bytes, major=major, minor=minor,
        multi_processor_count=identity.sms, warp_size=32,
    )  # fmt: skip


def is_asked_by(frame: FrameType, *packages: str) -> bool:
    """Whether the code that asks is of one of these packages."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in packages
