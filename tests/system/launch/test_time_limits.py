"""A run that takes too long is stopped as if somebody had asked it to."""

import os
from pathlib import Path

import pytest
from running import run, write_program

import rankwise

pytestmark = pytest.mark.system

SAVES = """
import time, rankwise
while not rankwise.should_stop():
    time.sleep(0.01)  # a step
print("saved", flush=True)
"""


@pytest.mark.parametrize("on", [(), ("--on", "sim")], ids=["processes", "simulated"])
def test_ranks_that_take_too_long_can_save(on: tuple[str, ...], tmp_path: Path) -> None:
    script = write_program(tmp_path, SAVES)

    done = run("run", *on, "--nproc-per-node=2", "--no-prefix", "--timeout=300ms", script)

    assert done.code == 124
    assert done.stdout.splitlines() == ["saved"] * 2
    assert "the time limit of 300 ms is over: stopping all ranks for up to 30 s" in done.stderr
    assert "stopped by its time limit of 300 ms after" in done.stderr


def block() -> None:
    Path(os.environ["FIFO"]).read_bytes()


def test_a_function_that_takes_too_long_is_a_time_out(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    with pytest.raises(rankwise.RunTimeout, match=r"^stopped by its time limit of 200 ms after "):
        rankwise.run(block, nprocs=1, timeout=0.2, grace=0, env={"FIFO": str(fifo)})


def test_a_restart_that_is_due_after_the_limit_is_not_made(tmp_path: Path) -> None:
    script = write_program(tmp_path, "import sys; sys.exit(7)")

    options = ("--max-restarts=3", "--restart-backoff=1m", "--timeout=600ms")
    done = run("run", *options, script)

    assert done.code == 7
    assert "the time limit of 600 ms is over" in done.stderr
    assert "root cause: rank 0 exited with code 7" in done.stderr
