"""The runs on this machine, for the commands that ask one of them."""

import time
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from rankwise.base.errors import ConfigError
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.base.wording import ranks_in_words
from rankwise.cli.options import DURATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rankwise.launch.control.client import RunAnswer, RunSummary, RunUnreachable


_ENDED = "of an ended run, `rankwise report DIR/NAME_*` reads its folder in --log-dir"

NAMES_PATIENCE = Duration(500 * MILLISECOND)
"""How long runs may take to tell what they are called; all are asked at once."""
PLACE_PATIENCE = Duration(2 * SECOND)
"""How long agents of one name may take to tell whether they are nodes of one run."""


ReplyT = TypeVar("ReplyT")


class RunNotFound(ConfigError):
    """No run, or more than one, is what the user may have meant: exit code 2, as of bad options."""


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
"""For what cannot be taken back: the only run there is may be another user's, or a later one."""

ANSWER_TIMEOUT_OPTION = click.option(
    "--timeout",
    type=DURATION,
    default="10s",
    show_default=True,
    help="How long to wait for the answer.",
)


def agents_called(name: str | None) -> "list[RunSummary]":
    """The agents of the run on this machine that is meant: of several nodes there may be several.

    Raises:
        RunNotFound: they are of several runs of one name, or as `choose_agents` does.
        RunUnreachable: which of them belong together cannot be found out.
    """
    from rankwise.launch.control.client import NotGenuine, ask_all, list_runs, names_of  # noqa: PLC0415  # not for --help

    runs = list_runs()
    chosen = choose_agents(runs, name, names_of(runs, deadline_after(NAMES_PATIENCE)))
    if len(chosen) > 1:
        asked = ask_all(chosen, "status", deadline_after(PLACE_PATIENCE))
        replies = [each for each in asked if not isinstance(each.answer, NotGenuine)]
        chosen = [each.run for each in replies] or chosen
        if len(chosen) > 1 and not are_of_one_run(replies):
            pids = ", ".join(str(run.pid) for run in chosen)
            raise RunNotFound(
                f"several runs here are called {name}, pids {pids}", hint="name a pid"
            )
    return chosen


def are_of_one_run(replies: "Iterable[RunAnswer]") -> bool:
    """Whether agents of one name meet each other; raises if one of them does not answer."""
    places = {(each.run.uid, each.lines()[0].get("place")) for each in replies}
    return len(places) == 1 and all(place for _, place in places)


def answers(
    replies: "Iterable[tuple[RunSummary, ReplyT | RunUnreachable]]", *, tells: bool = True
) -> "Iterator[tuple[RunSummary, ReplyT]]":
    """What the agents of a run answer. Of several, one that does not is told of, if `tells`.

    Raises:
        RunUnreachable: none has answered, and the others were told of.
    """
    errors: list[Exception] = []
    has_answer = False
    for run, told in replies:
        if isinstance(told, Exception):
            errors.append(told)
        else:
            has_answer = True
            yield run, told
    last = None if has_answer or not errors else errors.pop()
    for error in errors if tells or last is not None else ():
        click.echo(f"rankwise: {error}", err=True)
    if last is not None:
        raise last


def name_of(run: "RunSummary") -> str:
    """What a run is called."""
    from rankwise.launch.control.client import names_of  # noqa: PLC0415  # not for --help

    return names_of([run], deadline_after(NAMES_PATIENCE))[run]


def deadline_after(patience: Duration) -> Instant:
    """When an answer is due, on the clock of the control socket."""
    return Instant(time.monotonic_ns() + patience)


def choose_agents(
    runs: "Sequence[RunSummary]", name: str | None, names: "Mapping[RunSummary, str]"
) -> "list[RunSummary]":
    """The agents that a user means by a run's name, the beginning of one, a pid, or nothing.

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
        raise RunNotFound(
            "no run of yours is active on this machine",
            hint=_ENDED,
        )
    if name == "":
        raise click.UsageError(f"the name of the run is empty, expected one of: {shown}")
    exact = [run for run in runs if name and (is_called(run, name) or name == str(run.pid))]
    fitting = exact or [run for run in runs if names[run].startswith(name or "")]
    if not fitting:
        raise RunNotFound(f"no active run is called {name!r}; active: {shown}", hint=_ENDED)
    if not exact and len({names[run] for run in fitting}) > 1:
        if name is None:
            raise click.UsageError(f"there are several runs, name one of them: {shown}")
        several = ", ".join(f"{names[run]} (pid {run.pid})" for run in fitting)
        raise RunNotFound(f"{name!r} could be any of: {several}", hint="name its pid")
    return fitting


def is_called(run: "RunSummary", name: str) -> bool:
    """Whether that is the run's name, also where others are not told it."""
    from rankwise.launch.control.addresses import shown_id  # noqa: PLC0415  # not for --help

    return run.run_id in (name, shown_id(name, is_secret=True))


def ranks_and_pids(group: "Sequence[Mapping[str, Any]]") -> str:
    """`ranks 0-1 (pids 7, 8)`, of the lines of an answer."""
    pids = ", ".join(str(line["pid"]) for line in group)
    return f"{ranks_in_words(line['rank'] for line in group)} (pid{'s' * (len(group) > 1)} {pids})"


def print_json(lines: "Iterable[object]") -> None:
    """Print each as a line of JSON."""
    import msgspec  # noqa: PLC0415  # only here

    for line in lines:
        click.echo(msgspec.json.encode(line).decode())
