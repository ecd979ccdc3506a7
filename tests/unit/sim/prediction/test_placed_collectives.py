"""Collectives between some devices of a machine, against their closed forms."""

import pytest

from rankwise.sim import load_topology
from rankwise.sim.ccl.message_model import Algorithm, Collective, Rooted
from rankwise.sim.ccl.message_timing import placed_time
from rankwise.sim.hardware import parse_topology
from rankwise.sim.hardware.specification import SipsSpec
from rankwise.simranks.prediction.costs import NetworkCosts

SIZE = 1 << 20
EIGHT = tuple(range(8))


def sips(machine: str) -> SipsSpec:
    return load_topology(machine).machine.system.sips


@pytest.mark.parametrize(
    ("collective", "algorithm", "latencies", "sizes"),
    [
        ("all_reduce", "ring", 14, 14 / 8),
        ("all_reduce", "halving_doubling", 6, 14 / 8),
        ("reduce_scatter", "ring", 7, 7 / 8),
        ("all_gather", "ring", 7, 7),
        ("all_to_all", "direct", 1, 7 / 8),
        ("broadcast", "rooted", 3, 3),
        ("reduce", "rooted", 3, 3),
        ("gather", "rooted", 1, 7),
        ("scatter", "rooted", 1, 7),
    ],
)
def test_behind_a_switch_each_takes_its_latencies_and_bytes(
    collective: Collective | Rooted, algorithm: Algorithm, latencies: int, sizes: float
) -> None:
    behind_switch = sips("switch8")
    hop = 2 * behind_switch.fastest_link.latency  # cut through: its bytes are paid once

    time = placed_time(collective, SIZE, behind_switch, EIGHT, algorithm)

    bytes_time = round(sizes * SIZE)
    assert time == pytest.approx(
        latencies * hop + behind_switch.fastest_link.rate.time_for(bytes_time), abs=100
    )


def test_a_barrier_takes_latencies_alone() -> None:
    switch = sips("switch8")

    assert placed_time("barrier", 0, switch, EIGHT, "rooted") == 3 * 2 * switch.fastest_link.latency


def test_a_row_and_a_column_of_a_torus_are_rings() -> None:
    torus = sips("pod64")
    step = torus.fastest_link.latency + torus.fastest_link.rate.time_for(SIZE // 8)

    for homes in (EIGHT, tuple(range(0, 64, 8)), tuple(range(3, 64, 8))):
        assert placed_time("all_reduce", SIZE, torus, homes, "ring") == 14 * step


def test_neighbours_that_are_far_apart_share_links() -> None:
    torus = sips("pod64")

    near = placed_time("all_reduce", SIZE, torus, (0, 1, 2, 3), "ring")
    far = placed_time("all_reduce", SIZE, torus, (0, 27, 2, 29), "ring")

    assert far > near


def test_the_root_of_five_is_what_takes_longest() -> None:
    switch = sips("switch8")
    # The root sends, or gets, three messages one after the other.
    time = 2 * switch.fastest_link.latency + 3 * switch.fastest_link.rate.time_for(SIZE)

    for collective in ("broadcast", "reduce"):
        assert placed_time(collective, SIZE, switch, (0, 3, 5, 6, 7), "rooted") == time


def test_an_all_reduce_over_levels_is_hierarchical_where_that_is_faster() -> None:
    topology = parse_topology(
        """
        like: default
        system:
          sips:
            levels:
              - {count: 8, graph: switch, link: {bandwidth_GBps: 100, latency_ns: 100}}
              - {count: 3, graph: rails, link: {bandwidth_GBps: 25, latency_ns: 500}}
        """,
        "levels",
    )
    network, everyone = topology.machine.system.sips, tuple(range(24))
    size = 8 << 20

    time = placed_time("all_reduce", size, network, everyone, "hierarchical")

    inside, across = 2 * 7 / 8 * size / 0.1, 2 * 2 / 3 * size / 8 / 0.025
    assert time == pytest.approx(14 * 200_000 + inside + 4 * 1_000_000 + across, rel=1e-4)
    assert NetworkCosts(topology).time("all_reduce", size, everyone) == time
    gathered = placed_time("all_gather", size // 24, network, everyone, "hierarchical")
    scattered = placed_time("reduce_scatter", size, network, everyone, "hierarchical")
    assert gathered == pytest.approx(time / 2, rel=1e-3)
    assert scattered == pytest.approx(time / 2, rel=1e-3)
