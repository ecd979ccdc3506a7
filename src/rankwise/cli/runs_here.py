"""The runs on this machine, for the commands that ask one of them."""

import time
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from rankwise.base.errors import RankwiseError
from rankwise.base.units import MILLISECOND, Duration, Instant
from rankwise.base.wording import ranks_in_words
from rankwise.cli.options import DURATION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.launch.control.client import RunSummary


NAMES_PATIENCE = Duration(500 * MILLISECOND)
"""How long runs may take to tell what they are called; all are asked at once."""


class RunNotFound(RankwiseError):
    """No run, or more than one, is what the user may have meant."""


def complete_run(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a run."""
    from rankwise.launch.control.client import list_runs, names_of  # noqa: PLC0415  # not for --help

    names = dict.fromkeys(names_of(list_runs(), deadline_after(NAMES_PATIENCE)).values())
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


RUN_ARGUMENT = click.argument("run", required=False, shell_complete=complete_run)
"""May be left out while there is only one run."""
NAMED_RUN_ARGUMENT = click.argument("run", shell_complete=complete_run)
"""For what cannot be taken back: the only run there is may be somebody else's, or a later one."""

ANSWER_TIMEOUT_OPTION = click.option(
    "--timeout",
    type=DURATION,
    default="10s",
    show_default=True,
    help="How long to wait for the answer.",
)


def run_called(name: str | None) -> "RunSummary":
    """The run on this machine that is meant; raises as `choose_run` does."""
    from rankwise.launch.control.client import list_runs, names_of  # noqa: PLC0415  # not for --help

    runs = list_runs()
    return choose_run(runs, name, names_of(runs, deadline_after(NAMES_PATIENCE)))


def name_of(run: "RunSummary") -> str:
    """What a run is called."""
    from rankwise.launch.control.client import names_of  # noqa: PLC0415  # not for --help

    return names_of([run], deadline_after(NAMES_PATIENCE))[run]


def deadline_after(patience: Duration) -> Instant:
    """When an answer is due, on the clock of the control socket."""
    return Instant(time.monotonic_ns() + patience)


def choose_run(
    runs: "Sequence[RunSummary]", name: str | None, names: "Mapping[RunSummary, str]"
) -> "RunSummary":
    """The one run that a user means by a name, the beginning of one, a pid, or nothing.

    Args:
        runs: to choose from.
        name: what the user said.
        names: what each of them is called.

    Raises:
        click.UsageError: there is nothing to choose by, and several runs to choose from.
        RunNotFound: no run fits, or several do.
    """
    shown = ", ".join(f"{names[run]} (pid {run.pid})" for run in runs)
    if not runs:
        raise RunNotFound("no run of yours is active on this machine")
    if name is None:
        if len(runs) > 1:
            raise click.UsageError(f"there are several runs, name one of them: {shown}")
        return runs[0]
    if not name:
        raise click.UsageError(f"the name of the run is empty, expected one of: {shown}")
    exact = [run for run in runs if is_called(run, name) or name == str(run.pid)]
    fitting = exact or [run for run in runs if names[run].startswith(name)]
    if not fitting:
        raise RunNotFound(f"no run is called {name!r}, there are: {shown}")
    if len(exact) > 1:  # nodes of one run, or namesakes: the name says nothing about them
        pids = ", ".join(str(run.pid) for run in exact)
        raise RunNotFound(
            f"run {name!r} has {len(exact)} agents here, pids {pids}", hint="name a pid"
        )
    if len(fitting) > 1:
        several = ", ".join(f"{names[run]} (pid {run.pid})" for run in fitting)
        raise RunNotFound(f"{name!r} could be any of: {several}", hint="name its pid")
    return fitting[0]


def is_called(run: "RunSummary", name: str) -> bool:
    """Whether that is the run's name, also where others are not told it."""
    from rankwise.launch.control.addresses import shown_id  # noqa: PLC0415  # not for --help

    return run.run_id in (name, shown_id(name, is_secret=True))


def ranks_and_pids(group: "Sequence[Mapping[str, Any]]") -> str:
    """`ranks 0-1 (pids 7, 8)`, of the lines of an answer."""
    pids = ", ".join(str(line["pid"]) for line in group)
    return f"{ranks_in_words(line['rank'] for line in group)} (pid{'s' * (len(group) > 1)} {pids})"
