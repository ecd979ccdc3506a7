"""The model checker itself: what it finds, and that it looks everywhere."""

from collections.abc import Callable, Sequence

import pytest

from rankwise.base.units import Instant
from rankwise.testing.interleavings import Interleaving, InterleavingError, explore

NEVER = Instant(0)


def test_every_order_of_two_programs_is_seen() -> None:
    def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
        words = world.words(1)

        def unsafely_add() -> None:
            words[0] = words[0] + 1

        return [unsafely_add, unsafely_add]

    sums = set()
    explore(setup, lambda world: sums.add(world.memory[0]))

    assert sums == {1, 2}


def test_a_program_that_nobody_wakes_is_found_with_its_story() -> None:
    def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
        word = world.word()
        return [lambda: word.sleep(0, NEVER), word.add]

    with pytest.raises(
        InterleavingError, match=r"no program is left to wake 0 on 0, after\s+0: sleep on 0"
    ):
        explore(setup)


def test_an_addition_that_wakes_leaves_nobody_asleep() -> None:
    def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
        word = world.word()
        return [lambda: word.sleep(0, NEVER), word.add_and_wake]

    explore(setup)


def test_an_exception_of_a_program_is_cited_with_its_story() -> None:
    def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
        words = world.words(1)

        def refuse_one() -> None:
            if words[0]:
                raise ValueError("a one")

        return [refuse_one, lambda: words.__setitem__(0, 1)]

    with pytest.raises(InterleavingError, match=r"ValueError: a one, after\s+1: store 1 at 0"):
        explore(setup)


def test_an_end_that_is_wrong_is_cited() -> None:
    def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
        words = world.words(2)
        return [lambda: words[0], lambda: words[1]]

    def check(world: Interleaving) -> None:
        assert world.done == {0: 0}, "both have ended"

    with pytest.raises(InterleavingError, match="both have ended"):
        explore(setup, check)


def test_a_killed_program_takes_no_further_step() -> None:
    def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
        words = world.words(2)

        def store_twice() -> None:
            words[0] = 1
            words[1] = 1

        return [store_twice, lambda: world.kill(0)]

    ends = set()
    explore(setup, lambda world: ends.add(tuple(world.memory)))

    assert ends == {(0, 0), (1, 0), (1, 1)}


def test_quiet_words_make_fewer_states_and_the_same_ends() -> None:
    def states(quiet: list[int]) -> tuple[int, set[int]]:
        ends: set[int] = set()

        def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
            words = world.words(3, quiet)

            def program(own: int) -> None:
                words[own] = 1
                words[2] = own

            return [lambda: program(0), lambda: program(1)]

        return explore(setup, lambda world: ends.add(world.memory[2])), ends

    loud, quiet = states([]), states([0, 1])

    assert quiet[0] < loud[0]
    assert quiet[1] == loud[1] == {0, 1}


def test_too_many_states_are_refused() -> None:
    def setup(world: Interleaving) -> Sequence[Callable[[], object]]:
        words = world.words(4)
        return [words.tolist, words.tolist]

    with pytest.raises(InterleavingError, match="more than 5 states"):
        explore(setup, states_max=5)
