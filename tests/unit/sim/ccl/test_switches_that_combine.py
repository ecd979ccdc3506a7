"""Switches that copy and combine messages: what `nvls_allreduce` takes, sends and gives."""

from typing import Any

import pytest
import yaml

from rankwise.base.errors import ConfigError
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.faults.vocabulary import KillLink
from rankwise.sim.hardware import parse_topology
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.reporting.machine_drawing import as_text
from rankwise.sim.runtime.multiprocessing import SpawnException

BANDWIDTH = 25_000.0
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
HOST = {"link": {"bandwidth_GBps": 50, "latency_ns": 0}, "command_ns": 0}
SWITCH = {"graph": "switch", "link": {"bandwidth_GBps": 25, "latency_ns": 100}}


def network(**sips: Any) -> Topology:
    return parse_topology(yaml.safe_dump({"system": {"sips": sips, "host": HOST}, **DEVICE}), "net")


def one_switch(count: int, *, multicast: bool = True) -> Topology:
    return network(count=count, multicast=multicast, **SWITCH)


def nodes(devices: int, count: int) -> Topology:
    rail = {"bandwidth_GBps": 25, "latency_ns": 500}
    inside = {"name": "inside", "count": devices, "multicast": True, **SWITCH}
    outside = {"name": "rail", "count": count, "graph": "rails", "link": rail}
    return network(levels=[inside, outside])


class Ran:
    """An all-reduce of so many f32 per rank, each of which has the number of its rank plus one."""

    def __init__(
        self, topology: Topology, elements: int, level: str, algorithm: str = "nvls_allreduce",
        *, has_data: bool = False,
    ) -> None:  # fmt: skip
        engine = GraphEngine(topology, enable_data=has_data)
        self.results: list[list[float]] = []

        def worker(rank: int, torch: Any) -> None:
            x = torch.full((elements,), rank + 1.0, dtype="f32")
            torch.distributed.all_reduce(x, algorithm=algorithm)
            if has_data:
                self.results.append(x.tolist())

        layout = {"slot_size": 16_384, "vc_chunk_size": 8_192, "n_lanes": 1, "fidelity": level}
        with RuntimeContext(engine=engine, ccl={"defaults": layout}) as torch:
            torch.multiprocessing.spawn(worker, args=(torch,), nprocs=topology.sip_count)
            times = [(each.start, each.end) for each in engine.op_log if each.kind == "all_reduce"]
            self.microseconds = (max(end for _, end in times) - min(times)[0]) / 1e6
        self.carried = {link.name: link.bytes_carried for link in engine.machine.links}


@pytest.mark.parametrize("level", ["queue", "message"])
def test_each_link_carries_all_of_the_data_once_each_way(level: str) -> None:
    size = 8 << 20
    ran = Ran(one_switch(4), size // 4, level)

    assert ran.microseconds == pytest.approx(size / BANDWIDTH, rel=0.03)
    for wire in ("sip2->switch", "switch->sip2"):  # by queues, credits cross it, too
        assert size <= ran.carried[wire] <= 1.01 * size


@pytest.mark.parametrize("level", ["queue", "message"])
def test_rails_carry_a_part_of_the_data_while_switches_work_on_the_next_pieces(level: str) -> None:
    size = 4 << 20

    ran = Ran(nodes(4, 2), size // 4, level)

    # One after the other: all parts but one's own twice inside, and halves of a part twice across.
    one_by_one = (2 * 3 / 4 * size + size / 4) / BANDWIDTH
    assert size / BANDWIDTH <= ran.microseconds < 0.7 * one_by_one
    assert size / 4 <= ran.carried["sip0->rail0"] <= 1.01 * size / 4


@pytest.mark.parametrize("topology", [one_switch(3), nodes(2, 2)])
def test_all_levels_give_the_sum(topology: Topology) -> None:
    total = sum(range(1, topology.sip_count + 1))

    for level in ("queue", "message"):
        results = Ran(topology, 37, level, has_data=True).results
        assert results == [[float(total)] * 37] * topology.sip_count


def test_a_switch_without_multicast_is_refused() -> None:
    with pytest.raises(SpawnException, match="needs switches with multicast: true"):
        Ran(one_switch(4, multicast=False), 64, "queue")


@pytest.mark.parametrize(
    ("sips", "message"),
    [
        ({"count": 4, "graph": "ring_1d", "link": SWITCH["link"], "multicast": True},
         "multicast is for graph switch"),
        ({"levels": [{"count": 2, **SWITCH}, {"count": 2, **SWITCH, "multicast": True}]},
         "expected on levels"),
    ],
)  # fmt: skip
def test_multicast_elsewhere_than_at_a_switch_of_devices_is_refused(
    sips: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        network(**sips)


def test_messages_go_by_themselves_where_links_are_dead() -> None:
    size = 1 << 20
    whole = nodes(4, 2)
    failed = whole.with_faults([KillLink(link="sip3-rail3")])

    # Three copies of each part cross the link to the switch.
    assert Ran(failed, size // 4, "queue").carried["sip0->inside0"] > 1.4 * Ran(
        whole, size // 4, "queue"
    ).carried["sip0->inside0"]  # fmt: skip


def test_auto_takes_the_switch_where_it_halves_the_time() -> None:
    size = 4 << 20
    chosen = Ran(one_switch(8), size // 4, "message", "auto").microseconds

    assert chosen == Ran(one_switch(8), size // 4, "message").microseconds
    assert chosen < 0.65 * Ran(one_switch(8), size // 4, "message", "ring_allreduce").microseconds


def test_the_text_of_a_machine_says_that_its_switch_has_multicast() -> None:
    assert "switch with multicast" in as_text(one_switch(4))
    assert "inside: switch with multicast, 2 times" in as_text(nodes(4, 2))


@pytest.mark.parametrize(
    "ccl",
    [
        {"defaults": {"algorithm": "nvls_allreduce"}},
        {"collectives": {"all_reduce": "nvls_allreduce"}},
    ],
)
def test_a_configured_algorithm_that_no_switch_can_do_is_refused_before_ranks_start(
    ccl: dict[str, Any],
) -> None:
    engine = GraphEngine(one_switch(4, multicast=False))

    with pytest.raises(ConfigError) as refused:
        RuntimeContext(engine=engine, ccl=ccl)

    assert str(refused.value).startswith(
        "the given configuration: all_reduce gets algorithm nvls_allreduce, which needs switches "
        "with multicast: true, and the machine has none ("
    )
    RuntimeContext(engine=GraphEngine(one_switch(4)), ccl=ccl)
