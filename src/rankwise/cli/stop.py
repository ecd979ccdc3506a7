"""`rankwise stop`: asks a run on this machine to end, and waits until it has."""

from typing import Any

import click

from rankwise.base.errors import RankwiseError
from rankwise.base.units import SECOND, Duration, duration_from_seconds, format_duration
from rankwise.base.wording import counted
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.runs_here import (
    NAMED_RUN_ARGUMENT,
    agents_called,
    answers,
    deadline_after,
    name_of,
)

PATIENCE = Duration(10 * SECOND)
"""How soon an agent must have confirmed it."""


@click.command("stop", context_settings=CONTEXT_SETTINGS)
@NAMED_RUN_ARGUMENT
@click.option("--now", is_flag=True, help="Kill the ranks at once, without saving.")
@click.option("--no-wait", is_flag=True, help="Return when the run has the request.")
def stop(run: str, *, now: bool, no_wait: bool) -> None:
    """Stop RUN like SIGTERM: ranks may save, and are killed after --shutdown-timeout.

    RUN is a name that `rankwise ps` shows, the beginning of one, or the pid of an agent. A
    run on several nodes stops on all of them, or with --on-preemption leave its nodes on this
    machine leave it. A suspended run is resumed first. Ctrl-C ends the waiting only.
    """
    from rankwise.launch.control.client import expect_over, is_suspended, listen_to_all, resume  # noqa: PLC0415  # not for --help
    from rankwise.launch.control.server import ControlRequest  # noqa: PLC0415  # the same

    agents = agents_called(run)
    name = name_of(agents[0])
    for agent in agents:
        if is_suspended(agent):
            click.echo(f"resuming {name} (pid {agent.pid}), which is suspended")
            resume(agent)
    request = ControlRequest("stop", at_once=now)
    stopping = 0
    for agent, told in answers(listen_to_all(agents, request, deadline_after(PATIENCE))):
        click.echo(_what_follows(told, f"{name} (pid {agent.pid})", now=now))
        stopping += 1
        if no_wait and stopping == len(agents):
            return
    if not stopping:
        raise RankwiseError(f"run {name!r} (pid {agents[0].pid}) was over already")
    for agent in agents:
        expect_over(agent)
    click.echo("stopped")


def _what_follows(told: dict[str, Any], who: str, *, now: bool) -> str:
    ranks = f"{counted(told['stopping'])} of {who}"
    grace = format_duration(duration_from_seconds(told["grace_s"]))
    return f"killing {ranks}" if now else f"stopping {ranks} for up to {grace}"
