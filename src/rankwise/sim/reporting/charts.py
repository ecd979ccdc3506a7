"""The charts of the page, as SVG: how busy the engines were over time, and the roofline."""

import math
from collections.abc import Sequence
from html import escape

from rankwise.base.web_page import BINS, LEFT, ROW, WIDTH, busy_shares, strip, svg, time_axis
from rankwise.base.wording import ranges_of
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.reporting.results import BenchResult, format_rate
from rankwise.sim.reporting.timeline import ENGINES, ReportedRun, by_place

SIPS_SHOWN = 8
_COLOURS = {
    "host": "#8a63b8", "commands": "#7a8699", "kernels": "#2f6fb5", "collectives": "#c77d2e",
    "waiting": "#9aa9bd",
    "dma": "#2b9a8b", "gemm": "#c2453f", "math": "#b08a1e",
}  # fmt: skip


def timeline_chart(engine: ReportedRun) -> str:
    """A strip per SIP and kind of engine."""
    end = engine.now
    totals: dict[tuple[int, str], list[float]] = {}
    counts: dict[tuple[int, str], int] = {}
    has_more = False
    for place, slices in by_place(engine.op_log).items():
        if place.sip >= SIPS_SHOWN:
            has_more = True
            continue
        key = (place.sip, place.engine)
        shares = busy_shares([(each.start, each.end) for each in slices], end, BINS)
        before = totals.get(key, [0.0] * BINS)
        totals[key] = [one + other for one, other in zip(before, shares, strict=True)]
        counts[key] = counts.get(key, 0) + 1
    lines: list[str] = []
    y = 8
    for sip in sorted({sip for sip, _ in totals}):
        for name in ENGINES:
            if (sip, name) not in totals:
                continue
            shares = [share / counts[sip, name] for share in totals[sip, name]]
            lines += strip(f"SIP {sip} {name}", _COLOURS[name], shares, y)
            y += ROW
        y += 6
    lines += time_axis(end, y, format_picoseconds)
    if has_more:
        lines.append(f'<text x="0" y="{y + 34}">SIPs from {SIPS_SHOWN} on are not shown</text>')
    return svg(LEFT + WIDTH + 20, y + 40, lines, "How busy engines were over time")


class _LogScale:
    """From a range of positive numbers, by their logarithms, to coordinates."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high))
        self._start, self._per_decade = start, (end - start) / max(1, self.high - self.low)

    def __call__(self, value: float) -> float:
        return self._start + (math.log10(value) - self.low) * self._per_decade

    def decades(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


_PICTURE_WIDTH = 1030
_PLOT_LEFT, _PLOT_RIGHT, _PLOT_TOP, _PLOT_BOTTOM = 110, 1000, 20, 330


def roofline_chart(topology: Topology, results: Sequence[BenchResult]) -> str:
    """Operations per second over operations per byte, both logarithmic."""
    spec, clock = topology.machine, topology.machine.system.clock
    pes = topology.pe_count
    peaks = [
        (f"GEMM engines of a SIP, {dtype}", rate * clock * 1e9 * pes)
        for dtype, rate in [_best(spec.pe.gemm.flops_per_cycle)]
    ] + [
        (f"math engines of a SIP, {dtype}", rate * clock * 1e9 * pes)
        for dtype, rate in [_best(spec.pe.math.elements_per_cycle)]
    ]
    memory = spec.sip.cubes.count * spec.cube.hbm.channels * spec.cube.hbm.bandwidth * 1e9
    points = [
        (result.flops / result.bytes, result.flops_per_second, result)
        for result in results
        if result.flops and result.bytes and result.time_ps
    ]
    highest = max(*(peak for _, peak in peaks), *(point[1] for point in points))
    x = _LogScale(
        min(0.1, *(point[0] for point in points)) * 0.9,
        max(highest / memory * 4, *(point[0] for point in points)),
        _PLOT_LEFT,
        _PLOT_RIGHT,
    )
    y = _LogScale(
        min(memory * 0.1, *(point[1] for point in points)), highest, _PLOT_BOTTOM, _PLOT_TOP
    )
    lines = _grid(x, y)
    dots = [(x(intensity), y(rate)) for intensity, rate, _ in points]
    labels = _Labels(dots)
    for name, peak in peaks:
        # The slope begins where it enters the plot, from the left or from below.
        start = max(10.0**x.low, 10.0**y.low / memory)
        corner = max(peak / memory, start)
        lines.append(
            f'<path d="M{x(start):.1f},{y(min(peak, memory * start)):.1f} '
            f'L{x(corner):.1f},{y(peak):.1f} L{_PLOT_RIGHT},{y(peak):.1f}" fill="none" '
            'stroke="#2f6fb5" stroke-width="2"/>'
        )
        above, below = y(peak) - 5, y(peak) + 14
        places = [(right, at, "end") for right in (_PLOT_RIGHT, 620) for at in (above, below)]
        lines.append(labels.put(f"{name}: {format_rate(peak, 'FLOP/s')}", places))
    lines += _numbered_points(dots, labels)
    top = _PLOT_BOTTOM + 62
    for number, (_, _, result) in enumerate(points, 1):
        lines.append(
            f'<text class="strong" x="{_PLOT_LEFT}" y="{top + 15 * (number - 1)}">{number}. '
            f"{escape(result.bench)}: {escape(result.case)}, "
            f"{format_rate(result.flops_per_second, 'FLOP/s')}</text>"
        )
    return svg(_PICTURE_WIDTH, top + 15 * len(points), lines, "Roofline")


class _Labels:
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

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        is_inside = left >= _PLOT_LEFT and right <= _PICTURE_WIDTH and bottom <= _PLOT_BOTTOM + 3
        return is_inside and not any(
            left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
            for other in self._taken
        )


def _box(text: str, x: float, y: float, anchor: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, about."""
    width = 6.5 * len(text)
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return left, y - 10, left + width, y + 3


def _numbered_points(points: Sequence[tuple[float, float]], labels: _Labels) -> list[str]:
    """Points with their numbers; those that lie on each other share a label."""
    lines, together = [], list[tuple[float, float, list[int]]]()
    for number, (px, py) in enumerate(points, 1):
        lines.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="#c2453f"/>')
        for lx, ly, numbers in together:
            if abs(px - lx) < 12 and abs(py - ly) < 12:
                numbers.append(number)
                break
        else:
            together.append((px, py, [number]))
    for px, py, numbers in together:
        places = [
            (px + 9, py + 4, "start"), (px - 9, py + 4, "end"),
            *((px, py + off, "middle") for off in (-9, 17, -22, 30)),
        ]  # fmt: skip
        lines.append(labels.put(ranges_of(numbers), places, ' class="strong"'))
    return lines


def _best(rates: dict[str, float] | object) -> tuple[str, float]:
    """The float dtype with the highest rate; of all if there is none."""
    assert isinstance(rates, dict), "rates are a mapping"
    floats = {dtype: rate for dtype, rate in rates.items() if dtype[0] in "bf"} or rates
    return max(floats.items(), key=lambda item: item[1])


def _grid(x: _LogScale, y: _LogScale) -> list[str]:
    lines = []
    for value in x.decades():
        lines.append(
            f'<line x1="{x(value):.1f}" y1="{_PLOT_TOP}" x2="{x(value):.1f}" y2="{_PLOT_BOTTOM}" '
            'stroke="#8fa3bf" opacity="0.3"/>'
        )
        lines.append(
            f'<text x="{x(value):.1f}" y="{_PLOT_BOTTOM + 16}" text-anchor="middle">'
            f"{value:g}</text>"
        )
    for value in y.decades():
        lines.append(
            f'<line x1="{_PLOT_LEFT}" y1="{y(value):.1f}" x2="{_PLOT_RIGHT}" y2="{y(value):.1f}" '
            'stroke="#8fa3bf" opacity="0.3"/>'
        )
        lines.append(
            f'<text x="{_PLOT_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">'
            f"{format_rate(value, 'FLOP/s')}</text>"
        )
    middle = (_PLOT_LEFT + _PLOT_RIGHT) / 2
    lines.append(
        f'<text x="{middle}" y="{_PLOT_BOTTOM + 36}" text-anchor="middle">'
        "operations per byte</text>"
    )
    return lines
