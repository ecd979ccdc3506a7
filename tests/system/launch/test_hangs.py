"""A gang that shows no sign of life tells where it stands before it is killed."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from running import run, start, write_program

import rankwise
from rankwise import FailureCause
from rankwise.collectives import all_reduce

pytestmark = pytest.mark.system

HANG = """
import os, threading
def wait_for_the_others():
    print("waiting", flush=True)
    threading.Event().wait()
def wait_in_a_thread():
    threading.Event().wait()
if os.environ["RANK"] == "1":
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
wait_for_the_others()
"""


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_every_ranks_stacks_are_shown_before_anything_is_killed(
    method: str, tmp_path: Path
) -> None:
    script = write_program(tmp_path, HANG)

    done = run("run", "--nproc-per-node=2", "--hang-timeout=3s", "--start-method", method, script)

    assert done.code == 124
    rank_0, rank_1 = (
        done.stderr.split(f"rankwise: rank {rank}:\n")[1].split("\nrankwise:")[0] for rank in (0, 1)
    )
    assert rank_0.count("in wait_for_the_others") == 1
    assert "in wait_in_a_thread" not in rank_0
    assert "in wait_in_a_thread" in rank_1
    assert "no sign of life for 3 s" in done.stderr


def test_ranks_that_end_when_they_are_asked_have_answered_all_the_same(tmp_path: Path) -> None:
    # Any signal ends a pause, also the one that asks for stacks.
    script = write_program(tmp_path, "import signal\nsignal.pause()")

    done = run("run", "--nproc-per-node=2", "--hang-timeout=3s", script)

    assert done.code == 124
    assert done.stderr.count("rankwise: rank ") == 2


def test_ranks_that_cannot_answer_do_not_keep_the_others_from_answering(tmp_path: Path) -> None:
    script = write_program(tmp_path, HANG)
    stopped = write_program(
        tmp_path,
        f"""
import os, signal
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
exec(open({str(script)!r}).read())
""",
        "stopped.py",
    )

    done = run(
        "run", "--nproc-per-node=2", "--hang-timeout=3s", "--shutdown-timeout=100ms", stopped
    )

    shown = done.stderr.find("rankwise: rank 1:")
    killed = done.stderr.find("rank 0 did not end within 100 ms: killed")
    assert 0 <= shown < killed, done.stderr


def test_collectives_are_signs_of_life(server: rankwise.ForkServer) -> None:
    def reduce_for_a_while() -> int:
        rounds, end = 0, time.monotonic() + 4.5
        while all_reduce(np.array([time.monotonic() < end], dtype=np.int64))[0] == 2:
            time.sleep(0.02)
            rounds += 1
        return rounds

    results = rankwise.run(reduce_for_a_while, nprocs=2, hang_timeout=3, server=server)

    assert min(results) > 1


def test_output_is_a_sign_of_life(server: rankwise.ForkServer) -> None:
    def print_for_a_while() -> None:
        for _ in range(9):
            time.sleep(0.5)
            print("alive", flush=True)

    rankwise.run(print_for_a_while, nprocs=1, hang_timeout=3, server=server)


def test_a_hang_is_a_failure_that_carries_the_stacks(server: rankwise.ForkServer) -> None:
    def hang_here() -> None:
        time.sleep(1000)

    with pytest.raises(rankwise.WorkersFailed) as caught:
        rankwise.run(hang_here, nprocs=2, hang_timeout=2, server=server)

    assert [failure.cause for failure in caught.value.failures] == [FailureCause.HUNG] * 2
    assert all("in hang_here" in failure.stacks for failure in caught.value.failures)


def test_a_live_run_can_be_listed_and_asked_for_its_stacks(tmp_path: Path) -> None:
    script = write_program(tmp_path, HANG)
    name = f"asked-{tmp_path.parent.name}-{tmp_path.name}"[-60:]
    with start("run", "--nproc-per-node=2", "--rdzv-id", name, script) as running:
        running.wait_for("waiting", count=2)
        listed = [json.loads(line) for line in run("ps", "--json").lines]
        asked = run("stacks", name)
        asked_json = [json.loads(line) for line in run("stacks", "--json", str(running.pid)).lines]
        running.signal(signal.SIGTERM)
        done = running.finish()

    (ours,) = [row for row in listed if row["run_id"] == name]
    assert (ours["pid"], ours["nproc"], ours["state"]) == (running.pid, 2, "running")
    assert asked.stdout.count("in wait_for_the_others") == 2
    assert asked.code == 0
    assert [rank["rank"] for rank in asked_json] == [0, 1]
    assert all("in wait_for_the_others" in rank["stacks"] for rank in asked_json)
    assert done.code == 128 + signal.SIGTERM
    assert name not in Path("/proc/net/unix").read_text()
