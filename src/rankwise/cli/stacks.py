"""`rankwise stacks`: where every rank of a run is, without stopping any of them.

Ranks that stand in the same place are shown once: of 64 ranks, 63 usually wait for the other one.
"""

import re
from typing import TYPE_CHECKING, Any

import click

from rankwise.base.units import Duration
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.options import DURATION
from rankwise.cli.runs_here import RUN_ARGUMENT, deadline_after, run_called

if TYPE_CHECKING:
    from collections.abc import Sequence

_THREAD_ID = re.compile(r"\b0x[0-9a-f]+\b")


@click.command("stacks", context_settings=CONTEXT_SETTINGS)
@RUN_ARGUMENT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per rank.")
@click.option(
    "--timeout",
    type=DURATION,
    default="10s",
    show_default=True,
    help="How long to wait for the answer.",
)
def stacks(run: str | None, *, as_json: bool, timeout: Duration) -> None:
    """Print the Python stacks of every rank of RUN.

    RUN is a run's name as `rankwise ps` shows it, the beginning of one, or the pid of its agent;
    it may be left out while there is only one run.
    """
    from rankwise.launch.control import ask  # noqa: PLC0415  # not for --help

    answer = ask(run_called(run), "stacks", deadline_after(timeout))
    ranks = sorted(answer, key=lambda line: int(line.get("rank", -1)))
    if as_json:
        import msgspec  # noqa: PLC0415  # only here

        for line in ranks:
            click.echo(msgspec.json.encode(line).decode())
    else:
        click.echo(render(ranks))


def render(ranks: "Sequence[dict[str, Any]]") -> str:
    """The stacks of all ranks as text, equal ones together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in ranks:
        # Threads have other addresses in every process.
        groups.setdefault(_THREAD_ID.sub("0x…", str(line.get("stacks", ""))), []).append(line)
    return "\n\n".join(_render_group(group) for group in groups.values())


def _render_group(group: "Sequence[dict[str, Any]]") -> str:
    ranks = ", ".join(str(line.get("rank")) for line in group)
    pids = ", ".join(str(line.get("pid")) for line in group)
    plural = "s" if len(group) > 1 else ""
    stacks = str(group[0].get("stacks", "")).strip("\n") or "  (no answer)"
    return f"rank{plural} {ranks} (pid{plural} {pids})\n{stacks}"
