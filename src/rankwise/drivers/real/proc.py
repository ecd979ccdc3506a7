"""What the kernel's files show before anything starts: processes, and NVIDIA's driver."""

import os
from contextlib import suppress

from rankwise.base.errors import ConfigError

MOUNT_COMMAND = "mount -t proc proc /proc"
GPUS_VARIABLE = "RANKWISE_GPUS"
"""1: ask NVIDIA's driver although no device file shows a GPU; 0: never ask."""
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Of NVIDIA's driver, and of Windows' subsystem for Linux."""


def proc_lack(root: str = "") -> str | None:
    """What is wrong with /proc, after its name; None if it shows this process.

    Args:
        root: put before `/proc`; a directory in tests.
    """
    with suppress(OSError):
        if os.readlink(f"{root}/proc/self") == str(os.getpid()):
            return None
        # Its numbers are those of other processes here: signals would reach the wrong ones.
        return "shows the processes of another PID namespace"
    return "is not mounted"


def check_proc() -> None:
    """Refuse to go on without /proc: descriptors, children and threads are read from it.

    Raises:
        ConfigError: it is not mounted, or shows another PID namespace.
    """
    if (lack := proc_lack()) is not None:
        raise ConfigError(f"/proc {lack}", hint=f"mount it: {MOUNT_COMMAND}")


def may_have_gpus() -> bool:
    """Whether this machine may have a GPU of NVIDIA."""
    switch = os.environ.get(GPUS_VARIABLE)
    if switch in ("0", "1"):
        return switch == "1"
    return any(map(os.path.exists, _GPU_DRIVERS))
