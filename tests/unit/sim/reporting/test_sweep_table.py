"""The table of a sweep: rows, CSV, JSON, pandas, the front, the page."""

import csv
import io
import json
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise import sim
from rankwise.base.errors import ConfigError
from rankwise.sim.reporting.results import FIGURES, BenchResult
from rankwise.sim.reporting.sweep_page import _Place, pareto_chart, pareto_front, sweep_page
from rankwise.sim.reporting.sweep_table import BENCH, PREDICTION, SweepTable, SweptCase, Value


def result(time_ps: int) -> BenchResult:
    return BenchResult(
        bench="gemm", case="64 x 64", time_ps=time_ps, flops=64, bytes=64, bound="compute",
        bound_ps=1, is_checked=True,
    )  # fmt: skip


def measured(*, total: int = 0) -> SweepTable:
    cases = [
        SweptCase(point={"tile": tile, "n": n}, rows=[result(time).as_row()], devices=devices)
        for tile, n, time, devices in (("32", "a", 500, 1), ("64", "a", 300, 2), ("64", "b", 9, 2))
    ]
    failed = SweptCase(point={"tile": "65", "n": "a"}, failure="tile is 65 <b>")
    return SweepTable(["tile", "n"], [*cases, failed], BENCH, "gemm", total)


def predicted(point: str, seconds: float | None, peak: int) -> SweptCase:
    row: dict[str, Value] = {
        "machine": "a100", "ranks": 8, "steps": 2, "step_time_s": seconds, "computing_s": seconds,
        "exposed_communication_s": None if seconds is None else seconds / 4, "waiting_s": seconds,
        "communication_s": seconds, "peak_active_bytes": peak, "capacity_bytes": 100,
        "fits": seconds is not None, "reason": "" if seconds else "rank 1 failed: out of memory",
    }  # fmt: skip
    return SweptCase(point={"tp": point}, rows=[row], devices=8)


def test_a_table_is_a_sequence_of_rows_with_numbers_as_keys() -> None:
    table = measured()

    assert len(table) == 3
    assert [(row["tile"], row["n"], row["time_ps"]) for row in table] == [
        (32, "a", 500), (64, "a", 300), (64, "b", 9),
    ]  # fmt: skip
    assert table.columns == ("tile", "n", *FIGURES)
    assert table.failures == [({"tile": "65", "n": "a"}, "tile is 65 <b>")]


def test_csv_and_json_keep_values_as_they_were_given() -> None:
    table = measured()

    rows = list(csv.DictReader(io.StringIO(table.to_csv())))

    assert [row["tile"] for row in rows] == ["32", "64", "64"]
    assert [row["tile"] for row in json.loads(table.to_json())] == ["32", "64", "64"]


def test_pandas_gets_the_columns_where_it_is_installed() -> None:
    if find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    frame = measured().to_pandas()

    assert list(frame.columns) == ["tile", "n", *FIGURES]
    assert list(frame["time_ps"]) == [500, 300, 9]


def test_to_pandas_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(
        ModuleNotFoundError, match=r"to_pandas\(\) needs pandas: pip install pandas"
    ):
        measured().to_pandas()


def test_a_front_over_orders_of_magnitude_is_drawn_by_logarithms() -> None:
    sizes = ((0.001, 2 << 20), (0.1, 200 << 20), (10.0, 20 << 30))
    cases = [predicted(str(number), *each) for number, each in enumerate(sizes)]

    chart = pareto_chart(SweepTable(["tp"], cases, PREDICTION, "train.py"))

    assert all(f">{tick}</text>" in chart for tick in ("1 MiB", "16 MiB", "4 GiB", "100 ms"))


PLACES = st.lists(
    st.builds(
        _Place,
        st.integers(1, 9).map(float),
        st.integers(1, 9).map(float),
        st.just(""),
        st.just(""),
        st.booleans(),
    ),
    max_size=12,
)


@given(PLACES)
def test_no_place_that_fits_beats_one_of_the_front(places: list[_Place]) -> None:
    front = pareto_front(places)

    for each in front:
        assert each.fits
        assert not any(
            other.fits
            and (other.cost, other.seconds) != (each.cost, each.seconds)
            and other.cost <= each.cost
            and other.seconds <= each.seconds
            for other in places
        )
    assert bool(front) == any(place.fits for place in places)


def test_the_page_has_a_plot_per_numeric_key_and_says_what_failed() -> None:
    page = sweep_page(measured(total=6))

    assert page.count("<svg") == 2  # scaling with tile, and the front
    assert "Scaling with tile" in page
    assert "4 of 6 combinations of tile, n: the sweep did not come to its end" in page
    assert "tile is 65 &lt;b&gt;" in page


def test_the_page_tells_large_values_of_keys_as_they_were_given() -> None:
    cases = [
        SweptCase(point={"elements": elements}, rows=[result(500).as_row()])
        for elements in ("1048576", "4194304")
    ]

    page = sweep_page(SweepTable(["elements"], cases, BENCH, "ring"))

    assert ">1048576</text>" in page


@pytest.mark.parametrize("values", ["64", 64])
def test_a_sweep_over_one_value_that_is_no_list_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"over: tile is .*64.*, expected a list of values"):
        sim.sweep("gemm", {"tile": values})


def test_what_does_not_fit_is_in_the_table_with_its_reason() -> None:
    cases = [predicted("1", None, 300), predicted("2", 0.5, 90), predicted("4", 0.75, 60)]
    page = sweep_page(SweepTable(["tp"], cases, PREDICTION, "train.py"))

    assert "no: rank 1 failed: out of memory" in page
    assert "25.0 %" in page
    assert page.count("<svg") == 2


def test_the_plot_of_predictions_has_tokens_per_second_if_all_count_them() -> None:
    cases = [predicted(tp, seconds, peak) for tp, seconds, peak in (("1", 1.0, 90), ("2", 2.0, 60))]
    for case, rate in zip(cases, (1_000.0, 4_000.0), strict=True):
        case.rows[0]["tokens_per_s"] = rate  # type: ignore[index]  # a plain dictionary
    page = sweep_page(SweepTable(["tp"], cases, PREDICTION, "train.py"))

    assert "Tokens/s against peak memory" in page
    assert "2: 4,000, 60 bytes" in page


def test_a_table_of_nothing_has_a_page() -> None:
    assert "0 of 4 combinations" in sweep_page(SweepTable(["tp"], [], PREDICTION, "train.py", 4))


def test_a_notebook_shows_plots_and_rows_in_a_style_of_their_own() -> None:
    shown = measured()._repr_html_()

    assert shown.startswith('<div class="rankwise"><style>')
    assert "<td>500 ps</td>" in shown
