"""`--sweep`: one simulation per combination of values, each in a process of its own, on all cores.

Results appear in the order of the combinations, whatever the order of their ends. A combination
that fails gets a line of its own, and the others continue. Ctrl-C shows the results so far.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import click
import msgspec

from rankwise.cli.sim_failures import tell_error
from rankwise.cli.sim_progress import counted, terminal_width
from rankwise.sim.benches.session import BenchSettings, check_keys
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.reporting.files import check_writable, write_text
from rankwise.sim.reporting.results import time_row, times_as_csv
from rankwise.sim.reporting.sweep_page import result_of, sweep_page, table_rows
from rankwise.sim.reporting.sweep_table import BENCH, TIME, SweepTable
from rankwise.sim.reporting.table import result_table
from rankwise.simranks.run.sweeps import SweepOutcome, sweep_settings

Point = Mapping[str, str]
_INTERRUPTED = 130


class TableTarget(NamedTuple):
    """Where the table of a sweep goes.

    Attributes:
        style: `table`, `csv` or `json`, for standard output.
        report: the file of the page.
        results: the file that keeps what is done.
    """

    style: str
    report: str | None
    results: str | None


def run_sweep(settings: BenchSettings, points: Sequence[Point], shown: TableTarget) -> int:
    """Run every point and print the results; 1 if any failed."""
    check_keys(settings, points[0])
    if shown.report is not None:
        check_writable(shown.report)
    with counted(len(points)) as progress:
        swept = sweep_settings(settings, points, shown.results, progress)
    return show(swept, shown)


def show(swept: SweepOutcome, shown: TableTarget) -> int:
    """Tell how a sweep has ended, print its table, and write its page; returns the exit code."""
    table = swept.table
    _tell_failures(table)
    if swept.reused:
        click.echo(
            f"results: {swept.reused:,} of {table.total:,} are from {shown.results}", err=True
        )
    if swept.is_interrupted:
        rest = "; the same command runs the rest" if shown.results else ""
        told = f"{len(table.cases):,} of {table.total:,} cases are done"
        click.echo(f"rankwise: interrupted: {told}{rest}", err=True)
    if swept.problem:
        tell_error(swept.problem)
    if len(table) or shown.style == "csv":
        _print(table, shown.style)
    elif shown.style == "json":
        click.echo("[]")
    if shown.report is not None and table.cases:
        write_text(shown.report, sweep_page(table))
        click.echo(f"report: {shown.report}", err=True)
    if swept.is_interrupted:
        return _INTERRUPTED
    return int(bool(table.failures or swept.problem))


def show_times(times: Sequence[tuple[Point, int]], style: str) -> None:
    """Print the simulated picoseconds of a program that measures nothing, a line or row each."""
    rows = [{**point, **time_row(time_ps)} for point, time_ps in times]
    if style == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
    elif style == "csv":
        click.echo(times_as_csv(rows))
    else:
        for point, time_ps in times:
            shown = "  ".join(f"{key}={value}" for key, value in point.items())
            click.echo(f"{shown}  simulated time: {format_picoseconds(time_ps)}")


def _tell_failures(table: SweepTable) -> None:
    """Tell what points failed with; what many have in common is told once."""
    places: dict[str, list[str]] = {}
    for point, failure in table.failures:
        shown = " ".join(f"{key}={value}" for key, value in point.items())
        places.setdefault(failure, []).append(shown)
    for failure, shown_points in places.items():
        more = f" and {len(shown_points) - 1} more points" if len(shown_points) > 1 else ""
        tell_error(f"at {shown_points[0]}{more}: {failure}")


def _print(table: SweepTable, style: str) -> None:
    if style == "json":
        click.echo(table.to_json())
    elif style == "csv":
        click.echo(table.to_csv())
    elif table.kind == BENCH:
        pairs = [(case.point, result_of(row)) for case in table.cases for row in case.rows]
        labels = [(key, [point[key] for point, _ in pairs]) for key in table.keys]
        click.echo(result_table([result for _, result in pairs], labels, terminal_width()))
    elif table.kind == TIME:
        pairs_of_times = [
            (case.point, int(row["time_ps"] or 0)) for case in table.cases for row in case.rows
        ]
        show_times(pairs_of_times, style)
    else:
        from rankwise.base.wording import aligned  # noqa: PLC0415  # predictions alone

        click.echo("\n".join(aligned(table_rows(table), texts=len(table.keys), is_last_text=True)))
