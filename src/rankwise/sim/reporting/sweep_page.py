"""The page of a sweep: how figures scale, what is bought with what, and the table."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

import msgspec

from rankwise.base.plots import (
    COLOURS,
    PICTURE_WIDTH,
    PLOT_BOTTOM,
    PLOT_LEFT,
    PLOT_RIGHT,
    PLOT_TOP,
    Labels,
    Series,
    axes,
    dot,
    legend,
    lines_plot,
    polyline,
    round_up,
    scale_for,
)
from rankwise.base.units import format_bytes
from rankwise.base.web_page import document, fragment, svg, table
from rankwise.sim.hardware.quantities import PICOSECONDS_PER_SECOND, format_picoseconds
from rankwise.sim.reporting.results import COLUMNS, BenchResult, cells_of, tells
from rankwise.sim.reporting.sweep_table import (
    BENCH,
    PREDICTION,
    SweepTable,
    SweptCase,
    Value,
    number_of,
)

_SERIES_SHOWN = 16
_PLOTS_SHOWN = 4
_LABELS_SHOWN = 12
_ROWS_IN_NOTEBOOK = 60
_BYTES_BASE = 16.0
"""Powers of it are round numbers of bytes: 1 MiB, 16 MiB, 256 MiB, 4 GiB."""
_WHOLE_MOST = 1e10
"""Below, whole values are told as they were given."""
Row = Mapping[str, Value]


def sweep_page(swept: SweepTable) -> str:
    """The page."""
    done = f"{len(swept.cases):,} of {swept.total:,} combinations"
    missing = "" if len(swept.cases) == swept.total else ": the sweep did not come to its end"
    sections = [
        f"<h1>{escape(swept.title)}</h1>",
        f'<p class="about">{done} of {escape(", ".join(swept.keys))}{missing}.</p>',
    ]
    for key in _numeric_keys(swept)[:_PLOTS_SHOWN]:
        if chart := scaling_chart(swept, key):
            note = "Time over the values of one key, both logarithmic; a line per series."
            if _series_count(swept, key) > _SERIES_SHOWN:
                note += f" {_SERIES_SHOWN} of {_series_count(swept, key)} series are shown."
            sections += [
                f"<h2>Scaling with {escape(key)}</h2>",
                f'<p class="note">{note}</p>',
                f'<div class="scroll">{chart}</div>',
            ]
    if chart := pareto_chart(swept):
        sections += [
            "<h2>Pareto front</h2>",
            f'<p class="note">{escape(_about_front(swept))}</p>',
            f'<div class="scroll">{chart}</div>',
        ]
    sections += ["<h2>Results</h2>", table(table_rows(swept))]
    if swept.failures:
        rows = [(*point.values(), failure) for point, failure in swept.failures]
        sections += ["<h2>Failures</h2>", table([(*swept.keys, "failed with"), *rows])]
    return document(f"{swept.title}: sweep", sections)


def in_notebook(swept: SweepTable) -> str:
    """The first plots and the table, for a cell of a notebook."""
    charts = [scaling_chart(swept, key) for key in _numeric_keys(swept)[:1]] + [pareto_chart(swept)]
    rows = table_rows(swept)
    left_out = len(rows) - 1 - _ROWS_IN_NOTEBOOK
    more = [f"<p>{left_out:,} more rows; to_html() has all</p>"] if left_out > 0 else []
    return fragment([*filter(None, charts), table(rows[: _ROWS_IN_NOTEBOOK + 1]), *more])


def table_rows(swept: SweepTable) -> list[tuple[str, ...]]:
    """The table in words, the first row being the names of its columns."""
    pairs = [(case, row) for case in swept.cases for row in case.rows]
    points = [tuple(case.point[key] for key in swept.keys) for case, _ in pairs]
    if swept.kind == BENCH:
        results = [result_of(row) for _, row in pairs]
        columns = list(zip(COLUMNS, *map(cells_of, results), strict=True)) if results else []
        shown = [each for each in columns if tells(each[0], each[1:])]
        figures = [tuple(each[index + 1] for each in shown) for index in range(len(pairs))]
        heads = tuple(each[0] for each in shown)
    elif swept.kind == PREDICTION:
        has_tokens = any(row.get("tokens_per_s") for _, row in pairs)
        rate = ("tokens/s",) if has_tokens else ()
        heads = (
            "step time", *rate, "exposed", "waiting", "peak memory", "ranks", "machine", "fits",
        )  # fmt: skip
        figures = [_prediction_cells(row, has_tokens=has_tokens) for _, row in pairs]
    else:
        heads = ("simulated",)
        figures = [(format_picoseconds(round(_seconds(row) * PICOSECONDS_PER_SECOND)),)
                   for _, row in pairs]  # fmt: skip
    return [(*swept.keys, *heads), *(p + f for p, f in zip(points, figures, strict=True))]


def _prediction_cells(row: Row, *, has_tokens: bool) -> tuple[str, ...]:
    step, is_known = row["step_time_s"], row["step_time_s"] is not None

    def share(name: str) -> str:
        part = row[name]
        return f"{100 * float(part) / float(step):.1f} %" if part is not None and step else "-"

    return (
        _time_in_words(float(step)) if is_known and step is not None else "-",
        *((f"{float(row.get('tokens_per_s') or 0):,.0f}",) if has_tokens else ()),
        share("exposed_communication_s"),
        share("waiting_s"),
        format_bytes(int(row["peak_active_bytes"] or 0)),
        f"{row['ranks']}",
        str(row["machine"]),
        "yes" if row["fits"] else f"no: {row['reason']}",
    )


def result_of(row: Row) -> BenchResult:
    """The result that a row was made of."""
    names = BenchResult.__struct_fields__
    return msgspec.convert({name: row[name] for name in names}, BenchResult)


def _seconds(row: Row) -> float:
    value = row.get("step_time_s") if "step_time_s" in row else row.get("seconds")
    return float(value or 0.0)


def _numeric_keys(swept: SweepTable) -> list[str]:
    """Keys whose values are all positive numbers; those with the most values come first."""
    found = []
    for key in swept.keys:
        values = {number_of(case.point[key]) for case in swept.cases}
        if len(values) > 1 and all(not isinstance(each, str) and each > 0 for each in values):
            found.append((-len(values), swept.keys.index(key), key))
    return [key for _, _, key in sorted(found)]


def _series_of(swept: SweepTable, key: str) -> dict[str, list[tuple[float, float, str]]]:
    found: dict[str, list[tuple[float, float, str]]] = {}
    for case in swept.cases:
        for index, row in enumerate(case.rows):
            seconds = _seconds(row)
            if seconds <= 0:
                continue
            others = [f"{other}={value}" for other, value in case.point.items() if other != key]
            if len(case.rows) > 1:
                others.append(f"result {index + 1}")
            name = " ".join(others) or swept.title
            value = float(number_of(case.point[key]))
            told = f"{_point_in_words(case)}: {_time_in_words(seconds)}"
            found.setdefault(name, []).append((value, seconds, told))
    return {name: sorted(points) for name, points in found.items()}


def _series_count(swept: SweepTable, key: str) -> int:
    return len(_series_of(swept, key))


def scaling_chart(swept: SweepTable, key: str) -> str:
    """Time over the values of one key; empty if there are none."""
    found = list(_series_of(swept, key).items())[:_SERIES_SHOWN]
    if not found:
        return ""
    series = [Series(name, points) for name, points in found]
    names = (key, "step time" if swept.kind == PREDICTION else "simulated time")
    return lines_plot(series, (_number_in_words, _time_in_words), names, f"Scaling with {key}")


class _Place(msgspec.Struct, frozen=True):
    cost: float
    seconds: float
    name: str
    series: str
    fits: bool
    rate: float = 0.0
    """Tokens per second; 0 if they are not known."""

    @property
    def rank(self) -> float:
        """Less is better."""
        return -self.rate if self.rate else self.seconds


def _places(swept: SweepTable) -> tuple[str, list[_Place]]:
    """What each result costs, and how long it takes; and what the cost is."""
    what = "peak memory" if swept.kind == PREDICTION else "devices"
    found = []
    for case in swept.cases:
        for row in case.rows:
            is_memory = swept.kind == PREDICTION
            cost = float(row["peak_active_bytes"] or 0) if is_memory else float(case.devices)
            seconds = _seconds(row)
            if seconds > 0 and cost > 0:
                name = " ".join(case.point.values())
                series = next(iter(case.point.items())) if len(case.point) > 1 else ("", "")
                found.append(
                    _Place(
                        cost,
                        seconds,
                        name,
                        "=".join(filter(None, series)),
                        bool(row.get("fits", True)),
                        float(row.get("tokens_per_s") or 0.0),
                    )
                )
    if not all(place.rate for place in found):
        found = [msgspec.structs.replace(place, rate=0.0) for place in found]
    return what, found


def pareto_front(places: Sequence[_Place]) -> list[_Place]:
    """The places that no other beats in both cost and time or rate, by their costs."""
    front: list[_Place] = []
    for each in sorted(places, key=lambda place: (place.cost, place.rank)):
        if each.fits and (not front or each.rank < front[-1].rank):
            front.append(each)
    return front


def _about_front(swept: SweepTable) -> str:
    if swept.kind == PREDICTION:
        what = "Tokens/s" if any(place.rate for place in _places(swept)[1]) else "Step time"
        return (
            f"{what} against peak memory. On the line are the combinations that fit and that no "
            "other beats in both; names are the values of the keys."
        )
    return (
        "Time against the number of devices. On the line are the combinations that no other beats "
        "in both; names are the values of the keys."
    )


def pareto_chart(swept: SweepTable) -> str:
    """Time against cost; empty if all cost the same."""
    what, places = _places(swept)
    if len({place.cost for place in places}) < 2:
        return ""
    costs = [place.cost for place in places]
    base = _BYTES_BASE if what == "peak memory" else 10.0
    x = scale_for(costs, _round_cost(what, max(costs)), PLOT_LEFT, PLOT_RIGHT - 20, base)
    has_rates = any(place.rate for place in places)
    heights = [place.rate if has_rates else place.seconds for place in places]
    y = scale_for(heights, round_up(max(heights)), PLOT_BOTTOM, PLOT_TOP)
    height_in_words = _rate_in_words if has_rates else _time_in_words
    words: tuple[Callable[[float], str], Callable[[float], str]] = (
        (lambda value: format_bytes(round(value))) if what == "peak memory" else _number_in_words,
        height_in_words,
    )
    of_time = "step time" if swept.kind == PREDICTION else "time"
    lines = axes(x, y, words, (what, "tokens/s" if has_rates else of_time))
    names = list(dict.fromkeys(place.series for place in places))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    dots = [(x(place.cost), y(height)) for place, height in zip(places, heights, strict=True)]
    at_place = dict(zip(map(id, places), dots, strict=True))
    labels = Labels(dots)
    front = pareto_front(places)
    if len(front) > 1:
        lines.append(polyline([at_place[id(each)] for each in front], "#8fa3bf", "front"))
    for at, place, height in zip(dots, places, heights, strict=True):
        fits = "" if place.fits else ", does not fit"
        told = f"{place.name}: {height_in_words(height)}, {words[0](place.cost)}{fits}"
        lines.append(dot(*at, colours[place.series] if place.fits else "#9aa9bd", told))
    lines += [labels.beside(each.name, *at_place[id(each)]) for each in front[:_LABELS_SHOWN]]
    more: list[str] = []
    bottom: float = PLOT_BOTTOM + 44
    if len(names) > 1:
        more, bottom = legend(names, [colours[name] for name in names], PLOT_BOTTOM + 58)
    return svg(
        PICTURE_WIDTH, round(bottom + 14), [*lines, *more],
        f"{'Tokens/s' if has_rates else 'Time'} against {what}",
    )  # fmt: skip


def _round_cost(what: str, cost: float) -> float:
    """A largest value whose half can be read: of bytes in the unit in which they are told."""
    if what != "peak memory":
        return round_up(cost)
    unit = 1 << 30 if cost >= 1 << 30 else 1 << 20
    return round_up(cost / unit) * unit


def _point_in_words(case: SweptCase) -> str:
    return " ".join(f"{key}={value}" for key, value in case.point.items())


def _rate_in_words(rate: float) -> str:
    return f"{rate:,.0f}"


def _number_in_words(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() and value < _WHOLE_MOST else f"{value:.4g}"


def _time_in_words(seconds: float) -> str:
    return format_picoseconds(round(seconds * PICOSECONDS_PER_SECOND)) if seconds else "0"
