"""Agents in the placement group of a real Ray cluster: a head and a second raylet on this host."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from running import Deaths, Finished, Running, start, write_program

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),  # Ray takes its time to start, and to notice the loss of a node
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is missing: pip install ray"
    ),
]

RAY_CLUSTER = """
import os, sys
if os.fork():
    os._exit(0)  # Ray keeps idle processes for later: they are no descendants of the tests
from ray.cluster_utils import Cluster

head = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_cpus=4, object_store_memory=80_000_000)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
TELLS_ITS_PLACE = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "says", *sys.argv[1:])
print("errors too", file=sys.stderr)
"""
STEPS = """
import os, time
import rankwise
assert not rankwise.should_stop()
print("pid", os.getpid(), flush=True)
while not rankwise.should_stop():
    time.sleep(0.01)
print("saved", flush=True)
"""
FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise SystemExit(42)
time.sleep(600)
"""
PATIENCE_S = 200.0


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """The address of a cluster of two nodes."""
    with tempfile.TemporaryDirectory(prefix="rwr-") as folder:
        program = write_program(Path(folder), RAY_CLUSTER)
        cluster = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        assert cluster.stdout is not None
        assert cluster.stdin is not None
        yield _address(cluster.stdout)
        cluster.wait()
        cluster.stdin.close()
        cluster.stdout.read()  # until the cluster has ended
        cluster.stdout.close()


def _address(output: IO[str]) -> str:
    for line in output:
        if line.startswith("address "):
            return line.split()[1]
    pytest.fail("the Ray cluster has not started")


def on_ray(address: str, *words: str | Path) -> Running:
    return start("run", "--on", "ray", *words, environment={"RAY_ADDRESS": address})


def finished(running: Running) -> Finished:
    with running:
        return running.finish(PATIENCE_S)


def test_each_node_has_an_agent_and_their_output_comes_here(
    ray_cluster: str, tmp_path: Path
) -> None:
    program = write_program(tmp_path, TELLS_ITS_PLACE)

    done = finished(
        on_ray(ray_cluster, "--nnodes", "2", "--nproc-per-node", "2", program, "--on", "hello")
    )

    assert done.code == 0, done
    assert sorted(done.lines) == [
        f"[default{rank}]:rank {rank} of 4 says --on hello" for rank in range(4)
    ]
    assert done.stderr.count("errors too") == 4


def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    ray_cluster: str, tmp_path: Path
) -> None:
    program = write_program(tmp_path, FAILS)

    done = finished(on_ray(ray_cluster, "--nnodes", "2", program))

    assert done.code == 42, done
    assert "root cause: rank 1" in done.stderr


def stepping(ray_cluster: str, folder: Path, *words: str) -> Running:
    """A job of two ranks that go on until they are told to stop."""
    return on_ray(ray_cluster, *words, write_program(folder, STEPS))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_ranks_at_a_step(
    number: signal.Signals, ray_cluster: str, tmp_path: Path
) -> None:
    with stepping(ray_cluster, tmp_path, "--nnodes", "2") as job:
        job.wait_for("pid", count=2)
        job.signal(number)
        done = job.finish(PATIENCE_S)

    assert done.code == 128 + number, done
    assert done.stdout.count("saved") == 2


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_lost_agent_is_replaced_while_the_others_go_on(ray_cluster: str, tmp_path: Path) -> None:
    words = ("--nnodes", "1:2", "--rdzv-conf", "lease_ttl=4")

    with stepping(ray_cluster, tmp_path, *words) as job:
        told = job.wait_for("pid", count=2)
        rank = next(map(int, re.findall(r"default1.*pid (\d+)", told)))
        actor = parent_of(parent_of(parent_of(rank)))  # above the agent, above its guardian
        os.kill(actor, signal.SIGKILL)
        job.wait_for("is lost", stream="stderr")
        # The other rank alone, then both again; or both at once, if Ray is quick.
        job.wait_for("begins on", count=3, stream="stderr")
        job.wait_for("default1", count=2)
        job.signal(signal.SIGTERM)
        done = job.finish(PATIENCE_S)

    assert done.code == 143, done


def test_nothing_is_left_when_the_driver_is_killed(ray_cluster: str, tmp_path: Path) -> None:
    with stepping(ray_cluster, tmp_path, "--nnodes", "2") as job:
        told = job.wait_for("pid", count=2)
        ranks = Deaths(map(int, re.findall(r"pid (\d+)", told)))
        job.process.kill()

        assert ranks.survivors(PATIENCE_S) == []


def test_nodes_that_are_not_there_are_waited_for_no_longer_than_allowed(
    ray_cluster: str, tmp_path: Path
) -> None:
    words = ("--nnodes", "3", "--rdzv-conf", "join_timeout=1")

    done = finished(stepping(ray_cluster, tmp_path, *words))

    assert done.code == 1
    assert "Ray has not found 3 nodes with CPU: 1 each within 1 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_cluster_the_way_to_start_one_is_told(tmp_path: Path) -> None:
    done = finished(stepping("127.0.0.1:1", tmp_path, "--nnodes", "2"))

    assert done.code == 2, done
    assert "ray start --head" in done.stderr.splitlines()[-1]
