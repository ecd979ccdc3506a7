"""Plots of the pages that runs leave: axes, lines, points with labels, and bars; as SVG.

All pages draw with these and with the strips of `web_page`. Coordinates grow to the right and
downwards. Text without a colour of its own follows the page, light or dark.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple, Protocol

from rankwise.base.web_page import LEFT, WIDTH, svg

COLOURS = ("#2f6fb5", "#c77d2e", "#2b9a8b", "#c2453f", "#8a63b8", "#b08a1e", "#7a8699", "#4f8f3a")
"""Of series, in their order."""
GRID = "#8fa3bf"
PICTURE_WIDTH = 1030
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 110, 1000, 20, 330
_BAR, _LINE_OF_TEXT = 18, 15
_CHARACTER = 6.5
"""How wide a character is, about."""
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
"""Of lines, when the colours begin anew."""
_SPAN_OF_LINEAR = 20
"""A larger ratio of values is drawn by logarithms: the small ones would lie on each other."""


class Scale(Protocol):
    """From values to coordinates."""

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        ...

    def ticks(self) -> list[float]:
        """Values to be named at the axis."""
        ...


class LogScale:
    """From a range of positive numbers, by their logarithms to a base, to coordinates."""

    def __init__(
        self, low: float, high: float, start: float, end: float, base: float = 10.0
    ) -> None:
        self._base = base
        per_base = math.log10(base)  # exact at powers of ten
        self.low = math.floor(math.log10(low) / per_base)
        self.high = math.ceil(math.log10(high) / per_base)
        self._start, self._per_power = start, (end - start) / max(1, self.high - self.low)

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        power = math.log10(value) / math.log10(self._base)
        return self._start + (power - self.low) * self._per_power

    def ticks(self) -> list[float]:
        """The powers of the base."""
        return [self._base**power for power in range(self.low, self.high + 1)]


class TightLogScale:
    """The same, from the smallest value to the largest: the values themselves are named."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._values = sorted(set(values))
        self._low = math.log(self._values[0])
        self._start = start
        span = math.log(self._values[-1]) - self._low
        self._per = (end - start) / span if span else 0.0

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        return self._start + (math.log(value) - self._low) * self._per

    def ticks(self) -> list[float]:
        """The values, as far as there is room for their names."""
        shown: list[float] = []
        for value in self._values:
            if not shown or abs(self(value) - self(shown[-1])) >= 60:
                shown.append(value)
        return shown


class LinearScale:
    """From nought and a largest value, best a round one, to coordinates."""

    def __init__(self, highest: float, start: float, end: float) -> None:
        self._highest = highest or 1.0
        self._start, self._span = start, end - start

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        return self._start + self._span * value / self._highest

    def ticks(self) -> list[float]:
        """Nought, the half and the whole."""
        return [0.0, self._highest / 2, self._highest]


def scale_for(
    values: Sequence[float], highest: float, start: float, end: float, base: float = 10.0
) -> Scale:
    """By logarithms if the positive values differ much, else linear to a round highest value."""
    if min(values) > 0 and max(values) > _SPAN_OF_LINEAR * min(values):
        return LogScale(min(values), max(values), start, end, base)
    return LinearScale(highest, start, end)


def round_up(value: float) -> float:
    """The next figure that people read at a glance, as does its half: 1, 2, 4, 10, 20, ..."""
    if value <= 0:
        return 0.0
    scale = 10.0 ** math.floor(math.log10(value))
    return scale * next(step for step in (1, 2, 4, 10, 20) if step * scale >= value)


def level(y: float, text: str, left: float = LEFT, right: float = LEFT + WIDTH) -> list[str]:
    """A line of the grid at a height, with the value that it stands for."""
    return [
        (
            f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" '
            f'stroke="{GRID}" opacity="0.3"/>'
        ),
        (f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'),
    ]


def axes(
    x: Scale,
    y: Scale,
    words: tuple[Callable[[float], str], Callable[[float], str]],
    names: tuple[str, str],
) -> list[str]:
    """A grid with the values of both axes; `words` say a value, `names` the axes."""
    lines = []
    for value in x.ticks():
        at = x(value)
        lines += [
            (
                f'<line x1="{at:.1f}" y1="{PLOT_TOP}" x2="{at:.1f}" y2="{PLOT_BOTTOM}" '
                f'stroke="{GRID}" opacity="0.3"/>'
            ),
            (
                f'<text x="{at:.1f}" y="{PLOT_BOTTOM + 16}" text-anchor="middle">'
                f"{escape(words[0](value))}</text>"
            ),
        ]
    for value in y.ticks():
        lines += level(y(value), words[1](value), PLOT_LEFT, PLOT_RIGHT)
    middle = (PLOT_LEFT + PLOT_RIGHT) / 2
    lines.append(
        f'<text x="{middle}" y="{PLOT_BOTTOM + 36}" text-anchor="middle">{escape(names[0])}</text>'
    )
    if names[1]:
        lines.append(f'<text x="{PLOT_LEFT - 100}" y="{PLOT_TOP - 10}">{escape(names[1])}</text>')
    return lines


def polyline(
    points: Sequence[tuple[float, float]], colour: str, title: str = "", dashes: str = ""
) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}>'
        f"<title>{escape(title)}</title></polyline>"
    )


def dot(x: float, y: float, colour: str, title: str = "", radius: int = 5) -> str:
    """A point."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">'
        f"<title>{escape(title)}</title></circle>"
    )


def legend(
    names: Sequence[str], colours: Sequence[str], y: float, dashes: Sequence[str] = ()
) -> tuple[list[str], float]:
    """Names in their colours, in as many lines as they need; and how far down they go.

    Of names with `dashes`, a piece of their line is shown.
    """
    lines, x = [], float(PLOT_LEFT)
    for index, (name, colour) in enumerate(zip(names, colours, strict=True)):
        mark, of_line = 10, any(dashes)
        if of_line:
            mark = 24
        width = mark + 8 + _CHARACTER * len(name)
        if x + width > PICTURE_WIDTH and x > PLOT_LEFT:
            x, y = float(PLOT_LEFT), y + _LINE_OF_TEXT
        lines.append(
            polyline([(x, y - 4), (x + mark, y - 4)], colour, "", dashes[index])
            if of_line
            else f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>'
        )
        lines.append(f'<text x="{x + mark + 4:.1f}" y="{y:.1f}">{escape(name)}</text>')
        x += width + 14
    return lines, y


class Labels:
    """Texts beside what they name: each at the first of its places that is free.

    Args:
        dots: the points of the plot, on which no text is to lie.
    """

    def __init__(self, dots: Sequence[tuple[float, float]]) -> None:
        self._taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots]

    def put(self, text: str, places: Sequence[tuple[float, float, str]], kind: str = "") -> str:
        """Where none is free, it is the first. A place is a point, and which end lies there."""
        boxes = [(_box(text, *place), place) for place in places]
        box, (x, y, anchor) = next((each for each in boxes if self._is_free(each[0])), boxes[0])
        self._taken.append(box)
        return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

    def beside(self, text: str, x: float, y: float) -> str:
        """A text beside a point."""
        places = [
            (x + 9, y + 4, "start"), (x - 9, y + 4, "end"),
            *((x, y + off, "middle") for off in (-9, 17, -22, 30)),
        ]  # fmt: skip
        return self.put(text, places, ' class="strong"')

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        is_inside = left >= PLOT_LEFT and right <= PICTURE_WIDTH and bottom <= PLOT_BOTTOM + 3
        return is_inside and not any(
            left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
            for other in self._taken
        )


def _box(text: str, x: float, y: float, anchor: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, about."""
    width = _CHARACTER * len(text)
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return left, y - 10, left + width, y + 3


class Series(NamedTuple):
    """Points of one line, each with what is said of it."""

    name: str
    points: Sequence[tuple[float, float, str]]


def lines_plot(
    series: Sequence[Series],
    words: tuple[Callable[[float], str], Callable[[float], str]],
    names: tuple[str, str],
    title: str,
) -> str:
    """A line per series over a logarithmic axis; the other axis is logarithmic, too."""
    points = [point for each in series for point in each.points]
    x = TightLogScale([point[0] for point in points], PLOT_LEFT + 20, PLOT_RIGHT - 20)
    heights = [point[1] for point in points]
    y = LogScale(min(heights), max(heights), PLOT_BOTTOM, PLOT_TOP)
    lines = axes(x, y, words, names)
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(series))]
    dashes = [_DASHES[index // len(COLOURS) % len(_DASHES)] for index in range(len(series))]
    for each, colour, dash in zip(series, colours, dashes, strict=True):
        placed = [(x(point[0]), y(point[1])) for point in each.points]
        if len(placed) > 1:
            lines.append(polyline(placed, colour, each.name, dash))
        lines += [
            dot(*at, colour, point[2], 4) for at, point in zip(placed, each.points, strict=True)
        ]
    more, bottom = legend([each.name for each in series], colours, PLOT_BOTTOM + 58, dashes)
    return svg(PICTURE_WIDTH, round(bottom + 14), [*lines, *more], title)


class Bar(NamedTuple):
    """A row of a chart of bars: a name, and lengths with their colours and what is said of them."""

    name: str
    parts: Sequence[tuple[float, str, str]]
    text: str = ""


_NAMES_MOST = 240


def bars_chart(rows: Sequence[Bar], title: str, names: Sequence[tuple[str, str]] = ()) -> str:
    """Bars from a common line to the right, and to the left if they are negative.

    The parts of a row follow each other. `names` is the legend: names and colours.
    """
    left = min(_NAMES_MOST, round(max(len(row.name) for row in rows) * _CHARACTER) + 8) + 10
    low = min(0.0, *(sum(min(0.0, part[0]) for part in row.parts) for row in rows))
    high = max(0.0, *(sum(max(0.0, part[0]) for part in row.parts) for row in rows))
    right = PICTURE_WIDTH - 12 - round(max(len(row.text) for row in rows) * _CHARACTER)
    per = (right - left) / ((high - low) or 1.0)
    zero = left - low * per
    lines, y = [], 6
    for row in rows:
        lines.append(
            f'<text x="{left - 10}" y="{y + 12}" text-anchor="end">'
            f"{escape(_cut(row.name))}<title>{escape(row.name)}</title></text>"
        )
        ends = {True: zero, False: zero}
        for length, colour, told in row.parts:
            is_right = length >= 0
            start = ends[is_right]
            ends[is_right] = end = start + length * per
            lines.append(
                f'<rect x="{min(start, end):.1f}" y="{y}" width="{abs(end - start):.1f}" '
                f'height="{_BAR - 5}" fill="{colour}"><title>{escape(told)}</title></rect>'
            )
        lines.append(
            f'<text class="strong" x="{max(*ends.values(), zero) + 6:.1f}" y="{y + 11}">'
            f"{escape(row.text)}</text>"
        )
        y += _BAR
    lines.append(
        f'<line x1="{zero:.1f}" y1="2" x2="{zero:.1f}" y2="{y}" stroke="{GRID}" opacity="0.6"/>'
    )
    if names:
        more, bottom = legend([each[0] for each in names], [each[1] for each in names], y + 18)
        lines, y = [*lines, *more], round(bottom)
    return svg(PICTURE_WIDTH, y + 8, lines, title)


def _cut(text: str) -> str:
    longest = round((_NAMES_MOST - 2) / _CHARACTER)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
