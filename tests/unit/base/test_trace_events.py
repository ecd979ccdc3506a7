"""Timelines: figures that viewers read as whole nanoseconds, and lanes without overlaps."""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankwise.base.trace_events import lanes_of, microseconds, slice_event

instants = st.integers(0, 10**15) | st.integers(0, 10**12).map(lambda number: 500 * number)
intervals = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda each: (each[0], sum(each))),
    max_size=40,
).map(sorted)


def cut_off(figure: float) -> int:
    return int(figure * 1_000)


def rounded_up_at_halves(figure: float) -> int:
    return math.floor(figure * 1_000 + 0.5)


def rounded_to_even(figure: float) -> int:
    return round(figure * 1_000)


@given(instants)
@example(1_001_000)  # 1.001 us times a thousand is a little less than 1,001
@example(2_500)  # a half, which rounding to even would take down
def test_an_instant_is_read_as_the_exact_one_would_be(picoseconds: int) -> None:
    figure = microseconds(picoseconds)

    assert round(figure * 1_000_000) == picoseconds
    assert cut_off(figure) == picoseconds // 1_000
    assert rounded_up_at_halves(figure) == (picoseconds + 500) // 1_000
    assert rounded_to_even(figure) == (picoseconds + 500) // 1_000


@pytest.mark.parametrize("read", [cut_off, rounded_up_at_halves, rounded_to_even])
@given(start=instants, duration=st.integers(0, 10_000) | st.integers(0, 10**12))
@example(start=500, duration=500)  # rounded by themselves they are 1 and 1, their sum is 1
@example(start=600, duration=1_600)
@example(start=2_500, duration=1_500)
def test_a_slice_never_seems_to_end_after_the_next_begins(
    read: Callable[[float], int], start: int, duration: int
) -> None:
    event = slice_event("load", "dma", 1, 2, start, start + duration, {})

    assert read(event["ts"]) + read(event["dur"]) <= read(microseconds(start + duration))
    assert 0 <= duration - round(event["dur"] * 1_000_000) <= 501
    assert read(event["dur"]) >= (1 if duration >= 1_000 else 0)


@given(intervals)
def test_what_is_in_one_lane_does_not_overlap(given_intervals: list[tuple[int, int]]) -> None:
    lanes = lanes_of(given_intervals)

    ends: dict[int, int] = {}
    for (start, end), lane in zip(given_intervals, lanes, strict=True):
        assert start >= ends.get(lane, 0)
        ends[lane] = max(end, start + 1)


@given(intervals)
def test_no_more_lanes_are_used_than_things_happen_at_once(
    given_intervals: list[tuple[int, int]],
) -> None:
    lanes = lanes_of(given_intervals)

    at_once = max(
        (
            sum(start <= instant < max(end, start + 1) for start, end in given_intervals)
            for instant in range(75)
        ),
        default=0,
    )
    assert len(set(lanes)) == at_once
