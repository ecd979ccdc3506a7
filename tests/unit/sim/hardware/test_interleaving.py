"""Which memory gives what: consecutive and interleaved mappings, and DMAs over several channels."""

from collections import Counter

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.sim.hardware import GraphEngine, HardwareMachine, MemoryRead, MemoryWrite, MmuMap
from rankwise.sim.hardware.footprint import Footprint
from rankwise.sim.hardware.hardware_machine import Memory
from rankwise.sim.hardware.interleaving import Consecutive, Interleaved, Places, interleaved_sizes
from rankwise.sim.hardware.topology import load_topology, parse_topology
from rankwise.sim.kernel import Simulator

MEMORIES = [Memory("hbm", (0, 0, channel), 1 << 30, None) for channel in range(5)]


@st.composite
def rules(draw: st.DrawFn) -> tuple[int, Places]:
    """How many bytes, and where they lie."""
    count = draw(st.integers(1, 5))
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
        return sum(sizes), Consecutive(sizes, MEMORIES[:count])
    return draw(st.integers(1, 600)), Interleaved(draw(st.integers(1, 40)), MEMORIES[:count])


@given(rules(), st.data())
def test_shares_of_many_ranges_are_those_of_each_range_cut_by_hand(
    rule: tuple[int, Places], data: st.DataObject
) -> None:
    size, places = rule
    edges = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=12)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    by_hand: Counter[Memory] = Counter()
    for begin, end in pairs:
        for memory, count in places.stretches(begin, end - begin):
            by_hand[memory] += count

    begins, ends = (np.array(side) for side in zip(*pairs, strict=True))
    numbers, sizes = places.pieces(begins, ends)

    found: Counter[Memory] = Counter()
    for number, count in zip(numbers.tolist(), sizes.tolist(), strict=True):
        found[places.memories[number]] += count
    assert found == by_hand


@given(st.integers(1, 5_000), st.integers(1, 90), st.integers(1, 7))
def test_what_a_memory_has_in_all_is_the_sum_of_its_granules(
    size: int, granule: int, count: int
) -> None:
    memories = [Memory("hbm", (0, 0, channel), 1 << 30, None) for channel in range(count)]
    by_hand: Counter[Memory] = Counter()
    for memory, there in Interleaved(granule, memories).stretches(0, size):
        by_hand[memory] += there

    sizes = interleaved_sizes(size, granule, count)

    assert sizes == [by_hand[memory] for memory in memories]


def test_rows_that_are_as_long_as_a_round_do_not_begin_in_the_same_memory() -> None:
    places = Interleaved(64, MEMORIES)
    rows = 64 * len(MEMORIES) * np.arange(10)

    numbers, _ = places.pieces(rows, rows + 64)

    assert Counter(numbers.tolist()) == dict.fromkeys(range(5), 2)


def test_interleaved_memory_is_one_run_of_bytes_still() -> None:
    engine = GraphEngine("default")
    places = tuple((size, 0, pe) for pe, size in enumerate(interleaved_sizes(1000, 256, 3)))
    command = MmuMap(sip=0, address=4096, size=1000, places=places, interleave=256)
    engine.wait(engine.submit(command))
    values = np.arange(1000, dtype=np.uint8)
    engine.wait(engine.submit(MemoryWrite(sip=0, address=4096, data=values)))

    read = engine.wait(engine.submit(MemoryRead(sip=0, address=4096 + 200, size=400)))

    np.testing.assert_array_equal(read, values[200:600])
    channel = engine.machine.sip(0).cube(0).hbm
    assert [engine.space(0).used(channel(pe)) for pe in range(3)] == [256, 256 + 232, 256]


def test_what_an_access_leaves_out_is_not_shared() -> None:
    engine = GraphEngine("default")
    cube = engine.machine.sip(0).cube(0)
    mapping = engine.space(0).map_places(
        4096, [(1024, cube.hbm(0)), (1024, cube.hbm(1))], interleave=256
    )
    every_other = Footprint(100, 512 * np.arange(4))

    shares = mapping.shares(*every_other.bursts(4096, 64))

    assert shares == [(cube.hbm(0), 256), (cube.hbm(1), 256)]


def bytes_of_channels(size: int, channels: int, times: int = 1) -> tuple[int, list[int]]:
    """Picoseconds that DMAs over some channels take, one after the other, and what each carried."""
    machine = HardwareMachine(Simulator(), load_topology("default"))
    cube = machine.sip(0).cube(0)
    shares = [(cube.hbm(channel), size // channels) for channel in range(channels)]
    for _ in range(times):
        machine.simulator.run(cube.pe(0).start_dmas(shares, is_load=True))
    carried = [link.bytes_carried for link in machine.links if "hbm" in link.name]
    return machine.simulator.now, carried


def test_a_dma_over_several_channels_takes_all_that_the_port_of_its_pe_gives() -> None:
    latency_ns = 20 + 100 + 5 + 2

    one, _ = bytes_of_channels(1 << 18, 1)
    four, carried = bytes_of_channels(1 << 18, 4)

    assert one == pytest.approx((latency_ns + (1 << 18) / 50) * 1_000, rel=0.01)
    # Four channels of 50 GB/s give more than the 128 GB/s that the PE's engine takes.
    assert four == pytest.approx((latency_ns + (1 << 18) / 128) * 1_000, rel=0.05)
    assert carried == [1 << 16] * 4


def test_a_dma_has_no_more_flows_than_chunks_and_the_same_bytes() -> None:
    _, carried = bytes_of_channels(8 * 1024, 8)

    assert sorted(carried) == [0] * 6 + [4096] * 2


def test_channels_that_are_drawn_together_stand_for_each_other_in_turn() -> None:
    _, carried = bytes_of_channels(8 * 1024, 8, times=16)

    assert carried == [4 * 4096] * 8


def test_granules_that_are_no_whole_bursts_are_refused() -> None:
    text = load_topology("default").spec
    text["cube"]["hbm"] |= {"interleave_bytes": 100}

    with pytest.raises(ConfigError, match="interleave_bytes is 100, not a multiple of burst_bytes"):
        parse_topology(yaml.safe_dump(text), "it")
