"""The charts of a run's page: what the ranks did over time, and what they used."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from rankwise.base.plots import COLOURS, level, polyline, round_up
from rankwise.base.units import Duration, format_duration
from rankwise.base.web_page import BINS, LEFT, ROW, WIDTH, busy_shares, strip, svg, time_axis
from rankwise.observe.records import BEGUN_BY_CPP, GpuSample
from rankwise.observe.timeline import RankTrack, RunTimeline

RANKS_SHOWN = 16
_SECTIONS, _CALLS, _WAITING = "#2f6fb5", "#c77d2e", "#8a63b8"
_WELL, _FAILED, _UNKNOWN = "#2b9a8b", "#c2453f", "#8fa3bf"
_SAMPLED = "#b08a1e"
_PLOT_HEIGHT = 110
_PLOT_TOP = 14


def ranks_chart(timeline: RunTimeline, ranks: Sequence[int]) -> str:
    """For each rank its attempts, sections, collectives, and the waiting in these."""
    lines: list[str] = []
    y = 8
    for rank in ranks:
        track = timeline.tracks[rank]
        lines += _attempts(track, y, timeline.end)
        y += ROW
        for name, colour, shares in _shares(track, timeline.end):
            if any(shares):
                lines += strip(name, colour, shares, y, "of the time")
                y += ROW
        if any(shares := _sampled_shares(track, timeline.end)):
            lines += strip("from C++", _SAMPLED, shares, y, "of the most calls in such a part")
            y += ROW
        y += 6
    top = 4
    for at, text in timeline.moments:
        x = _x(at, timeline.end)
        lines.append(
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y}" stroke="{_FAILED}" '
            f'stroke-dasharray="3 3"><title>{escape(text)}, at {_time(at)}</title></line>'
        )
    lines += time_axis(timeline.end, y, _time)
    return svg(LEFT + WIDTH + 20, y + 30, lines, "What the ranks did over time")


def _attempts(track: RankTrack, y: int, end: int) -> list[str]:
    lines = [f'<text class="strong" x="0" y="{y + 10}">rank {track.rank}</text>']
    for life in track.lives:
        begin, stop = _x(life.begin, end), _x(life.end, end)
        colour = _UNKNOWN if not life.is_over else _FAILED if life.exit else _WELL
        how = "its end was not recorded" if not life.is_over else life.exit or "ended well"
        lines.append(
            f'<rect x="{begin:.1f}" y="{y + 2}" width="{max(1.0, stop - begin):.1f}" '
            f'height="{ROW - 6}" fill="{colour}"><title>rank {track.rank}, attempt '
            f"{life.attempt}: {_time(life.begin)} to {_time(life.end)}, {escape(how)}"
            "</title></rect>"
        )
    return lines


def _shares(track: RankTrack, end: int) -> Iterable[tuple[str, str, list[float]]]:
    sections = [(each.begin, each.end) for each in track.sections if not each.depth]
    yield "sections", _SECTIONS, busy_shares(sections, end, BINS)
    covered = busy_shares(track.covered, end, BINS)
    calls = busy_shares([(each.begin, each.end) for each in track.calls], end, BINS)
    waits = [(each.begin, each.waited_until) for each in track.calls if each.waited_until]
    waiting = busy_shares(waits, end, BINS)
    yield "collectives", _CALLS, _of_what_was_seen(calls, covered)
    yield "waiting", _WAITING, _of_what_was_seen(waiting, covered)


def _sampled_shares(track: RankTrack, end: int) -> list[float]:
    """How many calls C++ has begun in each part of the time, of the most in any."""
    counts = [0] * BINS
    for call in track.calls:
        if call.stage == BEGUN_BY_CPP and end:
            counts[min(BINS - 1, call.begin * BINS // end)] += 1
    most = max(counts)
    return [count / most if most else 0.0 for count in counts]


def _of_what_was_seen(shares: Sequence[float], covered: Sequence[float]) -> list[float]:
    """Where a part of the time was recorded, that part stands for all of it."""
    return [
        min(1.0, share / max(seen, share)) if seen and share else 0.0
        for share, seen in zip(shares, covered, strict=True)
    ]


Curve = tuple[str, list[tuple[int, float]]]
"""A name, and its values over time."""


def resource_chart(timeline: RunTimeline, ranks: Sequence[int], what: str) -> str:
    """CPU time per second, or memory, of each rank over time."""
    curves: list[Curve] = [
        (
            f"rank {rank}",
            _cores(timeline.tracks[rank]) if what == "cores" else _memory(timeline, rank),
        )
        for rank in ranks
    ]
    return _curves_chart(timeline, curves, what, f"{what} of each rank over time")


def gpu_chart(timeline: RunTimeline, what: str) -> str:
    """The share of time in which kernels ran, memory or temperature of each GPU over time."""
    has_nodes = len({node for node, _ in timeline.gpus}) > 1
    curves: list[Curve] = [
        (
            f"GPU {gpu}, node {node}" if has_nodes else f"GPU {gpu}",
            [(at, value) for at, each in seen if (value := _of_gpu(each, what)) is not None],
        )
        for (node, gpu), seen in list(timeline.gpus.items())[:RANKS_SHOWN]
    ]
    if not any(points for _, points in curves):
        return ""
    return _curves_chart(timeline, curves, what, f"{what} of each GPU over time")


def _of_gpu(sample: GpuSample, what: str) -> float | None:
    if what == "memory":
        return None if sample.memory is None else float(sample.memory)
    if what == "% busy":
        return None if sample.utilisation is None else 100 * sample.utilisation
    return None if sample.celsius is None else float(sample.celsius)


def _curves_chart(timeline: RunTimeline, curves: Sequence[Curve], what: str, title: str) -> str:
    highest = max((value for _, points in curves for _, value in points), default=0.0)
    unit, size = _unit_of_memory(highest) if what == "memory" else (what, 1)
    highest = size * round_up(highest / size)
    lines = _frame(highest, unit, size)
    for index, (name, points) in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        if points:
            places = [(_x(at, timeline.end), _height(value, highest)) for at, value in points]
            lines.append(polyline(places, colour, name))
        x, row = index % 8, index // 8
        lines.append(
            f'<text x="{LEFT + 110 * x}" y="{_PLOT_TOP + _PLOT_HEIGHT + 38 + 14 * row}" '
            f'fill="{colour}">{name}</text>'
        )
    lines += time_axis(timeline.end, _PLOT_TOP + _PLOT_HEIGHT, _time)
    height = _PLOT_TOP + _PLOT_HEIGHT + 46 + 14 * (max(0, len(curves) - 1) // 8)
    return svg(LEFT + WIDTH + 20, height, lines, title)


def _frame(highest: float, unit: str, size: int) -> list[str]:
    lines = []
    for value in (0.0, highest / 2, highest):
        lines += level(_height(value, highest), f"{value / size:.4g} {unit}")
    return lines


def _cores(track: RankTrack) -> list[tuple[int, float]]:
    samples = sorted(track.samples, key=lambda each: each[0])
    return [
        (at, (sample.cpu - before.cpu) / (at - earlier))
        for (earlier, before), (at, sample) in pairwise(samples)
        if at > earlier and sample.cpu >= before.cpu  # else it is another process
    ]


def _memory(timeline: RunTimeline, rank: int) -> list[tuple[int, float]]:
    samples = sorted(timeline.tracks[rank].samples, key=lambda each: each[0])
    return [(at, float(sample.memory)) for at, sample in samples]


def _unit_of_memory(highest: float) -> tuple[str, int]:
    """A unit in which this many bytes can be read, as `rankwise ps` and `top` have it."""
    return ("GiB", 1 << 30) if highest >= 1 << 30 else ("MiB", 1 << 20)


def _height(value: float, highest: float) -> float:
    return _PLOT_TOP + _PLOT_HEIGHT * (1 - (value / highest if highest else 0.0))


def _x(at: int, end: int) -> float:
    return LEFT + WIDTH * min(1.0, max(0.0, at / end if end else 0.0))


def _time(at: int) -> str:
    return format_duration(Duration(at))
