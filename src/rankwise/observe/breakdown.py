"""Where the time of a run of processes went, from its journals: as predictions are divided."""

from collections.abc import Iterable
from fractions import Fraction

from rankwise.observe.records import BEGUN_BY_CPP
from rankwise.observe.timeline import PlacedCall, RankTrack, RunTimeline
from rankwise.sim.reporting.breakdown import (
    COMPUTE,
    EXPOSED,
    HOST,
    WAITING,
    Breakdown,
    RankParts,
    parts_of,
)

_PICOSECONDS = 1_000
"""Of a nanosecond."""
OUTSIDE = "outside of sections and collectives"
Key = tuple[str, str]
_Interval = tuple[int, int, int, Key]
"""Begin, end, order (of what goes on at one time, the lowest counts), and what it is."""


def breakdown_of(timeline: RunTimeline) -> Breakdown:
    """Divide the time of each rank, from the begin of the run to the end of its journal."""
    described = timeline.nodes[0].described
    remarks = []
    if timeline.calls_recorded < 0.995:
        share = Fraction(round(1000 * timeline.calls_recorded), 10)
        remarks.append(
            f"{float(share):g} % of the calls were recorded, the others count as compute"
        )
    if any(
        call.stage == BEGUN_BY_CPP for track in timeline.tracks.values() for call in track.calls
    ):
        remarks.append("calls that C++ begins (DDP, FSDP) have no durations, they count as compute")
    hosts = sorted({node.host for node in timeline.nodes if node.host})
    return Breakdown(
        program="" if described is None else _program_of(described.command),
        machine=", ".join(hosts) if described is None else described.host,
        size=timeline.world_size,
        whole_ps=timeline.end * _PICOSECONDS,
        steps=0,
        ranks=tuple(
            RankParts(
                rank,
                parts_of(
                    {
                        (*key, ""): time * _PICOSECONDS
                        for key, time in divide(_intervals(track)).items()
                    },
                    timeline.end * _PICOSECONDS,
                ),
            )
            for rank, track in timeline.tracks.items()
        ),
        remarks=tuple(remarks),
    )


def _program_of(command: Iterable[str]) -> str:
    return next((word for word in command if word.endswith(".py")), "")


def _intervals(track: RankTrack) -> Iterable[_Interval]:
    for life in track.lives:
        yield life.begin, life.end, 3, (COMPUTE, OUTSIDE)
    if track.lives:
        yield 0, track.lives[0].begin, 4, (HOST, "until the rank starts")
    for each in track.sections:
        yield each.begin, each.end, 2, (COMPUTE, f"section {each.name}")
    for call in track.calls:
        if call.stage != BEGUN_BY_CPP:
            kind = _kind_of(call)
            yield call.begin, call.waited_until, 0, (WAITING, kind)
            yield call.waited_until, call.end, 1, (EXPOSED, kind)


def _kind_of(call: PlacedCall) -> str:
    """The operation without its number, operands and place: `all_reduce`."""
    return call.signature.operation


def divide(intervals: Iterable[_Interval]) -> dict[Key, int]:
    """How long each was the first of what went on."""
    borders: list[tuple[int, int, int, Key]] = []
    for begin, end, order, key in intervals:
        if end > begin:
            borders += [(begin, 1, order, key), (end, -1, order, key)]
    borders.sort()
    found: dict[Key, int] = {}
    active: dict[tuple[int, Key], int] = {}
    before = 0
    for at, change, order, key in borders:
        if active and at > before:
            _, first = min(active)
            found[first] = found.get(first, 0) + at - before
        before = at
        count = active.get((order, key), 0) + change
        if count:
            active[order, key] = count
        else:
            active.pop((order, key), None)
    return found
