from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.sim.hardware.links import CHUNKS_PER_FLOW_MAX, FlowLane, Link, start_flow
from rankwise.sim.hardware.quantities import Rate, picoseconds
from rankwise.sim.kernel import Simulator


def link(simulator: Simulator, gigabytes: float, latency_ns: float, name: str = "link") -> Link:
    rate = Rate.of_gigabytes_per_second(gigabytes)
    return Link(simulator, name, rate, picoseconds(latency_ns))


SPEEDS = st.sampled_from([3, 12.5, 25, 50, 64, 100, 400, 1_000])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(SPEEDS, st.integers(0, 900)), min_size=1, max_size=6),
    st.integers(1, 1 << 22),
    st.sampled_from([64, 256, 4_096]),
)
def test_a_flow_alone_takes_its_latencies_plus_its_size_at_the_lowest_bandwidth(
    hops: list[tuple[float, int]], size: int, chunk: int
) -> None:
    simulator = Simulator()
    path = [link(simulator, speed, latency) for speed, latency in hops]

    simulator.run(start_flow(simulator, path, size, chunk))

    latency = sum(each.latency for each in path)
    slowest = max(each.rate.time_for(size) for each in path)
    rounding = CHUNKS_PER_FLOW_MAX  # each chunk's time is rounded up to a picosecond
    assert latency + slowest <= simulator.now <= latency + slowest + rounding
    assert [each.bytes_carried for each in path] == [size] * len(path)


def test_two_flows_share_a_link_fairly_and_together_fill_it() -> None:
    simulator = Simulator()
    shared = link(simulator, 50, 0)
    ends = []
    for size in (1 << 20, 1 << 20):
        start_flow(simulator, [shared], size, 4_096).add_callback(
            lambda _: ends.append(simulator.now)
        )

    simulator.run()

    alone = shared.rate.time_for(1 << 20)
    assert ends[1] == 2 * alone
    assert ends[0] > 2 * alone - 2 * shared.rate.time_for(1 << 14)
    assert shared.busy == simulator.now


def test_a_short_message_does_not_wait_for_the_whole_of_a_long_one() -> None:
    simulator = Simulator()
    shared = link(simulator, 50, 0)
    start_flow(simulator, [shared], 1 << 20, 4_096)
    short = start_flow(simulator, [shared], 256, 256)

    simulator.run(short)

    assert simulator.now <= 2 * shared.rate.time_for((1 << 20) // CHUNKS_PER_FLOW_MAX)


def test_flows_of_one_lane_have_one_turn_together() -> None:
    simulator = Simulator()
    shared, lane = link(simulator, 50, 0), FlowLane()
    queued = [start_flow(simulator, [shared], 1 << 16, 1_024, lane=lane) for _ in range(3)]
    other = start_flow(simulator, [shared], 1 << 16, 1_024)

    simulator.run(other)

    assert simulator.now == pytest.approx(2 * shared.rate.time_for(1 << 16), rel=0.02)
    assert not any(each.is_done for each in queued)


@pytest.mark.parametrize("between", [0, 2])
def test_a_lane_that_waits_for_a_slow_link_leaves_the_rest_of_a_fast_one_to_others(
    between: int,
) -> None:
    simulator = Simulator()
    fast, slow = link(simulator, 50, 100), link(simulator, 10, 100)
    # Pieces of 1,024 bytes reach the slow link at once: nothing is paced by it.
    way = [fast, *(link(simulator, 50, 100) for _ in range(between)), slow]
    held_up = [start_flow(simulator, way, 1 << 16, 1_024, lane=lane) for lane in [FlowLane()] * 8]
    free = start_flow(simulator, [fast], 1 << 18, 1_024)

    simulator.run(free)

    assert not held_up[-1].is_done
    assert simulator.now == pytest.approx(fast.rate.time_for((1 << 18) * 5 // 4), rel=0.05)


def test_a_lane_alone_fills_the_buffer_in_front_of_a_slow_link() -> None:
    simulator = Simulator()
    fast, slow = link(simulator, 50, 0), link(simulator, 10, 0)
    flows = [start_flow(simulator, [fast, slow], 1 << 16, 1_024) for _ in range(4)]

    for flow in flows:
        simulator.run(flow)

    assert simulator.now == pytest.approx(slow.rate.time_for(1 << 18), rel=0.01)
    assert fast.bytes_carried == slow.bytes_carried == 1 << 18


def test_flows_from_two_links_into_one_have_half_of_it_each() -> None:
    simulator = Simulator()
    sources = [link(simulator, 50, 10) for _ in range(2)]
    shared = link(simulator, 50, 10)
    ends: list[int] = []
    for source in sources:
        start_flow(simulator, [source, shared], 1 << 20, 4_096).add_callback(
            lambda _: ends.append(simulator.now)
        )

    simulator.run()

    assert ends[0] == pytest.approx(ends[1], rel=0.02)
    assert ends[1] == pytest.approx(2 * shared.rate.time_for(1 << 20), rel=0.01)


def run_flows(
    flows: list[tuple[int, int, list[int]]], speeds: list[float], observe_every: int = 10_000
) -> dict[str, Any]:
    simulator = Simulator()
    busy = []
    links = [link(simulator, speed, 10 * index) for index, speed in enumerate(speeds)]
    ends: dict[int, int] = {}
    for number, (start, size, hops) in enumerate(flows):
        path = [links[hop] for hop in hops]

        def begin(number: int = number, size: int = size, path: list[Link] = path) -> None:
            done = start_flow(simulator, path, size, 256, f"flow {number}")
            done.add_callback(lambda _: ends.__setitem__(number, simulator.now))

        simulator.call_at(start, begin)
    while len(ends) < len(flows):
        simulator.run(simulator.now + observe_every)
        for each in links:
            assert 0 <= each.busy <= simulator.now, "no link is over 100 % busy"
        busy.append([each.busy for each in links])
    return {"ends": ends, "carried": [each.bytes_carried for each in links], "busy": busy}


FLOWS = st.lists(
    st.tuples(
        st.integers(0, 100_000),
        st.integers(1, 100_000),
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(FLOWS)
def test_every_byte_crosses_every_link_of_its_path_once_and_runs_repeat(
    flows: list[tuple[int, int, list[int]]],
) -> None:
    result = run_flows(flows, [50, 25, 100, 10, 77])

    expected = [sum(size for _, size, hops in flows if hop in hops) for hop in range(4)]
    assert result["carried"] == [*expected, 0]
    assert run_flows(flows, [50, 25, 100, 10, 77]) == result
    assert run_flows(flows, [50, 25, 100, 10, 154]) == result, "an idle link changes nothing"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(FLOWS)
def test_an_express_takes_the_same_time_as_a_flow_that_is_worked_off_chunk_by_chunk(
    flows: list[tuple[int, int, list[int]]],
) -> None:
    # All durations are multiples of ten: from here on, no two flows come to a link at once, where
    # it would be the order of requests that decides.
    flows = [(10 * start + number, size, hops) for number, (start, size, hops) in enumerate(flows)]
    with_express = run_flows(flows, [50, 25, 100, 10], observe_every=3_333)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "is_idle", lambda _link, _at: False)
        without = run_flows(flows, [50, 25, 100, 10], observe_every=3_333)

    assert with_express == without


def test_messages_one_after_the_other_stay_expresses() -> None:
    simulator = Simulator()
    path = [link(simulator, 50, 500), link(simulator, 100, 300)]
    pace = path[0].rate.time_for(65_536)
    before = len(simulator._soon) + len(simulator._later)
    for number in range(5):
        simulator.call_at(number * pace, start_flow, simulator, path, 65_536, 256)

    simulator.run(4 * pace + 1)

    pending = len(simulator._soon) + len(simulator._later)
    assert pending - before <= 5, "an end for each, and nothing for chunks"
    simulator.run()
    assert simulator.now == 5 * pace + 800_000


def test_a_flow_of_nothing_still_takes_the_latency() -> None:
    simulator = Simulator()
    simulator.run(start_flow(simulator, [link(simulator, 50, 30)], 0, 256))

    assert simulator.now == 30_000
