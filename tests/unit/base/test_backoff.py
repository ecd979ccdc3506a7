"""Pauses before restarts."""

import pytest

from rankwise.base.backoff import Backoff
from rankwise.base.units import SECOND


@pytest.mark.parametrize(
    ("restart", "seconds"), [(1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (10_000, 60)]
)
def test_pauses_double_up_to_the_longest(restart: int, seconds: int) -> None:
    assert Backoff().before_restart(restart) == seconds * SECOND


@pytest.mark.parametrize("changes", [{"initial": -1}, {"longest": -1}, {"factor": 0}])
def test_a_back_off_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="back-off"):
        Backoff(**changes)  # type: ignore[arg-type]
