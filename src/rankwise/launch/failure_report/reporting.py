"""From an outcome straight to text, for those who need not look at the report in between."""

from collections.abc import Mapping
from typing import TextIO

from rankwise.base.failure import Outcome
from rankwise.launch.failure_report.composing import compose_report
from rankwise.launch.failure_report.model import ReportContext
from rankwise.launch.failure_report.rendering import plain_text, write_report


def render_plain(outcome: Outcome, context: ReportContext) -> str:
    """The report as lines without decoration and without a newline at the end."""
    return plain_text(compose_report(outcome, context))


def print_report(
    outcome: Outcome, context: ReportContext, stream: TextIO, environment: Mapping[str, str]
) -> None:
    """Write the report to a stream: boxed on a terminal, plain lines anywhere else."""
    write_report(compose_report(outcome, context), stream, environment)
