"""Planning a domain: where buffers lie, and what is refused before any memory exists."""

import math
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.windows import RANKS_MAX, WindowRegion
from rankwise.workers.domains import create_domain, place_domain, plan_domain


def test_buffers_lie_one_after_the_other_at_cache_lines() -> None:
    spec = plan_domain("tp", [0, 1], {"a": (3, "u1"), "b": ((2, 5), "f8"), "c": ((), "i4")})

    assert [(b.name, b.offset, b.shape, b.nbytes) for b in spec.buffers] == [
        ("a", 0, (3,), 3),
        ("b", 64, (2, 5), 80),
        ("c", 192, (), 4),
    ]
    assert spec.window_bytes == 196
    assert str(spec.buffers[1]) == "buffer 'b' of (2, 5) float64"


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 7), max_size=3), st.sampled_from(["u1", "f4", ">i8", "S3"])
        ),
        max_size=6,
    )
)
def test_buffers_never_overlap_and_always_fit(described: list[tuple[list[int], str]]) -> None:
    buffers = {f"b{index}": (tuple(shape), dtype) for index, (shape, dtype) in enumerate(described)}

    spec = plan_domain("tp", [0], buffers)

    ends = [buffer.offset + buffer.nbytes for buffer in spec.buffers]
    starts = [buffer.offset for buffer in spec.buffers]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert all(start % 64 == 0 for start in starts)
    assert max(ends, default=0) <= spec.window_bytes
    for buffer, (shape, dtype) in zip(spec.buffers, described, strict=True):
        assert buffer.nbytes == math.prod(shape) * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("", [0]), {}, "a domain's name is '', expected a text"),
        (("tp", []), {}, r"ranks are \[\], expected at least one whole number"),
        (("tp", [1, 1]), {}, r"ranks are \[1, 1\], expected .* none twice"),
        (("tp", [-1]), {}, "none negative"),
        (("tp", ["a"]), {}, r"ranks are \['a'\]"),
        (("tp", [0], {"x": "f4"}), {}, r"described by 'f4', .*for example \(\(1024,\), \"f4\"\)"),
        (("tp", [0], {"x": (2, "f4", 1)}), {}, "expected a shape and a dtype"),
        (("tp", [0], {"x": (2, "float33")}), {}, "expected a shape and a dtype"),
        (("tp", [0], {"x": ((2, -1), "f4")}), {}, r"has shape \(2, -1\), expected no negative"),
        (("tp", [0], {"x": (2, object)}), {}, "has dtype object, expected numbers"),
        (("tp", [0], {"x": (2, [("a", "f4")])}), {}, "give each field its own buffer"),
        (("tp", [0], {"": (2, "f4")}), {}, "buffer '': expected a text"),
        (
            ("tp", [0], {"x": (1024, "f4")}),
            {"window_bytes": 4000},
            r"buffer 'x' of \(1024,\) float32 ends at byte 4096 of its window, which has 3.906 KiB",
        ),
        (("tp", [0]), {"signals": "go"}, "signals are 'go', expected a list of names"),
        (("tp", [0]), {"signals": ["go", "go"]}, "expected each once"),
        (("tp", [0]), {"signals": ["go", 1]}, "expected a list of names"),
        (("tp", [0]), {"timeout": 0}, "domain 'tp': timeout is 0, expected a number of seconds"),
        (("tp", [0]), {"window_bytes": 1 << 60}, "window_bytes is 1152921504606846976, expected"),
        (("tp", range(RANKS_MAX + 1)), {}, "rank_count is 4097, expected between 1 and 4096"),
        (("tp", [0, 1]), {"window_bytes": 1 << 46}, "2 windows of .* bytes .* need .* at most"),
        (("tp", [0]), {"chunk_bytes": 0}, "chunk_bytes is 0, expected between 1"),
    ],
)
def test_what_cannot_be_planned_is_named(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_domain(*arguments, **options)


def test_many_domains_are_placed_in_one_memory_and_found_there() -> None:
    left = plan_domain("left", [0, 1], {"x": (10, "f4")}, signals=["go"])
    right = plan_domain("right", [2, 3, 5], {"y": (20, "f8")}).at(left.region_bytes)
    with mmap.mmap(-1, left.region_bytes + right.region_bytes) as memory:
        memory[:] = b"\xff" * len(memory)  # what was there before does not matter
        for spec in (left, right):
            place_domain(memory, spec)

        found = [WindowRegion.find(memory, spec.offset) for spec in (left, right)]

        assert [region.name for region in found] == ["left", "right"]
        assert [region.rank_count for region in found] == [2, 3]
        assert found[0].window_offset(1) + found[0].window_bytes <= right.offset


def test_a_domain_that_has_no_room_is_refused() -> None:
    spec = plan_domain("tp", [0, 1], window_bytes=1 << 20)

    with (
        mmap.mmap(-1, 1 << 20) as memory,
        pytest.raises(
            ConfigError, match=r"the 2 windows of 'tp' need .* the memory ends at 1048576"
        ),
    ):
        place_domain(memory, spec)


def test_memory_of_its_own_has_the_planned_size() -> None:
    spec = plan_domain("tp", [0, 1, 2], {"x": (5, "f4")}, signals=["a", "b"])

    with create_domain(spec) as region:
        assert region.layout.total_bytes == spec.region_bytes
        assert region.layout.signal_count == 2
