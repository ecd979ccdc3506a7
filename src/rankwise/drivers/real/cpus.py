"""How many CPUs this process may use at a time.

The affinity says which CPUs it may run on. A container is usually limited otherwise: a quota of its
control group allows it so much CPU time in each period, on any CPU of the machine. A program that
starts a thread for each CPU of 96 under a quota of 4 uses up the quota at once and then stands
still until the period ends.
"""

import os
from collections.abc import Iterator
from math import ceil

import msgspec

from rankwise.drivers.real.cgroups import UNIFIED, group_directories, group_paths, small_text


class CpuQuota(msgspec.Struct, frozen=True):
    """CPU time that a control group may use, in CPUs, and the file that says so."""

    cpus: float
    file: str


def usable_cpu_count(root: str = "") -> int:
    """How many CPUs this process may use: its affinity, and the tightest quota, rounded up.

    Args:
        root: put before `/proc` and `/sys`; a directory in tests.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = tightest_quota(root)
    return allowed if quota is None else min(allowed, max(1, ceil(quota.cpus)))


def tightest_quota(root: str = "") -> CpuQuota | None:
    """The smallest quota of this process's control group and its ancestors; None without one."""
    return min(_quotas(root), key=lambda quota: quota.cpus, default=None)


def _quotas(root: str) -> Iterator[CpuQuota]:
    paths = group_paths(root)
    for controller in ("cpu", UNIFIED):  # the controller is in one of both hierarchies
        if controller in paths:
            for directories in group_directories(root, paths[controller], controller):
                for directory in directories:
                    yield from _quota_of(directory, controller)


def _quota_of(directory: str, controller: str) -> Iterator[CpuQuota]:
    if controller == UNIFIED:
        file = f"{directory}/cpu.max"  # "max 100000" or "400000 100000"; the root has none
        quota, _, period = small_text(file).strip().partition(" ")
    else:
        file = f"{directory}/cpu.cfs_quota_us"  # -1 without a quota
        quota = small_text(file).strip()
        period = small_text(f"{directory}/cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(quota) and int(period):
        yield CpuQuota(int(quota) / int(period), file)
