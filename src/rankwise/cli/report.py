"""`rankwise report`: the page and the timeline of a run, from its journals.

Exit codes: 0 they are written; 1 one cannot be written; 2 what was given is no journal of a run.
"""

import click

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.cli.journals import journal_at, lines_of
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.options import complete_file

DEFAULT_PAGE = "report.html"


@click.command("report", context_settings=CONTEXT_SETTINGS)
@click.argument("journals", metavar="JOURNAL...", nargs=-1, type=click.Path(exists=True))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=complete_file,
    help=f"Where to write the page; {DEFAULT_PAGE} unless only --trace is given.",
)
@click.option(
    "--trace",
    metavar="FILE",
    shell_complete=complete_file,
    help="Write a timeline of all ranks for Perfetto as well; compressed if FILE ends in .gz.",
)
def report(journals: tuple[str, ...], output: str | None, trace: str | None) -> None:
    """Write one HTML page about a run that is over, or that goes on: what its ranks did.

    JOURNAL is the journal.jsonl that a run has left in its log directory, or that directory. Of a
    run on several nodes, give the journals of all of them: they are joined, and the clocks of the
    nodes are aligned by the collectives that their ranks have shared.

    The page has a timeline of the ranks, who made the others wait, failures with tracebacks, CPU
    time and memory over time, and the environment. It needs no network and can be mailed. The
    journal of a run whose agent was killed is read as far as it goes.
    """
    from rankwise.cli.run_files import tell_file, write_run_files  # noqa: PLC0415  # not for --help
    from rankwise.observe.timeline import timeline_of  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.files import NotWritten, check_writable  # noqa: PLC0415  # the same

    if not journals:
        raise ConfigError(
            "no journal given", hint="a run writes its journal into the directory of --log-dir"
        )
    page = output if output is not None else None if trace is not None else DEFAULT_PAGE
    for path in (page, trace):
        if path is not None:
            check_writable(path)
    if page is not None and page == trace:
        raise ConfigError(f"--output and --trace are both {page!r}, and would overwrite each other")
    paths = [journal_at(path, "report") for path in journals]
    timeline = timeline_of([(path, lines_of(path)) for path in paths])
    failed: list[RankwiseError] = []
    for wanted in ((page, None), (None, trace)):
        try:
            for name, path, more in write_run_files(timeline, *wanted):
                click.echo(tell_file(name, path, more))
        except RankwiseError as error:
            failed.append(error)
    if failed:
        raise NotWritten("\n".join(map(str, failed)))
