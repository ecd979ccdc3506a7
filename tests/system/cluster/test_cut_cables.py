"""A node whose cable is pulled out for less than a lease, and for more."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest
from etcd_servers import etcd_cluster, needs_etcd
from nodes_in_namespaces import Node, needs_namespaces, network
from running import WITHIN_S, Running, wait_for_any, write_program

pytestmark = [pytest.mark.system, needs_etcd, needs_namespaces]

STAY = """
import os, threading
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[list[Node], list[Running]]]:
    """Three nodes, whose agents run a job that two could run, by an etcd elsewhere."""
    with network() as lan, ExitStack() as stack:
        etcd = stack.enter_context(etcd_cluster(tmp_path, host=lan.address))
        ((host, port),) = etcd.endpoints
        nodes = [lan.add_node() for _ in range(3)]
        words = (
            *("run", "--nnodes", "2:3", "--max-restarts", "3", "--rdzv-id", "cut"),
            *("--rdzv-backend", "etcd", "--rdzv-endpoint", f"{host}:{port}"),
            write_program(tmp_path, STAY),
        )
        agents = [stack.enter_context(node.start(*words)) for node in nodes]
        wait_for_any(agents, "of 3", count=3)
        yield nodes, agents


def test_a_node_that_is_cut_off_for_less_than_its_lease_costs_nothing(
    job: tuple[list[Node], list[Running]],
) -> None:
    nodes, agents = job

    nodes[2].pull_out()
    Event().wait(3.0)  # of a lease of 5 s, of which the last second is not used
    nodes[2].plug_in()
    agents[2].signal(signal.SIGTERM)
    done = [agent.finish(WITHIN_S) for agent in agents]

    assert [each.code for each in done] == [143, 143, 143], done
    assert all(each.stdout.count("of 3") == 1 for each in done)


def test_the_others_go_on_without_a_node_that_is_cut_off_for_longer_and_take_it_in_again(
    job: tuple[list[Node], list[Running]],
) -> None:
    nodes, agents = job

    nodes[2].pull_out()
    agents[2].wait_for("this node is cut off from the store", stream="stderr")
    wait_for_any(agents[:2], "of 2", count=2)
    nodes[2].plug_in()
    wait_for_any(agents, "of 3", count=6)
    agents[0].signal(signal.SIGTERM)
    done = [agent.finish(WITHIN_S) for agent in agents]

    assert [each.code for each in done] == [143, 143, 143], done
    assert all("is lost" in each.stderr for each in done[:2])
    assert not any("failed" in each.stderr for each in done)
