"""How late ranks come, from what a calibration has seen."""

import pytest

pytest.importorskip("torch")

from rankwise.simranks.torch.calibration import lateness


def test_lateness_is_that_after_a_second_whatever_ranks_had_computed() -> None:
    assert lateness([(0.01, 0.001), (0.04, 0.002)]) == pytest.approx(0.01)


def test_longest_tenth_of_delays_does_not_count() -> None:
    assert lateness([(1.0, 0.001)] * 9 + [(1.0, 5.0)]) == pytest.approx(0.001)


def test_ranks_without_collectives_have_no_lateness() -> None:
    assert lateness([]) is None
