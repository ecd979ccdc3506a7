"""Which memory of a process is new, by the rules of the C library."""

from rankwise.simranks.prediction.heap import Heap

MIB = 1 << 20


def test_memory_that_was_freed_is_not_new() -> None:
    heap = Heap()
    heap.take(8 * MIB)
    heap.give_back(8 * MIB)

    assert heap.take(8 * MIB) == 0
    assert heap.take(4 * MIB) == 4 * MIB


def test_a_heap_gives_back_more_than_twice_the_largest_block() -> None:
    heap = Heap()
    for _ in range(4):
        heap.take(8 * MIB)
    for _ in range(3):
        heap.give_back(8 * MIB)

    assert heap.take(24 * MIB) == 24 * MIB


def test_a_heap_keeps_up_to_twice_the_largest_block() -> None:
    heap = Heap()
    for _ in range(3):
        heap.take(8 * MIB)
    for _ in range(2):
        heap.give_back(8 * MIB)

    assert heap.take(16 * MIB) == 0


def test_a_block_of_32_mib_is_new_each_time() -> None:
    heap = Heap()
    heap.take(32 * MIB)
    heap.give_back(32 * MIB)

    assert heap.take(32 * MIB) == 32 * MIB
