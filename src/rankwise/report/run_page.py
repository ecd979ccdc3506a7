"""The page of a real run: what its ranks did, who was late, what failed, and in which environment.

It is made of the journals of one node or of many, as a simulated run's page is made of its results,
and of the same parts (`rankwise.base.web_page`). What a journal lacks, the page says: a node whose
journal was not given, a run without a recorded end, calls that were not recorded.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple, TypeVar

from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import SECOND, Duration, format_bytes, format_duration
from rankwise.base.web_page import document, facts_table, table
from rankwise.base.wording import ranges_of, ranks_in_words
from rankwise.core.ledger import Delay, straggler_in_words
from rankwise.core.ledger.lateness import notable
from rankwise.core.ledger.sentences import with_cpu_wait
from rankwise.launch.telling.failure_report.composing import blocks_of_standing
from rankwise.launch.telling.failure_report.hints import is_peer_gone
from rankwise.launch.telling.failure_report.sentences import headline
from rankwise.launch.telling.failure_report.stacks import fatal_lines, innermost_frames
from rankwise.observe.records import BEGUN_BY_CPP, GpuSample
from rankwise.observe.story import NodeStory
from rankwise.observe.timeline import PlacedCall, RunTimeline, clocks_in_words
from rankwise.report.charts import RANKS_SHOWN, gpu_chart, ranks_chart, resource_chart

K = TypeVar("K")

ROWS_SHOWN = 20
FAILURES_SHOWN = 32
_TEXT_LINES = 60


def run_page(timeline: RunTimeline) -> str:
    """The page as HTML."""
    ranks = _shown_ranks(timeline)
    title = _title(timeline)
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">{escape(_about(timeline))}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in _holds(timeline)),
        "<h2>Timeline</h2>",
        f'<p class="note">{escape(_about_chart(timeline, ranks))}</p>',
        f'<div class="scroll">{ranks_chart(timeline, ranks)}</div>',
        *_failures(timeline),
        *_lateness(timeline),
        *_collectives(timeline),
        *_sections(timeline),
        *_resources(timeline, ranks),
        *_gpus(timeline),
        "<h2>Environment</h2>",
        *(facts_table(_environment(node)) for node in timeline.nodes),
    ]
    return document(f"{title}: run", sections)


def _title(timeline: RunTimeline) -> str:
    described = timeline.nodes[0].described
    return described.name if described is not None else "A run"


def _about(timeline: RunTimeline) -> str:
    began = datetime.fromtimestamp(timeline.wall_ns / SECOND, UTC)
    attempts = _attempt_count(timeline)
    nodes = timeline.node_count
    return (
        f"{_status(timeline)}, {_counted(timeline.world_size, 'rank')} on "
        f"{_counted(nodes, 'node')}, {_counted(attempts, 'attempt')}; "
        f"began {began:%Y-%m-%d %H:%M:%S} UTC."
    )


def _attempt_count(timeline: RunTimeline) -> int:
    return len({life.attempt for track in timeline.tracks.values() for life in track.lives})


def _status(timeline: RunTimeline) -> str:
    outcomes = [node.outcome for node in timeline.nodes if node.outcome is not None]
    took = format_duration(Duration(timeline.end))
    if not outcomes:
        return f"No end was recorded, after {took}"
    worst = next((each for each in outcomes if each.status != "succeeded"), outcomes[0])
    return f"{str(worst.status).capitalize()} after {took}"


def _holds(timeline: RunTimeline) -> Iterable[str]:
    """What the page does not hold, and how well the clocks agree."""
    nodes = timeline.node_count
    if any(node.described is not None and node.described.is_simulated for node in timeline.nodes):
        yield (
            "The ranks were simulated. Times are virtual: only sleeping takes time, and events of "
            "one instant are a nanosecond apart. --on sim:MACHINE predicts the time of computing "
            "and collectives."
        )
    if nodes > len(timeline.nodes):
        here = ranks_in_words(timeline.tracks)
        yield (
            f"The run had {nodes} nodes. This page holds {here}, from "
            f"{_counted(len(timeline.nodes), 'journal')}. To join all nodes, give their "
            "journals: rankwise report JOURNAL JOURNAL …"
        )
    if clocks := clocks_in_words(timeline):
        yield f"{clocks[0].upper()}{clocks[1:]}."
    for node in timeline.nodes:
        if node.outcome is None:
            how = "in the middle of a line" if node.is_cut else "before the run does"
            yield (
                f"The journal {node.path} ends {how}: its agent was killed, is still running, or "
                "could not write any more. The page covers the time until then."
            )


def _about_chart(timeline: RunTimeline, ranks: Sequence[int]) -> str:
    told = (
        "The first row of a rank shows its attempts: green ended well, red failed or was stopped. "
        "The rows below show its time in sections and collectives, and its waits for the last "
        "rank: the stronger the colour, the more. A dashed line is a restart."
    )
    left_out = len(timeline.tracks) - len(ranks)
    if left_out:
        told += (
            f" {left_out} of {len(timeline.tracks)} ranks are hidden. Failed ranks, late ranks and "
            "the lowest ranks are shown."
        )
    if any(
        call.stage == BEGUN_BY_CPP for track in timeline.tracks.values() for call in track.calls
    ):
        told += (
            " The row 'from C++' is a sample of the calls that C++ begins, as DDP and FSDP do. It "
            "is from torch's flight recorder and has no durations."
        )
    share = timeline.calls_recorded
    if share < 0.995:
        told += f" {100 * share:.2g} % of the calls were recorded, a part of each interval."
    return told


def _shown_ranks(timeline: RunTimeline) -> list[int]:
    """The ranks of the charts: the odd ones first, if there are too many."""
    failed = [failure.rank for _, failure in _all_failures(timeline)]
    late = sorted(timeline.delays, key=lambda delay: -delay.waited)
    order = [*failed, *(delay.rank for delay in late[: RANKS_SHOWN // 2]), *timeline.tracks]
    known = [rank for rank in dict.fromkeys(order) if rank in timeline.tracks]
    return sorted(known[:RANKS_SHOWN])


def _all_failures(timeline: RunTimeline) -> list[tuple[int, Failure]]:
    """Those that ranks had by themselves, by attempt, each once; the root cause first."""
    found: dict[tuple[int, int], Failure] = {}
    roots: dict[int, int] = {}
    for node in timeline.nodes:
        last = () if node.outcome is None else node.outcome.failures
        for failures in (*node.failures.values(), last):
            if failures:
                roots.setdefault(failures[0].attempt, failures[0].rank)
            for failure in failures:
                key = (failure.attempt, failure.rank)
                if failure.rank >= 0 and failure.cause is not FailureCause.STOPPED:
                    found.setdefault(key, failure)

    def place(item: tuple[tuple[int, int], Failure]) -> tuple[int, bool, int]:
        (attempt, rank), failure = item
        return attempt, rank != roots.get(attempt), failure.wall_ns

    order = sorted(found.items(), key=place)
    return [(attempt, failure) for (attempt, _), failure in order]


def _failures(timeline: RunTimeline) -> Iterable[str]:
    failures = [failure for _, failure in _all_failures(timeline)]
    if not failures:
        return
    yield "<h2>Failures</h2>"
    stories = _grouped(failures)
    # Attempts are counted from 1, as in the report on the terminal.
    has_many = _attempt_count(timeline) > 1
    seen: set[int] = set()
    for told in stories[:FAILURES_SHOWN]:
        first = told[0]
        title = _title_of(first, is_root=first.attempt not in seen, has_many=has_many)
        seen.add(first.attempt)
        when = datetime.fromtimestamp(first.wall_ns / SECOND, UTC) if first.wall_ns else None
        at = f", {when:%H:%M:%S} UTC" if when else ""
        who = ranks_in_words([failure.rank for failure in told])
        where = f" on {first.host}" if first.host else ""
        yield (f'<h3>{escape(title)}</h3><p class="note">{who}{escape(where)}{at}</p>')
        if text := _text_of(told):
            yield f'<pre class="scroll">{escape(text)}</pre>'
    if len(stories) > FAILURES_SHOWN:
        yield f'<p class="note">{len(stories) - FAILURES_SHOWN} more failures are left out.</p>'


def _title_of(failure: Failure, *, is_root: bool, has_many: bool) -> str:
    words = [f"attempt {failure.attempt + 1}"] * has_many + ["root cause"] * is_root
    label = ", ".join(words).capitalize()
    consequence = " (a consequence: its peer was gone)" if is_peer_gone(failure) else ""
    return f"{label}{': ' * bool(label)}{headline(failure)}{'' if is_root else consequence}"


def _grouped(failures: Iterable[Failure]) -> list[list[Failure]]:
    """Group failures: a hang is one story, ranks accused together are one, others stand alone."""
    stories: dict[tuple[int, FailureCause, tuple[int, ...]], list[Failure]] = {}
    for failure in failures:
        ranks: tuple[int, ...] = (failure.rank,)
        if failure.cause is FailureCause.HUNG:
            ranks = ()  # all ranks hang at once, also those that the others accuse
        elif failure.is_shared:
            ranks = failure.accused
        stories.setdefault((failure.attempt, failure.cause, ranks), []).append(failure)
    return list(stories.values())


def _text_of(told: Sequence[Failure]) -> str:
    """The traceback, or where the ranks stand, or else what the rank wrote last."""
    first = told[0]
    if first.error is not None:
        lines = first.error.traceback.splitlines()
    elif first.cause is FailureCause.HUNG or first.is_shared:
        lines = [line for block in blocks_of_standing(told) for line in (block.title, *block.lines)]
    elif first.cause is FailureCause.OUT_OF_STEP:
        lines = list(innermost_frames(first.stacks))
    else:
        lines = fatal_lines(first.stacks)
    lines = lines or list(first.stderr_tail)
    left_out = len(lines) - _TEXT_LINES
    if left_out > 0:
        half = _TEXT_LINES // 2
        lines = [*lines[:half], f"… {left_out} lines are left out", *lines[-half:]]
    return "\n".join(lines)


def _lateness(timeline: RunTimeline) -> Iterable[str]:
    delays = [delay for delay in timeline.delays if delay.last]
    of_all = _late_of_all_nodes(timeline)
    if timeline.straggler is not None or delays or of_all:
        yield "<h2>Lateness</h2>"
    lasted = timeline.lasted
    if of_all:
        yield f'<p class="note">{escape(of_all)}</p>'
    if timeline.straggler is not None:
        late = timeline.straggler
        waited = Duration(round(late.cost * lasted))
        delay = Delay(rank=late.rank, last=late.last, waited=waited)
        told = _with_cpu_wait(straggler_in_words(late), delay, timeline)
        yield f'<p class="note">{escape(f"{told[0].upper()}{told[1:]}.")}</p>'
    if not delays:
        return
    which = "collectives" if timeline.straggler is None else "the calls of Python"
    delays.sort(key=lambda delay: (-delay.waited, delay.rank))
    rows = [
        [
            str(delay.rank),
            f"{100 * delay.waited / lasted:.1f} %" if lasted else "",
            format_duration(delay.waited),
            f"{100 * delay.last:.0f} %",
        ]
        for delay in delays[:ROWS_SHOWN]
    ]
    seen = "" if timeline.seen > 0.995 else f" {100 * timeline.seen:.2g} % of the calls were seen."
    yield (
        f'<p class="note">How long the other ranks waited in {which} for one rank alone, on '
        "average: as a share of the time since the first call, and in seconds. The last column "
        "is the share of the calls to which the rank came last; one rank always does. "
        f"{_who_is_late(timeline)} The first call of each group is not counted.{seen}</p>"
    )
    yield table([["rank", "of the time", "others waited", "came last in"], *rows])
    if len(delays) > ROWS_SHOWN:
        yield f'<p class="note">{len(delays) - ROWS_SHOWN} ranks cost less.</p>'


def _late_of_all_nodes(timeline: RunTimeline) -> str:
    """What the nodes have found out together at their end, where this page has not all of them."""
    told = [node.late.text for node in timeline.nodes if node.late is not None]
    if not told or len(timeline.nodes) == timeline.node_count:
        return ""
    return f"On all nodes: {told[0]}. The table compares the ranks of this page."


def _who_is_late(timeline: RunTimeline) -> str:
    worst = notable(timeline.delays, timeline.lasted)
    if worst is None:
        among = " in these calls" if timeline.straggler is not None else ""
        return f"No rank cost the other ranks a notable part of the run{among}."
    told = f"<b>Rank {worst.rank}</b> cost the other ranks a notable part of the run"
    return f"{_with_cpu_wait(told, worst, timeline)}."


def _with_cpu_wait(text: str, delay: Delay, timeline: RunTimeline) -> str:
    cpu_wait = timeline.tracks[delay.rank].cpu_wait(timeline.first_call_at)
    return with_cpu_wait(text, delay, cpu_wait, timeline.lasted)


class _Sum(NamedTuple):
    """Of calls of one line, or sections of one name."""

    number: int
    lasted: int
    waited: int
    longest: int
    rank: int

    def plus(self, lasted: int, waited: int, rank: int) -> "_Sum":
        longest, of = max((self.longest, -self.rank), (lasted, -rank))
        return _Sum(self.number + 1, self.lasted + lasted, self.waited + waited, longest, -of)


def _collectives(timeline: RunTimeline) -> Iterable[str]:
    sums: dict[tuple[str, str], _Sum] = {}
    for rank, track in timeline.tracks.items():
        for call in track.calls:
            if call.stage == BEGUN_BY_CPP:
                continue
            key = (_unnumbered(call), call.place)
            known = sums.get(key, _Sum(0, 0, 0, 0, rank))
            sums[key] = known.plus(call.end - call.begin, call.waited_until - call.begin, rank)
    if not sums:
        return
    rows = [
        [
            operation,
            place,
            f"{each.number:,}",
            format_duration(Duration(each.lasted // each.number)),
            f"{100 * each.waited / each.lasted:.0f} %" if each.lasted else "",
            f"{format_duration(Duration(each.longest))} (rank {each.rank})",
        ]
        for (operation, place), each in _largest(sums)
    ]
    yield "<h2>Collectives</h2>"
    yield (
        '<p class="note">Recorded calls of all ranks by line, the largest sum first. Waiting lasts '
        "until the last rank arrives, if all members were recorded. An asynchronous call counts "
        "the time to issue it; the wait for its handle has its own row.</p>"
    )
    yield table([["operation", "line", "calls", "on average", "waiting", "longest"], *rows])


def _unnumbered(call: PlacedCall) -> str:
    text = call.text_without_number
    return f"{text} in group {call.label}" if call.label else text


def _sections(timeline: RunTimeline) -> Iterable[str]:
    sums: dict[str, _Sum] = {}
    for rank, track in timeline.tracks.items():
        for each in track.sections:
            known = sums.get(each.name, _Sum(0, 0, 0, 0, rank))
            sums[each.name] = known.plus(each.end - each.begin, 0, rank)
    if not sums:
        return
    rows = [
        [
            name,
            f"{each.number:,}",
            format_duration(Duration(each.lasted // each.number)),
            f"{format_duration(Duration(each.longest))} (rank {each.rank})",
        ]
        for name, each in _largest(sums)
    ]
    yield "<h2>Sections</h2>"
    yield '<p class="note">Of all ranks. Sections may be nested.</p>'
    yield table([["section", "runs", "on average", "longest"], *rows])


def _largest(sums: dict[K, _Sum]) -> list[tuple[K, _Sum]]:
    return sorted(sums.items(), key=lambda item: -item[1].lasted)[:ROWS_SHOWN]


def _resources(timeline: RunTimeline, ranks: Sequence[int]) -> Iterable[str]:
    sampled = [rank for rank in ranks if timeline.tracks[rank].samples]
    if not sampled:
        return
    yield "<h2>Resources</h2>"
    yield (
        '<p class="note">CPU time per second, and memory, of each rank\'s own process; processes '
        "that it starts count when they have ended.</p>"
    )
    for what in ("cores", "memory"):
        yield f'<div class="scroll">{resource_chart(timeline, sampled, what)}</div><p></p>'


def _gpus(timeline: RunTimeline) -> Iterable[str]:
    if not timeline.gpus:
        return
    yield "<h2>GPUs</h2>"
    yield '<p class="note">Memory is that of all processes on a GPU.</p>'
    for what in ("% busy", "memory", "°C"):
        if chart := gpu_chart(timeline, what):
            yield f'<div class="scroll">{chart}</div><p></p>'
    yield table([["GPU", "ranks", "busy on average", "most memory", "hottest", "slow clocks",
                  "memory errors"],
                 *_rows_of_gpus(timeline)])  # fmt: skip


def _errors_between(samples: Sequence[GpuSample]) -> str:
    counts = [each.errors for each in samples if each.errors is not None]
    return f"{counts[-1] - counts[0]}" if counts else ""


def _rows_of_gpus(timeline: RunTimeline) -> Iterable[list[str]]:
    has_nodes = len(timeline.nodes) > 1
    for (node, gpu), seen in timeline.gpus.items():
        samples = [each for _, each in seen]
        busy = [each.utilisation for each in samples if each.utilisation is not None]
        memory = max((each.memory for each in samples if each.memory is not None), default=None)
        hottest = max((each.celsius for each in samples if each.celsius is not None), default=None)
        ranks = sorted({rank for each in samples for rank in each.ranks})
        slow = Counter(why for each in samples for why in each.throttled_by)
        yield [
            f"{gpu} on node {timeline.nodes[node].node_rank}" if has_nodes else f"{gpu}",
            ranges_of(ranks) if ranks else "unknown",
            f"{sum(busy) / len(busy):.0%}" if busy else "",
            "" if memory is None else format_bytes(memory),
            "" if hottest is None else f"{hottest} °C",
            ", ".join(f"{why} {count / len(samples):.0%}" for why, count in slow.items()),
            _errors_between(samples),
        ]


def _environment(node: NodeStory) -> Iterable[tuple[str, str]]:
    yield "node", f"{node.node_rank}: {ranks_in_words(node.ranks)}" if node.ranks else "no rank"
    described = node.described
    if described is None:
        yield "host", node.host
        yield "journal", node.path
        return
    yield "host", described.host
    yield "command", shlex.join(described.command)
    yield "directory", described.directory
    packages = (f"{name} {version}" for name, version in described.packages.items())
    yield (
        "versions",
        ", ".join([f"rankwise {described.rankwise}", f"Python {described.python}", *packages]),
    )
    yield "system", described.system
    yield "machine", f"{described.cpus} CPUs, {format_bytes(described.memory)} of memory"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
