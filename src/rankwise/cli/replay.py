"""`rankwise replay`: the states of a run's machines, again, from its journal.

Exit codes: 0 the machines decide as they did, as far as the journal goes; 1 one decides otherwise
(another version of rankwise has written the journal, or the journal was changed); 2 a file that is
no journal.
"""

from typing import TYPE_CHECKING

import click

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND
from rankwise.cli.journals import journal_at, lines_of
from rankwise.cli.main import CONTEXT_SETTINGS

if TYPE_CHECKING:
    from rankwise.base.failure import Failure
    from rankwise.core.agent.replay import ReplayStep

_COLUMNS = "{:<14} {}{:>14}  {:<11} {:<13} {:<6} {}"
_WALL = "{:<27} "
"""Of the calendar, where the journal has it; simulations have none."""


@click.command("replay", context_settings=CONTEXT_SETTINGS)
@click.argument("journal", type=click.Path(exists=True))
@click.option(
    "--machine", metavar="NAME", help="Show only this state machine, such as `agent n3.0`."
)
@click.option("--all", "shows_all", is_flag=True, help="Show every event, not only state changes.")
def replay(journal: str, machine: str | None, *, shows_all: bool) -> int:
    """Show the state changes of a run's agents again, from its journal.

    JOURNAL is a journal.jsonl from a log directory, that directory, or the file of
    `rankwise sim cluster --journal`. The agents get the same facts at the same times, and must give
    the same orders. For other machines, such as those of chip workers, it shows every fact (<) and
    order (>) with the number of its cause.

    Each line is a state change: agent, time (UTC, and since its start), phase, number and phase of
    the round, whether its node leads, and the fact that caused it. If the agent held the exit of a
    rank back, a line says for how long, and why. The root cause comes last.
    """
    from rankwise.core.agent.replay import replay as steps_of  # noqa: PLC0415  # not for --help

    journal = journal_at(journal, "replay")
    last: dict[str, tuple[str, str, bool]] = {}
    first_at: dict[str, int] = {}
    different: ReplayStep | None = None
    cut_off: ReplayStep | None = None
    root: Failure | None = None
    count = 0
    for step in steps_of(lines_of(journal), journal):
        if machine is not None and step.machine != machine:
            continue
        if not count:
            wall = " " * len(_wall(step.wall))
            click.echo(_COLUMNS.format("agent", wall, "time", "phase", "round", "leads", "fact"))
        count += 1
        begun = first_at.setdefault(step.machine, step.at)
        state = (step.phase, step.round, step.leads)
        if shows_all or last.get(step.machine) != state:
            fact = _name_in_journal(step)
            time = f"{(step.at - begun) / SECOND:.6f} s"
            leads = "leads" if step.leads else ""
            state_then = (step.phase, step.round, leads, fact)
            click.echo(_COLUMNS.format(step.machine, _wall(step.wall), time, *state_then))
        for line in step.held_exits:
            click.echo(f"{step.machine:<14}   {line}")
        last[step.machine] = state
        root = _root_cause(step) or root
        if step.differs and different is None:
            different = step
        if step.is_cut_off:
            cut_off = step
    if not count and _show_entries(journal, machine):
        return 0
    if not count:
        if machine is not None:
            raise ConfigError(
                f"{journal} holds no entry of {machine}",
                hint="without --machine all are shown, by their names",
            )
        raise ConfigError(
            f"{journal} holds no entry",
            hint="is it the journal.jsonl of a run's log directory, by this version of rankwise?",
        )
    if root is not None:
        from rankwise.launch.telling.failure_report.sentences import headline  # noqa: PLC0415  # not for --help

        click.echo(f"root cause: {headline(root)}")
    if different is not None:
        click.echo(
            f"{different.machine} decides differently now, at {different.at} ns: it orders "
            f"{different.effects}, and ordered {different.recorded}",
            err=True,
        )
        return 1
    if cut_off is not None:
        missing = len(cut_off.effects) - len(cut_off.recorded)
        orders = f"{missing} orders that follow" if missing > 1 else "the order that follows"
        click.echo(
            f"the journal ends after {_name_in_journal(cut_off)} of {cut_off.machine}, before"
            f" {orders}: its writer was killed, or still runs",
            err=True,
        )
    return 0


def _name_in_journal(step: "ReplayStep") -> str:
    return str(step.stimulus.__struct_config__.tag)


def _wall(text: str) -> str:
    return _WALL.format(text) if text else ""


def _root_cause(step: "ReplayStep") -> "Failure | None":
    """The root cause of the whole job, if this step ends an agent's life with one."""
    from rankwise.core.agent.vocabulary import FinishRun  # noqa: PLC0415  # not for --help

    finished = next((each for each in step.effects if isinstance(each, FinishRun)), None)
    return None if finished is None or finished.verdict is None else finished.verdict.root


def _show_entries(journal: str, machine: str | None) -> bool:
    """Show what other machines were told and ordered; whether there was anything."""
    from rankwise.core.agent.replay import entries  # noqa: PLC0415  # not for --help

    begun: int | None = None
    for entry in entries(lines_of(journal), journal):
        if machine is not None and entry.machine != machine:
            continue
        begun = entry.at if begun is None else begun
        mark = ">" if entry.is_order else "<"
        click.echo(
            f"{entry.machine:<14} {_wall(entry.wall)}{(entry.at - begun) / SECOND:>12.6f} s  "
            f"{mark} #{entry.cause:<6} {entry.kind:<20} {entry.text}"
        )
    return begun is not None
