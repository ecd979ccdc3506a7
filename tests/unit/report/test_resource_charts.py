"""The axes of the charts on the page of a run."""

import pytest

from rankwise.report.charts import round_up


@pytest.mark.parametrize(
    ("highest", "top"),
    [(0.0, 0.0), (0.0799, 0.1), (0.03, 0.04), (1.0, 1.0), (1.01, 2.0), (3.7, 4.0), (4.1, 10.0)],
)
def test_an_axis_ends_at_a_round_figure(highest: float, top: float) -> None:
    assert round_up(highest) == pytest.approx(top)


@pytest.mark.parametrize("exponent", range(-12, 13))
def test_no_curve_leaves_its_chart_nor_takes_less_than_a_third_of_it(exponent: int) -> None:
    for value in (1.0, 1.5, 2.0, 3.0, 5.0, 9.99):
        highest = value * 10.0**exponent

        assert highest <= round_up(highest) * (1 + 1e-12)
        assert round_up(highest) < 3 * highest
