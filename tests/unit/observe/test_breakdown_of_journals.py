"""How the time of a rank of processes is divided."""

from hypothesis import given
from hypothesis import strategies as st

from rankwise.observe.breakdown import divide

KEYS = [("waiting", "a"), ("exposed", "a"), ("compute", "b"), ("compute", "outside")]


def test_what_goes_on_at_one_time_counts_once_and_the_lowest_order_first() -> None:
    assert divide(
        [
            (0, 100, 3, KEYS[3]),
            (10, 60, 2, KEYS[2]),
            (20, 30, 0, KEYS[0]),
            (30, 50, 1, KEYS[1]),
        ]
    ) == {KEYS[3]: 10 + 40, KEYS[2]: 10 + 10, KEYS[0]: 10, KEYS[1]: 20}


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 3), st.sampled_from(KEYS)),
        max_size=10,
    )
)
def test_the_parts_add_up_to_what_is_covered(
    intervals: list[tuple[int, int, int, tuple[str, str]]],
) -> None:
    covered = {at for begin, end, _, _ in intervals for at in range(begin, end)}

    assert sum(divide(intervals).values()) == len(covered)
