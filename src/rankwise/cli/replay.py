"""`rankwise replay`: the states of a run's machines, again, from its journal.

Exit codes: 0 the machines decide as they did; 1 one decides otherwise (another version of rankwise
has written the journal, or the journal was changed); 2 a file that is no journal.
"""

from collections.abc import Iterator

import click

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND
from rankwise.cli.main import CONTEXT_SETTINGS


@click.command("replay", context_settings=CONTEXT_SETTINGS)
@click.argument("journal", type=click.Path(exists=True, dir_okay=False))
@click.option("--machine", metavar="NAME", help="Only of this machine, as `agent n3.0`.")
@click.option("--all", "shows_all", is_flag=True, help="Every fact, not only changes of state.")
def replay(journal: str, machine: str | None, *, shows_all: bool) -> int:
    """Show again how the agents of a run went from state to state.

    JOURNAL is the journal.jsonl that a run on several nodes has left in its log directory, one on
    each node, or what `rankwise sim cluster --journal` wrote. The machines are fed what they were
    told, at the same times, and must order the same.
    """
    from rankwise.core.agent.replay import Step  # noqa: PLC0415  # not for --help
    from rankwise.core.agent.replay import replay as steps_of  # noqa: PLC0415  # the same

    last: dict[str, tuple[str, str, bool]] = {}
    first_at: dict[str, int] = {}
    different: Step | None = None
    count = 0
    for step in steps_of(_lines(journal), journal):
        if machine is not None and step.machine != machine:
            continue
        count += 1
        begun = first_at.setdefault(step.machine, step.at)
        state = (step.phase, step.round, step.leads)
        if shows_all or last.get(step.machine) != state:
            fact = type(step.stimulus).__name__
            lead = "leads" if step.leads else ""
            click.echo(
                f"{step.machine:<14} {(step.at - begun) / SECOND:>12.6f} s  {step.phase:<11} "
                f"{step.round:<13} {lead:<6} {fact}"
            )
        last[step.machine] = state
        if step.differs and different is None:
            different = step
    if not count:
        if machine is not None:
            raise ConfigError(
                f"{journal} holds no entry of {machine}",
                hint="without --machine all are shown, by their names",
            )
        raise ConfigError(
            f"{journal} holds no entry of an agent",
            hint="only runs on several nodes have agents to replay; this one has a gang's journal, "
            "or none",
        )
    if different is not None:
        click.echo(
            f"{different.machine} decides otherwise now, at {different.at} ns: it orders "
            f"{different.effects}, and ordered {different.recorded}",
            err=True,
        )
        return 1
    return 0


def _lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # a plain name, as given
            yield from file
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be read: {error.strerror}") from error
