"""`rankwise stop`: asks a run on this machine to end, and waits until it has."""

import click

from rankwise.base.errors import RankwiseError
from rankwise.base.units import SECOND, Duration, duration_from_seconds, format_duration
from rankwise.base.wording import counted
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.runs_here import NAMED_RUN_ARGUMENT, deadline_after, name_of, run_called

PATIENCE = Duration(10 * SECOND)
"""How soon an agent must have heard it."""


class NotStopped(RankwiseError):
    """The run did not take notice that it should end."""


@click.command("stop", context_settings=CONTEXT_SETTINGS)
@NAMED_RUN_ARGUMENT
@click.option("--now", is_flag=True, help="Kill the ranks at once: they can save nothing.")
@click.option("--no-wait", is_flag=True, help="Return when the run has heard it.")
def stop(run: str, *, now: bool, no_wait: bool) -> None:
    """Stop RUN as SIGTERM does: ranks may save, and are killed after --shutdown-timeout.

    RUN is a run's name as `rankwise ps` shows it, the beginning of one, or the pid of its agent.
    A run on several nodes is stopped on all of them, unless it was started with --on-preemption
    leave. A run that Ctrl-Z has suspended is resumed first. Stopping it twice changes nothing;
    Ctrl-C ends the waiting, and the run goes on to its end.
    """
    from rankwise.launch.control.client import expect_over, is_suspended, listen, resume  # noqa: PLC0415  # not for --help
    from rankwise.launch.control.server import Request  # noqa: PLC0415  # the same

    chosen = run_called(run)
    name = name_of(chosen)
    if is_suspended(chosen):
        click.echo(f"resuming {name} (pid {chosen.pid}), which is suspended")
        resume(chosen)
    answer = listen(chosen, Request("stop", at_once=now), deadline_after(PATIENCE))
    told = next(answer, None)
    if told is None:
        raise NotStopped(f"run {name!r} (pid {chosen.pid}) was over already")
    grace = format_duration(duration_from_seconds(told["grace_s"]))
    how = "killing" if now else "stopping"
    patience = "" if now else f" for up to {grace}"
    click.echo(f"{how} {counted(told['stopping'])} of {name} (pid {chosen.pid}){patience}")
    if no_wait:
        return
    for _ in answer:
        pass
    expect_over(chosen)
    click.echo("stopped")
