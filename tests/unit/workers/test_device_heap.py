from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.workers.errors import BadPointer, DeviceMemoryExhausted
from rankwise.workers.platforms.heap import CHIPS_MAX, DeviceHeap
from rankwise.workers.platforms.port import Leak


def test_a_pointer_tells_which_chip_it_is_of() -> None:
    pointer = DeviceHeap(3).reserve(64, "x")

    assert pointer >> 48 == 4
    with pytest.raises(BadPointer, match=r"is memory of chip 3, and this is chip 0 \(run the task"):
        DeviceHeap(0).find(pointer, 8, "argument 0")
    with pytest.raises(BadPointer, match="is memory of chip 3, and this is chip 5"):
        DeviceHeap(5).release(pointer)


def test_what_was_freed_is_known_as_such() -> None:
    heap = DeviceHeap(0)
    pointer = heap.reserve(64, "x")
    heap.release(pointer)

    with pytest.raises(BadPointer, match="chip 0 that was freed before"):
        heap.release(pointer)
    with pytest.raises(BadPointer, match="chip 0 that was freed before"):
        heap.find(pointer + 8, 8, "argument 0")


def test_a_pointer_into_a_block_is_good_for_use_and_not_for_free() -> None:
    heap = DeviceHeap(0)
    pointer = heap.reserve(64, "x")

    assert heap.find(pointer + 56, 8, "argument 0").address == pointer
    with pytest.raises(BadPointer, match=rf"is 56 bytes into 'x' \(free takes .*{pointer:#x}"):
        heap.release(pointer + 56)


def test_running_over_the_end_of_a_block_is_an_error() -> None:
    heap = DeviceHeap(0)
    pointer = heap.reserve(64, "x")
    heap.reserve(64, "y")

    with pytest.raises(BadPointer, match=r"65 bytes at .* run over the end of 'x' of chip 0"):
        heap.find(pointer, 65, "argument 0")


@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        (0, "is a null pointer, expected one of chip 1"),
        (4096, r"is not memory of chip 1 \(a tensor in memory of the host"),
        ((2 << 48) + (1 << 40), "is memory that chip 1 has never given out"),
        (2**64 - 1, "is not memory of chip 1"),
    ],
)
def test_a_number_that_is_no_pointer_is_told_apart(pointer: int, message: str) -> None:
    with pytest.raises(BadPointer, match=message):
        DeviceHeap(1).find(pointer, 8, "argument 0")


def test_a_full_chip_says_what_is_left_and_who_holds_the_most() -> None:
    heap = DeviceHeap(2, capacity=1 << 20)
    heap.reserve(1 << 19, "weights")
    heap.reserve(1 << 10, "small")

    with pytest.raises(
        DeviceMemoryExhausted,
        match=r"chip 2 has no room for 1 MiB, 511 KiB left; the largest of its 2 blocks is "
        r"'weights' with 512 KiB",
    ):
        heap.reserve(1 << 20, "x")
    assert heap.used == (1 << 19) + (1 << 10)


@pytest.mark.parametrize("size", [0, -1])
def test_memory_of_no_size_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} bytes of chip 0"):
        DeviceHeap(0).reserve(size, "x")


@pytest.mark.parametrize("chip", [-1, CHIPS_MAX + 1])
def test_a_number_that_no_chip_has_is_refused(chip: int) -> None:
    with pytest.raises(ConfigError, match=f"device_id is {chip}"):
        DeviceHeap(chip)


def test_attached_memory_is_used_but_neither_freed_nor_counted() -> None:
    heap = DeviceHeap(0, capacity=64)
    heap.attach(0x7F00_0000_0000, 4096, "the window of rank 1")

    assert not heap.find(0x7F00_0000_0100, 16, "argument 0").is_own
    assert heap.used == 0
    assert heap.leaks() == ()
    with pytest.raises(BadPointer, match="is in 'the window of rank 1', which malloc has not"):
        heap.release(0x7F00_0000_0000)
    heap.detach(0x7F00_0000_0000)
    heap.detach(0x7F00_0000_0000)
    with pytest.raises(BadPointer, match="not memory of chip 0"):
        heap.find(0x7F00_0000_0100, 16, "argument 0")
    with pytest.raises(BadPointer, match="no address of the host"):
        heap.attach(1 << 50, 16, "x")


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=30), st.data())
def test_blocks_never_overlap_and_the_account_is_right(
    sizes: list[int], data: st.DataObject
) -> None:
    heap = DeviceHeap(0)
    held: dict[int, int] = {}
    for size in sizes:
        held[heap.reserve(size, f"{size}")] = size
        if data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(held)))
            heap.release(victim)
            del held[victim]

    places = sorted(held.items())

    assert all(a + size < b for (a, size), (b, _) in pairwise(places))
    assert heap.used == sum(held.values())
    assert heap.leaks() == tuple(Leak(start, size, f"{size}") for start, size in places)
    for start, size in places:
        assert heap.find(start + size - 1, 1, "x").address == start
