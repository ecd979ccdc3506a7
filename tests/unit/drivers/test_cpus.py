"""How many CPUs may be used, on machines made of files that say what a kernel would."""

import os
from pathlib import Path

import pytest

from rankwise.cli.doctor import check_cpus
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.launch.run import thread_limit
from rankwise.launch.run.thread_limit import thread_environment

V1_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
V1 = "sys/fs/cgroup/cpu,cpuacct"
V2 = "sys/fs/cgroup"


class Machine:
    """A directory that looks like `/` of a machine, and the CPUs that the affinity allows."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(96)))
        monkeypatch.setattr(os, "cpu_count", lambda: 96)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    def in_groups(self, groups: str, mounts: str) -> None:
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts)

    def v1_quota(self, directory: str, quota: int, period: int = 100_000) -> None:
        self.write(f"{V1}/{directory}/cpu.cfs_quota_us", f"{quota}\n")
        self.write(f"{V1}/{directory}/cpu.cfs_period_us", f"{period}\n")

    def usable(self) -> int:
        return usable_cpu_count(str(self.root))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_affinity_counts_where_no_group_is_visible(machine: Machine) -> None:
    assert machine.usable() == 96


@pytest.mark.parametrize(
    ("cpu_max", "count"),
    [
        ("400000 100000", 4),
        ("250000 100000", 3),
        ("5000 100000", 1),
        ("max 100000", 96),
        ("20000000 100000", 96),
    ],
)
def test_quota_of_version_2_is_rounded_up(machine: Machine, cpu_max: str, count: int) -> None:
    machine.in_groups("0::/pod\n", V2_MOUNT)
    machine.write(f"{V2}/pod/cpu.max", f"{cpu_max}\n")

    assert machine.usable() == count


def test_tightest_quota_of_all_ancestors_counts_in_version_2(machine: Machine) -> None:
    machine.in_groups("0::/slice/pod/container\n", V2_MOUNT)
    machine.write(f"{V2}/slice/pod/container/cpu.max", "max 100000\n")
    machine.write(f"{V2}/slice/pod/cpu.max", "800000 100000\n")
    machine.write(f"{V2}/slice/cpu.max", "300000 50000\n")

    assert machine.usable() == 6


def test_tightest_quota_of_all_ancestors_counts_in_version_1(machine: Machine) -> None:
    machine.in_groups("5:memory:/other\n4:cpu,cpuacct:/pods/one\n0::/\n", V1_MOUNT)
    machine.v1_quota("pods/one", -1)
    machine.v1_quota("pods", 150_000)
    machine.v1_quota("", -1)

    assert machine.usable() == 2


def test_container_whose_mount_begins_at_its_group_finds_the_quota(machine: Machine) -> None:
    mount = V2_MOUNT.replace(" / /sys", " /docker/ab12 /sys")
    machine.in_groups("0::/docker/ab12\n", mount)
    machine.write(f"{V2}/cpu.max", "200000 100000\n")

    assert machine.usable() == 2


def test_quota_of_version_2_counts_beside_controllers_of_version_1(machine: Machine) -> None:
    machine.in_groups("4:memory:/job\n0::/job\n", V2_MOUNT)
    machine.write(f"{V2}/job/cpu.max", "100000 100000\n")

    assert machine.usable() == 1


def test_doctor_names_the_quota_and_its_file(machine: Machine) -> None:
    machine.in_groups("0::/pod\n", V2_MOUNT)
    machine.write(f"{V2}/pod/cpu.max", "350000 100000\n")

    assert check_cpus(str(machine.root)).text == (
        f"4 of 96 may be used: a quota of 3.5 ({machine.root}/sys/fs/cgroup/pod/cpu.max)"
    )


def test_single_rank_under_a_quota_starts_as_many_threads_as_it_allows(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.in_groups("0::/pod\n", V2_MOUNT)
    machine.write(f"{V2}/pod/cpu.max", "400000 100000\n")
    monkeypatch.setattr(thread_limit, "usable_cpu_count", machine.usable)

    assert thread_environment(1, {}) == {"OMP_NUM_THREADS": "4"}
    assert thread_environment(2, {}) == {"OMP_NUM_THREADS": "1"}
    assert thread_environment(1, {"OMP_NUM_THREADS": "7"}) == {}


def test_single_rank_without_a_quota_keeps_the_threads_that_its_libraries_choose(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_limit, "usable_cpu_count", machine.usable)

    assert thread_environment(1, {}) == {}
