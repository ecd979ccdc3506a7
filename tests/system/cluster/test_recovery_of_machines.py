"""`rankwise.recover` among machines with addresses of their own, of which one is lost wholly."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import etcd_cluster, find_etcd, free_ports, needs_etcd
from nodes_in_namespaces import needs_namespaces, network
from running import WITHIN_S, Finished, Running, wait_for_any, write_program

pytestmark = [pytest.mark.system, needs_etcd, needs_namespaces]

NUMPY = """
import os
import numpy as np
import rankwise
from rankwise import collectives

def steps():
    while not rankwise.should_stop():
        yield int(collectives.all_reduce(np.array([rankwise.rank()]))[0])
"""
TORCH = """
import os
import rankwise
import torch
import torch.distributed as dist

def steps():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    while not rankwise.should_stop():
        model(torch.ones(1, 4)).sum().backward()
        total = torch.tensor([rankwise.rank()])
        dist.all_reduce(total)
        yield int(total)
        is_still = torch.tensor([os.path.exists(f"{os.path.dirname(__file__)}/still")])
        dist.all_reduce(is_still)
        if is_still:
            print("still", flush=True)
            dist.recv(total, src=(rankwise.rank() + 1) % 4)
    del model  # or torch, which destroys the group with the model's hooks alive, may hang there
    dist.destroy_process_group()
"""
TRAIN = """
print("begun", flush=True)

def train():
    for number, total in enumerate(steps()):
        if number == 0:
            print("call", rankwise.rank(), total, os.getpid(), flush=True)

rankwise.recover(train)
"""
PRELOADED = ("--start-method=forkserver", "--preload=torch,torch._dynamo")


class Job:
    """Two machines run it, and a third one is a spare."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._lan = stack.enter_context(network())
        self.nodes = [self._lan.add_node() for _ in range(3)]
        self.agents: list[Running] = []
        self.still = folder / "still"
        self._folder = folder
        self._stack = stack

    def start(self, steps: str, *, has_own_etcd: bool = False) -> None:
        """Start the agents, the spare one after the others have begun."""
        if steps is TORCH:
            pytest.importorskip("torch")
        etcd = find_etcd()
        assert etcd is not None
        places = {"PATH": f"{Path(etcd).parent}:{os.environ['PATH']}", "TMPDIR": str(self._folder)}
        words = (
            *("run", "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1"),
            *("--rdzv-id", "machines", "--rdzv-conf", "lease_ttl=5", "--rdzv-backend", "etcd"),
            *(self._own_etcd() if has_own_etcd else self._etcd_elsewhere()),
            *(PRELOADED if steps is TORCH else ()),
            write_program(self._folder, steps + TRAIN),
        )
        for node in self.nodes:
            self.agents.append(self._stack.enter_context(node.start(*words, environment=places)))
        wait_for_any(self.agents, "is a spare", stream="stderr")
        wait_for_any(self.agents, "call ", count=4)

    def running(self) -> list[int]:
        """Which nodes have ranks, by the order of their ranks."""
        return sorted(
            (number for number in range(3) if calls(self.agents[number])),
            key=lambda number: calls(self.agents[number]),
        )

    def stop(self, *agents: Running) -> list[Finished]:
        """Stop the job at the first of these, which run it."""
        agents[0].signal(signal.SIGTERM)
        return [agent.finish(WITHIN_S) for agent in agents]

    def _etcd_elsewhere(self) -> tuple[str, ...]:
        cluster = self._stack.enter_context(etcd_cluster(self._folder, host=self._lan.address))
        ((host, port),) = cluster.endpoints
        return ("--rdzv-endpoint", f"{host}:{port}")

    def _own_etcd(self) -> tuple[str, ...]:
        port = free_ports(1)[0]
        members = ",".join(f"{node.address}:{port}" for node in self.nodes)
        return ("--rdzv-own-etcd", "--rdzv-endpoint", members)


def calls(agent: Running) -> list[tuple[int, int, int]]:
    """Rank, sum of all ranks, and process of each call whose first step was done."""
    found = re.findall(r"call (\d+) (\d+) (\d+)", agent.stdout)
    return [(int(rank), int(total), int(pid)) for rank, total, pid in found]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(tmp_path, stack)


@pytest.mark.parametrize(
    ("steps", "has_own_etcd"),
    [
        pytest.param(NUMPY, True, id="numpy_own_etcd"),
        pytest.param(TORCH, False, id="gloo_etcd", marks=pytest.mark.torch),
    ],
)
@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_live_on_when_the_other_machine_is_lost_and_a_spare_takes_its_place(
    job: Job, steps: str, lost: int, has_own_etcd: bool
) -> None:
    job.start(steps, has_own_etcd=has_own_etcd)
    pair = job.running()
    stays, spare = job.agents[pair[1 - lost]], job.agents[3 - sum(pair)]
    before = calls(stays)

    job.nodes[pair[lost]].lose()
    wait_for_any([stays, spare], "call ", count=2 + 4)
    after = calls(stays)[2:]
    done = job.stop(stays, spare)

    assert sorted(after) == sorted(before), done
    assert len(calls(spare)) == 2
    assert [each.code for each in done] == [143, 143], done
    assert stays.stdout.count("begun") == 2
    assert "failed" not in stays.stderr, done


@pytest.mark.parametrize(
    "steps",
    [pytest.param(NUMPY, id="numpy"), pytest.param(TORCH, id="gloo", marks=pytest.mark.torch)],
)
def test_ranks_on_both_machines_live_on_when_one_of_them_dies(job: Job, steps: str) -> None:
    job.start(steps)
    first, second = (job.agents[number] for number in job.running())
    dead = min(calls(second))[2]
    if steps is TORCH:  # gloo forgets what it is sending when a connection ends: let all receive
        job.still.touch()
        wait_for_any([first, second], "still", count=4)
        job.still.unlink()

    os.kill(dead, signal.SIGKILL)
    wait_for_any([first, second], "call ", count=4 + 4)
    done = job.stop(first, second)

    assert [each.code for each in done] == [143, 143], done
    assert len({pid for _, _, pid in calls(first)}) == 2
    assert len({pid for _, _, pid in calls(second)}) == 3
    assert "2 of them called again" in first.stderr
    assert "1 of them called again" in second.stderr
