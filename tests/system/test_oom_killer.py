"""The real OOM killer, let loose on a process of this test in a cgroup of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

LIMIT_BYTES = 64 * 1024 * 1024
PARENT = """
import os, signal, subprocess, sys
from rankwise.drivers.real.oom import OomWatch

open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
watch = OomWatch()
print("before:", watch.verdict().was_oom)
hungry = '''
open("/proc/self/oom_score_adj", "w").write("1000")
eaten = []
while True:
    eaten.append(b"x" * 1_000_000)
'''
status = subprocess.run([sys.executable, "-I", "-S", "-c", hungry], timeout=60).returncode
print("status:", status)
verdict = watch.verdict()
print("after:", verdict.was_oom, verdict.evidence)
"""
POOL = """
import os, sys
import rankwise

def hungry():
    open("/proc/self/oom_score_adj", "w").write("1000")
    eaten = []
    while True:
        eaten.append(b"x" * 1_000_000)

open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
with rankwise.Pool(1) as pool:
    failed = pool.submit(hungry)
    following = pool.submit(abs, -3)
    print(str(failed.exception()).replace(chr(10), " "))
    print(type(failed.exception()).__name__, failed.exception().was_oom, following.result())
"""
POOL_LIMIT_BYTES = 256 * 1024 * 1024


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of the memory controller, below ours, with a small limit."""
    group = _own_group() / f"rankwise-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        limit = next(
            (
                group / name
                for name in ("memory.max", "memory.limit_in_bytes")
                if (group / name).exists()
            ),
            None,
        )
        if limit is None:
            pytest.skip(f"the memory controller is not enabled below {group.parent}")
        limit.write_text(f"{LIMIT_BYTES}\n", encoding="ascii")
        for name in ("memory.swap.max", "memory.swappiness"):
            if (group / name).exists():
                (group / name).write_text("0\n", encoding="ascii")
        yield group
    finally:
        group.rmdir()


def _own_group() -> Path:
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    if "memory" in groups:
        return Path(f"/sys/fs/cgroup/memory{groups['memory']}")
    return Path(f"/sys/fs/cgroup{groups.get('', '')}")


def test_a_kill_by_the_real_oom_killer_is_told_from_any_other(small_group: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", PARENT, str(small_group)],
        check=True,
        capture_output=True,
        text=True,
        timeout=90,
    )

    before, status, after = told.stdout.splitlines()
    assert before == "before: False"
    assert status == "status: -9"
    assert after.startswith("after: True memory.")
    assert f"of /{small_group.name}" in after or f"/{small_group.name}:" in after
    assert after.endswith("oom_kill 0 -> 1, limit 64 MiB")


def test_task_that_the_oom_killer_ends_says_so_and_the_pool_goes_on(small_group: Path) -> None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (small_group / name).exists():
            (small_group / name).write_text(f"{POOL_LIMIT_BYTES}\n", encoding="ascii")

    told = subprocess.run(
        [sys.executable, "-c", POOL, str(small_group)],
        check=True,
        capture_output=True,
        text=True,
        timeout=90,
    )

    message, rest = told.stdout.splitlines()
    assert "out of memory" in message
    assert "limit 256 MiB" in message
    assert rest == "WorkerDied True 3"
