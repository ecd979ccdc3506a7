"""Jobs of a real SLURM, whose nodes are lost, cancelled and requeued."""

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from etcd_servers import find_etcd, needs_etcd
from running import RANKWISE, Running, write_program
from slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

pytestmark = [pytest.mark.system, needs_slurm]

TELLS_ITS_PLACE = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename)
"""
STAYS = """
import os, threading
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
threading.Event().wait()
"""
STEPS_UNTIL_TOLD = """
import os, time
import rankwise
assert not rankwise.should_stop()  # from its first step on a rank is asked, and not signalled
print("stepping as", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
steps = 0
while not rankwise.should_stop():
    steps += 1
    time.sleep(0.005 + 0.001 * int(os.environ["RANK"]))
print(f"saved after {steps} steps", flush=True)
"""
RUN = " ".join(RANKWISE) + " run"
NAME = "trial"
THREE_NODES = ("--nodes=3", "--ntasks-per-node=1", f"--job-name={NAME}")
ELASTIC = ("--nnodes", "2:3", "--rdzv-conf", "lease_ttl=4")
LOST_NODE_3 = "round 0 is over: node .*on node3 is lost"


@pytest.fixture
def folder() -> Path:
    """Where SLURM lives: the path of munge's socket must be a short one."""
    return Path(tempfile.mkdtemp(prefix="slurm-"))


@pytest.fixture
def slurm(folder: Path) -> Iterator[SlurmCluster]:
    with slurm_cluster(folder, 3) as cluster:
        yield cluster


class Job:
    """Jobs of three nodes."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self._slurm = slurm
        self._folder = folder

    def step(
        self, program: str, *words: str, options: tuple[str, ...] = (), **environment: str
    ) -> Running:
        """Start a step: `options` are srun's, and `words` those of rankwise."""
        script = write_program(self._folder, program)
        run = (*RANKWISE, "run", *words, script)
        return self._slurm.command("srun", *THREE_NODES, *options, *run, **environment)

    @contextmanager
    def batch(
        self, *lines: str, options: tuple[str, ...] = (), **environment: str
    ) -> Iterator[tuple[Running, Running]]:
        """Start a script: sbatch, which waits for its end, and what the job writes."""
        script = write_program(self._folder, "\n".join(["#!/bin/bash", *lines, ""]), "job.sh")
        output = self._folder / "output"
        output.touch()
        words = ("--wait", *THREE_NODES, "--open-mode=append", f"--output={output}", *options)
        with (
            self._slurm.command("sbatch", *words, script, **environment) as job,
            Running("tail", "--lines=+1", "--follow", str(output)) as tail,
        ):
            yield job, tail

    def cancel(self) -> None:
        self._slurm.do("scancel", f"--name={NAME}")

    def requeue(self) -> None:
        number = self._slurm.do("squeue", "--noheader", "--format=%A", f"--name={NAME}")
        self._slurm.do("scontrol", "requeue", number.strip())


@pytest.fixture
def job(slurm: SlurmCluster, tmp_path: Path) -> Job:
    return Job(slurm, tmp_path)


def saved(output: str) -> list[str]:
    return re.findall(r"saved after \d+ steps", output)


def test_a_step_needs_no_words_about_its_nodes(job: Job) -> None:
    with job.step(TELLS_ITS_PLACE, "--nproc-per-node", "2") as step:
        done = step.finish()

    assert done.code == 0, done
    assert sorted(line.partition("]:")[2] for line in done.lines) == [
        f"rank {rank} of 6 on node{1 + rank // 2}" for rank in range(6)
    ]
    assert "3 nodes (node1, node2, node3)" in done.stderr


def test_a_step_that_is_cancelled_saves_at_one_step(job: Job) -> None:
    # SLURM's signal reaches the three members of etcd, too, if the nodes run one.
    with job.step(STEPS_UNTIL_TOLD, "--nproc-per-node", "2") as step:
        step.wait_for("stepping", count=6)
        job.cancel()
        done = step.finish()

    assert len(saved(done.stdout)) == 6, done
    assert len(set(saved(done.stdout))) == 1, done
    assert "failed" not in done.stderr


def test_ranks_that_scancel_kills_are_not_blamed(job: Job) -> None:
    with job.step(STAYS, "--max-restarts", "3") as step:
        step.wait_for("of 3", count=3)
        job.cancel()
        done = step.finish()

    assert done.stderr.count("stopped by SIGTERM") == 3, done
    assert "failed" not in done.stderr
    assert done.stdout.count("of 3") == 3


def test_a_killed_agent_is_missed_and_named(job: Job, slurm: SlurmCluster) -> None:
    with job.step(STAYS, *ELASTIC) as step:
        step.wait_for("of 3", count=3)
        (agent,) = slurm.nodes[2].agents()
        os.kill(agent, signal.SIGKILL)
        step.wait_for("of 2", count=2)
        job.cancel()
        done = step.finish()

    assert len(re.findall(LOST_NODE_3, done.stderr)) == 2, done


def test_a_step_that_may_lose_a_node_goes_on_without_it(
    job: Job, slurm: SlurmCluster, folder: Path
) -> None:
    with job.step(STAYS, *ELASTIC, options=("--no-kill",), TMPDIR=str(folder)) as step:
        step.wait_for("of 3", count=3)
        slurm.nodes[2].lose()
        step.wait_for("of 2", count=2)
        step.wait_for("left: node3", count=2, stream="stderr")

    assert len(re.findall(LOST_NODE_3, step.stderr)) == 2, step.stderr


@needs_etcd
def test_a_step_with_its_own_etcd_may_lose_its_first_node(
    job: Job, slurm: SlurmCluster, folder: Path
) -> None:
    etcd = find_etcd()
    assert etcd is not None
    places = {"PATH": f"{Path(etcd).parent}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    words = ("--rdzv-own-etcd", *ELASTIC)
    with job.step(STAYS, *words, options=("--no-kill",), **places) as step:
        step.wait_for("of 3", count=3)
        slurm.nodes[0].lose()
        step.wait_for("of 2", count=2)


def test_a_job_whose_node_fails_is_requeued_and_runs_on_the_others(
    job: Job, slurm: SlurmCluster, tmp_path: Path, folder: Path
) -> None:
    program = write_program(tmp_path, STEPS_UNTIL_TOLD)
    with job.batch(f"srun {RUN} {program}", options=("--requeue",), TMPDIR=str(folder)) as (
        _,
        output,
    ):
        output.wait_for("stepping", count=3)
        slurm.spare.start()
        slurm.spare.wait_up()
        slurm.nodes[2].lose()
        output.wait_for("stepping as 1.0-1", count=3)

    assert "3 nodes (node1, node2, node4)" in output.stdout


def test_a_requeued_job_saves_and_begins_again(job: Job, tmp_path: Path) -> None:
    program = write_program(tmp_path, STEPS_UNTIL_TOLD)
    with job.batch(f"srun {RUN} {program}") as (_, output):
        output.wait_for("stepping as 1.0", count=3)
        job.requeue()
        output.wait_for("stepping as 1.0-1", count=3)
        job.cancel()
        output.wait_for("saved", count=6)
        output.wait_for("exit code 143", count=6)

    first, second = saved(output.stdout)[:3], saved(output.stdout)[3:]
    assert len(set(first)) == 1
    assert len(set(second)) == 1


def test_a_batch_script_without_srun_ends_with_the_line_to_write(job: Job, tmp_path: Path) -> None:
    program = write_program(tmp_path, TELLS_ITS_PLACE)
    with job.batch(f"{RUN} {program}") as (batch, output):
        done = batch.finish()
        output.wait_for("write srun --ntasks-per-node 1 rankwise run")

    assert done.code == 2
    assert "rank 0" not in output.stdout
