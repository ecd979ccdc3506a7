"""Whether the kernel's files about processes can be read; nothing is started without them."""

import os
from contextlib import suppress

from rankwise.base.errors import ConfigError

MOUNT_COMMAND = "mount -t proc proc /proc"


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
