"""Results as values, as a table, as CSV."""

import csv
import io
import re

import pytest

from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.reporting.results import (
    FIGURES,
    BenchResult,
    as_csv,
    format_rate,
)
from rankwise.sim.reporting.table import result_table


def result(**changes: object) -> BenchResult:
    fields: dict[str, object] = {
        "bench": "gemm", "case": "2 x 2", "time_ps": 2_000_000, "flops": 4_000_000, "bytes": 1_000,
        "bound": "compute", "bound_ps": 500_000, "is_checked": True,
    }  # fmt: skip
    return BenchResult(**{**fields, **changes})  # type: ignore[arg-type]


def test_rates_and_the_share_of_the_bound_follow_from_the_time() -> None:
    found = result()

    assert found.seconds == pytest.approx(2e-6)
    assert found.flops_per_second == pytest.approx(2e12)
    assert found.bytes_per_second == pytest.approx(5e8)
    assert found.ratio == pytest.approx(0.25)


def test_a_table_has_aligned_columns_and_says_how_the_numbers_were_checked() -> None:
    head, first, second, note = result_table([result(), result(case="20000 x 2")]).splitlines()

    assert first.split()[-2:] == ["25.0", "%"]
    assert head.index("bound") == first.index("compute") == second.index("compute")
    assert note == "numbers: equal to numpy's"


def test_what_holds_results_back_is_a_column_where_there_is_any() -> None:
    held = result(held_back_by="wave tail")

    assert "held back by" not in result_table([result()])
    assert result_table([result(), held]).splitlines()[2].endswith("25.0 %  wave tail")
    assert held.as_row()["held_back_by"] == "wave tail"


def test_the_level_of_fidelity_is_a_column_where_it_differs_or_is_not_the_most_exact() -> None:
    kernel, queue, message = (result(fidelity=each) for each in ("kernel", "queue", "message"))

    assert "fidelity" not in result_table([kernel, kernel])
    assert result_table([kernel, queue]).splitlines()[2].rstrip().endswith("queue")
    assert "message" in result_table([message, message])


def test_a_result_whose_bound_nobody_knows_has_no_share_of_it() -> None:
    _head, row, _note = result_table([result(bound_ps=0)]).splitlines()

    assert row.split()[-2:] == ["-", "-"]


LONG = "hierarchical_allreduce, 1024 ranks x 65536 f16"


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 30])
def test_a_table_fits_the_terminal_and_loses_no_figure(width: int) -> None:
    results = [result(bench="ccl_allreduce", case=LONG, bound="alpha-beta"), result(case="2 x 2")]
    labels = [("system.sips.link.bandwidth_GBps", ["50", "100"]), ("algorithm", ["one", "two"])]

    table = result_table(results, labels, width)

    assert max(map(len, table.splitlines())) <= width
    shown = table.replace("\n", " ")
    for figure in ("2 us", "500 ns", "25.0 %", "compute", "100", "two"):
        assert re.search(re.escape(figure).replace("\\ ", r"\s+"), shown), figure


def test_a_table_of_one_bench_fits_eighty_columns_with_a_row_per_result() -> None:
    table = result_table([result(case=LONG), result(case=LONG)], width=80)

    title, head, *rows = table.splitlines()
    assert title == "gemm:"
    assert head.split() == [
        "case", "simulated", "FLOP/s", "bytes/s", "bound", "lower", "bound", "reached",
    ]  # fmt: skip
    assert sum("25.0 %" in row for row in rows) == 2
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("checked", "note"),
    [
        ([False, False], "numbers: none, only time was simulated"),
        ([True, False], "numbers: 1 of 2 results are equal to numpy's"),
    ],
)
def test_a_table_does_not_claim_checks_that_were_not_made(checked: list[bool], note: str) -> None:
    table = result_table([result(is_checked=each) for each in checked])

    assert table.splitlines()[-1] == note


def test_labels_of_a_sweep_come_first_in_csv_and_every_figure_has_its_column() -> None:
    text = as_csv([result(), result(time_ps=1)], [("m", ["8", "16"])])

    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["m"] for row in rows] == ["8", "16"]
    assert set(FIGURES) == set(result().as_row()) == set(rows[0]) - {"m"}
    assert rows[0]["time_ps"] == "2000000"


def test_times_and_rates_are_written_for_people() -> None:
    assert format_picoseconds(999) == "999 ps"
    assert format_picoseconds(7_869_520) == "7.87 us"
    assert format_picoseconds(2 * 10**12) == "2 s"
    assert format_picoseconds(6_712 * 10**12, 3) == "6,712 s"
    assert format_picoseconds(999_960 * 10**3, 3) == "1,000 us"
    assert format_rate(1.5e12, "FLOP/s") == "1.5 TFLOP/s"
    assert format_rate(0, "B/s") == "-"
