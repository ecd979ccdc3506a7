from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.sim.ccl.message_rounds import ROUNDS, MessageRound, RoundNetwork
from rankwise.sim.ccl.message_timing import (
    Algorithm,
    Collective,
    Dimension,
    MessageCosts,
    collective_time,
    placed_time,
)
from rankwise.sim.hardware.routing import sip_route
from rankwise.sim.hardware.specification import Graph, LinkSpec, SipsSpec
from rankwise.sim.kernel import Server, Simulator, all_of

Steps = Generator[Any, Any, Any]


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_a_ring_all_reduce_takes_the_time_of_its_closed_form(count: int) -> None:
    size = 1_000 * count
    ring = Dimension(count=count, bandwidth_gbps=100, latency_ns=700)

    time = collective_time("all_reduce", size, [ring])

    alpha, part_time = 700_000, 1_000 * 10  # 100 GB/s are a tenth of a byte per picosecond
    assert time.picoseconds == 2 * (count - 1) * (alpha + part_time)
    assert time.messages == 2 * (count - 1) * count


@pytest.mark.parametrize("count", [2, 5, 16])
def test_bytes_on_every_link_of_a_ring_equal_the_formula(count: int) -> None:
    ring = Dimension(count=count, bandwidth_gbps=50, latency_ns=500)

    time = collective_time("all_reduce", 600 * count, [ring], chunks=3)

    per_link = 2 * (count - 1) * 600
    assert time.bytes_per_link[0].tolist() == [per_link] * count


def test_doubling_the_bandwidth_of_a_dimension_that_is_not_used_changes_nothing() -> None:
    def time(bandwidth: float) -> int:
        lonely = Dimension(count=1, bandwidth_gbps=bandwidth, latency_ns=100)
        ring = Dimension(count=4, bandwidth_gbps=50, latency_ns=100)
        return collective_time("all_reduce", 4_096, [lonely, ring]).picoseconds

    assert time(10) == time(20)


def test_chunks_follow_each_other_through_the_dimensions() -> None:
    inner = Dimension(count=2, bandwidth_gbps=100, latency_ns=100)
    outer = Dimension(count=4, bandwidth_gbps=25, latency_ns=1_000)
    size = 1 << 20

    pipelined = collective_time("all_reduce", size, [inner, outer], chunks=4).picoseconds

    parts = [
        collective_time("reduce_scatter", size // 4, [inner]).picoseconds,
        4 * collective_time("all_reduce", size // 8, [outer]).picoseconds,
        collective_time("all_gather", size // 8, [inner]).picoseconds,
    ]
    assert pipelined == sum(parts)


def one_by_one(rounds: Iterator[MessageRound]) -> Iterator[MessageRound]:
    """The same rounds, of which none is said to be like the next."""
    for each in rounds:
        yield from [each._replace(times=1)] * each.times


def event_driven(algorithm: Algorithm, kind: Collective, sips: SipsSpec, size: int) -> int:
    """The same model, told to the event kernel: a process per rank and per message."""
    simulator = Simulator()
    rate, latency = sips.fastest_link.rate, sips.fastest_link.latency
    links: dict[tuple[int, int], Server] = {}
    ranks = range(sips.count)
    rounds = list(one_by_one(ROUNDS[algorithm](kind, sips.count, size)))
    ready = [[simulator.future() for _ in ranks] for _ in range(len(rounds) + 1)]

    def message(number: int, source: int, destination: int) -> Steps:
        yield ready[number][source]
        node = source
        for following in sip_route(sips, source, destination):
            link = links.setdefault((node, following), Server(simulator))
            yield link.occupy(rate.time_for(rounds[number].size)) + latency
            node = following

    def turn(number: int, rank: int, messages: list[Any]) -> Steps:
        yield all_of([ready[number][rank], *messages])
        ready[number + 1][rank].succeed()

    for number, each in enumerate(rounds):
        inboxes: list[list[Any]] = [[] for _ in ranks]
        for targets in each.targets:
            for source, destination in enumerate(targets):
                inboxes[destination].append(simulator.process(message(number, source, destination)))
        for rank in ranks:
            simulator.process(turn(number, rank, inboxes[rank]))
    for first in ready[0]:
        first.succeed()
    simulator.run(all_of(ready[-1]))
    return simulator.now


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.tuples(
        st.sampled_from(["ring", "direct", "halving_doubling"]),
        st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
        st.sampled_from(["ring_1d", "fully_connected", "switch"]),
    ),
    st.integers(1, 3),
    st.integers(1, 5_000),
    st.integers(0, 800),
)
def test_the_recurrence_gives_what_an_event_queue_gives(
    case: tuple[Algorithm, Collective, Graph], power: int, size: int, latency: int
) -> None:
    algorithm, kind, graph = case
    count = 2**power
    link = LinkSpec(bandwidth=64, latency_ns=latency)
    dimension = Dimension(
        count=count, graph=graph, algorithm=algorithm, bandwidth_gbps=64, latency_ns=latency
    )

    time = collective_time(kind, size, [dimension])

    expected = event_driven(algorithm, kind, SipsSpec(count=count, graph=graph, link=link), size)
    assert time.picoseconds == expected


NETWORKS: list[tuple[Graph, int, tuple[int, int] | None]] = [
    (graph, count, None)
    for graph in ("ring_1d", "fully_connected", "switch")
    for count in (2, 5, 8)
]
NETWORKS += [
    (graph, 12, shape) for graph in ("mesh_2d", "torus_2d") for shape in ((3, 4), (2, 6), (1, 12))
]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=2),
    st.tuples(
        st.sampled_from(["ring", "direct"]),
        st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
        st.integers(1, 20_000),
        st.integers(1, 3),
    ),
    st.builds(
        MessageCosts,
        endpoint_ns=st.sampled_from([0, 10]),
        memory_gbps=st.sampled_from([None, 300]),
        contention=st.booleans(),
        cut_through=st.booleans(),
    ),
    st.integers(0, 800),
)
def test_replayed_rounds_give_what_all_of_them_give_to_the_picosecond(
    networks: list[tuple[Graph, int, tuple[int, int] | None]],
    task: tuple[Algorithm, Collective, int, int],
    costs: MessageCosts,
    latency: int,
) -> None:
    algorithm, kind, size, chunks = task
    dimensions = [
        Dimension(
            count=count, graph=graph, shape=shape, algorithm=algorithm,
            bandwidth_gbps=64, latency_ns=latency,
        )
        for graph, count, shape in networks
    ]  # fmt: skip

    replayed = collective_time(kind, size, dimensions, chunks=chunks, costs=costs)

    rounds = ROUNDS[algorithm]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROUNDS, algorithm, lambda *given: one_by_one(rounds(*given)))
        in_full = collective_time(kind, size, dimensions, chunks=chunks, costs=costs)
    assert replayed[:2] == in_full[:2]
    for with_replay, without in zip(replayed[2], in_full[2], strict=True):
        assert with_replay.tolist() == without.tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.permutations(range(12)),
    st.integers(2, 12),
    st.sampled_from(["mesh_2d", "torus_2d", "ring_1d", "switch"]),
    st.integers(1, 20_000),
)
def test_replayed_rounds_are_exact_between_any_devices_of_a_machine(
    devices: list[int], count: int, graph: Graph, size: int
) -> None:
    shape = (3, 4) if graph in {"mesh_2d", "torus_2d"} else None
    link = LinkSpec(bandwidth=64, latency_ns=300)
    sips = SipsSpec(count=12, graph=graph, shape=shape, link=link)
    homes = tuple(device % 9 for device in devices[:count])  # some share one

    replayed = placed_time("all_reduce", size, sips, homes, "ring")

    rounds = ROUNDS["ring"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROUNDS, "ring", lambda *given: one_by_one(rounds(*given)))
        assert replayed == placed_time("all_reduce", size, sips, homes, "ring")


def test_a_large_symmetric_ring_is_timed_from_two_rounds_per_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calculated: list[int] = []
    run_round = RoundNetwork._run_round

    def counting(self: RoundNetwork, *given: Any) -> Any:
        calculated.append(1)
        return run_round(self, *given)

    monkeypatch.setattr(RoundNetwork, "_run_round", counting)
    ring = Dimension(count=256, bandwidth_gbps=100, latency_ns=700)

    collective_time("all_reduce", 1_000 * 256, [ring], chunks=4)

    assert len(calculated) <= 4 * 2 * 2


def test_reductions_and_endpoints_cost_what_they_are_said_to_cost() -> None:
    pair = Dimension(count=2, bandwidth_gbps=1_000, latency_ns=0)
    costs = MessageCosts(endpoint_ns=10, memory_gbps=100)

    time = collective_time("all_reduce", 2_000, [pair], costs=costs)

    # One to hand out, two messages taken in; 3,000 bytes of memory traffic; 2,000 on the wire.
    assert time.picoseconds == 3 * 10_000 + 30_000 + 2_000


@pytest.mark.parametrize(("size", "chunks"), [(0, 1), (8, 0)])
def test_nothing_cannot_be_timed(size: int, chunks: int) -> None:
    ring = Dimension(count=2, bandwidth_gbps=1, latency_ns=1)

    with pytest.raises(ConfigError):
        collective_time("all_reduce", size, [ring], chunks=chunks)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 1), (-50, 1), (50, -1), (float("nan"), 1)])
def test_links_that_cannot_be_are_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(ValueError, match=f"links of {bandwidth} GB/s and {latency} ns"):
        Dimension(count=4, bandwidth_gbps=bandwidth, latency_ns=latency)


def test_halving_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two of ranks, not 6"):
        Dimension(count=6, algorithm="halving_doubling", bandwidth_gbps=1, latency_ns=1)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8])
def test_every_chunk_goes_once_up_and_once_down_each_edge_of_its_tree(count: int) -> None:
    trees = Dimension(
        count=count, graph="fully_connected", algorithm="double_binary_tree",
        bandwidth_gbps=50, latency_ns=500,
    )  # fmt: skip

    time = collective_time("all_reduce", 8_000, [trees], chunks=4)

    assert time.messages == 4 * 2 * (count - 1)
    assert int(time.bytes_per_link[0].sum()) == 4 * 2 * (count - 1) * 2_000


def test_a_chunk_takes_the_depth_of_its_tree_up_and_down_again() -> None:
    trees = Dimension(
        count=8, graph="fully_connected", algorithm="double_binary_tree",
        bandwidth_gbps=100, latency_ns=700,
    )  # fmt: skip
    costs = MessageCosts(endpoint_ns=10, memory_gbps=300)

    time = collective_time("all_reduce", 1_000, [trees], costs=costs)

    hop, endpoint, reduction = 700_000 + 10_000, 10_000, 10_000
    up, down = 3 * (hop + endpoint + reduction), 3 * (hop + endpoint)
    assert time.picoseconds == endpoint + up + down


@pytest.mark.parametrize("count", [8, 16])
def test_chunks_follow_each_other_through_a_double_tree_at_the_rate_of_its_inner_nodes(
    count: int,
) -> None:
    trees = Dimension(
        count=count, graph="switch", algorithm="double_binary_tree",
        bandwidth_gbps=50, latency_ns=500,
    )  # fmt: skip
    size, chunks, depth = 64 << 20, 128, (count - 1).bit_length()

    time = collective_time("all_reduce", size, [trees], chunks=chunks).picoseconds

    # Inner nodes receive and send all of the data twice; the first chunk goes up and down before.
    expected = 2 * size / 0.05 + 4 * depth * (size / chunks / 0.05 + 500_000)
    assert time == pytest.approx(expected, rel=0.04)


def test_a_double_tree_with_one_active_chunk_waits_for_each_result() -> None:
    trees = Dimension(
        count=8, graph="switch", algorithm="double_binary_tree",
        bandwidth_gbps=50, latency_ns=500,
    )  # fmt: skip

    followed, waited = (
        collective_time(
            "all_reduce", 64 << 20, [trees], chunks=64, costs=MessageCosts(active_chunks=active)
        ).picoseconds
        for active in (None, 1)
    )

    assert waited > 5.5 * followed


def test_two_chunks_of_a_double_tree_overlap_since_its_root_is_a_leaf_of_the_other() -> None:
    trees = Dimension(
        count=64, graph="switch", algorithm="double_binary_tree",
        bandwidth_gbps=50, latency_ns=500,
    )  # fmt: skip

    one = collective_time("all_reduce", 1 << 20, [trees]).picoseconds
    two = collective_time("all_reduce", 2 << 20, [trees], chunks=2).picoseconds

    assert two < 1.9 * one


def test_a_message_that_comes_earlier_is_served_earlier_even_if_its_chunk_is_later() -> None:
    def time(chunks: int, *extra: Dimension) -> int:
        trees = Dimension(
            count=8, graph="switch", algorithm="double_binary_tree",
            bandwidth_gbps=50, latency_ns=500,
        )  # fmt: skip
        size = (1 << 18) * chunks
        costs = MessageCosts(active_chunks=1)
        return collective_time(
            "all_reduce", size, [*extra, trees], chunks=chunks, costs=costs
        ).picoseconds

    alone = Dimension(count=1, bandwidth_gbps=1, latency_ns=0)

    # With another dimension, chunks go through one at a time, and cannot overtake on a link.
    assert time(4) < time(4, alone)
    assert time(2) == time(2, alone)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_trees_only_all_reduce(kind: Collective) -> None:
    trees = Dimension(count=4, algorithm="double_binary_tree", bandwidth_gbps=1, latency_ns=1)

    with pytest.raises(ConfigError, match=f"double_binary_tree has no {kind}"):
        collective_time(kind, 64, [trees])


def test_trees_may_be_the_last_of_several_dimensions() -> None:
    ring = Dimension(count=4, bandwidth_gbps=100, latency_ns=100)
    trees = Dimension(
        count=4, graph="switch", algorithm="double_binary_tree", bandwidth_gbps=25, latency_ns=1_000
    )
    size = 1 << 20

    both = collective_time("all_reduce", size, [ring, trees]).picoseconds

    parts = [
        collective_time("reduce_scatter", size, [ring]),
        collective_time("all_reduce", size // 4, [trees]),
        collective_time("all_gather", size // 4, [ring]),
    ]
    assert both == sum(part.picoseconds for part in parts)
    with pytest.raises(ConfigError, match="last dimension only"):
        collective_time("all_reduce", size, [trees, ring])


def test_halving_charges_reductions_by_what_was_received_unless_told_otherwise() -> None:
    pairs = Dimension(
        count=4, graph="fully_connected", algorithm="halving_doubling",
        bandwidth_gbps=1_000, latency_ns=0,
    )  # fmt: skip

    received = collective_time(
        "reduce_scatter", 4_000, [pairs], costs=MessageCosts(memory_gbps=1_000)
    )
    as_astra_sim = collective_time(
        "reduce_scatter", 4_000, [pairs],
        costs=MessageCosts(memory_gbps=1_000, reductions="astra_sim"),
    )  # fmt: skip

    wires = 2_000 + 1_000
    assert received.picoseconds == wires + 3 * (2_000 + 1_000)
    assert as_astra_sim.picoseconds == wires + 3 * 1_000


def test_halving_sends_the_largest_part_to_the_neighbour() -> None:
    ring = Dimension(count=8, algorithm="halving_doubling", bandwidth_gbps=50, latency_ns=500)

    carried = collective_time("reduce_scatter", 800, [ring]).bytes_per_link[0]

    # Neighbours exchange 400 bytes over one link each way, then 200 over two, 100 over four.
    assert int(carried.sum()) == 8 * (400 * 1 + 200 * 2 + 100 * 4)


def test_a_dimension_takes_chunks_in_the_order_in_which_they_come_to_it() -> None:
    size, chunks, near, far = (
        16 << 20, 4,
        Dimension(count=8, bandwidth_gbps=100, latency_ns=100),
        Dimension(count=8, bandwidth_gbps=25, latency_ns=1_000),
    )  # fmt: skip

    time = collective_time("all_reduce", size, [near, far], chunks=chunks).picoseconds

    part = size // chunks
    scatter = collective_time("reduce_scatter", part, [near]).picoseconds
    across = collective_time("all_reduce", part // 8, [far]).picoseconds
    gather = collective_time("all_gather", part // 8, [near]).picoseconds
    # All chunks are scattered first; until then the first is back, and the others follow in time.
    assert scatter + across < chunks * scatter
    assert scatter + chunks * across < chunks * scatter + (chunks - 1) * gather
    assert time == chunks * (scatter + gather)


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_the_two_ways_to_charge_halving_differ_by_the_reduction_of_half_the_data(
    count: int, chunks: int, kind: Collective
) -> None:
    size, memory_gbps = 1 << 20, 1_000
    switch = Dimension(
        count=count, graph="switch", algorithm="halving_doubling",
        bandwidth_gbps=50, latency_ns=500,
    )  # fmt: skip
    received, as_astra_sim = (
        collective_time(
            kind, size, [switch], chunks=chunks,
            costs=MessageCosts(memory_gbps=memory_gbps, reductions=way),
        ).picoseconds
        for way in ("received", "astra_sim")
    )  # fmt: skip

    # At 1,000 GB/s a byte takes 1 ps, and three are moved for one that is combined.
    assert received - as_astra_sim == 3 * size // 2
