"""Two tasks of a SLURM step, each on a node: the variables are SLURM's, everything else is real."""

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import find_etcd, first_member, needs_etcd
from running import WITHIN_S, Running, start, wait_for_any, write_program

from rankwise.cli.slurm import PORT_COUNT, SlurmStep
from rankwise.drivers.real.stores.encryption import has_certificates

pytestmark = pytest.mark.system

TELLS_ITS_PLACE = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["GROUP_RANK"],
      "in", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
"""
STEPS_UNTIL_TOLD = """
import time
import rankwise
assert not rankwise.should_stop()  # from its first step on a rank is asked, and not signalled
print("stepping", flush=True)
while not rankwise.should_stop():
    time.sleep(0.01)
print("saved", flush=True)
"""


def job_with_a_free_port() -> int:
    """The number of a job on whose port nobody listens."""
    for job in range(os.getpid(), os.getpid() + PORT_COUNT):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", SlurmStep(job, 0, 2, 2, 0, "").port))
            except OSError:
                continue
            return job
    pytest.fail("every port of the range is taken")


def srun(job: int, node: int, *words: str | Path) -> Running:
    """A task as srun starts it, with two nodes of which this host plays both."""
    environment = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost,node[07]",
        "SLURM_NODEID": str(node),
        "SLURM_TOPOLOGY_ADDR": f"spine.leaf.node{node}",
        "SLURM_CPUS_ON_NODE": "1",
    }
    return start("run", *words, environment=environment)


def test_nodes_of_a_step_meet_without_being_told_where(tmp_path: Path) -> None:
    job = job_with_a_free_port()
    program = write_program(tmp_path, TELLS_ITS_PLACE)

    with (
        srun(job, 1, "--nproc-per-node", "2", program) as second,
        srun(job, 0, "--nproc-per-node", "2", program) as first,
    ):
        done = [first.finish(), second.finish()]

    assert [each.code for each in done] == [0, 0], done
    told = [sorted(line.partition("]:")[2] for line in each.lines) for each in done]
    assert told == [
        [f"rank {rank} of 4 on {node} in {job}.0" for rank in (2 * node, 2 * node + 1)]
        for node in (0, 1)
    ]
    assert f"SLURM step {job}.0: this is node 0 of 2" in done[0].stderr


def test_a_step_that_is_preempted_stops_all_ranks_at_a_step_and_says_143(tmp_path: Path) -> None:
    job = job_with_a_free_port()
    program = write_program(tmp_path, STEPS_UNTIL_TOLD)

    with srun(job, 0, program) as first, srun(job, 1, program) as second:
        for task in (first, second):
            task.wait_for("stepping")
        # SLURM sends it to every task of the step.
        for task in (first, second):
            task.signal(signal.SIGTERM)
        done = [first.finish(), second.finish()]

    assert [each.code for each in done] == [143, 143], done
    assert all("saved" in each.stdout for each in done)


def test_several_tasks_on_a_node_end_with_one_line_and_code_2(tmp_path: Path) -> None:
    program = write_program(tmp_path, TELLS_ITS_PLACE)
    environment = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4"}
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"):
        environment[name] = "1"

    with start("run", program, environment=environment) as task:
        done = task.finish()

    assert done.code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--ntasks-per-node 1" in done.stderr


@needs_etcd
@pytest.mark.skipif(not has_certificates(), reason="needs the extra rankwise[tls]")
def test_three_nodes_run_an_etcd_of_their_own_and_survive_the_loss_of_the_first(
    tmp_path: Path,
) -> None:
    etcd = find_etcd()
    assert etcd is not None
    job = job_with_a_free_port()
    program = write_program(tmp_path, STEPS_UNTIL_TOLD)
    environment = {
        "PATH": f"{Path(etcd).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "RANKWISE_STORE_TOKEN": "what the nodes of this job know",
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "127.0.0.[11-13]",
    }
    words = ("run", "--nnodes", "2:3", "--max-restarts", "3", program)
    with ExitStack() as stack:
        tasks = [
            stack.enter_context(
                start(*words, environment={**environment, "SLURM_NODEID": str(node)})
            )
            for node in range(3)
        ]
        wait_for_any(tasks, "stepping", count=3)
        first = first_member(tasks)
        others = [task for task in tasks if task is not first]
        first.signal(signal.SIGKILL)
        wait_for_any(others, "stepping", count=4)  # once more each
        for task in others:
            task.signal(signal.SIGTERM)
        done = [task.finish(WITHIN_S) for task in others]

    assert [each.code for each in done] == [143, 143], done
    port = SlurmStep(job, 0, 3, 3, 0, "").port
    endpoints = ",".join(f"127.0.0.{last}:{port}" for last in (11, 12, 13))
    assert all(f"meet in an etcd of their own at {endpoints}" in each.stderr for each in done)
    assert not any("anyone who" in each.stderr for each in done), done
