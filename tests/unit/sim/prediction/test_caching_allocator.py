"""The allocator of torch for CUDA; expected figures follow from c10/cuda/CUDACachingAllocator."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.simranks.prediction.caching_allocator import (
    AllocatorSettings,
    CachedBlock,
    CachingAllocator,
    NoMemory,
    replay,
)

KIB, MIB = 1 << 10, 1 << 20
EXPANDABLE = AllocatorSettings(expandable=True)


def figures(allocator: CachingAllocator) -> tuple[int, int, int]:
    """Bytes that are allocated, active and reserved."""
    return allocator.allocated.current, allocator.active.current, allocator.reserved.current


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # One MiB is left over: too little to be cut off, so the tensor has it all.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_request_takes_a_segment_of_its_class(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()

    allocator.allocate(size)

    assert figures(allocator) == (allocated, allocated, reserved)
    assert allocator.requested.current == size


def test_smallest_block_that_is_large_enough_serves_a_request() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    address = small.address
    allocator.free(large)
    allocator.free(small)

    assert allocator.allocate(30 * MIB).address == address
    assert allocator.reserved.current == 96 * MIB


def test_other_streams_are_not_served_by_a_free_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(32 * MIB, stream=0))

    allocator.allocate(32 * MIB, stream=7)

    assert allocator.reserved.current == 64 * MIB


def test_freed_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for place in (1, 3, 0, 2):
        allocator.free(blocks[place])

    allocator.allocate(20 * MIB)

    assert figures(allocator) == (20 * MIB, 20 * MIB, 20 * MIB)


def test_fragments_make_a_large_request_take_another_segment() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for place in (0, 2):
        allocator.free(blocks[place])

    allocator.allocate(9 * MIB)

    assert figures(allocator) == (19 * MIB, 19 * MIB, 40 * MIB)


def test_block_is_active_until_the_streams_that_used_it_have_passed() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(32 * MIB)
    allocator.use(block, 7)
    allocator.free(block, {7: 100}, now=50)
    assert figures(allocator) == (0, 32 * MIB, 32 * MIB)

    early = allocator.allocate(32 * MIB, now=99)
    late = allocator.allocate(32 * MIB, now=100)

    assert allocator.reserved.current == 64 * MIB
    assert early.address != late.address


def test_full_device_takes_the_cache_back_before_it_refuses() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    held, cached = allocator.allocate(40 * MIB), allocator.allocate(50 * MIB)
    allocator.use(cached, 7)
    allocator.free(cached, {7: 1000})

    allocator.allocate(60 * MIB)

    assert figures(allocator) == (100 * MIB, 100 * MIB, 100 * MIB)
    assert allocator.retries == 1
    with pytest.raises(NoMemory) as refused:
        allocator.allocate(1)
    assert refused.value.size == 512
    allocator.free(held)
    assert allocator.allocate(40 * MIB).is_allocated


def test_full_device_cannot_take_back_a_segment_of_which_a_part_is_in_use() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    first = allocator.allocate(90 * MIB)
    allocator.free(first)
    allocator.allocate(2 * MIB)

    with pytest.raises(NoMemory):
        allocator.allocate(95 * MIB)

    assert figures(allocator) == (2 * MIB, 2 * MIB, 90 * MIB)


def test_growing_request_needs_less_in_an_expandable_segment() -> None:
    plain, expandable = CachingAllocator(), CachingAllocator(EXPANDABLE)
    for allocator in (plain, expandable):
        for size in (30 * MIB, 50 * MIB, 70 * MIB):
            allocator.free(allocator.allocate(size))

    assert plain.reserved.current == (30 + 50 + 70) * MIB
    assert expandable.reserved.current == 80 * MIB  # pages of 20 MiB


def test_expandable_segment_grows_behind_its_last_free_block() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first, second = allocator.allocate(25 * MIB), allocator.allocate(10 * MIB)
    end = second.address + second.size
    assert allocator.reserved.current == 40 * MIB

    third = allocator.allocate(30 * MIB)  # 5 MiB are left, and two pages follow

    assert third.address == end
    assert figures(allocator) == (65 * MIB, 65 * MIB, 80 * MIB)
    assert first.segment == third.segment


def test_empty_cache_returns_whole_pages_of_expandable_segments() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    allocator.free(blocks[1])

    allocator.empty_cache()

    # Of 30 to 60 MiB, the page from 40 to 60 is empty.
    assert figures(allocator) == (60 * MIB, 60 * MIB, 80 * MIB)
    assert allocator.allocate(30 * MIB).address == blocks[0].address + 30 * MIB
    assert allocator.reserved.current == 100 * MIB


def test_sizes_are_rounded_to_parts_of_a_power_of_two_if_that_is_set() -> None:
    allocator = CachingAllocator(AllocatorSettings(roundup_divisions=4))

    assert allocator.allocate(1200 * KIB).size == 1280 * KIB
    assert allocator.allocate(2 * MIB).size == 2 * MIB
    assert allocator.allocate(100).size == 512


def test_blocks_above_the_limit_of_splits_stay_whole() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=64 * MIB))
    allocator.free(allocator.allocate(100 * MIB))

    allocator.allocate(30 * MIB)
    assert allocator.reserved.current == 130 * MIB  # it would have wasted 70 MiB
    assert allocator.allocate(90 * MIB).size == 100 * MIB


def recorded(settings: AllocatorSettings) -> CachingAllocator:
    """A few steps of a small training: activations that grow, and a bucket of another stream."""
    allocator = CachingAllocator(settings)
    allocator.trace = []
    weights = [allocator.allocate(size) for size in (48 * MIB, 3 * MIB, 700)]
    for step in range(3):
        now = 1000 * step
        activations = [allocator.allocate((8 + step) * MIB, now=now) for _ in range(6)]
        bucket = allocator.allocate(25 * MIB, stream=1, now=now)
        allocator.use(bucket, 0)
        for block in reversed(activations):
            allocator.free(block, now=now)
        allocator.free(bucket, {0: now + 900}, now=now)
    assert all(block.is_allocated for block in weights)
    return allocator


@pytest.mark.parametrize("config", [AllocatorSettings(), EXPANDABLE])
def test_recorded_requests_reserve_the_same_again(config: AllocatorSettings) -> None:
    allocator = recorded(config)
    trace: list[dict[str, Any]] = allocator.snapshot()["device_traces"][0]

    again = replay(trace, config)

    assert again.reserved.peak == allocator.reserved.peak
    assert again.allocated.peak == allocator.allocated.peak


def test_steps_with_growing_activations_reserve_what_torchs_rules_say() -> None:
    """By hand: the 3 MiB of weights leave 17 of their 20 MiB.

    Two activations of 8 MiB fit there and two into each further segment of 20 MiB: 6 need two more.
    Of 9 MiB one fits there, and two into each segment: one more. From 10 MiB on a segment is as
    large as the request, if no free block is: there are three of 20 MiB for two each, which serve
    six.
    """
    assert recorded(AllocatorSettings()).reserved.current == (
        48 * MIB + 2 * MIB + (1 + 2 + 1) * 20 * MIB + 26 * MIB
    )


def test_steps_in_expandable_segments_reserve_what_torchs_rules_say() -> None:
    """By hand: 48 + 3 + 6 x 10 MiB are 6 pages of 20 MiB; the bucket has two pages of its own."""
    assert recorded(EXPANDABLE).reserved.current == (6 * 20 + 2 + 2 * 20) * MIB


WRITTEN_BY_HAND = """
segment_alloc   A       48    0
alloc           A       48    0  weights
segment_alloc   B       20    0
alloc           B       3     0  17 MiB are left over
alloc           B+3     12    0  of these 17, and 2 are left
segment_alloc   C       12    0
alloc           C       12    0
free_requested  B+3     12    0
free_completed  B+3     12    0  it joins the 2: 17 MiB are free again
free_requested  C       12    0
free_completed  C       12    0
alloc           C       11.5  0  half a MiB is too little to be cut off
segment_alloc   D       20    1
alloc           D       4     1
free_requested  D       4     1
free_completed  D       4     1
segment_free    D       20    1  an emptied cache; B has a block in use
segment_alloc   E       30    0
alloc           E       30    0
free_requested  E       30    0
free_completed  E       30    0
alloc           B+3     16    0  the smallest that fits, of 17 MiB, whole
alloc           E       20    0
alloc           E+20    9     0  of 10 MiB, whole
segment_alloc   F       20    0
alloc           F       9     0
"""
IN_PAGES_BY_HAND = """
segment_map     A       60    0  three pages of 20 MiB
alloc           A       48    0
alloc           A+48    3     0
segment_map     A+60    40    0  9 MiB are left, 21 more are two pages
alloc           A+51    30    0
free_requested  A+48    3     0
free_completed  A+48    3     0
segment_map     A+100   20    0
alloc           A+81    25    0
free_requested  A+51    30    0
free_completed  A+51    30    0  with the 3 MiB before it, 33 are free
alloc           A+48    33    0
segment_map     B       40    1
alloc           B       25    1
free_requested  B       25    1
free_completed  B       25    1
segment_unmap   B       40    1  an emptied cache; of A no whole page is free
segment_map     B       40    1
alloc           B       25    1
segment_map     A+120   60    0
alloc           A+106   60    0
"""


def trace_of(written: str) -> list[dict[str, Any]]:
    """The trace of a snapshot: action, place, MiB, stream, and a note."""
    trace = []
    for line in written.strip().splitlines():
        action, place, size, stream, *_ = line.split()
        segment, _, offset = place.partition("+")
        address = (ord(segment) << 40) + int(offset or 0) * MIB
        entry = {"action": action, "addr": address, "size": int(float(size) * MIB)}
        trace.append({**entry, "stream": int(stream)})
    return trace


@pytest.mark.parametrize(
    ("written", "config", "reserved"),
    [(WRITTEN_BY_HAND, AllocatorSettings(), 130), (IN_PAGES_BY_HAND, EXPANDABLE, 220)],
)
def test_snapshot_that_is_written_by_hand_from_torchs_source_reserves_the_same(
    written: str, config: AllocatorSettings, reserved: int
) -> None:
    trace = trace_of(written)
    taken = [each["size"] for each in trace if each["action"] in {"segment_alloc", "segment_map"}]
    given = [each["size"] for each in trace if each["action"] in {"segment_free", "segment_unmap"}]

    again = replay(trace, config)

    assert again.reserved.current == sum(taken) - sum(given) == reserved * MIB
    assert again.reserved.peak == reserved * MIB


@pytest.mark.torch
@pytest.mark.parametrize("config", [AllocatorSettings(), EXPANDABLE])
def test_snapshot_is_read_by_torchs_own_visualizer(config: AllocatorSettings) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    allocator = recorded(config)
    snapshot = allocator.snapshot()

    told = viz.segsum(snapshot)  # it raises where the sizes do not add up

    assert f"total_reserved: {viz.Bytes(allocator.reserved.current)}" in told
    assert "total_allocated: 51.0MiB" in told  # the weights; the bucket's end is not passed yet
    assert "[0:48.0MiB]" in viz.trace(snapshot)
    assert "<html>" in viz.trace_plot(snapshot)


requests = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 60 * MIB), st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 40), st.integers(0, 2)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(requests, st.booleans(), st.sampled_from([None, 300 * MIB]))
@settings(max_examples=150, deadline=None)
def test_blocks_fill_their_segments_without_gaps_or_overlaps(
    asked: list[tuple[str, int, int]], is_expandable: bool, limit: int | None
) -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable=is_expandable), limit=limit)
    blocks: list[CachedBlock] = []
    for now, (what, number, stream) in enumerate(asked):
        if what == "take":
            try:
                blocks.append(allocator.allocate(number, stream, now))
            except NoMemory:
                assert limit is not None
        elif what == "free" and blocks:
            block = blocks.pop(number % len(blocks))
            allocator.use(block, stream)
            allocator.free(block, {stream: now + 3}, now)
        elif what == "empty":
            allocator.empty_cache()
        check(allocator, blocks)
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert figures(allocator) == (0, 0, 0)


def check(allocator: CachingAllocator, blocks: list[CachedBlock]) -> None:
    parts = allocator.snapshot()["segments"]
    for segment in parts:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] >= at
            at = block["address"] + block["size"]
        states = [block["state"] for block in segment["blocks"]]
        if not segment["is_expandable"]:
            assert ("inactive", "inactive") not in list(pairwise(states))
            assert at == segment["address"] + segment["total_size"]
    assert sum(segment["total_size"] for segment in parts) == allocator.reserved.current
    assert sum(segment["active_size"] for segment in parts) == allocator.active.current
    assert sum(block.size for block in blocks) == allocator.allocated.current
    assert allocator.limit is None or allocator.reserved.current <= allocator.limit
