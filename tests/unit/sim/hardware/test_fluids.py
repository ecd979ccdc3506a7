"""Fluids take their share of links, from each other and from flows of chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.sim.hardware.fluids import WHOLE, Fluid, fair_share
from rankwise.sim.hardware.links import Link, start_flow
from rankwise.sim.hardware.quantities import Rate
from rankwise.sim.kernel import Simulator

SIZE = 1_000_000
ALONE = 20_000_000
"""Picoseconds that SIZE takes a link of 50 GB/s."""


def link_of(simulator: Simulator, latency: int = 0) -> Link:
    return Link(simulator, "wire", Rate.of_gigabytes_per_second(50), latency)


def begin(simulator: Simulator, links: list[Link], *, duration: int = ALONE) -> list[int]:
    """Start a fluid of SIZE bytes per link; the list gets the instant of its end."""
    fluid = Fluid(simulator, "fluid", dict.fromkeys(links, SIZE), duration, [duration])
    ends: list[int] = []
    fluid.reached(duration).add_callback(lambda _event: ends.append(simulator.now))
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


@given(st.lists(st.integers(0, WHOLE), max_size=6), st.integers(0, 6))
def test_shares_are_even_and_exceed_no_link(demands: list[int], flows: int) -> None:
    share = fair_share(demands, flows)

    given_away = sum(min(demand, share) for demand in demands) + flows * share
    if flows or sum(demands) > WHOLE:
        assert WHOLE - len(demands) - flows <= given_away <= WHOLE
    else:
        assert all(demand <= share for demand in demands)
