"""Which memory of a process is new, by the rules of the C library."""

from rankwise.simranks.prediction.process_heap import ProcessHeap

MIB = 1 << 20
HEADER = 64
"""What a block has beside its bytes."""


def heap_in_use(largest: int) -> ProcessHeap:
    """A heap whose program has freed a block: smaller ones are not mapped on their own."""
    heap = ProcessHeap()
    heap.take("first", largest)
    heap.give_back("first", largest)
    return heap


def test_memory_that_was_freed_is_not_new() -> None:
    heap = heap_in_use(8 * MIB)
    heap.take("a", 8 * MIB)
    heap.give_back("a", 8 * MIB)

    assert heap.take("b", 8 * MIB) == 0
    assert heap.take("c", 4 * MIB) == 4 * MIB + HEADER


def test_blocks_are_mapped_on_their_own_until_one_of_their_size_was_freed() -> None:
    heap = ProcessHeap()

    assert heap.take("a", 8 * MIB) == 8 * MIB
    heap.give_back("a", 8 * MIB)
    assert heap.take("b", 8 * MIB) == 8 * MIB + HEADER
    heap.give_back("b", 8 * MIB)
    assert heap.take("c", 8 * MIB) == 0


def test_a_heap_gives_back_more_than_twice_the_largest_block() -> None:
    heap = heap_in_use(8 * MIB)
    for name in "abcd":
        heap.take(name, 8 * MIB)
    for name in "dcb":
        heap.give_back(name, 8 * MIB)

    assert heap.take("e", 8 * MIB) == 0
    assert heap.take("f", 8 * MIB) > 7 * MIB


def test_a_heap_keeps_up_to_twice_the_largest_block() -> None:
    heap = heap_in_use(8 * MIB)
    for name in "abc":
        heap.take(name, 8 * MIB - HEADER)
    for name in "cb":
        heap.give_back(name, 8 * MIB - HEADER)

    assert heap.take("d", 8 * MIB - HEADER) == 0
    assert heap.take("e", 8 * MIB - HEADER) == 0


def test_a_block_that_lives_longer_keeps_the_heap_from_shrinking() -> None:
    heap = heap_in_use(8 * MIB)
    for name in "abcde":
        heap.take(name, 8 * MIB)
    for name in "dcba":
        heap.give_back(name, 8 * MIB)

    assert sum(heap.take(name, 8 * MIB) for name in "wxyz") == 0


def test_free_parts_that_touch_hold_a_larger_block() -> None:
    heap = heap_in_use(16 * MIB)
    for name in "abc":
        heap.take(name, 4 * MIB)
    for name in "ab":
        heap.give_back(name, 4 * MIB)

    assert heap.take("d", 8 * MIB) == 0


def test_a_block_lies_in_the_smallest_free_part_that_holds_it() -> None:
    heap = heap_in_use(16 * MIB)
    for name, size in (("a", 8), ("b", 1), ("c", 4), ("d", 1)):
        heap.take(name, size * MIB)
    heap.give_back("a", 8 * MIB)
    heap.give_back("c", 4 * MIB)

    assert heap.take("e", 4 * MIB) == 0
    assert heap.take("f", 8 * MIB) == 0


def test_a_block_of_more_than_32_mib_is_new_each_time() -> None:
    heap = ProcessHeap()
    for name in "ab":
        assert heap.take(name, 33 * MIB) == 33 * MIB
        heap.give_back(name, 33 * MIB)
