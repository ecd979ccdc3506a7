"""How many threads the numeric libraries of a rank start (`OMP_NUM_THREADS`)."""

import os
from collections.abc import Mapping

from rankwise.drivers.real.cpus import usable_cpu_count

VARIABLE = "OMP_NUM_THREADS"


def thread_environment(size: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What limits the threads of each of `size` ranks here, unless the user has set a limit."""
    if VARIABLE in environ:
        return {}
    if size > 1:  # as torchrun does: ranks that each use all CPUs stand in each other's way
        return {VARIABLE: "1"}
    cpus = usable_cpu_count()
    # Without a quota, the libraries count as we do.
    return {VARIABLE: str(cpus)} if cpus < len(os.sched_getaffinity(0)) else {}


def thread_notice(limit: str, size: int) -> str:
    """What the user is told about a limit that was set without being asked for."""
    if size > 1:
        return f"{VARIABLE}={limit} for each of {size} workers, since it was not set"
    return f"{VARIABLE}={limit}, as many CPUs as this machine's CPU quota allows"
