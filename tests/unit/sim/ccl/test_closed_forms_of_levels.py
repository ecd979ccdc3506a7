"""Collectives on networks of levels take what their closed forms say, within 3 %.

Devices are so fast, and messages so large, that the links between devices are what takes time.
"""

from typing import Any

import pytest
import yaml

from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.ccl.message_timing import Dimension, collective_time
from rankwise.sim.faults.vocabulary import KillLink
from rankwise.sim.hardware import HardwareMachine, parse_topology
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.kernel import Simulator, all_of

INSIDE, ACROSS = 100_000.0, 25_000.0
"""Bytes per microsecond."""
FAST = {"bandwidth_GBps": 100_000, "latency_ns": 0}
DEVICE: dict[str, Any] = {
    "sip": {"cubes": {"shape": [1, 1], "link": FAST}},
    "cube": {
        "pes": {"count": 1, "link": FAST},
        "hbm": {"channels": 1, "capacity_MiB": 8192, **FAST},
    },
    "pe": {
        "tcm": {"capacity_KiB": 65_536, **FAST},
        "dma": {"bandwidth_GBps": 100_000, "setup_ns": 0},
        "gemm": {"flops_per_cycle": {"f32": 1_000}},
        "math": {"elements_per_cycle": {"f32": 1_000_000}},
        "ipcq": {"wake_ns": 0},
    },
}


def link(bandwidth: float, latency: float) -> dict[str, float]:
    return {"bandwidth_GBps": bandwidth, "latency_ns": latency}


def machine(*levels: dict[str, Any]) -> Topology:
    system = {
        "sips": {"levels": list(levels)},
        "host": {"link": link(50, 0), "command_ns": 0},
    }
    return parse_topology(yaml.safe_dump({"system": system, **DEVICE}), "cluster")


def nodes(devices: int, count: int) -> Topology:
    """Nodes of devices on a switch, and rails between them."""
    return machine(
        {"name": "inside", "count": devices, "graph": "switch", "link": link(100, 100)},
        {"name": "rail", "count": count, "graph": "rails", "link": link(25, 500)},
    )


def microseconds(
    topology: Topology, algorithm: str, size: int, slot: int = 131_072, level: str = "queue"
) -> float:
    """How long an all-reduce of so many bytes among all devices takes, queue by queue."""
    engine = GraphEngine(topology, enable_data=False)

    def worker(_rank: int, torch: Any) -> None:
        torch.distributed.all_reduce(torch.empty(size // 4, dtype="f32"), algorithm=algorithm)

    layout = {"slot_size": slot, "vc_chunk_size": slot // 2, "n_lanes": 1, "fidelity": level}
    with RuntimeContext(engine=engine, ccl={"defaults": layout}) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=topology.sip_count)
        return torch.now / 1e6


def reduced(size: float, count: int, rate: float) -> float:
    """A ring reduce-scatter or all-gather of so many bytes, without latencies."""
    return (count - 1) / count * size / rate


def test_a_ring_over_two_levels_goes_at_the_rate_of_the_slow_one() -> None:
    size = 4 << 20

    assert microseconds(nodes(8, 2), "ring_allreduce", size) == pytest.approx(
        2 * reduced(size, 16, ACROSS), rel=0.03
    )


@pytest.mark.parametrize(("devices", "count", "size"), [(8, 2, 4 << 20), (8, 8, 4 << 20)])
def test_a_hierarchical_all_reduce_sends_across_what_is_left_inside(
    devices: int, count: int, size: int
) -> None:
    # A message has two slots at least, so that rings are pipelines.
    slot = size // devices // count // 2
    took = microseconds(nodes(devices, count), "hierarchical_allreduce", size, slot)

    expected = 2 * reduced(size, devices, INSIDE) + 2 * reduced(size / devices, count, ACROSS)
    assert took == pytest.approx(expected, rel=0.03)


def fat_tree(oversubscription: float, **more: Any) -> Topology:
    return machine({
        "name": "net", "count": 16, "graph": "fat_tree", "leaf": 4, "link": link(25, 100),
        "oversubscription": oversubscription, **more,
    })  # fmt: skip


def crossing(topology: Topology, pairs: list[tuple[int, int]], size: int) -> float:
    """How long so many bytes take from each source to each target, all at a time."""
    simulator = Simulator()
    built = HardwareMachine(simulator, topology)
    flows = [
        built.start_transfer(built.sip(source).pe(0), built.sip(target).pe(0), size)
        for source, target in pairs
    ]
    simulator.run(all_of(flows))
    return simulator.now / 1e6


@pytest.mark.parametrize("oversubscription", [1, 2, 4])
def test_flows_that_cross_a_fat_tree_pay_its_oversubscription(oversubscription: int) -> None:
    size = 4 << 20
    topology = fat_tree(oversubscription, spines=2)

    # Each leaf's four devices send to the next leaf's; two of them share a spine.
    took = crossing(topology, [(sip, (sip + 4) % 16) for sip in range(16)], size)

    assert took == pytest.approx(oversubscription * size / ACROSS, rel=0.03)
    inside = crossing(topology, [(sip, sip ^ 1) for sip in range(16)], size)
    assert inside == pytest.approx(size / ACROSS, rel=0.03)


def test_an_all_reduce_pays_oversubscription_across_leaves_alone() -> None:
    size = 4 << 20

    took = microseconds(fat_tree(4), "hierarchical_allreduce", size)

    expected = 2 * reduced(size, 4, ACROSS) + 4 * 2 * reduced(size / 4, 4, ACROSS)
    assert took == pytest.approx(expected, rel=0.03)


def test_flows_are_hashed_over_spines_by_the_seed() -> None:
    size, pairs = 1 << 20, [(sip, sip + 4) for sip in range(4)]
    times = {
        seed: crossing(fat_tree(1, spines=4, routing="hashed", seed=seed), pairs, size)
        for seed in range(6)
    }

    assert times[0] == crossing(fat_tree(1, spines=4, routing="hashed", seed=0), pairs, size)
    # As many flows as fall on the busiest spine take turns there.
    collisions = {round(took / (size / ACROSS)) for took in times.values()}
    assert collisions <= {1, 2, 3, 4}
    assert len(collisions) > 1
    assert crossing(fat_tree(1, spines=4), pairs, size) == pytest.approx(size / ACROSS, rel=0.03)


def test_rails_carry_as_much_as_they_are_and_a_dead_one_leaves_its_load_to_another() -> None:
    size = 4 << 20
    whole = nodes(8, 2)
    failed = whole.with_faults([KillLink(link="sip3-rail3")])
    inside, across = 2 * reduced(size, 8, INSIDE), 2 * reduced(size / 8, 2, ACROSS)

    assert microseconds(whole, "hierarchical_allreduce", size) == pytest.approx(
        inside + across, rel=0.03
    )
    # Two rings share a rail, and wait for each other.
    assert microseconds(failed, "hierarchical_allreduce", size) == pytest.approx(
        inside + 2 * across, rel=0.03
    )


def test_an_all_reduce_along_the_axes_of_a_torus_keeps_all_of_them_busy() -> None:
    size = 4 << 20
    torus = machine({
        "name": "torus", "count": 16, "graph": "torus_2d", "shape": [4, 4], "link": link(25, 100),
    })  # fmt: skip

    # Each half goes along one axis while the other half goes along the other one.
    half = 2 * reduced(size / 2, 4, ACROSS) + 2 * reduced(size / 8, 4, ACROSS)
    assert microseconds(torus, "torus_allreduce", size) == pytest.approx(half, rel=0.03)
    assert microseconds(torus, "hierarchical_allreduce", size) == pytest.approx(2 * half, rel=0.03)


@pytest.mark.parametrize(
    ("source", "target", "alpha", "rate"),
    [(0, 1, 0.2, INSIDE), (0, 8, 1.0, ACROSS), (0, 9, 1.2, ACROSS)],
)
def test_a_message_takes_the_alpha_and_beta_of_the_levels_that_it_crosses(
    source: int, target: int, alpha: float, rate: float
) -> None:
    for size in (1_024, 1 << 22):
        took = crossing(nodes(8, 2), [(source, target)], size)

        assert took == pytest.approx(alpha + size / rate, rel=0.03)


def test_a_double_tree_goes_at_the_rate_of_its_inner_nodes_on_each_level() -> None:
    size, slot = 16 << 20, 65_536
    topology = machine({"name": "net", "count": 8, "graph": "switch", "link": link(25, 100)})
    trees = Dimension(
        count=8, graph="switch", algorithm="double_binary_tree", bandwidth_gbps=25, latency_ns=100
    )

    by_queues = microseconds(topology, "tree_allreduce", size, slot)
    by_messages = microseconds(topology, "tree_allreduce", size, slot, "message")
    alone = collective_time("all_reduce", size, [trees], chunks=size // slot).picoseconds / 1e6

    # Inner nodes receive and send all of the data twice.
    expected = 2 * size / ACROSS
    assert alone == pytest.approx(expected, rel=0.04)
    assert by_queues == pytest.approx(expected, rel=0.03)
    assert by_messages == pytest.approx(expected, rel=0.03)
