"""The charts of the page, as SVG: how busy the engines were over time, and the roofline."""

from collections.abc import Sequence
from html import escape

from rankwise.base.plots import (
    PICTURE_WIDTH,
    PLOT_BOTTOM,
    PLOT_LEFT,
    PLOT_RIGHT,
    PLOT_TOP,
    Labels,
    LogScale,
    axes,
    dot,
)
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
    x = LogScale(
        min(0.1, *(point[0] for point in points)) * 0.9,
        max(highest / memory * 4, *(point[0] for point in points)),
        PLOT_LEFT,
        PLOT_RIGHT,
    )
    y = LogScale(min(memory * 0.1, *(point[1] for point in points)), highest, PLOT_BOTTOM, PLOT_TOP)
    words = (lambda value: f"{value:g}", lambda value: format_rate(value, "FLOP/s"))
    lines = axes(x, y, words, ("operations per byte", ""))
    dots = [(x(intensity), y(rate)) for intensity, rate, _ in points]
    labels = Labels(dots)
    for name, peak in peaks:
        # The slope begins where it enters the plot, from the left or from below.
        start = max(10.0**x.low, 10.0**y.low / memory)
        corner = max(peak / memory, start)
        lines.append(
            f'<path d="M{x(start):.1f},{y(min(peak, memory * start)):.1f} '
            f'L{x(corner):.1f},{y(peak):.1f} L{PLOT_RIGHT},{y(peak):.1f}" fill="none" '
            'stroke="#2f6fb5" stroke-width="2"/>'
        )
        above, below = y(peak) - 5, y(peak) + 14
        places = [(right, at, "end") for right in (PLOT_RIGHT, 620) for at in (above, below)]
        lines.append(labels.put(f"{name}: {format_rate(peak, 'FLOP/s')}", places))
    lines += _numbered_points(dots, labels)
    top = PLOT_BOTTOM + 62
    for number, (_, _, result) in enumerate(points, 1):
        lines.append(
            f'<text class="strong" x="{PLOT_LEFT}" y="{top + 15 * (number - 1)}">{number}. '
            f"{escape(result.bench)}: {escape(result.case)}, "
            f"{format_rate(result.flops_per_second, 'FLOP/s')}</text>"
        )
    return svg(PICTURE_WIDTH, top + 15 * len(points), lines, "Roofline")


def _numbered_points(points: Sequence[tuple[float, float]], labels: Labels) -> list[str]:
    """Points with their numbers; those that lie on each other share a label."""
    lines, together = [], list[tuple[float, float, list[int]]]()
    for number, (px, py) in enumerate(points, 1):
        lines.append(dot(px, py, "#c2453f"))
        for lx, ly, numbers in together:
            if abs(px - lx) < 12 and abs(py - ly) < 12:
                numbers.append(number)
                break
        else:
            together.append((px, py, [number]))
    for px, py, numbers in together:
        lines.append(labels.beside(ranges_of(numbers), px, py))
    return lines


def _best(rates: dict[str, float] | object) -> tuple[str, float]:
    """The float dtype with the highest rate; of all if there is none."""
    assert isinstance(rates, dict), "rates are a mapping"
    floats = {dtype: rate for dtype, rate in rates.items() if dtype[0] in "bf"} or rates
    return max(floats.items(), key=lambda item: item[1])
