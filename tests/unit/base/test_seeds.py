"""Streams of chance: independent by name, the same everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.seeds import derived_seed

NAMES = st.lists(st.one_of(st.text(max_size=3), st.integers(-5, 5)), max_size=3)


def test_a_derived_seed_is_the_same_on_every_machine_and_for_ever() -> None:
    assert derived_seed(0) == 10_341_546_458_073_702_813
    assert derived_seed(7311, "faults", 3) == 14_589_703_764_314_707_571


def test_names_are_told_apart_however_they_are_cut() -> None:
    seeds = {
        derived_seed(1, "a", "bc"),
        derived_seed(1, "ab", "c"),
        derived_seed(1, "abc"),
        derived_seed(1, "1"),
        derived_seed(1, 1),
        derived_seed(11),
        derived_seed(1),
    }

    assert len(seeds) == 7


@given(st.integers(), st.integers(), NAMES, NAMES)
def test_equal_names_and_only_they_give_equal_seeds(
    seed: int, other_seed: int, names: list[str | int], other_names: list[str | int]
) -> None:
    # By text: 0 and False are the same list entry to Python, and the kind is told apart.
    is_same = repr((seed, names)) == repr((other_seed, other_names))

    assert (derived_seed(seed, *names) == derived_seed(other_seed, *other_names)) is is_same
    assert 0 <= derived_seed(seed, *names) < 1 << 64
