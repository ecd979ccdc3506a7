"""`--sweep`: one simulation per combination of values, each in a process of its own, on all cores.

Results are shown in the order of the combinations, however they came. A combination that fails is
told in a line of its own, and does not take the others with it.
"""

from collections.abc import Mapping, Sequence

import click
import msgspec

from rankwise.cli.sim_failures import tell_error
from rankwise.cli.sim_progress import counted, terminal_width
from rankwise.cli.sim_workers import simulate_all
from rankwise.sim.benches.session import Outcome, Settings, check_keys
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.reporting.results import BenchResult, as_csv, time_row, times_as_csv
from rankwise.sim.reporting.table import result_table

Point = Mapping[str, str]


def run_sweep(settings: Settings, points: Sequence[Point], style: str) -> int:
    """Run every point and print the results; 1 if any failed."""
    check_keys(settings, points[0])
    outcomes = list(zip(points, _outcomes(settings, points), strict=True))
    _tell_failures(outcomes)
    rows = [(point, result) for point, outcome in outcomes for result in outcome.results]
    times = [(point, outcome.time_ps) for point, outcome in outcomes if not outcome.failure]
    if rows or (style != "table" and not times):
        _show(points[0], rows, style)
    else:
        show_times(times, style)
    return int(any(outcome.failure for _, outcome in outcomes))


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


def _tell_failures(outcomes: Sequence[tuple[Point, Outcome]]) -> None:
    """Tell what points failed with; what many have in common is told once."""
    places: dict[str, list[str]] = {}
    for point, outcome in outcomes:
        if outcome.failure:
            shown = " ".join(f"{key}={value}" for key, value in point.items())
            places.setdefault(outcome.failure, []).append(shown)
    for failure, shown_points in places.items():
        more = f" and {len(shown_points) - 1} more points" if len(shown_points) > 1 else ""
        tell_error(f"at {shown_points[0]}{more}: {failure}")


def _outcomes(settings: Settings, points: Sequence[Point]) -> list[Outcome]:
    wanted = [
        msgspec.structs.replace(settings, fields={**settings.fields, **point}) for point in points
    ]
    with counted(len(points)) as tell_one_more:
        return simulate_all(wanted, tell_one_more)


def _show(first: Point, rows: list[tuple[Point, BenchResult]], style: str) -> None:
    results = [result for _, result in rows]
    labels = [(key, [point[key] for point, _ in rows]) for key in first]
    if style == "json":
        dicts = [{**point, **result.as_row()} for point, result in rows]
        click.echo(msgspec.json.format(msgspec.json.encode(dicts)).decode())
    elif style == "csv":
        click.echo(as_csv(results, labels))
    else:
        click.echo(result_table(results, labels, terminal_width()))
