"""`rankwise top`: how the ranks of a run are, live in a terminal, or once as text or JSON."""

import os
import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from rankwise.base.errors import RankwiseError
from rankwise.base.units import SECOND, Duration, duration_from_seconds
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.options import DURATION
from rankwise.cli.runs_here import (
    NAMES_PATIENCE,
    choose_agents,
    complete_run,
    deadline_after,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.launch.control.client import RunSummary
    from rankwise.tui.picture import RunPicture
    from rankwise.tui.samples import RunSample

INTERVAL_MIN = duration_from_seconds(0.1)


@click.command("top", context_settings=CONTEXT_SETTINGS)
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--once", is_flag=True, help="Print once, as text of 80 columns.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
@click.option(
    "--interval",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Time between two updates; more if an update takes over a tenth of it.",
)
def top(run: str | None, *, once: bool, as_json: bool, interval: Duration) -> None:
    """Show the state, steps, last collective, lateness, CPU and memory of each rank.

    Without RUN, it shows all your runs and pools (rankwise.Pool) on this machine. Ranks are folded
    by state, problems first: failed, hung, awaited (others wait for it), late, still (no progress
    for 10 s), suspended (by SIGSTOP, Ctrl-Z or a debugger). Keys: q quit, enter unfold or fold, o
    order, f fold all, ? help. In a terminal it is live, which needs pip install 'rankwise[tui]';
    into a pipe it is printed once.

    RUN is a name that `rankwise ps` shows, the beginning of one, or the pid of an agent.
    On several nodes, it shows the ranks on this machine.
    """
    if interval < INTERVAL_MIN:
        raise click.BadParameter("expected at least 100ms", param_hint="--interval")
    if as_json or once or not _is_on_terminal():
        _print_once(run, as_json=as_json)
        return
    if find_spec("textual") is None:
        command = f"{shlex.quote(sys.executable)} -m pip install 'rankwise[tui]'"
        raise RankwiseError(
            "the live view of rankwise top needs textual, which is not installed",
            hint=f"install it: {command}; or print it once: rankwise top --once",
        )
    from rankwise.tui.app import show  # noqa: PLC0415  # textual takes its time

    show(lambda: _chosen(run), interval / SECOND)


def _is_on_terminal() -> bool:
    """Whether keys can be read, and a screen can be drawn."""
    has_screen = os.environ.get("TERM", "dumb") != "dumb"
    return has_screen and sys.stdin.isatty() and sys.stdout.isatty()


def _chosen(name: str | None) -> "list[RunSummary]":
    from rankwise.launch.control.client import list_pools, list_runs, names_of  # noqa: PLC0415  # not for --help

    runs = list_runs() + list_pools()
    if name is None:
        return runs
    return choose_agents(runs, name, names_of(runs, deadline_after(NAMES_PATIENCE)))


def _print_once(name: str | None, *, as_json: bool) -> None:
    from rankwise.tui.picture import Watcher  # noqa: PLC0415  # the same
    from rankwise.tui.samples import look_at  # noqa: PLC0415  # not for --help

    samples = look_at(_chosen(name))
    pictures = [Watcher(sample.run).see(sample) for sample in samples]
    if not as_json:
        from rankwise.tui.text import page  # noqa: PLC0415  # the same

        click.echo(page(pictures))
        return
    print_json(_rows(samples, pictures))


def _rows(
    samples: "Sequence[RunSample]", pictures: "Sequence[RunPicture]"
) -> "Iterator[dict[str, Any]]":
    """One object per run: what its agent says, and what each rank uses."""
    import msgspec  # noqa: PLC0415  # only here

    from rankwise.launch.control.client import is_suspended  # noqa: PLC0415  # only here

    for sample, picture in zip(samples, pictures, strict=True):
        row: dict[str, Any] = {"run_id": sample.run.run_id, "pid": sample.run.pid}
        if sample.status is None:
            state = "suspended" if is_suspended(sample.run) else "silent"
            yield row | {"state": state, "problem": sample.problem}
            continue
        status = msgspec.to_builtins(sample.status)
        for worker, shown in zip(status["workers"], picture.rows, strict=True):
            del worker["marks"]
            worker |= {
                "state": str(shown.state),
                "step_rate": shown.step_rate,
                "cpu_percent": shown.cpu_percent,
                "memory_bytes": shown.memory_bytes,
                "gpu_bytes": shown.gpu_bytes,
                "gpu_busy": shown.gpu_busy,
                "gpu_celsius": shown.gpu_celsius,
                "gpu_slow": shown.gpu_slow,
                "gpu_errors": shown.gpu_errors,
            }
        yield row | status
