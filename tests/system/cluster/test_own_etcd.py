"""Three agents that run an etcd of their own: the loss of any of them ends nothing."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import find_etcd, free_ports, needs_etcd
from running import WITHIN_S, Deaths, Running, start, wait_for_any, write_program

pytestmark = [pytest.mark.system, needs_etcd]

STAY = """
import os, threading
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Running]]:
    """Three agents, each at an address of its own; the first runs the first member."""
    etcd = find_etcd()
    assert etcd is not None
    port = free_ports(1)[0]
    endpoints = ",".join(f"127.0.0.{last}:{port}" for last in (11, 12, 13))
    environment = {
        "PATH": f"{Path(etcd).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    words = (
        *("run", "--nnodes", "2:3", "--rdzv-id", "own", "--max-restarts", "3"),
        *("--rdzv-backend", "etcd", "--rdzv-own-etcd", "--rdzv-endpoint", endpoints),
        write_program(tmp_path, STAY),
    )
    with ExitStack() as stack:
        started = [stack.enter_context(start(*words, environment=environment)) for _ in range(3)]
        wait_for_any(started, "of 3", count=3)
        yield started


def members_of(agent: Running) -> list[int]:
    """The etcds that an agent runs."""
    children = Path(f"/proc/{agent.pid}/task").glob("*/children")
    pids = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"]


def first_member(agents: list[Running]) -> Running:
    """The agent whose machine has the first of the endpoints."""
    for agent in agents:
        for pid in members_of(agent):
            if b"--name\0m0\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return agent
    raise AssertionError("nobody runs the first member")


def test_the_loss_of_the_first_node_costs_a_round_and_nothing_is_left(
    agents: list[Running], tmp_path: Path
) -> None:
    lost = first_member(agents)
    others = [agent for agent in agents if agent is not lost]
    deaths = Deaths([pid for agent in agents for pid in members_of(agent)])

    lost.signal(signal.SIGKILL)
    wait_for_any(others, "of 2", count=2)
    others[0].signal(signal.SIGTERM)
    done = [agent.finish(WITHIN_S) for agent in others]

    assert [each.code for each in done] == [143, 143], done
    assert all(re.search("round 0 is over: node .* on .* is lost", each.stderr) for each in done)
    assert deaths.survivors(within_s=WITHIN_S) == []


def test_a_member_that_is_told_to_end_like_all_processes_of_a_job_is_started_again(
    agents: list[Running],
) -> None:
    lost = first_member(agents)
    (member,) = members_of(lost)
    gone = Deaths([member])

    os.kill(member, signal.SIGTERM)
    assert gone.survivors(within_s=WITHIN_S) == []
    for agent in agents:
        agent.signal(signal.SIGTERM)

    assert [agent.finish(WITHIN_S).code for agent in agents] == [143, 143, 143]
