"""The axes of the charts on the page of a run."""

import re

import pytest

from rankwise.base.plots import round_up
from rankwise.base.units import Duration
from rankwise.observe.records import Sample
from rankwise.observe.timeline import RankTrack, RunTimeline
from rankwise.report.charts import resource_chart


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


@pytest.mark.parametrize(
    ("most", "axis"),
    [
        (30 << 20, ["0 MiB", "20 MiB", "40 MiB"]),
        (900 << 20, ["0 MiB", "500 MiB", "1000 MiB"]),
        (3 << 30, ["0 GiB", "2 GiB", "4 GiB"]),
    ],
)
def test_memory_is_shown_in_the_units_of_ps_and_top(most: int, axis: list[str]) -> None:
    track = RankTrack(0)
    track.samples = [
        (at, Sample(rank=0, cpu=Duration(0), memory=most // at, cpu_wait=Duration(0)))
        for at in (1, 2)
    ]
    timeline = RunTimeline([], [], {0: track}, [], 2, 0, (), 1.0, None, 1, 0)

    chart = resource_chart(timeline, [0], "memory")

    assert re.findall(r">(\d+ [MG]iB)<", chart) == axis
