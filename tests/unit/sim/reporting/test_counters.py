"""Counter tracks: bandwidth of wires and HBM, PEs in use, slots under way."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from rankwise.sim.benches.session import BenchSession, BenchSettings
from rankwise.sim.hardware.hardware_machine import SlotMessage
from rankwise.sim.hardware.links import Link, start_flow
from rankwise.sim.hardware.op_log import LoggedOperation
from rankwise.sim.hardware.quantities import Rate
from rankwise.sim.hardware.samples import SAMPLES_MOST, LinkSamples
from rankwise.sim.kernel import Simulator
from rankwise.sim.reporting.counters import Count, bandwidths, pes_in_use, queue_depths
from rankwise.sim.reporting.trace import trace_events


def operation(place: str, start: int, end: int) -> LoggedOperation:
    return LoggedOperation(
        number=0, kind="dot", name="dot", place=place, start=start, end=end, bytes=0, flops=0,
        reads=(), writes=(),
    )  # fmt: skip


def values(counts: Iterator[Count]) -> list[tuple[int, str, int, float]]:
    return [(each.sip, each.name, each.at, each.value) for each in counts]


def test_pe_with_two_operations_at_once_counts_once() -> None:
    found = pes_in_use(
        [operation("sip1.cube0.pe0", 0, 10), operation("sip1.cube0.pe0", 5, 20),
         operation("sip1.cube0.pe1", 10, 15), operation("sip1", 0, 99)]
    )  # fmt: skip

    assert [(at, value) for _, _, at, value in values(found)] == [(0, 1), (10, 2), (15, 1), (20, 0)]


def test_slots_count_at_their_destination_from_sending_to_arrival() -> None:
    found = queue_depths(
        [SlotMessage("sip0.a", "sip1.b", 8, 0, 10, 1), SlotMessage("sip0.a", "sip1.b", 8, 4, 12, 1)]
    )

    assert values(found) == [
        (1, "queue depth", 0, 1), (1, "queue depth", 4, 2), (1, "queue depth", 10, 1),
        (1, "queue depth", 12, 0),
    ]  # fmt: skip


def test_bandwidth_of_a_wire_is_what_it_carried_between_samples() -> None:
    simulator = Simulator()
    rate = Rate.of_gigabytes_per_second(50)
    wire = Link(simulator, "sip2->sip3", rate, 0)
    samples = LinkSamples([wire])
    samples.take(0)
    start_flow(simulator, [wire], 64_000, 1_000)
    simulator.run()
    end = simulator.now

    assert values(bandwidths(samples, end)) == [
        (2, "sip2->sip3", 0, pytest.approx(50)), (2, "sip2->sip3", end, 0),
    ]  # fmt: skip


def test_samples_are_bounded_whatever_the_length_of_the_run() -> None:
    samples = LinkSamples([])
    for instant in range(20 * SAMPLES_MOST):
        samples.take(instant)

    taken = samples.until(20 * SAMPLES_MOST)
    assert SAMPLES_MOST // 4 < len(taken) <= SAMPLES_MOST + 1
    assert [each.at for each in taken] == sorted({each.at for each in taken})


@pytest.mark.parametrize("fidelity", ["queue", "message"])
def test_trace_of_a_ring_counts_all_bytes_of_its_wires_and_changes_no_instant(
    fidelity: str,
) -> None:
    settings = BenchSettings(
        program="ccl_allreduce", has_data=False, fields={"elements": "16384", "fidelity": fidelity}
    )
    plain, traced = BenchSession(settings), BenchSession(settings, with_messages=True)
    assert plain.run().results == traced.run().results
    assert plain.engine.now == traced.engine.now

    counters = [each for each in trace_events(traced.engine) if each["ph"] == "C"]
    names = {each["name"] for each in counters}
    assert {"sip0->sip1", "HBM"} <= names
    assert ("queue depth" in names) == (fidelity == "queue")
    (wire,) = [link for link in traced.engine.machine.links if link.name == "sip0->sip1"]
    steps = [(each["ts"], each["args"]["GB/s"]) for each in counters if each["name"] == wire.name]
    carried = sum(value * 1e3 * (until - since) for (since, value), (until, _) in pairwise(steps))
    assert carried == pytest.approx(wire.bytes_carried, rel=0.01)
    assert max(value for _, value in steps) <= 50.5
