"""Runs in what containers are made of: namespaces, read-only mounts, quotas and foreign users."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import RANKWISE, Finished, Running, write_program

HAS_NAMESPACES = (
    os.geteuid() == 0
    and all(map(shutil.which, ("unshare", "setpriv", "ip")))
    and subprocess.run(["unshare", "-mnpf", "true"], check=False, capture_output=True).returncode
    == 0
)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not HAS_NAMESPACES, reason="namespaces need root, util-linux's unshare and iproute2"
    ),
]

READ_ONLY_ROOT = (
    "mount --make-rprivate / && mount --bind / / && mount -t tmpfs -o ro none /dev/shm"
    " && mount -o remount,ro,bind /"
)
NO_IPV4_LOOPBACK = "ip link set lo up && ip address del 127.0.0.1/8 dev lo"
STRANGER = "setpriv --reuid 54321 --regid 54321 --clear-groups env -i PATH=/usr/bin:/bin"
OF_VERSION_1, OF_VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def inside(setup: str, *words: str, unshared: str = "-m", before: str = "exec") -> Finished:
    """Run a command in namespaces of its own, which `setup` has furnished."""
    script = f'{setup} && {before} "$@"'
    command = ("unshare", *unshared.split(), "bash", "-c", script, "bash", *words)
    with Running(*command, cwd=Path("/")) as running:
        return running.finish()


def run_words(*words: str) -> tuple[str, ...]:
    return (*RANKWISE, "run", "--quiet", *words)


@pytest.fixture
def program(tmp_path: Path) -> str:
    return str(write_program(tmp_path, "import os\nprint('rank', os.environ['RANK'])\n"))


@pytest.fixture
def failing(tmp_path: Path) -> str:
    return str(write_program(tmp_path, "raise ValueError('bad')\n", "failing.py"))


def test_run_without_log_dir_needs_no_file_on_a_read_only_root(program: str) -> None:
    done = inside(READ_ONLY_ROOT, *run_words("--nproc-per-node", "2", program))

    assert (done.code, sorted(done.lines)) == (0, ["[default0]:rank 0", "[default1]:rank 1"])
    assert done.stderr == ""


def test_torchrun_as_a_module_needs_no_file_on_a_read_only_root(program: str) -> None:
    words = (sys.executable, "-m", "rankwise.compat.torch.run", "--standalone", program)

    done = inside(READ_ONLY_ROOT, *words)

    assert (done.code, "rank 0" in done.stdout) == (0, True), done.stderr
    assert "Traceback" not in done.stderr


def test_failure_on_a_read_only_root_is_reported(failing: str) -> None:
    done = inside(READ_ONLY_ROOT, *RANKWISE, "run", "--start-method", "forkserver", failing)

    assert done.code == 1
    assert "root cause: rank 0 failed: ValueError: bad" in done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("run", "--redirects", "3", "-m", "this"), "Read-only file system"),
        (("run", "--report", "/report.html", "-m", "this"), "the file system is read-only"),
        (("diff", "-m", "this"), "No usable temporary directory"),
    ],
)
def test_command_that_needs_a_file_ends_with_one_line_on_a_read_only_root(
    words: tuple[str, ...], complaint: str
) -> None:
    done = inside(READ_ONLY_ROOT, *RANKWISE, *words)

    assert done.code == 2
    assert done.stderr.count("\n") == 1
    assert complaint in done.stderr


@pytest.mark.parametrize(
    "words", [("run", "-m", "this"), ("run", "--on", "sim", "-m", "this"), ("ps",), ("why",)]
)
def test_command_without_proc_ends_with_one_line(words: tuple[str, ...]) -> None:
    done = inside("mount -t tmpfs none /proc", *RANKWISE, *words, unshared="-mpf")

    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        f"rankwise {words[0]}: error: /proc is not mounted (mount it: mount -t proc proc /proc)\n"
    )


@pytest.mark.parametrize(
    "call", ["rankwise.run(print)", "rankwise.spawn(print)", "run.main(['-m', 'this'])"]
)
def test_function_without_proc_is_refused_in_one_line(call: str) -> None:
    program = f"""
import rankwise
from rankwise.compat.torch import run
try:
    {call}
except rankwise.ConfigError as error:
    print(error)
"""
    done = inside("mount -t tmpfs none /proc", sys.executable, "-c", program, unshared="-mpf")

    assert done.stdout == "/proc is not mounted (mount it: mount -t proc proc /proc)\n"


def test_run_whose_proc_is_of_another_pid_namespace_is_refused(program: str) -> None:
    done = inside("true", *run_words(program), unshared="-pf")

    assert done.code == 2
    assert "/proc shows the processes of another PID namespace" in done.stderr


def test_unknown_user_without_home_runs_and_is_told_of_failures(failing: str) -> None:
    opened = f"{_opened()} && cp {failing} /mnt"
    words = (*RANKWISE, "run", "/mnt/failing.py")

    done = inside(opened, *words, before=f"exec {STRANGER}")

    assert done.code == 1
    assert "root cause: rank 0 failed: ValueError: bad" in done.stderr


def _opened() -> str:
    """Commands that let another user reach what the test needs, in the test's namespace alone.

    An interpreter below a closed home directory is shown again, in a directory that is open.
    """
    folders = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *sys.path)}
    folders = {folder for folder in folders if folder.is_dir()}
    lines = ["mount --make-rprivate /", "mount -t tmpfs none /mnt"]
    closed = {one for folder in folders for one in folder.parents if not one.stat().st_mode & 1}
    for number, outer in enumerate(sorted(one for one in closed if not closed & {*one.parents})):
        lines += [f"mkdir /mnt/{number}", f"mount --rbind {outer} /mnt/{number}"]
        lines += [f"mount -t tmpfs -o mode=755 none {outer}"]
        for folder in sorted(one for one in folders if outer in one.parents):
            hidden = f"/mnt/{number}/{folder.relative_to(outer)}"
            lines += [f"mkdir -p {folder}", f"mount --rbind {hidden} {folder}"]
    return " && ".join(lines)


def test_launcher_as_pid_1_reaps_orphans_and_ends_with_the_code_of_its_rank(tmp_path: Path) -> None:
    text = """
        import os, sys
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
        print(os.stat("/proc/1").st_uid, open("/proc/1/cmdline").read().count("rankwise"))
        sys.exit(3)
    """
    program = write_program(tmp_path, "\n".join(line[8:] for line in text.splitlines()))

    done = inside("true", *run_words(str(program)), unshared="-mpf --mount-proc")

    assert done.lines == ["[default0]:0 1"]
    assert done.code == 3


def test_ranks_talk_with_a_tiny_shared_memory(tmp_path: Path) -> None:
    program = _summing(tmp_path)

    done = inside(
        "mount -t tmpfs -o size=64k none /dev/shm",
        *run_words("--nproc-per-node", "2", program),
    )

    assert sorted(line.partition(":")[2] for line in done.lines) == ["2.0 127.0.0.1"] * 2


def test_ranks_meet_at_the_ipv6_loopback_where_there_is_no_other(tmp_path: Path) -> None:
    program = _summing(tmp_path)

    done = inside(NO_IPV4_LOOPBACK, *run_words("--nproc-per-node", "2", program), unshared="-mn")

    assert sorted(line.partition(":")[2] for line in done.lines) == ["2.0 ::1"] * 2


def test_node_serves_the_store_at_localhost_where_that_is_an_ipv6_address(tmp_path: Path) -> None:
    program = _summing(tmp_path)
    nodes = ("--nnodes", "1:2", "--rdzv-backend", "embedded", "--rdzv-endpoint", "localhost:29400")
    meeting = (*nodes, "--rdzv-conf", "last_call_timeout=1", "--health-port", "0")

    done = inside(
        NO_IPV4_LOOPBACK,
        *(*RANKWISE, "run", *meeting, "--nproc-per-node", "2", program),
        unshared="-mn",
    )

    assert sorted(line.partition(":")[2] for line in done.lines) == ["2.0 ::1"] * 2
    assert "health: http://[::1]:" in done.stderr


def _summing(folder: Path) -> str:
    text = (
        "import os\nimport numpy\nimport rankwise.collectives as c\n"
        "array = numpy.full(50_000, int(os.environ['RANK']) * 2.0)\n"
        "array = c.all_reduce(array)\n"
        "print(array[0], os.environ['MASTER_ADDR'])\n"
    )
    return str(write_program(folder, text, "summing.py"))


@pytest.fixture
def quota_of_one_cpu() -> Iterator[Path]:
    """A control group that may use the time of one CPU."""
    is_version_1 = (OF_VERSION_1 / "cpu.cfs_quota_us").exists()
    group = (OF_VERSION_1 if is_version_1 else OF_VERSION_2) / f"rankwise_test_{os.getpid()}"
    try:
        group.mkdir()
        if is_version_1:
            (group / "cpu.cfs_quota_us").write_text("100000")
        else:
            (group / "cpu.max").write_text("100000 100000")
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is all there is")
@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_ranks_are_as_many_as_the_quota_of_cpus_allows(
    program: str, quota_of_one_cpu: Path, kind: str
) -> None:
    done = inside(
        f"echo $$ > {quota_of_one_cpu}/cgroup.procs",
        *(*RANKWISE, "run", "--nproc-per-node", kind, program),
    )

    assert done.lines == ["[default0]:rank 0"]
    assert done.stderr == (
        "rankwise: OMP_NUM_THREADS=1, as many CPUs as this machine's CPU quota allows\n"
    )
