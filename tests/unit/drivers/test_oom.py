"""The watch on the kernel's counts of OOM kills, over files that say what a kernel would."""

from pathlib import Path

import pytest

from rankwise.drivers.real.oom import OomVerdict, OomWatch

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"


class Machine:
    """A directory that looks like `/` of a machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    def vmstat(self, kills: int) -> None:
        self.write("proc/vmstat", f"nr_free_pages 7\noom_kill {kills}\nnuma_hit 3\n")

    def v2(self, group: str = "/job", mount: str = V2_MOUNT) -> None:
        self.write("proc/self/cgroup", f"0::{group}\n")
        self.write("proc/self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda rw\n" + mount)

    def v2_events(self, directory: str, kills: int, limit: str = "max") -> None:
        text = f"low 0\nhigh 0\nmax 9\noom 4\noom_kill {kills}\noom_group_kill 0\n"
        self.write(f"sys/fs/cgroup/{directory}/memory.events", text)
        self.write(f"sys/fs/cgroup/{directory}/memory.max", f"{limit}\n")

    def v1(self, group: str = "/job") -> None:
        self.write("proc/self/cgroup", f"5:cpu,cpuacct:/\n4:memory:{group}\n0::/\n")
        self.write("proc/self/mountinfo", V1_MOUNT)

    def v1_kills(self, directory: str, kills: int, limit: int = 9223372036854771712) -> None:
        at = f"sys/fs/cgroup/memory/{directory}"
        self.write(
            f"{at}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        )
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")

    def watch(self) -> OomWatch:
        return OomWatch(str(self.root))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_kill_in_the_own_group_is_seen_with_the_tightest_limit(machine: Machine) -> None:
    machine.v2("/slice/job")
    machine.v2_events("slice/job", 1, limit="4294967296")
    machine.v2_events("slice", 5, limit="2147483648")
    watch = machine.watch()
    machine.v2_events("slice/job", 2, limit="4294967296")

    assert watch.verdict() == OomVerdict(
        was_oom=True, evidence="memory.events of /slice/job: oom_kill 1 -> 2, limit 2 GiB"
    )


def test_a_group_without_limit_means_that_the_machine_ran_out(machine: Machine) -> None:
    machine.v2()
    machine.v2_events("job", 0)
    watch = machine.watch()
    machine.v2_events("job", 1)

    assert watch.verdict() == OomVerdict(
        was_oom=True,
        evidence="memory.events of /job: oom_kill 0 -> 1,"
        " no limit: the machine itself ran out of memory",
    )


def test_kills_elsewhere_on_the_machine_are_not_ours_under_cgroup_v2(machine: Machine) -> None:
    machine.v2()
    machine.v2_events("job", 3)
    machine.vmstat(3)
    watch = machine.watch()
    machine.vmstat(4)

    assert watch.verdict() == OomVerdict(
        was_oom=False, evidence="memory.events of /job: oom_kill still 3"
    )


def test_the_nearest_ancestor_that_counts_answers_for_a_group_that_does_not(
    machine: Machine,
) -> None:
    machine.v2("/slice/job/step")
    machine.v2_events("slice", 0, limit="1610612736")
    watch = machine.watch()
    machine.v2_events("slice", 1, limit="1610612736")

    assert watch.verdict() == OomVerdict(
        was_oom=True, evidence="memory.events of /slice: oom_kill 0 -> 1, limit 1.5 GiB"
    )


def test_a_container_that_sees_only_its_part_of_the_hierarchy_finds_its_group(
    machine: Machine,
) -> None:
    machine.v2("/docker/abc/job", V2_MOUNT.replace("0:38 /", "0:38 /docker/abc"))
    machine.v2_events("job", 0)
    watch = machine.watch()
    machine.v2_events("job", 1)

    verdict = watch.verdict()

    assert verdict.was_oom is True
    assert "memory.events of /docker/abc/job:" in verdict.evidence


def test_a_group_outside_of_what_is_mounted_is_not_guessed(machine: Machine) -> None:
    machine.v2("/../other")
    machine.v2_events("other", 0)
    watch = machine.watch()
    machine.v2_events("other", 1)

    assert watch.verdict().was_oom is None


def test_a_kill_in_the_own_group_is_seen_under_cgroup_v1(machine: Machine) -> None:
    machine.v1()
    machine.v1_kills("job", 0, limit=50331648)
    machine.v1_kills("", 0)
    watch = machine.watch()
    machine.v1_kills("job", 1, limit=50331648)

    assert watch.verdict() == OomVerdict(
        was_oom=True, evidence="memory.oom_control of /job: oom_kill 0 -> 1, limit 48 MiB"
    )


def test_under_cgroup_v1_a_kill_elsewhere_may_have_been_in_a_group_below(machine: Machine) -> None:
    machine.v1()
    machine.v1_kills("job", 0)
    machine.vmstat(8)
    watch = machine.watch()
    machine.vmstat(9)

    verdict = watch.verdict()

    assert verdict.was_oom is None
    assert "oom_kill still 0, but that of the machine 8 -> 9" in verdict.evidence


def test_under_cgroup_v1_nothing_is_left_open_when_nothing_was_killed(machine: Machine) -> None:
    machine.v1()
    machine.v1_kills("job", 2)
    machine.vmstat(8)

    assert machine.watch().verdict() == OomVerdict(
        was_oom=False, evidence="memory.oom_control of /job: oom_kill still 2"
    )


def test_without_groups_the_count_of_the_machine_answers(machine: Machine) -> None:
    machine.vmstat(0)
    watch = machine.watch()

    assert watch.verdict() == OomVerdict(was_oom=False, evidence="/proc/vmstat: oom_kill still 0")
    machine.vmstat(1)
    assert watch.verdict() == OomVerdict(
        was_oom=True, evidence="/proc/vmstat: oom_kill 0 -> 1, counted for the whole machine"
    )


def test_where_nothing_can_be_read_it_is_not_known(machine: Machine) -> None:
    watch = machine.watch()
    machine.vmstat(1)

    assert watch.verdict() == OomVerdict(
        was_oom=None, evidence="no count of OOM kills can be read here"
    )


def test_lines_that_no_kernel_writes_do_no_harm(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "nonsense\n::\n4:memory\n")
    machine.write("proc/self/mountinfo", "- cgroup cgroup rw,memory\n1 2 3 - cgroup x rw,memory\n")
    machine.write("proc/vmstat", "oom_kill many\n")

    assert machine.watch().verdict().was_oom is None
