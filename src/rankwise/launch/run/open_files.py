"""How many files this process may open, and how many its workers may."""

import os
import resource

SPARE_FILES = 64
"""For whatever else the program and we open meanwhile."""
ORIGINAL_NOFILE = resource.getrlimit(resource.RLIMIT_NOFILE)
"""The limit of open files that workers get back: the agent may raise its own."""


def ensure_open_files(count: int) -> None:
    """Let this process open `count` files more, if it may: the pipes of 256 workers are a thousand.

    A limit that suffices is left alone, since it belongs to the program that calls us.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and len(os.listdir("/proc/self/fd")) + count + SPARE_FILES > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
