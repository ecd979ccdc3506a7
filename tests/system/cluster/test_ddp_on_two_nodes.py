"""Two nodes, three members of etcd: training goes on while a node is killed, or cut off."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import EtcdCluster, etcd_cluster, needs_etcd
from nodes_in_namespaces import Network, Node, needs_namespaces, network
from running import Running, wait_for_any

pytestmark = [pytest.mark.system, pytest.mark.torch, needs_etcd, needs_namespaces]

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_ddp.py"
PATIENCE_S = 180.0


class Training:
    """A job on two nodes, as somebody would start it by hand."""

    def __init__(self, net: Network, cluster: EtcdCluster, folder: Path, stack: ExitStack) -> None:
        pytest.importorskip("torch")
        self.nodes = (net.add_node(), net.add_node())
        self._endpoint = ",".join(f"{host}:{port}" for host, port in cluster.endpoints)
        self._folder = folder
        self._stack = stack

    def start(self, node: Node, epochs: int) -> Running:
        return self._stack.enter_context(
            node.start(
                *("run", "--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-id", "digits"),
                *("--rdzv-backend", "etcd", "--rdzv-endpoint", self._endpoint),
                *("--rdzv-conf", "lease_ttl=3,last_call_timeout=20", "--max-restarts", "3"),
                EXAMPLE,
                *("--checkpoint", self._folder / "digits.pt", "--epochs", str(epochs)),
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


def losses(*outputs: str) -> dict[int, float]:
    """The loss of each epoch, whoever printed it."""
    found = re.findall(r"epoch +(\d+)  loss ([\d.]+)", "\n".join(outputs))
    return {int(epoch): float(loss) for epoch, loss in found}


def test_the_loss_goes_on_falling_when_a_node_is_killed_and_comes_back(training: Training) -> None:
    first, second = training.nodes
    one = training.start(first, 60)
    two = training.start(second, 60)
    wait_for_any([one, two], "4 ranks begin")
    wait_for_any([one, two], "epoch", count=one.stdout.count("epoch") + 3)

    two.process.kill()
    wait_for_any([one], "2 ranks begin", count=one.stdout.count("2 ranks begin") + 1)
    back = training.start(second, 60)
    wait_for_any([one, two, back], "4 ranks begin", count=2)
    done = [one.finish(PATIENCE_S), back.finish(PATIENCE_S)]

    assert [each.code for each in done] == [0, 0], done
    told = losses(one.stdout, two.stdout, back.stdout)
    assert max(told) == 60
    assert told[60] < 0.05 < told[1]
    assert re.search(r"round \d+ is over", one.stderr)


def test_a_node_that_is_cut_off_stops_its_ranks_and_comes_back(training: Training) -> None:
    first, second = training.nodes
    one = training.start(first, 80)
    two = training.start(second, 80)
    wait_for_any([one, two], "4 ranks begin")

    second.pull_out()
    two.wait_for("cut off from the store", stream="stderr")
    wait_for_any([one], "2 ranks begin", count=one.stdout.count("2 ranks begin") + 1)
    second.plug_in()
    wait_for_any([one, two], "4 ranks begin", count=2)
    done = [one.finish(PATIENCE_S), two.finish(PATIENCE_S)]

    assert [each.code for each in done] == [0, 0], done
    assert max(losses(one.stdout, two.stdout)) == 80
