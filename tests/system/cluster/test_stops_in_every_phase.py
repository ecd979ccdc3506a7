"""SIGTERM in every phase of an agent's life is answered at once and ends it within the grace."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import etcd_cluster, free_ports, needs_etcd
from running import WITHIN_S, Running, start, wait_for_any, write_program

pytestmark = pytest.mark.system

STAY = """
import os, threading
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
threading.Event().wait()
"""
ONE_IS_DONE = """
import os, threading
print(f"rank {os.environ['RANK']}", flush=True)
if os.environ["RANK"] == "0":
    threading.Event().wait()
"""


class Agents:
    """Agents on this host that meet in a store at `endpoint`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.meeting = ("embedded", f"127.0.0.1:{free_ports(1)[0]}")
        self._folder = folder
        self._stack = stack

    def start(self, *words: str, program: str = STAY) -> Running:
        script = write_program(self._folder, program)
        backend, endpoint = self.meeting
        meeting = ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "run")
        return self._stack.enter_context(start("run", *meeting, *words, script))

    def elsewhere(self, backend: str, *words: str) -> Running:
        """An agent that nobody else meets."""
        meeting = ("--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}")
        return self.start("--nnodes", "2", *meeting, *words)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(tmp_path, stack)


def stop(agent: Running, answer: str) -> None:
    """Send SIGTERM; the agent says `answer`, and ends before a grace of 30 s is used up."""
    agent.signal(signal.SIGTERM)
    agent.wait_for(f"rankwise: SIGTERM: {answer}", stream="stderr")
    done = agent.finish(WITHIN_S)
    assert done.code == 143, done
    assert "stopped by SIGTERM" in done.stderr


def test_before_the_first_round(agents: Agents, tmp_path: Path) -> None:
    fifo = tmp_path / "checking"
    waiting = {
        agents.start("--nnodes", "2"): "waiting for more nodes",
        agents.elsewhere("embedded", "--rdzv-conf", "is_host=false"): "waiting for the store",
        agents.elsewhere("c10d", "--rdzv-conf", "is_host=false"): "waiting for the store",
        agents.elsewhere("etcd"): "waiting for the store",
        agents.elsewhere("embedded", "--node-check", f"mkfifo {fifo}; cat {fifo}"): "its checks",
    }
    for agent, on_whom in waiting.items():
        agent.wait_for(on_whom, stream="stderr")

    for agent in waiting:
        stop(agent, "this node leaves")


def test_a_run_that_never_began_had_no_attempt_and_no_restart(agents: Agents) -> None:
    agent = agents.start("--nnodes", "2", "--log-format", "json")
    agent.wait_for("waiting for more nodes", stream="stderr")

    agent.signal(signal.SIGTERM)
    *_, end = map(json.loads, agent.finish(WITHIN_S).stderr.splitlines())

    assert (end["event"], end["status"]) == ("end", "stopped")
    assert (end["starts"], end["restarts"]) == (0, 0)
    assert end["message"].startswith("stopped by SIGTERM after ")


def test_before_the_first_round_as_the_agent_that_serves(agents: Agents) -> None:
    words = ("--nnodes", "3", "--rdzv-conf")
    host = agents.start(*words, "linger=600,is_host=true")
    other = agents.start(*words, "is_host=false")
    wait_for_any([host, other], "2 of at least 3 nodes", stream="stderr")

    stop(host, "this node leaves")
    done = other.finish(WITHIN_S)
    assert done.code == 1, done
    assert "the run ends here: the agent that served the embedded store" in done.stderr


def test_while_its_ranks_run(agents: Agents) -> None:
    both = [agents.start("--nnodes", "2") for _ in range(2)]
    wait_for_any(both, "of 2", count=2)

    stop(both[0], "stopping all ranks for up to 30 s; a second signal kills them now")
    assert both[1].finish(WITHIN_S).code == 143


def test_while_it_is_a_spare(agents: Agents) -> None:
    both = [agents.start("--nnodes", "1:2", "--spares", "1") for _ in range(2)]
    wait_for_any(both, "this node is a spare for now", stream="stderr")
    spare = next(each for each in both if "a spare" in each.stderr)

    stop(spare, "this node leaves")


def test_while_its_ranks_are_done_and_others_are_not(agents: Agents) -> None:
    both = [agents.start("--nnodes", "2", program=ONE_IS_DONE) for _ in range(2)]
    wait_for_any(both, "waiting until the workers of", stream="stderr")
    done = next(each for each in both if "waiting until the workers of" in each.stderr)

    stop(done, "stopping the ranks of the other nodes for up to 30 s; a second signal leaves now")


@needs_etcd
def test_when_its_store_is_gone_and_its_ranks_were_stopped(agents: Agents, tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as etcd:
        (host, port), *_ = etcd.endpoints
        agents.meeting = ("etcd", f"{host}:{port}")
        both = [agents.start("--nnodes", "2", "--max-restarts", "1") for _ in range(2)]
        wait_for_any(both, "of 2", count=2)
        etcd.kill()
        for each in both:
            each.wait_for("round 0 is over", stream="stderr")

        for each in both:
            stop(each, "this node leaves")
