"""What a notebook shows of a machine, a run and a result."""

from html import escape

from rankwise.base.web_page import facts_table, fragment, table
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.reporting.charts import timeline_chart
from rankwise.sim.reporting.machine_drawing import as_svg, facts
from rankwise.sim.reporting.page import by_kind
from rankwise.sim.reporting.results import COLUMNS, BenchResult, cells_of, tells
from rankwise.sim.reporting.timeline import ReportedRun


def topology_html(topology: Topology) -> str:
    """The drawing of a machine and its facts."""
    return fragment([as_svg(topology), facts_table(facts(topology))])


def run_html(engine: ReportedRun) -> str:
    """What a run has done so far: how busy its engines were."""
    told = (
        f"{format_picoseconds(engine.now)} simulated on {engine.topology.name}, "
        f"{len(engine.op_log):,} operations"
    )
    sections = [f"<p>{escape(told)}</p>"]
    if engine.now:
        rows = [
            (each.kind, f"{each.used:,}", f"{each.mean:.1%}", f"{each.highest:.1%}", each.busiest)
            for each in by_kind(engine.machine.utilisation())
        ]
        sections += [
            timeline_chart(engine),
            table([("kind", "used", "busy on average", "at most", "which"), *rows]),
        ]
    return fragment(sections)


def result_html(result: BenchResult) -> str:
    """A result as a table of one row."""
    pairs = zip(COLUMNS, cells_of(result), strict=True)
    shown = [(head, cell) for head, cell in pairs if tells(head, [cell])]
    return fragment([table([*zip(*shown, strict=True)])])
