"""`rankwise sim compare`: two runs side by side, and where the difference comes from.

Exit codes: 0 they are compared; 1 a command failed, or a file cannot be written; 2 an argument
tells nothing of a run.
"""

import click
import msgspec

from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.sim_options import complete_files


@click.command("compare", context_settings=CONTEXT_SETTINGS)
@click.argument("first", metavar="A", shell_complete=complete_files)
@click.argument("second", metavar="B", shell_complete=complete_files)
@click.option("--json", "is_json", is_flag=True, help="Print the comparison as JSON.")
@click.option(
    "--report",
    metavar="FILE",
    shell_complete=complete_files,
    help="Write an HTML page with charts too.",
)
def compare(*, first: str, second: str, is_json: bool, report: str | None) -> int:
    """Compare two runs: where the difference comes from, per kind of operation and per rank.

    A and B are pages of --report, files of --prediction, journals or log directories, or rankwise
    commands in quotes: "rankwise run --on sim:h100-sxm train.py".

    All parts add up to the difference. Exit code 2: A or B tells nothing of a run.
    """
    from rankwise.cli.sim_progress import counted, terminal_width  # noqa: PLC0415  # not for --help
    from rankwise.sim.reporting.comparison import compare as side_by_side  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.files import check_writable, write_text  # noqa: PLC0415  # the same
    from rankwise.simranks.run import compared as given  # noqa: PLC0415  # the same

    if report is not None:
        check_writable(report)
    try:
        with counted(2, "compare", "run") as progress:
            one = given.breakdown_of(first)
            progress(1, int(given.is_command(first)))  # a file that is read tells no duration
            runs = one, given.breakdown_of(second)
    except given.CommandFailed as error:
        click.echo(f"rankwise: error: {error.message}", err=True)
        return 1
    words = first, second
    names = given.names_of(words)
    compared = side_by_side(*runs, names, given.commands_in_words(names, words))
    if is_json:
        click.echo(msgspec.json.format(msgspec.json.encode(compared.as_document())).decode())
    else:
        from rankwise.sim.reporting.comparison_text import as_text  # noqa: PLC0415  # the same

        click.echo(as_text(compared, terminal_width()))
    if report is not None:
        from rankwise.sim.reporting.comparison_page import comparison_page  # noqa: PLC0415  # the same

        write_text(report, comparison_page(compared))
        click.echo(f"report: {report}", err=True)
    return 0
