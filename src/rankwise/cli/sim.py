"""`rankwise sim`: programs of many ranks on a simulated accelerator, in virtual time.

Only click is imported until a command runs: the simulator brings numpy, and launching a job must
not. Exit codes: 0 success; 2 a setting, file or name that cannot be used, and nothing has run; 1 a
check that failed, ranks that failed or are stuck, or a time limit.
"""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rankwise.base.errors import ConfigError
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.sim_cluster import cluster
from rankwise.cli.sim_options import (
    assignments,
    complete_benches,
    complete_files,
    complete_machines,
    points_of,
    simulation_options,
    time_limits,
)

if TYPE_CHECKING:
    from rankwise.sim.benches.session import Settings


@click.group("sim", context_settings=CONTEXT_SETTINGS)
def sim() -> None:
    """Simulate a multi-chip accelerator: benches, your own programs, machines.

    Exit codes: 0 success; 2 a setting, file or name that cannot be used, and nothing has run; 1
    numbers that are wrong, ranks that failed or are stuck, or a time limit.
    """


sim.add_command(cluster)


@sim.command("bench", context_settings=CONTEXT_SETTINGS)
@click.argument("name", required=False, shell_complete=complete_benches)
@simulation_options
def bench(name: str | None, **options: Any) -> int:
    """Run the bench NAME; without a name, list them.

    A bench checks its numbers against numpy, and shows how near it comes to what the machine can
    do at best.
    """
    if name is None:
        return _list_benches()
    return _simulate(name, is_file=False, **options)


@sim.command("run", context_settings=CONTEXT_SETTINGS)
@click.argument("program", metavar="PROGRAM.py", shell_complete=complete_files)
@simulation_options
def run(program: str, **options: Any) -> int:
    """Run a program of your own.

    It defines run(torch), or worker(rank, world_size, torch), which then runs once per SIP.
    """
    return _simulate(program, is_file=True, **options)


@sim.command(
    "topology",
    short_help="Draw the machine of a preset or a file.",
    context_settings=CONTEXT_SETTINGS,
)
@click.argument("file", shell_complete=complete_machines)
@click.option(
    "--svg", metavar="FILE", shell_complete=complete_files, help="Write the drawing as SVG instead."
)
def topology(file: str, svg: str | None) -> None:
    """Draw the machine that FILE describes: a preset (default, torus16, pod64, switch8) or YAML."""
    from rankwise.cli.sim_progress import terminal_width  # noqa: PLC0415  # not for --help
    from rankwise.sim.hardware.topology import load_topology  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.machine_drawing import as_svg, as_text  # noqa: PLC0415  # the same

    machine = load_topology(file)
    if svg is None:
        click.echo(as_text(machine, terminal_width()))
    else:
        from rankwise.sim.reporting.files import write_text  # noqa: PLC0415  # the same

        write_text(svg, as_svg(machine))
        click.echo(f"drawing: {svg}")


def _list_benches() -> int:
    from rankwise.sim.benches.programs import summaries  # noqa: PLC0415  # not for --help

    found = summaries()
    width = max(len(name) for name, _ in found)
    for name, summary in found:
        click.echo(f"{name:<{width}}  {summary}")
    return 0


def _simulate(
    program: str,
    *,
    is_file: bool,
    sweep: tuple[str, ...],
    style: str,
    trace: str | None,
    report: str | None,
    **options: Any,
) -> int:
    settings = _settings(program, is_file=is_file, **options)
    swept = assignments("--sweep", sweep, is_list=True)
    for each in swept:
        if each.key in settings.fields:
            raise ConfigError(f"{each.key} is given by --set and by --sweep")
    if swept and (trace, report) != (None, None):
        raise ConfigError(
            "--trace and --report are about one run, and --sweep makes several",
            hint="run the point that you want to see by itself, with --set",
        )
    try:
        if swept:
            from rankwise.cli.sim_sweep import run_sweep  # noqa: PLC0415  # only here

            return run_sweep(settings, points_of(swept), style)
        return _run_one(settings, style, trace, report)
    except (click.ClickException, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001  # the user's program failed: show where, not us
        from rankwise.cli.sim_failures import tell_failure  # noqa: PLC0415  # only here

        return tell_failure(error)


def _run_one(settings: "Settings", style: str, trace: str | None, report: str | None) -> int:
    from rankwise.cli.sim_progress import watched  # noqa: PLC0415  # not for --help
    from rankwise.sim.benches.session import Session  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.files import check_writable  # noqa: PLC0415  # the same

    for path in (trace, report):
        if path is not None:
            check_writable(path)
    if trace is not None and trace == report:
        raise ConfigError(
            f"--trace and --report are both {trace!r}, and would overwrite each other"
        )
    session = Session(settings, with_messages=trace is not None)
    # What others read holds nothing but results; for people, the program's own words belong there.
    prints = nullcontext() if style == "table" else redirect_stdout(sys.stderr)
    with prints, watched(session.engine, settings.program):
        finished = session.run()
    if finished.results:
        _show(finished.results, style)
    elif style != "table":
        from rankwise.cli.sim_sweep import show_times  # noqa: PLC0415  # only here

        show_times([({}, finished.engine.now)], style)
    else:
        from rankwise.sim.hardware.quantities import format_picoseconds  # noqa: PLC0415  # the same

        click.echo(f"simulated time: {format_picoseconds(finished.engine.now)}")
    if trace is not None:
        from rankwise.sim.reporting.trace import write_trace  # noqa: PLC0415  # the same

        write_trace(trace, finished.engine)
        click.echo(f"trace: {trace} (open it at https://ui.perfetto.dev)", err=True)
    if report is not None:
        from rankwise.sim.reporting.page import write_page  # noqa: PLC0415  # the same

        write_page(report, settings.program, finished.engine, finished.results)
        click.echo(f"report: {report}", err=True)
    return 0


def _show(results: list[Any], style: str) -> None:
    from rankwise.cli.sim_progress import terminal_width  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.results import as_csv  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.table import result_table  # noqa: PLC0415  # the same

    if style == "json":
        rows = [result.as_row() for result in results]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        is_csv = style == "csv"
        click.echo(as_csv(results) if is_csv else result_table(results, width=terminal_width()))


def _settings(
    program: str,
    *,
    is_file: bool,
    topology: str,
    ccl: str | None,
    fields: tuple[str, ...],
    seed: int,
    timing_only: bool,
    max_time: tuple[str, ...],
) -> "Settings":
    from rankwise.sim.benches.session import Settings  # noqa: PLC0415  # not for --help

    limits = time_limits(max_time)
    return Settings(
        program=program,
        is_file=is_file,
        topology=topology,
        ccl=ccl,
        fields={each.key: each.values[0] for each in assignments("--set", fields, is_list=False)},
        seed=seed,
        has_data=not timing_only,
        virtual_limit_ps=limits.virtual_ps,
        real_limit_s=limits.real_s,
    )
