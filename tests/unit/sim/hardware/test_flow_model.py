"""Flow transfers take their share of links, from each other and from flows of chunks."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.sim.hardware import flow_model
from rankwise.sim.hardware.fair_shares import Figures, Uses, fair_speeds
from rankwise.sim.hardware.flow_model import WHOLE, FlowTransfer, shares_of
from rankwise.sim.hardware.links import Link, start_flow
from rankwise.sim.hardware.quantities import Rate
from rankwise.sim.kernel import Simulator

SIZE = 1_000_000
ALONE = 20_000_000
"""Picoseconds that SIZE takes a link of 50 GB/s."""


def link_of(simulator: Simulator, latency: int = 0) -> Link:
    return Link(simulator, "wire", Rate.of_gigabytes_per_second(50), latency)


def begin(
    simulator: Simulator, links: list[Link], *, duration: int = ALONE, latency: int = 0
) -> list[int]:
    """Start a transfer of SIZE bytes per link; the list gets the instant of its end."""
    loads = dict.fromkeys(links, SIZE)
    transfer = FlowTransfer(simulator, "transfer", loads, duration, [duration], latency=latency)
    ends: list[int] = []
    transfer.reached(duration).add_callback(lambda _event: ends.append(simulator.now))
    return ends


def test_alone_it_takes_what_it_was_told() -> None:
    simulator = Simulator()
    wire = link_of(simulator)

    ends = begin(simulator, [wire])
    simulator.run()

    assert ends == [ALONE]
    assert (wire.bytes_carried, wire.busy, wire.sharing) == (SIZE, ALONE, None)


def test_two_that_want_all_of_a_link_take_twice_as_long() -> None:
    simulator = Simulator()
    wire, own = link_of(simulator), link_of(simulator)

    first, second = begin(simulator, [wire]), begin(simulator, [wire, own])
    simulator.run()

    assert (first, second) == ([2 * ALONE], [2 * ALONE])
    assert (wire.bytes_carried, wire.busy) == (2 * SIZE, 2 * ALONE)


def test_who_is_left_has_the_link_for_itself() -> None:
    simulator = Simulator()
    wire = link_of(simulator)
    first = begin(simulator, [wire])
    second: list[list[int]] = []

    simulator.call_at(ALONE // 2, lambda: second.append(begin(simulator, [wire])))
    simulator.run()

    assert first == [3 * ALONE // 2]
    assert second == [[2 * ALONE]]


def test_two_that_together_want_less_than_a_link_do_not_feel_each_other() -> None:
    simulator = Simulator()
    wire = link_of(simulator)

    ends = [begin(simulator, [wire], duration=3 * ALONE) for _ in range(2)]
    simulator.run()

    assert ends == [[3 * ALONE], [3 * ALONE]]


@pytest.mark.parametrize("flow_first", [True, False])
def test_a_flow_and_a_fluid_have_half_of_a_link_each(flow_first: bool) -> None:
    simulator = Simulator()
    wire = link_of(simulator)

    if flow_first:
        done = start_flow(simulator, [wire], SIZE, 4_096)
    ends = begin(simulator, [wire])
    if not flow_first:
        done = start_flow(simulator, [wire], SIZE, 4_096)
    arrived: list[int] = []
    done.add_callback(lambda _event: arrived.append(simulator.now))
    simulator.run()

    assert arrived[0] == pytest.approx(2 * ALONE, rel=0.02)
    assert ends[0] == pytest.approx(2 * ALONE, rel=0.02)
    assert wire.bytes_carried == 2 * SIZE
    assert wire.busy == pytest.approx(2 * ALONE, rel=0.001)


def test_a_short_flow_costs_the_fluid_what_it_carries() -> None:
    simulator = Simulator()
    wire = link_of(simulator)
    ends = begin(simulator, [wire])

    simulator.call_at(ALONE // 2, start_flow, simulator, [wire], SIZE // 10, 4_096)
    simulator.run()

    assert ends[0] == pytest.approx(ALONE + ALONE // 10, rel=0.001)


def test_a_flow_takes_what_a_modest_fluid_leaves() -> None:
    simulator = Simulator()
    wire = link_of(simulator)
    ends = begin(simulator, [wire], duration=4 * ALONE)
    arrived: list[int] = []

    start_flow(simulator, [wire], SIZE, 4_096).add_callback(
        lambda _event: arrived.append(simulator.now)
    )
    simulator.run()

    assert ends == [4 * ALONE]
    assert arrived[0] == pytest.approx(ALONE * 4 // 3, rel=0.02)


def test_busy_and_bytes_grow_with_its_progress() -> None:
    simulator = Simulator()
    wire = link_of(simulator)
    begin(simulator, [wire])

    simulator.run(until=ALONE // 4)

    assert wire.bytes_carried == SIZE // 4
    assert wire.busy == ALONE // 4


@given(
    st.lists(st.tuples(st.integers(0, WHOLE), st.integers(1, 1 << 20)), max_size=6),
    st.integers(0, 1 << 20),
)
def test_shares_exceed_no_link_and_go_by_weight(
    transfers: list[tuple[int, int]], flows: int
) -> None:
    demands, weights = [demand for demand, _ in transfers], [weight for _, weight in transfers]
    shares = shares_of(demands, weights, flows)

    assert sum(shares) <= WHOLE
    for demand, weight, share in zip(demands, weights, shares, strict=True):
        assert share <= demand
        if share < demand:  # nobody has more for its weight, but for rounding
            assert all(
                other * weight <= (share + 1) * each
                for other, each in zip(shares, weights, strict=True)
            )


def begin_weighted(simulator: Simulator, links: list[Link], weight: int, **more: Any) -> list[int]:
    transfer = FlowTransfer(
        simulator, "transfer", dict.fromkeys(links, SIZE), ALONE, [ALONE],
        weights=dict.fromkeys(links, weight), **more,
    )  # fmt: skip
    ends: list[int] = []
    transfer.reached(ALONE).add_callback(lambda _event: ends.append(simulator.now))
    return ends


def test_two_transfers_have_a_link_by_weight() -> None:
    simulator = Simulator()
    wire = link_of(simulator)

    heavy, light = begin_weighted(simulator, [wire], 3), begin_weighted(simulator, [wire], 1)
    simulator.run()

    assert heavy[0] == pytest.approx(ALONE * 4 / 3, rel=1e-4)
    assert light[0] == pytest.approx(2 * ALONE, rel=1e-4)


def test_share_that_a_fluid_cannot_use_elsewhere_goes_to_others() -> None:
    """Three on one wire, of which one goes on over a second: a fourth gets two thirds of that."""
    simulator = Simulator()
    first, second = link_of(simulator), link_of(simulator)

    begin(simulator, [first, second])
    begin(simulator, [first])
    begin(simulator, [first])
    ends = begin(simulator, [second])
    simulator.run()

    assert ends[0] == pytest.approx(ALONE * 3 / 2, rel=1e-4)


def test_latency_of_a_fluid_does_not_grow_with_others_on_its_links() -> None:
    simulator = Simulator()
    wire = link_of(simulator)

    ends = [begin(simulator, [wire], duration=ALONE + 5, latency=5) for _ in range(2)]
    simulator.run()

    assert ends[0][0] == pytest.approx(2 * ALONE + 5, rel=1e-4)


def test_speeds_are_worked_out_once_for_all_that_begin_at_one_instant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = Simulator()
    wire, sizes = link_of(simulator), []

    def counted(uses: Uses, weights: Figures) -> Figures:
        sizes.append(len(weights))
        return fair_speeds(uses, weights)

    monkeypatch.setattr(flow_model, "fair_speeds", counted)

    for _ in range(100):
        begin(simulator, [wire])
    simulator.run(until=ALONE)

    assert set(sizes) == {100}
    assert len(sizes) == 1


def test_transfers_that_come_and_go_all_end() -> None:
    """`benchmarks/sim_sharing.py` measures the CPU time of a thousand."""
    simulator, random = Simulator(), Random(7)
    wires = [link_of(simulator) for _ in range(32)]

    ends: list[list[int]] = []
    for number in range(128):
        links = random.sample(wires, 4)
        simulator.call_at(
            number * 1_000_000, lambda links=links: ends.append(begin(simulator, links))
        )
    simulator.run()

    assert len(ends) == 128
    assert all(ends)
    assert all(wire.sharing is None for wire in wires)
