"""Whether it was the kernel's out-of-memory killer that sent a SIGKILL.

The signal itself does not tell who sent it. The kernel counts its own kills, though, before it
sends them, so by the time that a death is seen the count has risen:

- cgroup v2, `memory.events`: `oom_kill` counts kills in the group and below it. A group without
  the memory controller has no such file; the nearest ancestor that has one answers for it.
- cgroup v1, `memory.oom_control`: `oom_kill` counts kills in the very group, not below it.
- `/proc/vmstat`: `oom_kill` counts all kills of the machine, those in other containers included.

The counts are sampled when a gang starts and compared when a worker has died of SIGKILL. Both are
a handful of reads of small files, some tens of microseconds; nothing is watched in between.
"""

import msgspec

from rankwise.base.units import format_bytes
from rankwise.drivers.real.cgroups import UNIFIED, group_directories, group_paths, small_text

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as nearly 2**63."""


class OomVerdict(msgspec.Struct, frozen=True):
    """The answer: True, False, or None where it cannot be known, and the evidence in a sentence."""

    was_oom: bool | None
    evidence: str


class MemoryGroup(msgspec.Struct, frozen=True):
    """The cgroup that accounts for this process's memory.

    Attributes:
        name: its path as the kernel names it.
        directories: its directory, then those of its ancestors.
        events_file: the file with the count; `limit_file` the one with the limit.
        counts_below: whether kills in groups below it are counted, too.
    """

    name: str
    directories: tuple[str, ...]
    events_file: str
    limit_file: str
    counts_below: bool

    def kills(self) -> int | None:
        """How many processes have been killed."""
        return _read_counter(f"{self.directories[0]}/{self.events_file}")

    def limit_bytes(self) -> int | None:
        """The tightest limit of the group and its ancestors."""
        limits = [
            int(text)
            for directory in self.directories
            if (text := small_text(f"{directory}/{self.limit_file}").strip()).isdigit()
        ]
        # An ancestor may have the limit that counts, as a pod's does over its containers.
        tightest = min(limits, default=_UNLIMITED)
        return tightest if tightest < _UNLIMITED else None


class OomWatch:
    """Asked after a SIGKILL: was it the kernel's OOM killer?

    Make a new one for every attempt: it compares with the moment in which it was made. Two workers
    that are killed within one attempt both get the answer True if one of them was killed by the
    kernel, since it counts and does not name.

    Args:
        root: put before `/proc` and `/sys`; a directory in tests.
    """

    def __init__(self, root: str = "") -> None:
        self._vmstat = f"{root}/proc/vmstat"
        self._group = find_memory_group(root)
        self._group_kills = self._group.kills() if self._group is not None else None
        self._machine_kills = _read_counter(self._vmstat)

    def verdict(self) -> OomVerdict:
        """Compare the counts with those at the start."""
        # Read before the group's: a kill in between then shows in the group, which tells more.
        machine_before, machine_now = self._machine_kills, _read_counter(self._vmstat)
        machine_rose = _rose(machine_before, machine_now)
        group = self._group
        if group is not None:
            before, now = self._group_kills, group.kills()
            where = f"{group.events_file} of {group.name}: oom_kill"
            if _rose(before, now):
                return OomVerdict(
                    was_oom=True, evidence=f"{where} {before} -> {now}, {_describe_limit(group)}"
                )
            if before is not None and before == now:
                # cgroup v1 counts no kills of groups below this one, in which the worker may have
                # been.
                if group.counts_below or not machine_rose:
                    return OomVerdict(was_oom=False, evidence=f"{where} still {now}")
                return OomVerdict(
                    was_oom=None,
                    evidence=f"{where} still {now}, but that of the machine {machine_before} ->"
                    f" {machine_now}: it killed something elsewhere, perhaps this",
                )
        if machine_rose:
            return OomVerdict(
                was_oom=True,
                evidence=f"/proc/vmstat: oom_kill {machine_before} -> {machine_now},"
                " counted for the whole machine",
            )
        if machine_before is not None and machine_before == machine_now:
            return OomVerdict(was_oom=False, evidence=f"/proc/vmstat: oom_kill still {machine_now}")
        return OomVerdict(was_oom=None, evidence="no count of OOM kills can be read here")


def _rose(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _describe_limit(group: MemoryGroup) -> str:
    limit = group.limit_bytes()
    if limit is None:
        return "no limit: the machine itself ran out of memory"
    return f"limit {format_bytes(limit)}"


def find_memory_group(root: str = "") -> MemoryGroup | None:
    """The cgroup that counts what is killed for lack of memory; None if it is not to be seen."""
    paths = group_paths(root)
    if "memory" in paths:
        return _group_v1(root, paths["memory"])
    if UNIFIED in paths:
        return _group_v2(root, paths[UNIFIED])
    return None


def _group_v1(root: str, path: str) -> MemoryGroup | None:
    for directories in group_directories(root, path, "memory"):
        if _read_counter(f"{directories[0]}/memory.oom_control") is not None:
            return MemoryGroup(
                path, directories, "memory.oom_control", "memory.limit_in_bytes", counts_below=False
            )
    return None


def _group_v2(root: str, path: str) -> MemoryGroup | None:
    names = path.strip("/").split("/")
    for directories in group_directories(root, path, UNIFIED):
        for height in range(len(directories)):
            if _read_counter(f"{directories[height]}/memory.events") is not None:
                name = "/" + "/".join(names[: len(names) - height])
                return MemoryGroup(
                    name, directories[height:], "memory.events", "memory.max", counts_below=True
                )
    return None


def _read_counter(path: str) -> int | None:
    for line in small_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None
