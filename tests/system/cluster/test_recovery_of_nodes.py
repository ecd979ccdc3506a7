"""`rankwise.recover` among several nodes: a rank or a node dies; the ranks elsewhere live on."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import etcd_cluster, needs_etcd
from running import Finished, Running, start, wait_for_any, write_program

pytestmark = [pytest.mark.system, needs_etcd]

SHARED = """
import os, signal, time
import numpy as np
import rankwise
from rankwise import collectives

def say(*words):
    print(*words, rankwise.rank(), os.environ["WORLD_SIZE"], os.getpid(), flush=True)

def sum_of_ranks():
    return int(collectives.all_reduce(np.array([rankwise.rank()]))[0])

def train():
    n = rankwise.restart_count()
    sum_of_ranks()
    say("call")
BODY
    return sum_of_ranks()

print("result", rankwise.recover(train, timeout=100), flush=True)
"""
DDP = """
import os, time
import rankwise
import torch
import torch.distributed as dist

def say(*words):
    print(*words, rankwise.rank(), os.environ["WORLD_SIZE"], os.getpid(), flush=True)

def train():
    n = rankwise.restart_count()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
    model(torch.ones(1, 4)).sum().backward()
    say("call")
BODY
    total = torch.tensor([rankwise.rank()])
    dist.all_reduce(total)
    del model
    dist.destroy_process_group()
    return int(total)

print("result", rankwise.recover(train, timeout=100), flush=True)
"""
LAST_RANK_DIES_ONCE = "if n == 0 and rankwise.rank() == 3: os.kill(os.getpid(), 9)"
# Who dies while the others send may leave one of them stuck: gloo forgets what it is sending when a
# connection ends. So each waits to receive, two of them from ranks that live on.
WAIT_FOR_NEXT = "dist.recv(torch.zeros(1), src=(rankwise.rank() + 1) % 4)"
UNTIL_A_NODE_HAS_COME = f"""
if not os.path.exists(f"{{os.path.dirname(__file__)}}/lost"): {WAIT_FOR_NEXT}
has_come = torch.zeros(1)
while not has_come.item():
    model(torch.ones(1, 4)).sum().backward()
    has_come.fill_(os.path.exists(f"{{os.path.dirname(__file__)}}/come"))
    dist.all_reduce(has_come)
"""


# Torch is imported once on each node, and not by each rank: that takes seconds of a processor.
PRELOADED = ("--start-method=forkserver", "--preload=torch,torch._dynamo")


class Nodes:
    """Agents on this host that meet on an etcd."""

    def __init__(self, folder: Path, endpoint: str, stack: ExitStack) -> None:
        self.lost = folder / "lost"
        self.come = folder / "come"
        self._folder = folder
        self._endpoint = endpoint
        self._stack = stack

    def start(self, template: str, body: str, *words: str) -> Running:
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        script = write_program(self._folder, template.replace("BODY\n", lines))
        return self._stack.enter_context(
            start(
                *("run", "--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-id", "run"),
                *("--rdzv-backend", "etcd", "--rdzv-endpoint", self._endpoint),
                *("--restart-backoff", "1ms", *words),
                *(PRELOADED if template is DDP else ()),
                script,
            )
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with etcd_cluster(tmp_path, 1) as cluster, ExitStack() as stack:
        ((host, port),) = cluster.endpoints
        yield Nodes(tmp_path, f"{host}:{port}", stack)


def calls(*done: Finished) -> list[tuple[int, int, str]]:
    """Rank, size of the world, and process of each call, by process."""
    found = []
    for line in "".join(each.stdout for each in done).splitlines():
        _, _, said = line.partition(":")
        if said.startswith("call "):
            _, rank, size, pid = said.split()
            found.append((int(rank), int(size), pid))
    return found


def called_again(*done: Finished) -> list[int]:
    """The ranks that were called in a process that had been called before."""
    pids = [pid for _, _, pid in calls(*done)]
    seen: set[str] = set()
    again = []
    for rank, _, pid in calls(*done):
        if pid in seen:
            again.append(rank)
        seen.add(pid)
    assert len(pids) >= len(seen)
    return sorted(again)


def results(*done: Finished) -> int:
    return sum(each.stdout.count("result 6") for each in done)


@pytest.mark.parametrize("template", [SHARED, pytest.param(DDP, marks=pytest.mark.torch)])
def test_ranks_on_all_nodes_are_called_again_when_one_has_died(template: str, nodes: Nodes) -> None:
    if template is DDP:
        pytest.importorskip("torch")
    body = LAST_RANK_DIES_ONCE
    if template is DDP:
        body += f"\nif n == 0: {WAIT_FOR_NEXT}"
    both = [nodes.start(template, body, "--nnodes", "2") for _ in range(2)]

    done = [each.finish() for each in both]

    assert [each.code for each in done] == [0, 0], done
    assert called_again(*done) == [0, 1, 2], done
    assert results(*done) == 4
    told = done[0].stderr + done[1].stderr
    assert "round 1: ranks 0-1 of 4 here, 2 of them called again" in told
    assert "round 1: ranks 2-3 of 4 here, 1 of them called again" in told


@pytest.mark.torch
def test_ranks_live_on_while_another_node_is_killed_and_comes_back(nodes: Nodes) -> None:
    pytest.importorskip("torch")
    # The node that lives must keep its own lease where the machine stalls.
    words = ("--nnodes", "2", "--rdzv-conf", "lease_ttl=10")
    one, two = (nodes.start(DDP, UNTIL_A_NODE_HAS_COME, *words) for _ in range(2))
    wait_for_any([one, two], "call ", count=4)

    two.process.send_signal(signal.SIGKILL)
    wait_for_any([one], "is lost", stream="stderr")
    nodes.lost.touch()
    back = nodes.start(DDP, UNTIL_A_NODE_HAS_COME, *words)
    wait_for_any([one, back], "call ", count=2 + 4)
    nodes.come.touch()
    done = [one.finish(), back.finish()]

    assert [each.code for each in done] == [0, 0], done
    assert len(called_again(done[0])) == 2, done
    assert called_again(done[1]) == []
    assert results(*done) == 4
    assert "restart" not in done[0].stderr


@pytest.mark.torch
def test_a_smaller_world_is_trained_on_when_a_node_does_not_come_back(nodes: Nodes) -> None:
    pytest.importorskip("torch")
    words = ("--nnodes", "1:2", "--rdzv-conf", "lease_ttl=10,last_call_timeout=20")
    body = f"if os.environ['WORLD_SIZE'] == '4': {WAIT_FOR_NEXT}"
    one, two = (nodes.start(DDP, body, *words) for _ in range(2))
    wait_for_any([one, two], "call ", count=4)

    two.process.send_signal(signal.SIGKILL)
    done = one.finish()

    assert done.code == 0, done
    assert [size for _, size, _ in calls(done)] == [4, 4, 2, 2]
    assert called_again(done) == [0, 1]
