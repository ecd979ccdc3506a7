"""What a prediction says: the figures for the terminal, the page and the timeline for Perfetto.

Where a program steps an optimiser at least twice, the figures are per step, from the end of the
first step to that of the last: the first one has more to do. Otherwise they are of the whole run.
"""

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rankwise.base.units import format_bytes
from rankwise.base.wording import ranks_in_words
from rankwise.sim.benches.link_contention import ENOUGH
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.reporting.breakdown import EXPOSED, Breakdown, RankParts, parts_of
from rankwise.sim.reporting.files import write_text
from rankwise.sim.reporting.page import Table, write_page
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.reporting.trace import write_trace
from rankwise.simranks.prediction.bill import Key, difference
from rankwise.simranks.prediction.clocks import (
    Account,
    Prediction,
    PricedWork,
    RankClock,
)
from rankwise.simranks.prediction.holders import Held
from rankwise.simranks.prediction.machines.catalogue import MachineTopology
from rankwise.simranks.prediction.machines.trust import (
    Interval,
    interval_in_words,
    interval_of,
    memory_interval,
)
from rankwise.simranks.prediction.useful_work import Achieved

if TYPE_CHECKING:
    from rankwise.sim.hardware.op_log import OpLog
    from rankwise.sim.hardware.topology import Topology

OPERATIONS_SHOWN = 20
RANKS_SHOWN = 64
UNKNOWN_SHOWN = 3
HOLDERS_SHOWN = 3
PICOSECONDS_PER_SECOND = 1_000_000_000_000
VALUES_SHOWN = 3
READS_SHOWN = 3
COLUMNS = 80
_GLUE = "\N{NO-BREAK SPACE}"
LAUNCH = "launch"
_STAGES_SHOWN = 8
_SHARE_SHOWN = 0.0005
"""Shares from which on they are shown: others are 0.0 %."""


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
        tokens: of a step, or of the run, on all ranks; 0 if no embedding has told them.
        model_flops: of a step, or of the run, on all ranks; see `useful_work`.
        exposed_by: the parts of `exposed`, by kind of operation.
        mfu, hfu: the share of the peak that they are, without and with what is computed again.
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
    tokens: int = 0
    model_flops: int = 0
    mfu: float = 0.0
    hfu: float = 0.0
    exposed_by: Mapping[str, float] = MappingProxyType({})

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens * PICOSECONDS_PER_SECOND / self.time if self.time else 0.0

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
    # The first step is left out: it warms caches up, compiles and allocates.
    steps = max(0, min((len(clock.steps) for clock in clocks), default=0) - 1)
    spent = [_spent(clock, steps) for clock in clocks]
    # A step takes what it takes its slowest rank; shares of the others are of the same time.
    whole = max((each.time for each in spent), default=0)
    # A rank that ran counts for all of its class.
    weights = [prediction.weight(clock.number) for clock in clocks]
    size = prediction.size
    fullest = max(clocks, key=lambda clock: clock.memory.peak_of_run, default=None)

    def weighted(values: Iterable[float]) -> float:
        return sum(each * weight for each, weight in zip(values, weights, strict=True))

    def share(name: str) -> float:
        return weighted(getattr(each, name) for each in spent) / (whole * size) if whole else 0.0

    computing, exposed, asleep = share("computing"), share("exposed"), share("asleep")
    behind = share("behind")
    launch, computing = computing * _launching(prediction) + behind, computing + behind
    # The rest, so that the shares add up to one; rounding may leave less than nothing.
    waiting = max(0.0, 1 - computing - exposed - asleep) if whole else 0.0
    waited = weighted(each.waiting for each in spent)
    for_peers = weighted(each.for_peers for each in spent) / waited if waited else 0.0
    achieved = [_achieved(clock, steps) for clock in clocks]
    tokens = prediction.tokens_per_step
    if tokens is None:
        tokens = round(weighted(each.tokens for each in achieved) / max(1, steps))
    return Figures(
        steps=steps,
        time=whole // max(1, steps),
        computing=computing,
        exposed=exposed,
        waiting=waiting,
        asleep=asleep,
        bubble=for_peers * waiting,
        launch=launch,
        communicating=round(weighted(each.communicating for each in spent))
        // (size * max(1, steps)),
        memory_peak=fullest.memory.peak_of_run if fullest else 0,
        memory_rank=fullest.number if fullest else 0,
        tokens=tokens,
        model_flops=round(weighted(each.model_flops for each in achieved) / max(1, steps)),
        mfu=weighted(each.model_peak for each in achieved) / (whole * size) if whole else 0.0,
        hfu=weighted(each.all_peak for each in achieved) / (whole * size) if whole else 0.0,
        exposed_by=_exposed_by(prediction, steps, whole * size),
    )


def _remarks_of(prediction: Prediction) -> list[str]:
    """Remarks of the run, and why its figures are of no step if some ranks have steps."""
    counts = {each.number: len(each.steps) for each in prediction.clocks.values()}
    least, most = min(counts, key=counts.__getitem__, default=0), max(counts.values(), default=0)
    if not counts or counts[least] > 1 or most <= 1:
        return [*prediction.remarks]
    few = "stepped an optimizer once" if counts[least] else "never stepped an optimizer"
    remark = f"figures are of the whole run: rank {least} {few}, another rank {most} times"
    return [*prediction.remarks, remark]


def _launching(prediction: Prediction) -> float:
    """The share of all computing that is launches."""
    counts, costs = _counts_of(prediction, 0), prediction.costs
    whole = sum(count * each.duration for each, count in counts.items())
    launches = sum(count * costs.launch(each.work, each.duration) for each, count in counts.items())
    return launches / whole if whole else 0.0


def _spent(clock: RankClock, steps: int) -> Account:
    """What a rank spent in the steps that count, or in the whole run."""
    if not steps:
        return clock.account
    return clock.steps[steps].since(clock.steps[0])


def breakdown_of(prediction: Prediction, program: str) -> Breakdown:
    """Where the time of each simulated rank went, in the steps that `figures_of` tells of."""
    figures = figures_of(prediction)
    clocks = [clock for _, clock in sorted(prediction.clocks.items())]
    whole = max((_spent(clock, figures.steps).time for clock in clocks), default=0)
    remarks = _remarks_of(prediction)
    if prediction.equals is not None:
        remarks.append(f"{prediction.simulated_count} of {prediction.size} ranks stand for all")
    return Breakdown(
        program=program,
        machine=prediction.topology.name,
        size=prediction.size,
        whole_ps=whole,
        steps=figures.steps,
        ranks=tuple(
            RankParts(
                clock.number,
                parts_of(_bill_of(prediction, clock, figures.steps), whole),
                prediction.weight(clock.number),
            )
            for clock in clocks
        ),
        peak_memory=figures.memory_peak,
        remarks=tuple(remarks),
    )


def _bill_of(prediction: Prediction, clock: RankClock, steps: int) -> dict[Key, int]:
    costs = prediction.costs
    if not steps:
        return clock.bill.spent(costs)
    return difference(clock.bills[steps].spent(costs), clock.bills[0].spent(costs))


def _exposed_by(prediction: Prediction, steps: int, whole: int) -> dict[str, float]:
    """The kinds of exposed communication, as shares of the time of all ranks."""
    together: dict[str, float] = {}
    for clock in prediction.clocks.values():
        weight = prediction.weight(clock.number)
        for (cause, kind, _), time in _bill_of(prediction, clock, steps).items():
            if cause == EXPOSED:
                together[kind] = together.get(kind, 0.0) + time * weight
    return {kind: time / whole for kind, time in sorted(together.items())}


def _achieved(clock: RankClock, steps: int) -> Achieved:
    """What a rank achieved in the same time."""
    if not steps:
        return clock.work.achieved
    return clock.work_of_steps[steps].since(clock.work_of_steps[0])


def figure_rows(prediction: Prediction) -> list[tuple[str, str, str]]:
    """The figures as rows: what, how much, and what there is to add."""
    figures = figures_of(prediction)
    counted = f"mean of {figures.steps} after the first" if figures.steps else ""
    cause, cost = figures.held_back_by
    imbalance = max(0.0, figures.waiting - figures.bubble)
    rows = [
        ("step time" if figures.steps else "time", format_picoseconds(figures.time), counted),
        *_interval_rows(prediction, figures),
        *_rate_rows(prediction, figures),
        ("computing", _percent(figures.computing), ""),
        ("exposed communication", _percent(figures.exposed), _exposed_in_words(figures)),
        ("pipeline bubble", _percent(figures.bubble), _stages_in_words(prediction, figures)),
        (
            "waiting for others",
            _percent(figures.waiting),
            f"pipeline bubble {_percent(figures.bubble)}, imbalance {_percent(imbalance)}",
        ),
        ("asleep", _percent(figures.asleep), ""),
        ("held back by", _percent(cost), _in_words(prediction, cause)),
        *_memory_rows(prediction, figures),
    ]
    if prediction.unknown:
        names = sorted({work.name for work in prediction.unknown})
        count = sum(priced.count for priced in prediction.unknown.values())
        told = ", ".join(names[:UNKNOWN_SHOWN]) + ", ..." * (len(names) > UNKNOWN_SHOWN)
        why = "flops unknown, so only bytes count; a cost model (docs: plug-ins) can price it"
        rows.append(("too cheap", f"{count:,} operations", f"{told}: {why}"))
    shows = {
        "asleep": figures.asleep,
        "held back by": cause,
        "pipeline bubble": figures.bubble >= _SHARE_SHOWN,
    }
    # A row of nothing would only be in the way; rows that are always there can be compared.
    left_out = {name for name, is_shown in shows.items() if not is_shown}
    return [row for row in rows if row[0] not in left_out]


def _rate_rows(prediction: Prediction, figures: Figures) -> list[tuple[str, str, str]]:
    """What the step achieves, with what it may be on a machine that exists."""
    rows = []
    interval = interval_of(prediction, figures.time) if figures.time else None

    def between(value: float, form: Callable[[float], str]) -> list[str]:
        """A rate is high where the time is low."""
        if interval is None:
            return []
        ends = (value * figures.time / each for each in (interval.high, interval.low))
        return [_between(*map(form, ends))]

    if figures.tokens and figures.time:
        rate = figures.tokens_per_second
        each = f"{_rounded(rate / prediction.size)} per device"
        rows.append(("tokens/s", _rounded(rate), "; ".join([*between(rate, _rounded), each])))
    if figures.mfu >= _SHARE_SHOWN:
        notes = between(figures.mfu, _percent)
        if figures.hfu - figures.mfu > _SHARE_SHOWN:
            notes.append(f"HFU {_percent(figures.hfu)}")
        rows.append(("MFU", _percent(figures.mfu), "; ".join(notes)))
    return rows


def _exposed_in_words(figures: Figures) -> str:
    if not figures.communicating:
        return ""
    told = f"of {format_picoseconds(figures.communicating)}, {_percent(figures.hidden)} is hidden"
    kinds = sorted(figures.exposed_by.items(), key=lambda item: (-item[1], item[0]))
    shares = [f"{kind} {_percent(share)}" for kind, share in kinds if share >= _SHARE_SHOWN]
    return f"{told}; {', '.join(shares)}" if shares else told


class PipelineStage(NamedTuple):
    """A stage of the pipelines of a program.

    Attributes:
        position: in its pipeline.
        computing, bubble: means over its ranks, in picoseconds of a step.
        peak: the most memory of any of its ranks, in bytes.
    """

    position: int
    computing: float
    bubble: float
    peak: int


def stages_of(prediction: Prediction) -> list[PipelineStage]:
    """The stages, if ranks send each other messages: by the place in the group that they use."""
    by_position: dict[int, list[RankClock]] = {}
    # Messages in shorter groups, such as of two neighbours, tell no place in the whole pipeline.
    longest = max(map(len, prediction.pipelines), default=0)
    for ranks, places in prediction.pipelines.items():
        for clock in prediction.clocks.values():
            if len(ranks) == longest and clock.number in places:
                by_position.setdefault(places[clock.number], []).append(clock)
    steps = figures_of(prediction).steps

    def mean(name: str, clocks: list[RankClock]) -> float:
        weights = [prediction.weight(clock.number) for clock in clocks]
        values = (
            weight * getattr(_spent(clock, steps), name)
            for weight, clock in zip(weights, clocks, strict=True)
        )
        return float(sum(values) / sum(weights) / max(1, steps))

    return [
        PipelineStage(
            position,
            mean("computing", clocks),
            mean("for_peers", clocks),
            max(clock.memory.peak_of_run for clock in clocks),
        )
        for position, clocks in sorted(by_position.items())
    ]


def _stages_in_words(prediction: Prediction, figures: Figures) -> str:
    """The bubble and the memory by stage, for a note."""
    stages = stages_of(prediction)
    if not 1 < len(stages) <= _STAGES_SHOWN or not figures.time:
        return ""
    bubbles = ", ".join(f"{100 * each.bubble / figures.time:.1f}" for each in stages)
    peaks = ", ".join(format_bytes(each.peak) for each in stages)
    return f"by stage {bubbles} %; peak memory {peaks}"


def _memory_rows(prediction: Prediction, figures: Figures) -> list[tuple[str, str, str]]:
    """The peak, and on a machine that exists what the allocator reserves for it."""
    capacity = prediction.capacity
    full = ": does not fit" if figures.memory_peak > capacity else ""
    rows = [
        (
            "peak memory",
            format_bytes(figures.memory_peak),
            f"rank {figures.memory_rank}; a device has {format_bytes(capacity)}{full}",
        )
    ]
    if isinstance(prediction.topology, MachineTopology) and figures.memory_peak:
        reserved = reserved_peak(prediction)
        interval = memory_interval(prediction, figures.memory_peak, reserved)
        ends = _between(format_bytes(interval.low), format_bytes(interval.high))
        is_close = figures.memory_peak <= prediction.memory_limit < interval.high
        may_not = "; may not fit" if is_close else ""
        note = f"{ends}{may_not}; {interval_in_words(interval)}"
        rows.append(("reserved memory", format_bytes(reserved), note))
    return rows


def reserved_peak(prediction: Prediction) -> int:
    """The most that the allocator of any device has reserved."""
    return max((clock.memory.reserved.peak for clock in prediction.clocks.values()), default=0)


def _rounded(value: float) -> str:
    """With four digits, as the uncertainty is larger."""
    digits = max(0, len(str(int(value))) - 4)
    return f"{round(value, -digits):,.0f}" if value >= 10 else f"{value:.3g}"


def _interval_rows(prediction: Prediction, figures: Figures) -> list[tuple[str, str, str]]:
    """What the time may be, on a machine that exists."""
    interval = interval_of(prediction, figures.time)
    if interval is None or not figures.time:
        return []
    ends = _between(*(format_picoseconds(each, 3) for each in (interval.low, interval.high)))
    return [("interval", ends, interval_in_words(interval))]


def _between(low: str, high: str) -> str:
    """Two quantities, with their unit once if it is the same."""
    # Both were formatted the line before: a table needs the unit once.
    number, _, unit = low.rpartition(" ")
    return f"{number if unit == high.rpartition(' ')[2] else low} to {high}"


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
    until = ", until it ended early" if has_failed else ""
    name_width = max(len(name) for name, _, _ in rows)
    width = max(len(value) for _, value, _ in rows)
    lines = [
        f"predicted on {topology.name}, {devices}{until}:",
        *(
            line
            for name, value, note in rows
            for line in _wrapped(f"  {name:<{name_width}}  {value:>{width}}  ", note)
        ),
    ]
    lines += [f"  {line}" for line in holder_lines(prediction)]
    lines += [f"  {line}" for line in value_lines(prediction)]
    lines += [f"  {line}" for line in [*_remarks_of(prediction), *_read_lines(prediction)]]
    return "\n".join(lines)


def _wrapped(head: str, note: str) -> list[str]:
    """A row in lines that a terminal shows whole."""
    whole = note.replace(" %", f"{_GLUE}%")  # a number stays with its sign
    parts = textwrap.wrap(whole, max(20, COLUMNS - len(head)), break_on_hyphens=False) or [""]
    rest = " " * len(head)
    lines = [f"{rest if index else head}{part}".rstrip() for index, part in enumerate(parts)]
    return [line.replace(_GLUE, " ") for line in lines]


def holder_lines(prediction: Prediction) -> list[str]:
    """The holders of the memory of the fullest device at the peak of a step, after a head."""
    clock = prediction.clocks.get(figures_of(prediction).memory_rank)
    records = None if clock is None else clock.memory.holder_records
    if clock is None or records is None:
        return []
    rows, at = records.at_peak, f"at the peak of a step, {format_bytes(records.peak)}"
    if not rows:
        rows, at = records.present(), f"at the end, {format_bytes(clock.memory.used)}"
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


def _read_lines(prediction: Prediction) -> list[str]:
    """Where the program reads the number of a rank, if some ranks stand for others."""
    reads = {} if prediction.equals is None else prediction.equals.reads
    if not reads:
        return []
    lines = sorted({place.rpartition(":")[::2] for place, _ in reads}, key=_by_line)
    places = [f"{PurePath(file).name}:{line}" for file, line in lines]
    told = ", ".join(places[:READS_SHOWN]) + ", ..." * (len(places) > READS_SHOWN)
    return [f"rank number read at {told}: ranks that were not checked may differ there"]


def _by_line(place: tuple[str, str]) -> tuple[str, int]:
    return place[0], int(place[1])


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
    """The operations that took most of the time, by name: of a step and a rank, in the mean."""
    steps = figures_of(prediction).steps
    counts = _counts_of(prediction, steps)
    by_name: dict[str, list[PricedWork]] = {}
    for priced in prediction.works:
        if counts[priced] > 0:
            by_name.setdefault(priced.work.name, []).append(priced)
    ranks = sum(prediction.weight(number) for number in prediction.clocks)
    times = max(1, steps) * max(1, ranks)
    results = [
        _result(prediction, program, each, {work: counts[work] / times for work in each})
        for _, each in sorted(by_name.items())
    ]
    return sorted(results, key=lambda result: -result.time_ps)[:OPERATIONS_SHOWN]


def _counts_of(prediction: Prediction, steps: int) -> dict[PricedWork, float]:
    """How often all ranks carry out each operation, those that do not run as those of their class.

    Of the steps after the first; of the whole run if there are none.
    """
    counts: defaultdict[PricedWork, float] = defaultdict(float)
    for number, clock in prediction.clocks.items():
        weight = prediction.weight(number)
        for work, count in (clock.counts_of_steps[-1] if steps else clock.counts).items():
            counts[work] += weight * count
        for work, count in clock.counts_of_steps[0].items() if steps else ():
            counts[work] -= weight * count
    return counts


def _result(
    prediction: Prediction, program: str, works: list[PricedWork], counts: dict[PricedWork, float]
) -> BenchResult:
    dearest = max(works, key=lambda each: counts[each] * each.duration)
    return BenchResult(
        bench=program,
        case=f"{dearest.work.name} x {_count(sum(counts.values()))}",
        time_ps=round(sum(counts[each] * each.duration for each in works)),
        flops=round(sum(counts[each] * each.work.flops for each in works)),
        bytes=round(sum(counts[each] * each.work.size for each in works)),
        bound=prediction.costs.bound(dearest.work)[0],
        bound_ps=round(sum(counts[each] * prediction.costs.bound(each.work)[1] for each in works)),
        is_checked=False,
    )


def _count(number: float) -> str:
    """How often, in the mean."""
    return f"{number:,.0f}" if number == round(number) else f"{number:,.1f}"


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


def document(prediction: Prediction, program: str = "") -> dict[str, Any]:
    """The figures of a run, for other programs; times in seconds, sizes in bytes."""
    figures = figures_of(prediction)
    fullest = prediction.clocks.get(figures.memory_rank)
    records = None if fullest is None else fullest.memory.holder_records
    step = figures.time / PICOSECONDS_PER_SECOND
    interval = interval_of(prediction, figures.time) if figures.time else None
    reserved = reserved_peak(prediction)
    is_real = isinstance(prediction.topology, MachineTopology)
    of_memory = memory_interval(prediction, figures.memory_peak, reserved) if is_real else None
    return {
        "machine": prediction.topology.name,
        "ranks": prediction.size,
        "checked_ranks": prediction.simulated_count,
        "classes": _class_fields(prediction),
        "steps": figures.steps,
        "step_time_s": step,
        "interval": _interval_fields(interval),
        "tokens_per_step": figures.tokens or None,
        "tokens_per_s": figures.tokens_per_second or None,
        "tokens_per_s_interval": _rate_interval(figures.tokens_per_second, figures, interval),
        "model_flops_per_step": figures.model_flops,
        "mfu": figures.mfu,
        "mfu_interval": _rate_interval(figures.mfu, figures, interval),
        "hfu": figures.hfu,
        "computing_s": figures.computing * step,
        "communication_s": figures.communicating / PICOSECONDS_PER_SECOND,
        "exposed_communication_s": figures.exposed * step,
        "exposed_communication_by_kind_s": {
            kind: share * step for kind, share in figures.exposed_by.items()
        },
        "waiting_s": figures.waiting * step,
        "bubble": figures.bubble,
        "bubble_s": figures.bubble * step,
        "stages": [
            {
                "stage": each.position,
                "computing_s": each.computing / PICOSECONDS_PER_SECOND,
                "bubble_s": each.bubble / PICOSECONDS_PER_SECOND,
                "peak_active_bytes": each.peak,
            }
            for each in stages_of(prediction)
        ],
        "peak_active_bytes": figures.memory_peak,
        "peak_reserved_bytes": reserved,
        # Intervals are told for machines that exist: those of chips are as they are described.
        "memory_interval": None
        if of_memory is None
        else {
            "low_bytes": of_memory.low,
            "high_bytes": of_memory.high,
            "extrapolated": list(of_memory.extrapolated),
            "against": of_memory.against,
        },
        "context_bytes": prediction.capacity - prediction.memory_limit,
        "capacity_bytes": prediction.capacity,
        "peak_rank": figures.memory_rank,
        "peak_of_steps_bytes": 0 if records is None else records.peak,
        "holders": [] if records is None else [row._asdict() for row in records.at_peak],
        "memory_over_step": [] if records is None else records.curve,
        "values": [] if prediction.values is None else prediction.values.described(),
        "remarks": _remarks_of(prediction),
        "is_upper_bound": prediction.is_upper_bound,
        "reads_of_rank": []
        if prediction.equals is None
        else [
            {"place": place, "what": what, "times": times}
            for (place, what), times in sorted(prediction.equals.reads.items())
        ],
        "too_cheap": sorted({work.name for work in prediction.unknown}),
        "breakdown": msgspec.to_builtins(breakdown_of(prediction, program)),
    }


def _class_fields(prediction: Prediction) -> list[dict[str, Any]] | None:
    """The ranks that stand for others; None if all have run."""
    if prediction.equals is None:
        return None
    digests = prediction.digests
    return [
        {
            "ranks": ranks_in_words(each.members),
            "count": len(each.members),
            "checked": list(each.simulated),
            "digest": digests[each.simulated[0]].hex() if each.simulated[0] in digests else None,
        }
        for each in prediction.equals.classes
    ]


def _interval_fields(interval: Interval | None) -> dict[str, Any] | None:
    """What a step may take; None on a topology, which is checked against nothing."""
    if interval is None:
        return None
    return {
        "low_s": interval.low / PICOSECONDS_PER_SECOND,
        "high_s": interval.high / PICOSECONDS_PER_SECOND,
        "extrapolated": list(interval.extrapolated),
        "against": interval.against,
    }


def _rate_interval(
    value: float, figures: Figures, interval: Interval | None
) -> dict[str, float] | None:
    """What a rate may be: it is high where the time is low."""
    if interval is None or not value:
        return None
    return {
        "low": value * figures.time / interval.high,
        "high": value * figures.time / interval.low,
    }


def write_document(prediction: Prediction, path: str, program: str = "") -> None:
    """Write the figures of a run to a file of JSON."""
    write_text(path, json.dumps(document(prediction, program), indent=1) + "\n")


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
        breakdown = breakdown_of(prediction, program)
        write_page(
            report, program, run, results_of(prediction, program), tables, breakdown=breakdown
        )


def gibibytes(size: int) -> str:
    """A size in GiB, for messages that compare several; small ones get more digits."""
    size_gib = size / 2**30
    return f"{size_gib:.1f}" if size_gib >= 1 else f"{size_gib:.3g}"


def held_in_words(rows: list[Held]) -> list[str]:
    """The holders of memory: each kind with its share, then the largest holders of each."""
    kinds: dict[str, int] = {}
    for row in rows:
        kinds[row.kind] = kinds.get(row.kind, 0) + row.size
    lines = []
    for kind, size in sorted(kinds.items(), key=lambda item: -item[1]):
        largest = [row for row in rows if row.kind == kind][:HOLDERS_SHOWN]
        told = [_holder_in_words(row) for row in largest if row.module or row.place]
        line = f"{kind:<21}  {format_bytes(size):>10}  "
        while len(told) > 1 and len(line) + len(", ".join(told)) > COLUMNS - 4:
            told.pop()
        lines.append(f"{line}{', '.join(told)}".rstrip())
    return lines


def _holder_in_words(row: Held) -> str:
    where = f"{row.module} ({row.place})" if row.module and row.place else row.module or row.place
    return f"{where} {format_bytes(row.size)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
