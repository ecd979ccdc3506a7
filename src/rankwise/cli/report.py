"""`rankwise report`: the page and the timeline of a run, from its journals.

Exit codes: 0 they are written; 1 one cannot be written; 2 an argument is neither the journal nor
the name of a run.
"""

import os

import click

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.base.units import SECOND, Duration
from rankwise.cli.journals import journal_at, lines_of
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.options import complete_file
from rankwise.cli.runs_here import RunNotFound, agents_called, answers, deadline_after

DEFAULT_PAGE = "report.html"
PATIENCE = Duration(10 * SECOND)


@click.command("report", context_settings=CONTEXT_SETTINGS)
@click.argument("journals", metavar="JOURNAL|RUN...", nargs=-1)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=complete_file,
    help=f"File for the page; {DEFAULT_PAGE} unless only --trace is given.",
)
@click.option(
    "--trace",
    metavar="FILE",
    shell_complete=complete_file,
    help="Write a timeline for Perfetto too; compressed if FILE ends in .gz.",
)
def report(journals: tuple[str, ...], output: str | None, trace: str | None) -> None:
    """Write an HTML page about a run: what its ranks did.

    JOURNAL is a journal.jsonl from a log directory, or that directory. RUN is the name of an active
    run on this machine. For several nodes, give the journals of all: clocks are aligned by shared
    collectives.

    The page has a timeline, lateness, failures with tracebacks, CPU and memory over time, and the
    environment. It is one file, and needs no network. The journal of a killed agent works too.
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
    paths = [path for word in journals for path in _journals_of(word)]
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


def _journals_of(word: str) -> list[str]:
    """The journal at a path, or those of the agents on this machine of the run of that name."""
    if os.path.exists(word):  # noqa: PTH110  # pathlib costs ms
        return [journal_at(word, "report")]
    from rankwise.launch.control.client import ask_all  # noqa: PLC0415  # not for --help

    try:
        agents = agents_called(word)
    except RunNotFound as error:
        raise RunNotFound(
            f"{word!r} is not a file, and {error.message}",
            hint="name a journal.jsonl, a log directory, or a run of `rankwise ps`",
        ) from None
    paths = []
    for agent, (status, *_) in answers(ask_all(agents, "status", deadline_after(PATIENCE))):
        directory = status.get("log_dir")
        if not directory:
            raise ConfigError(
                f"run {word} (pid {agent.pid}) has no journal, since it has no log directory",
                hint="start it with --log-dir DIR",
            )
        paths.append(journal_at(directory, "report"))
    return paths
