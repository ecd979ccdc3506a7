"""What a prediction says: the figures for the terminal, the page and the timeline for Perfetto.

Where a program steps an optimiser at least twice, the figures are per step, from the end of the
first step to that of the last: the first one has more to do. Otherwise they are of the whole run.
"""

import json
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.base.units import format_bytes
from rankwise.sim.benches.holding import ENOUGH
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.prediction.clocks import Account, Prediction, PricedWork, RankClock
from rankwise.sim.prediction.holders import Held
from rankwise.sim.prediction.machines.catalogue import MachineTopology
from rankwise.sim.prediction.machines.trust import interval_in_words, interval_of
from rankwise.sim.reporting.page import Table, write_page
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.reporting.trace import write_trace

if TYPE_CHECKING:
    from rankwise.sim.hardware.op_log import OpLog
    from rankwise.sim.hardware.topology import Topology

OPERATIONS_SHOWN = 20
RANKS_SHOWN = 64
UNKNOWN_SHOWN = 3
HOLDERS_SHOWN = 3
PICOSECONDS_PER_SECOND = 1_000_000_000_000
VALUES_SHOWN = 3
LAUNCH = "launch"


class Figures(NamedTuple):
    """What the ranks spend their time with.

    Attributes:
        steps: how many steps the figures are a mean of; 0 if they are of the whole run.
        time: of a step, or of the run, in picoseconds: that of the slowest rank.
        computing, exposed, waiting, asleep: shares of it, means over the ranks; what is missing
            to 1 is the time after the end of a rank, which counts as waiting, as does all of it
            for one that has done nothing.
        bubble: the part of `waiting` that is for messages of others; the rest is for collectives.
            The time after the end of ranks is divided as they waited before.
        launch: the part of `computing` that is the launches of operations; on a machine whose hosts
            have clocks of their own, in which a device waits for its host.
        communicating: picoseconds of communication per rank in that time, hidden or not.
        memory_peak: of the device that needed most, in bytes; `memory_rank` says whose it is.
    """

    steps: int
    time: int
    computing: float
    exposed: float
    waiting: float
    asleep: float
    bubble: float
    launch: float
    communicating: int
    memory_peak: int
    memory_rank: int

    @property
    def hidden(self) -> float:
        """The share of communication that something was computed under."""
        if not self.communicating:
            return 0.0
        return max(0.0, 1 - self.exposed * self.time / self.communicating)

    @property
    def held_back_by(self) -> tuple[str, float]:
        """What costs most besides the work itself, and its share; no name if that is little."""
        causes = {
            "links": self.exposed,
            "pipeline bubble": self.bubble,
            "imbalance of ranks": self.waiting - self.bubble,
            LAUNCH: self.launch,
            "sleep": self.asleep,
        }
        if not self.time or self.computing - self.launch >= ENOUGH:
            return "", 0.0
        cause = max(causes, key=lambda each: causes[each])
        return cause, causes[cause]


def figures_of(prediction: Prediction) -> Figures:
    """The figures of a run."""
    clocks = [clock for _, clock in sorted(prediction.clocks.items())]
    steps = max(0, min((len(clock.steps) for clock in clocks), default=0) - 1)
    spent = [_spent(clock, steps) for clock in clocks]
    whole = max((each.time for each in spent), default=0)
    size = prediction.simulated_count
    fullest = max(clocks, key=lambda clock: clock.memory.peak_of_run, default=None)

    def share(name: str) -> float:
        return sum(getattr(each, name) for each in spent) / (whole * size) if whole else 0.0

    computing, exposed, asleep = share("computing"), share("exposed"), share("asleep")
    behind = share("behind")
    launch, computing = computing * _launching(prediction) + behind, computing + behind
    waiting = max(0.0, 1 - computing - exposed - asleep) if whole else 0.0
    waited = sum(each.waiting for each in spent)
    for_peers = sum(each.for_peers for each in spent) / waited if waited else 0.0
    return Figures(
        steps=steps,
        time=whole // max(1, steps),
        computing=computing,
        exposed=exposed,
        waiting=waiting,
        asleep=asleep,
        bubble=for_peers * waiting,
        launch=launch,
        communicating=sum(each.communicating for each in spent) // (size * max(1, steps)),
        memory_peak=fullest.memory.peak_of_run if fullest else 0,
        memory_rank=fullest.number if fullest else 0,
    )


def _launching(prediction: Prediction) -> float:
    """The share of all computing that is launches."""
    works, costs = prediction.works, prediction.costs
    whole = sum(each.count * each.duration for each in works)
    launches = sum(each.count * costs.launch(each.work, each.duration) for each in works)
    return launches / whole if whole else 0.0


def _spent(clock: RankClock, steps: int) -> Account:
    """What a rank spent in the steps that count, or in the whole run."""
    if not steps:
        return clock.account
    return clock.steps[steps].since(clock.steps[0])


def figure_rows(prediction: Prediction) -> list[tuple[str, str, str]]:
    """The figures as rows: what, how much, and what there is to add."""
    figures = figures_of(prediction)
    counted = f"mean of {figures.steps} after the first" if figures.steps else ""
    capacity = prediction.capacity
    full = ": does not fit" if figures.memory_peak > capacity else ""
    cause, cost = figures.held_back_by
    imbalance = max(0.0, figures.waiting - figures.bubble)
    rows = [
        ("step time" if figures.steps else "time", format_picoseconds(figures.time), counted),
        *_interval_rows(prediction, figures),
        ("computing", _percent(figures.computing), ""),
        (
            "exposed communication",
            _percent(figures.exposed),
            f"of {format_picoseconds(figures.communicating)}, {_percent(figures.hidden)} is hidden"
            if figures.communicating
            else "",
        ),
        (
            "waiting for others",
            _percent(figures.waiting),
            f"pipeline bubble {_percent(figures.bubble)}, imbalance {_percent(imbalance)}",
        ),
        ("asleep", _percent(figures.asleep), ""),
        ("held back by", _percent(cost), _in_words(prediction, cause)),
        (
            "peak memory",
            format_bytes(figures.memory_peak),
            f"rank {figures.memory_rank}; a device has {format_bytes(capacity)}{full}",
        ),
    ]
    if prediction.unknown:
        names = sorted({work.name for work in prediction.unknown})
        count = sum(priced.count for priced in prediction.unknown.values())
        told = ", ".join(names[:UNKNOWN_SHOWN]) + ", ..." * (len(names) > UNKNOWN_SHOWN)
        why = "flops unknown, so only bytes count; a cost model can price it"
        rows.append(("too cheap", f"{count:,} operations", f"{told}: {why}"))
    left_out = {
        name for name, tells in (("asleep", figures.asleep), ("held back by", cause)) if not tells
    }
    return [row for row in rows if row[0] not in left_out]


def _interval_rows(prediction: Prediction, figures: Figures) -> list[tuple[str, str, str]]:
    """What the time may be, on a machine that exists."""
    interval = interval_of(prediction, figures.time)
    if interval is None or not figures.time:
        return []
    ends = " to ".join(format_picoseconds(each, 3) for each in (interval.low, interval.high))
    return [("interval", ends, interval_in_words(interval))]


def _in_words(prediction: Prediction, cause: str) -> str:
    """What costs most; of a machine whose hosts have clocks of their own, what that means."""
    if cause == LAUNCH and isinstance(prediction.topology, MachineTopology):
        return "launches of kernels: the device waits for its host; counted as computing"
    return cause


def summary(prediction: Prediction, *, has_failed: bool = False) -> str:
    """The figures, for a terminal; those of a run that has failed go up to its end."""
    topology, rows = prediction.topology, figure_rows(prediction)
    if not prediction.now:
        return (
            f"predicted on {topology.name}: nothing, since no rank has computed with torch or "
            "Triton, called a collective or slept"
        )
    devices = f"{prediction.size} of {topology.sip_count} devices"
    if prediction.equals is not None:
        devices += f"; checked {prediction.simulated_count} of {prediction.size} ranks"
    until = ", until it failed" if has_failed else ""
    name_width = max(len(name) for name, _, _ in rows)
    width = max(len(value) for _, value, _ in rows)
    lines = [
        f"predicted on {topology.name}, {devices}{until}:",
        *(
            f"  {name:<{name_width}}  {value:>{width}}  {note}".rstrip()
            for name, value, note in rows
        ),
    ]
    lines += [f"  {line}" for line in holder_lines(prediction)]
    lines += [f"  {line}" for line in value_lines(prediction)]
    lines += [f"  {line}" for line in prediction.remarks]
    return "\n".join(lines)


def holder_lines(prediction: Prediction) -> list[str]:
    """Who holds the memory of the fullest device at the peak of a step, after a head."""
    clock = prediction.clocks.get(figures_of(prediction).memory_rank)
    book = None if clock is None else clock.memory.book
    if clock is None or book is None:
        return []
    rows, at = book.at_peak, f"at the peak of a step, {format_bytes(book.peak)}"
    if not rows:
        rows, at = book.present(), f"at the end, {format_bytes(clock.memory.used)}"
    return [f"memory of rank {clock.number} {at}:", *(f"  {line}" for line in held_in_words(rows))]


def value_lines(prediction: Prediction) -> list[str]:
    """What the program asked for that was not computed, after a head."""
    policy = prediction.values
    if policy is None or not policy.answers:
        return []
    return [
        "numbers that the program asked for, and got without computing:",
        *(
            f"  {PurePath(asked.place).name}  {asked.what}, {count:,} time{'s' * (count > 1)}: "
            + ", ".join(f"{each:g}" for each in first[:VALUES_SHOWN])
            + (", ..." if count > VALUES_SHOWN else "")
            for asked, (count, first) in sorted(policy.answers.items())
        ),
    ]


def rank_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """The time of each rank, for the page; a head first."""
    steps = figures_of(prediction).steps
    rows: list[tuple[str, ...]] = [
        ("rank", "time", "computing", "exposed communication", "waiting for others", "peak memory")
    ]
    clocks = sorted(prediction.clocks.items())
    for number, clock in clocks[:RANKS_SHOWN]:
        spent = _spent(clock, steps)
        whole = max(1, spent.time)
        rows.append(
            (
                str(number),
                format_picoseconds(spent.time),
                _percent(spent.computing / whole),
                _percent(spent.exposed / whole),
                _percent(spent.waiting / whole),
                format_bytes(clock.memory.peak_of_run),
            )
        )
    return rows


def results_of(prediction: Prediction, program: str) -> list[BenchResult]:
    """The operations that took most of the time, by name, all ranks together."""
    by_name: dict[str, list[PricedWork]] = {}
    for priced in prediction.works:
        by_name.setdefault(priced.work.name, []).append(priced)
    results = [_result(prediction, program, each) for _, each in sorted(by_name.items())]
    return sorted(results, key=lambda result: -result.time_ps)[:OPERATIONS_SHOWN]


def _result(prediction: Prediction, program: str, works: list[PricedWork]) -> BenchResult:
    dearest = max(works, key=lambda each: each.count * each.duration)
    return BenchResult(
        bench=program,
        case=f"{dearest.work.name} x {sum(each.count for each in works):,}",
        time_ps=sum(each.count * each.duration for each in works),
        flops=sum(each.count * each.work.flops for each in works),
        bytes=sum(each.count * each.work.size for each in works),
        bound=prediction.costs.bound(dearest.work)[0],
        bound_ps=sum(each.count * prediction.costs.bound(each.work)[1] for each in works),
        is_checked=False,
    )


class PredictedRun:
    """A run as the reports of `rankwise sim` want it; see `reporting.run`."""

    messages = None
    samples = None

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self.topology: Topology = prediction.topology
        self.op_log: OpLog = prediction.op_log
        self.now = prediction.now
        self.machine = self

    def utilisation(self) -> dict[str, float]:
        """How busy each device was with computing, as a share of the whole run."""
        whole = max(1, self.now)
        return {
            f"sip{number}.computing": clock.account.computing / whole
            for number, clock in sorted(self._prediction.clocks.items())
        }


def document(prediction: Prediction) -> dict[str, Any]:
    """The figures of a run, for other programs; times in seconds, sizes in bytes."""
    figures = figures_of(prediction)
    clocks = [prediction.clocks[each] for each in sorted(prediction.clocks)]
    fullest = prediction.clocks.get(figures.memory_rank)
    book = None if fullest is None else fullest.memory.book
    step = figures.time / PICOSECONDS_PER_SECOND
    return {
        "machine": prediction.topology.name,
        "ranks": prediction.size,
        "checked_ranks": prediction.simulated_count,
        "steps": figures.steps,
        "step_time_s": step,
        "interval": _interval_fields(prediction, figures),
        "computing_s": figures.computing * step,
        "communication_s": figures.communicating / PICOSECONDS_PER_SECOND,
        "exposed_communication_s": figures.exposed * step,
        "waiting_s": figures.waiting * step,
        "peak_active_bytes": figures.memory_peak,
        "peak_reserved_bytes": max((clock.memory.reserved.peak for clock in clocks), default=0),
        "context_bytes": prediction.capacity - prediction.memory_limit,
        "capacity_bytes": prediction.capacity,
        "peak_rank": figures.memory_rank,
        "peak_of_steps_bytes": 0 if book is None else book.peak,
        "holders": [] if book is None else [row._asdict() for row in book.at_peak],
        "memory_over_step": [] if book is None else book.curve,
        "values": [] if prediction.values is None else prediction.values.told(),
        "remarks": prediction.remarks,
        "too_cheap": sorted({work.name for work in prediction.unknown}),
    }


def _interval_fields(prediction: Prediction, figures: Figures) -> dict[str, Any] | None:
    """What a step may take; None on a topology, which is checked against nothing."""
    interval = interval_of(prediction, figures.time)
    if interval is None:
        return None
    return {
        "low_s": interval.low / PICOSECONDS_PER_SECOND,
        "high_s": interval.high / PICOSECONDS_PER_SECOND,
        "extrapolated": list(interval.extrapolated),
        "against": interval.against,
    }


def write_document(prediction: Prediction, path: str) -> None:
    """Write the figures of a run to a file of JSON."""
    Path(path).write_text(json.dumps(document(prediction), indent=1) + "\n")


def write_files(
    prediction: Prediction, program: str, trace: str | None, report: str | None
) -> None:
    """Write the timeline and the page that were asked for."""
    run = PredictedRun(prediction)
    if trace is not None:
        write_trace(trace, run)
    if report is not None:
        tables: list[Table] = [
            ("Prediction", [("figure", "value", ""), *figure_rows(prediction)]),
            ("Ranks", rank_rows(prediction)),
        ]
        write_page(report, program, run, results_of(prediction, program), tables)


def gibibytes(size: int) -> str:
    """A size in GiB, for messages that compare several; small ones get more digits."""
    size_gib = size / 2**30
    return f"{size_gib:.1f}" if size_gib >= 1 else f"{size_gib:.3g}"


def held_in_words(rows: list[Held]) -> list[str]:
    """Who holds memory: each kind with its share, then the largest holders of each."""
    kinds: dict[str, int] = {}
    for row in rows:
        kinds[row.kind] = kinds.get(row.kind, 0) + row.size
    lines = []
    for kind, size in sorted(kinds.items(), key=lambda item: -item[1]):
        largest = [row for row in rows if row.kind == kind][:HOLDERS_SHOWN]
        told = ", ".join(_holder_in_words(row) for row in largest if row.module or row.place)
        lines.append(f"{kind:<22} {format_bytes(size):>11}  {told}".rstrip())
    return lines


def _holder_in_words(row: Held) -> str:
    where = f"{row.module} ({row.place})" if row.module and row.place else row.module or row.place
    return f"{where} {format_bytes(row.size)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
