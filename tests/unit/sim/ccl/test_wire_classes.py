"""One rank stands for all where all do the same: times are those of all programs written out."""

from typing import Any

import pytest
import yaml

from rankwise.core.collectives.levels import Grid, halves_of, row_of
from rankwise.core.collectives.program import Task
from rankwise.sim.ccl.configuration import load_configuration
from rankwise.sim.ccl.layout import laid_out
from rankwise.sim.ccl.message_execution import MessageExecution
from rankwise.sim.ccl.message_pes import Elements, Lanes
from rankwise.sim.ccl.plan import Plan, requested
from rankwise.sim.ccl.wire_classes import wire_classes
from rankwise.sim.hardware import HardwareMachine, load_topology, parse_topology
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.kernel import Simulator


def network(sips: dict[str, Any]) -> Topology:
    return parse_topology(yaml.safe_dump({"like": "switch8", "system": {"sips": sips}}), "network")


def link(bandwidth: float) -> dict[str, float]:
    return {"bandwidth_GBps": bandwidth, "latency_ns": 500}


def nodes(outer: dict[str, Any]) -> Topology:
    inner = {"name": "inside", "count": 4, "graph": "switch", "link": link(450)}
    return network({"levels": [inner, {"name": "outside", "count": 4, "link": link(50), **outer}]})


RING = network({"count": 8, "graph": "ring_1d", "link": link(50)})
GRID = network({"count": 16, "graph": "mesh_2d", "shape": [4, 4], "link": link(50)})
RAILS = nodes({"graph": "rails"})
FAT_TREE = nodes({"graph": "fat_tree", "spines": 2, "oversubscription": 2})
RINGS = nodes({"graph": "ring_1d"})


def time_of(
    name: str, topology: Topology, elements: int, *, collective: str, is_alike: bool
) -> int:
    machine = HardwareMachine(Simulator(), topology)
    algorithm = load_configuration({}).algorithm(collective, name)
    sips = topology.machine.system.sips
    homes = tuple(range(sips.count))
    planned = Plan(requested(algorithm, collective, elements, 0, homes, sips))
    if not is_alike:
        planned.symmetry = None
    else:
        assert wire_classes(topology, homes, planned.symmetry) is not None
    count, queues = laid_out(machine, planned, algorithm, 4, homes, topology.pe_count)
    lanes = [Lanes(sip, tuple(range(count))) for sip in homes]
    work = Elements(4, "f32", "add")
    return MessageExecution(machine, planned, lanes, queues, work).time_alone()


@pytest.mark.parametrize("topology", [load_topology("switch8"), RAILS, FAT_TREE])
@pytest.mark.parametrize(
    "name",
    [
        "halving_doubling_allreduce", "recursive_doubling_allreduce", "direct_allreduce",
        "hierarchical_allreduce", "torus_allreduce",
    ],
)  # fmt: skip
def test_one_rank_takes_as_long_as_all_of_them(name: str, topology: Topology) -> None:
    one, everyone = (
        time_of(name, topology, 1 << 16, collective="all_reduce", is_alike=is_alike)
        for is_alike in (True, False)
    )

    assert one == pytest.approx(everyone, rel=1e-6)


@pytest.mark.parametrize("topology", [RING, load_topology("torus16"), RAILS, RINGS, FAT_TREE])
@pytest.mark.parametrize(
    "name", ["direct_all_to_all", "pairwise_all_to_all", "hierarchical_all_to_all"]
)
def test_one_rank_takes_as_long_as_all_of_them_in_an_all_to_all(
    name: str, topology: Topology
) -> None:
    one, everyone = (
        time_of(name, topology, 1 << 12, collective="all_to_all", is_alike=is_alike)
        for is_alike in (True, False)
    )

    assert one == pytest.approx(everyone, rel=1e-6)


def halves(count: int) -> Grid:
    grid = halves_of(Task(0, count, 64))
    assert grid is not None
    return grid


HASHED = nodes({"graph": "fat_tree", "spines": 2, "routing": "hashed"})
THREE_SPINES = nodes({"graph": "fat_tree", "spines": 3})


@pytest.mark.parametrize(
    ("topology", "grid"),
    [
        (RING, halves(8)),  # partners are neighbours of different sides
        (GRID, row_of(16)),  # it has borders
        (RAILS, row_of(16)),  # the next rank is in the next node for some
        (HASHED, halves(16)),
        (THREE_SPINES, halves(16)),
        (RAILS, None),
    ],
)
def test_a_network_that_is_not_alike_for_all_ranks_has_no_classes(
    topology: Topology, grid: Grid | None
) -> None:
    homes = range(topology.sip_count)

    assert wire_classes(topology, homes, grid) is None


def test_ranks_that_leave_devices_free_have_no_classes() -> None:
    assert wire_classes(load_topology("switch8"), range(4), row_of(4)) is None


@pytest.mark.parametrize("topology", [RING, load_topology("switch8"), RAILS, RINGS, FAT_TREE])
def test_the_wires_of_a_class_are_as_many_as_it_says(topology: Topology) -> None:
    count = topology.sip_count
    grid = Grid((4, count // 4), *(row_of(count)[1:])) if count > 8 else row_of(count)
    classes = wire_classes(topology, range(count), grid)
    assert classes is not None

    found: dict[Any, int] = {}
    for _, each in classes.all_hops():
        found[each] = found.get(each, 0) + 1

    assert all(each.size == number for each, number in found.items())
