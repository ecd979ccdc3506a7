"""Faults of the machine that unmodified programs are predicted on, against closed forms."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rankwise.sim import load_topology, triton
from rankwise.sim.faults.reading import read_chip_faults
from rankwise.sim.hardware.faults import Unreachable, checked_faults
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.triton import language as tl
from rankwise.simranks.prediction import Prediction, RankClock
from rankwise.simranks.prediction.costs import DeviceOperation, NetworkCosts
from rankwise.simranks.prediction.kernel_times import KernelTimes, Meter

RING = (0, 1, 2, 3)
SIZE = 1 << 20
LINK = load_topology("default").machine.system.sips.link
PART = LINK.rate.time_for(SIZE // 4)
"""The time of a quarter of the data on a link that is well."""


def machine_with(*words: str) -> Topology:
    machine = load_topology("default")
    return machine.with_faults(checked_faults(read_chip_faults(words), machine))


def time_of_ring(*words: str, begin: int = 0) -> int:
    return NetworkCosts(machine_with(*words)).time("all_gather", SIZE // 4, RING, begin)


def test_each_part_crosses_a_slow_link_in_its_time() -> None:
    assert time_of_ring() == 3 * (PART + LINK.latency)
    # One after the other without a break: only the last one's latency counts.
    assert time_of_ring("slow:link=sip0->sip1,times=4") == pytest.approx(
        3 * 4 * PART + LINK.latency, abs=1_000
    )


def test_a_message_takes_as_long_as_the_slowest_of_its_links() -> None:
    network = NetworkCosts(machine_with("slow:link=sip1-sip2,times=3"))

    assert network.message_time(0, 2, SIZE) == 3 * 4 * PART + 2 * LINK.latency
    assert network.message_time(0, 1, SIZE) == 4 * PART + LINK.latency


def test_what_begins_after_the_death_of_a_link_goes_around_and_a_message_under_way_arrives() -> (
    None
):
    network = NetworkCosts(machine_with("kill:link=sip0-sip1,at=1us"))
    direct, around = (4 * PART + hops * LINK.latency for hops in (1, 3))

    times = [network.message_time(0, 1, SIZE, begin) for begin in (0, 999_999, 1_000_000)]

    assert times == [direct, direct, around]


def test_a_collective_goes_on_with_what_is_left_when_a_link_dies() -> None:
    well, dead = time_of_ring(), time_of_ring("kill:link=sip0-sip1")
    assert dead > well

    at = well // 4_000 * 1_000
    left = 1 - Fraction(at, well)
    assert time_of_ring(f"kill:link=sip0-sip1,at={at // 1_000}ns") == at + round(left * dead)
    assert time_of_ring("kill:link=sip0-sip1,at=1s") == well
    assert time_of_ring("kill:link=sip0-sip1,at=1us", begin=1_000_000) == dead


def test_without_a_way_left_the_operation_names_the_dead_links() -> None:
    network = NetworkCosts(machine_with("kill:link=sip0-sip1", "kill:link=sip0-sip3"))

    with pytest.raises(Unreachable, match=r"no way from sip0 to sip1: dead are sip0->sip1, sip0->"):
        network.time("all_gather", SIZE, RING)


def test_an_operation_takes_as_long_as_the_slowest_pe_of_its_device() -> None:
    prediction = Prediction(machine_with("slow:pe=sip1.cube0.pe2,times=8"), 2)
    well, slow = (RankClock(prediction, number, 0) for number in range(2))
    work = DeviceOperation("aten.mm", "gemm", 1 << 40, 0, "f16")

    command = picoseconds(prediction.topology.machine.system.host.command_ns)
    assert slow.price(work).duration - command == pytest.approx(
        8 * (well.price(work).duration - command), abs=10
    )


@triton.jit
def twice(x_ptr: Any, block: tl.constexpr) -> None:
    places = x_ptr + tl.program_id(0) * block + tl.arange(0, block)
    tl.store(places, tl.load(places) * 2)


def test_a_kernel_of_triton_is_tried_on_the_slow_device_itself() -> None:
    prediction = Prediction(machine_with("slow:pe=sip1.cube0.pe0,times=8"), 4)
    times = KernelTimes(prediction, lambda _: None)
    x = np.ones(1 << 12, np.float32)

    def time_on(number: int) -> int:
        clock = RankClock(prediction, number, 0)
        meter = Meter(prediction, clock, lambda _: None)
        times.run(twice, 4, (x,), {"block": 1 << 10}, meter)
        return clock.time

    on_first, on_slow, on_another = (time_on(number) for number in (0, 1, 2))

    assert on_first == on_another < on_slow
    assert x.tolist() == [8] * len(x)
