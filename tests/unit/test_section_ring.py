"""Sections of a rank in memory: what its agent reads of them."""

from collections.abc import Iterator

import pytest

from rankwise.drivers.real.section_ring import (
    ENTRIES,
    OPEN_MAX,
    OpenSection,
    SectionReader,
    SectionWriter,
    SeenSection,
)
from rankwise.drivers.real.segments import Segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(2) as made:
        yield made


def test_each_section_is_read_once_when_it_has_ended(segment: Segment) -> None:
    writer, reader = SectionWriter(segment, 1), SectionReader(segment, 1)
    writer.begin("step", 10)
    writer.begin("load", 11)
    writer.end("load", 11, 15)

    assert reader.read() == [SeenSection("load", 1, 11, 15)]
    writer.end("step", 10, 20)
    assert reader.read() == [SeenSection("step", 0, 10, 20)]
    assert reader.read() == []
    assert SectionReader(segment, 0).read(is_last=True) == []


def test_the_last_look_shows_sections_that_never_ended(segment: Segment) -> None:
    writer, reader = SectionWriter(segment, 0), SectionReader(segment, 0)
    writer.begin("epoch", 1)
    writer.begin("step", 2)

    assert reader.read() == []
    assert reader.read(is_last=True) == [
        SeenSection("epoch", 0, 1, 0),
        SeenSection("step", 1, 2, 0),
    ]


def test_open_section_is_read_by_its_level_with_its_longest_run(segment: Segment) -> None:
    writer, reader = SectionWriter(segment, 0), SectionReader(segment, 0)
    writer.begin("epoch", 1)
    writer.begin("step", 2, longest=7)

    assert reader.open_at(0) == OpenSection("epoch", 0)
    assert reader.open_at(1) == OpenSection("step", 7)
    assert reader.open_at(2) is None


def test_of_many_sections_the_latest_are_read_and_deep_ones_do_no_harm(segment: Segment) -> None:
    writer, reader = SectionWriter(segment, 0), SectionReader(segment, 0)
    for number in range(1000):
        writer.begin(f"s{number}", number)
        writer.end(f"s{number}", number, number + 1)

    seen = reader.read()
    assert seen[-1] == SeenSection("s999", 0, 999, 1000)
    assert ENTRIES // 2 < len(seen) < ENTRIES
    for depth in range(3 * OPEN_MAX):
        writer.begin("é" * 100, depth)
    for depth in reversed(range(3 * OPEN_MAX)):
        writer.end("é" * 100, depth, 99)
    assert [each.depth for each in reader.read()] == list(reversed(range(3 * OPEN_MAX)))
