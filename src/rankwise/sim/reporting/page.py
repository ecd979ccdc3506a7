"""One self-contained HTML page about a run: results, timeline, utilisation, roofline, machine.

Everything is inline, the pictures are SVG written here, and nothing is fetched: the page can be
mailed. Equal runs give equal pages.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from rankwise.base.sorting import by_numbers
from rankwise.base.web_page import document, facts_table, table
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.reporting.breakdown import Breakdown, as_meta
from rankwise.sim.reporting.charts import roofline_chart, timeline_chart
from rankwise.sim.reporting.files import write_text
from rankwise.sim.reporting.machine_drawing import as_svg, facts
from rankwise.sim.reporting.results import COLUMNS, BenchResult, cells_of, tells
from rankwise.sim.reporting.timeline import ReportedRun

UTILISATION_ROWS = 12

Table = tuple[str, Sequence[Sequence[str]]]
"""A heading, and rows of cells; the first row has the names of the columns."""


def write_page(
    path: str,
    title: str,
    engine: ReportedRun,
    results: Sequence[BenchResult],
    tables: Sequence[Table] = (),
    *,
    failure: str = "",
    breakdown: Breakdown | None = None,
) -> None:
    """Write the page; packed if the name ends in .gz."""
    text = page(title, engine, results, tables, failure=failure, breakdown=breakdown)
    write_text(path, text)


def page(
    title: str,
    engine: ReportedRun,
    results: Sequence[BenchResult],
    tables: Sequence[Table] = (),
    *,
    failure: str = "",
    breakdown: Breakdown | None = None,
) -> str:
    """The page as HTML; `tables` come first, and mean that the numbers are those of a program.

    `failure` is what the run failed with; `breakdown` is kept where `sim compare` finds it.
    """
    topology = engine.topology
    sections = [
        f"<h1>{escape(title)}</h1>",
        (
            f'<p class="about">Simulated on <b>{escape(topology.name)}</b> '
            f"({escape(topology.described)}): "
            f"{format_picoseconds(engine.now)} of "
            f"simulated time, {len(engine.op_log):,} operations.</p>"
        ),
    ]
    if failure:
        sections += ["<h2>Failure</h2>", f'<pre class="scroll">{escape(failure)}</pre>']
    for heading, rows in tables:
        sections += [f"<h2>{escape(heading)}</h2>", table(rows)]
    if results:
        heading = "Operations" if tables else "Results"
        sections += [f"<h2>{heading}</h2>", _results(results, engine, is_program=bool(tables))]
    sections += [
        "<h2>Timeline</h2>",
        (
            '<p class="note">Use of each kind of engine over time: a stronger colour means busier. '
            "A row of PE engines is the mean over all PEs that were used.</p>"
        ),
        _by_rank(topology, f'<div class="scroll">{timeline_chart(engine)}</div>'),
        "<h2>Utilisation</h2>",
        _by_rank(topology, _utilisation(engine)),
    ]
    if any(result.flops and result.bytes and result.time_ps for result in results):
        sections += [
            "<h2>Roofline</h2>",
            (
                '<p class="note">The slope is the memory of the devices, the flat parts are '
                "their GEMM and math engines at the rate of the best dtype. Each point is a "
                "result, numbered below the plot. Results of several SIPs may lie above the "
                "roof; results bound by links (alpha-beta) lie far below it.</p>"
            ),
            f'<div class="scroll">{roofline_chart(topology, results)}</div>',
        ]
    sections += [
        "<h2>Machine</h2>",
        "" if topology.own_facts else f'<div class="scroll">{as_svg(topology)}</div>',
        "<p></p>" + facts_table(topology.own_facts or facts(topology)),
    ]
    head = "" if breakdown is None else as_meta(breakdown)
    return document(f"{title}: simulated run", sections, head)


def _by_rank(topology: Topology, section: str) -> str:
    """Devices that are no chips have the names of their ranks."""
    # A section is finished HTML, in which only names of devices have this form.
    return re.sub(r"\bsip(\d+)", r"rank \1", section) if topology.own_facts else section


def _results(results: Sequence[BenchResult], engine: ReportedRun, *, is_program: bool) -> str:
    # The bench is the page's title, unless there are several.
    first = int(len({result.bench for result in results}) == 1)
    columns = zip(COLUMNS, *map(cells_of, results), strict=True)
    shown = [each for each in columns if tells(each[0], each[1:])]
    rows = table([*zip(*shown[first:], strict=True)])
    if is_program:
        note = (
            "The longest operations of a step and a rank, means over the simulated ranks and the"
            " steps after the first, without collectives: these are in the timeline."
        )
    elif all(result.is_checked for result in results):
        note = "All numbers were compared with numpy's."
    else:
        note = "Only time was simulated."
    if not is_program and sum(result.time_ps for result in results) != engine.now:
        whole = format_picoseconds(engine.now)
        note += (
            " The table has the simulated time of the measured operations alone;"
            f" the {whole} at the top include everything before and after them."
        )
    return f'{rows}<p class="note">{note}</p>'


def _utilisation(engine: ReportedRun) -> str:
    """How busy each kind of resource was, and the busiest of all."""
    shares = engine.machine.utilisation()
    kinds = "".join(
        f"<tr><td>{each.kind}</td><td>{each.used:,}</td><td>{_percent(each.mean)}</td>"
        f"<td>{_percent(each.highest)}</td><td>{escape(each.busiest)}</td>{_bar(each.highest)}</tr>\n"
        for each in by_kind(shares)
    )
    busiest = busiest_first(shares)
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{_percent(share)}</td>{_bar(share)}</tr>\n"
        for name, share in busiest[:UTILISATION_ROWS]
    )
    rest = len(busiest) - UTILISATION_ROWS
    more = f"; {rest:,} more were used" if rest > 0 else ""
    return (
        '<p class="note">Busy time of links and engines, as a share of the simulated time. '
        "The average is over those of a kind that were used.</p>"
        '<div class="scroll"><table><tr><th>kind</th><th>used</th><th>on average</th>'
        f"<th>at most</th><th>which</th><th></th></tr>\n{kinds}</table></div>"
        f'<p class="note">The busiest of all{more}:</p><div class="scroll"><table>'
        f"<tr><th>resource</th><th>busy</th><th></th></tr>\n{rows}</table></div>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "&lt; 0.1 %"


def _bar(share: float) -> str:
    return (
        f'<td class="bar-cell"><span class="bar" style="width:{max(0.1, 100 * share):.1f}%">'
        "</span></td>"
    )


_KINDS = {
    "host to SIPs": r"host->sip\d+",
    "SIPs to host": r"sip\d+->host",
    "links between SIPs": r"(sip\d+|switch)->(sip\d+|switch)",
    "links between cubes": r"sip\d+\.cube\d+->cube\d+",
    "devices, computing": r"sip\d+\.computing",
    "HBM channels": r".*\.hbm\d+",
    "ports of PEs, in": r".*\.pe\d+\.in",
    "ports of PEs, out": r".*\.pe\d+\.out",
    "TCM": r".*\.tcm",
    "DMA engines": r".*\.dma",
    "GEMM engines": r".*\.gemm",
    "math engines": r".*\.math",
}
OTHERS = "others"


class KindInUse(NamedTuple):
    """The parts of one kind that were used at all.

    Attributes:
        used: how many there are of them.
        mean: how busy they were on average, 0 to 1.
        busiest: the name of the one that was busiest; the first of equals.
        highest: how busy that was.
    """

    kind: str
    used: int
    mean: float
    busiest: str
    highest: float


def by_kind(shares: Mapping[str, float]) -> list[KindInUse]:
    """The kinds of which anything was used, from the host to the engines."""
    found: dict[str, list[tuple[str, float]]] = {kind: [] for kind in (*_KINDS, OTHERS)}
    for name, share in busiest_first(shares):
        found[_kind_of(name)].append((name, share))
    return [
        KindInUse(kind, len(parts), _mean([share for _, share in parts]), *parts[0])
        for kind, parts in found.items()
        if parts
    ]


def busiest_first(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """What was used, by how busy it was; equals in the order of their numbers."""
    used = [(name, share) for name, share in shares.items() if share > 0]
    return sorted(used, key=lambda item: (-item[1], by_numbers(item[0])))


def _mean(shares: Sequence[float]) -> float:
    # Of equal numbers it is that number: rounding must not carry it above the highest.
    return min(shares[0], sum(shares) / len(shares))


def _kind_of(name: str) -> str:
    for kind, pattern in _KINDS.items():
        if re.fullmatch(pattern, name):
            return kind
    return OTHERS
