"""Which tasks must keep their order, and which bytes are free: compared with simple models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.core.tree.graph_layout import RecordedTask, lay_out
from rankwise.core.tree.hazards import Hazards
from rankwise.core.tree.heap import ALIGNMENT, Heap
from rankwise.core.tree.state import GraphTask
from rankwise.core.tree.vocabulary import HOST, Access, ChildPool

BYTES = 10


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    start = draw(st.integers(0, BYTES - 1))
    end = draw(st.integers(start + 1, BYTES))
    reads, writes = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    return Access(HOST, start, end, reads, writes)


@given(st.lists(st.lists(accesses(), min_size=1, max_size=3), max_size=12))
def test_producers_are_those_that_a_map_of_single_bytes_finds(
    submitted: list[list[Access]],
) -> None:
    hazards = Hazards()
    writers: dict[int, GraphTask] = {}
    readers: dict[int, list[GraphTask]] = {place: [] for place in range(BYTES)}

    for number, touched in enumerate(submitted):
        task = GraphTask(number, ChildPool.SUB, "", None)
        expected: dict[GraphTask, bool] = {}
        for access in touched:
            for place in range(access.start, access.end):
                if place in writers:
                    known = expected.get(writers[place], False)
                    expected[writers[place]] = known or access.reads
                for reader in readers[place] if access.writes else ():
                    expected.setdefault(reader, False)
        for writes in (False, True):
            for access in touched:
                for place in range(access.start, access.end) if access.writes is writes else ():
                    if writes:
                        writers[place], readers[place] = task, []
                    else:
                        readers[place].append(task)

        assert hazards.enter(task, touched) == expected


@given(st.lists(st.integers(-8, 8).filter(bool), max_size=60))
def test_a_heap_never_gives_a_byte_twice_and_gets_whole_again(wishes: list[int]) -> None:
    heap = Heap(ALIGNMENT, 16 * ALIGNMENT)
    taken: list[tuple[int, int]] = []

    for wish in wishes:
        if wish < 0 and taken:
            heap.give_back(*taken.pop(-wish % len(taken)))
            continue
        size = heap.rounded(abs(wish) * ALIGNMENT)
        address = heap.take(size)
        if address is not None:
            assert all(
                address + size <= other or other + length <= address for other, length in taken
            )
            taken.append((address, size))
    for address, size in taken:
        heap.give_back(address, size)

    assert heap.take(16 * ALIGNMENT) == ALIGNMENT


@given(st.lists(accesses(), max_size=12), st.integers(1, 3))
def test_a_layout_keeps_tasks_that_depend_on_each_other_at_one_child_in_order(
    touched: list[Access], child_count: int
) -> None:
    tasks = [RecordedTask(ChildPool.SUB, None, (access,), "") for access in touched]

    layout = lay_out(tasks, (ChildPool.SUB,) * child_count)

    assert sorted(place for places in layout.values() for place in places) == list(
        range(len(tasks))
    )
    assert all(places == sorted(places) for places in layout.values())
    hazards, child_of = Hazards(), {p: c for c, places in layout.items() for p in places}
    for place, recorded in enumerate(tasks):
        for producer in hazards.enter(GraphTask(place, ChildPool.SUB, "", None), recorded.accesses):
            assert child_of[producer.number] == child_of[place]


def test_a_recorded_graph_across_bound_children_is_refused() -> None:
    access = (Access(HOST, 0, 8, reads=True, writes=True),)
    tasks = [RecordedTask(ChildPool.SUB, child, access, f"task {child}") for child in (0, 1)]

    with pytest.raises(ConfigError, match="different children: task 0, task 1"):
        lay_out(tasks, (ChildPool.SUB, ChildPool.SUB))
