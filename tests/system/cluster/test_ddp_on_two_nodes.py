"""Two nodes, three members of etcd: training goes on while a node is killed, or cut off."""

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import EtcdCluster, etcd_cluster, needs_etcd
from nodes_in_namespaces import Network, Node, needs_namespaces, network
from running import Finished, Running, wait_for_any

pytestmark = [pytest.mark.system, pytest.mark.torch, needs_etcd, needs_namespaces]

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_ddp.py"
# Torch is imported once on each node, and not by each rank: that takes seconds of a processor.
PRELOADED = ("--start-method=forkserver", "--preload=torch,torch._dynamo")
ENDLESS = 100_000
"""So many epochs that no machine is done before the test is."""


class Training:
    """A job on two nodes, as somebody would start it by hand."""

    def __init__(self, net: Network, cluster: EtcdCluster, folder: Path, stack: ExitStack) -> None:
        pytest.importorskip("torch")
        self.nodes = (net.add_node(), net.add_node())
        self._endpoint = ",".join(f"{host}:{port}" for host, port in cluster.endpoints)
        self._folder = folder
        self._stack = stack

    def start(self, node: Node) -> Running:
        return self._stack.enter_context(
            node.start(
                *("run", "--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-id", "digits"),
                *("--rdzv-backend", "etcd", "--rdzv-endpoint", self._endpoint),
                *("--rdzv-conf", "lease_ttl=3,last_call_timeout=5", "--max-restarts", "3"),
                *PRELOADED,
                EXAMPLE,
                *("--checkpoint", self._folder / "digits.pt", "--epochs", str(ENDLESS)),
            )
        )


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with (
        network() as net,
        etcd_cluster(tmp_path, 3, host=net.address) as cluster,
        ExitStack() as stack,
    ):
        yield Training(net, cluster, tmp_path, stack)


def train_on_and_stop(*nodes: Running) -> list[Finished]:
    """Wait for more epochs, then stop the job at one of its nodes."""
    wait_for_any(nodes, "epoch ", count=sum(one.stdout.count("epoch ") for one in nodes) + 3)
    nodes[0].signal(signal.SIGTERM)
    return [one.finish() for one in nodes]


def losses(*outputs: str) -> dict[int, float]:
    """The loss of each epoch, whoever printed it."""
    found = re.findall(r"epoch +(\d+)  loss ([\d.]+)", "\n".join(outputs))
    return {int(epoch): float(loss) for epoch, loss in found}


def test_the_loss_goes_on_falling_when_a_node_is_killed_and_comes_back(training: Training) -> None:
    first, second = training.nodes
    one = training.start(first)
    two = training.start(second)
    wait_for_any([one, two], "4 ranks begin")
    wait_for_any([one, two], "epoch", count=one.stdout.count("epoch") + 3)

    two.process.kill()
    wait_for_any([one], "2 ranks begin", count=one.stdout.count("2 ranks begin") + 1)
    back = training.start(second)
    wait_for_any([one, two, back], "4 ranks begin", count=2)
    done = train_on_and_stop(one, back)

    assert [each.code for each in done] == [143, 143], done
    told = losses(one.stdout, two.stdout, back.stdout)
    # What the killed agent had not written yet is lost with it, and nothing else.
    lost, last = set(range(1, max(told))) - told.keys(), max(losses(two.stdout), default=0)
    assert lost == set(range(last + 1, last + 1 + len(lost)))
    assert told[max(told)] < told[1] / 4
    assert re.search(r"round \d+ is over", one.stderr)


def test_a_node_that_is_cut_off_stops_its_ranks_and_comes_back(training: Training) -> None:
    first, second = training.nodes
    one = training.start(first)
    two = training.start(second)
    wait_for_any([one, two], "4 ranks begin")

    second.pull_out()
    two.wait_for("cut off from the store", stream="stderr")
    wait_for_any([one], "2 ranks begin", count=one.stdout.count("2 ranks begin") + 1)
    second.plug_in()
    wait_for_any([one, two], "4 ranks begin", count=2)
    done = train_on_and_stop(one, two)

    assert [each.code for each in done] == [143, 143], done
