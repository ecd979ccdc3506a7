"""`rankwise sim`: programs of many ranks on a simulated accelerator, in virtual time.

Only click is imported until a command runs: the simulator brings numpy, and launching a job must
not. The help of `sim` tells the exit codes.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rankwise.base.errors import ConfigError, SimulationError
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.sim_cluster import cluster
from rankwise.cli.sim_compare import compare
from rankwise.cli.sim_options import (
    assignments,
    complete_benches,
    complete_files,
    complete_machines,
    points_of,
    simulation_options,
    time_limits,
)
from rankwise.launch.options import MACHINES, PRESETS_IN_WORDS

if TYPE_CHECKING:
    from rankwise.sim.benches.session import BenchSettings
    from rankwise.sim.hardware.engine import GraphEngine
    from rankwise.sim.hardware.topology import Topology
    from rankwise.sim.reporting.results import BenchResult


@click.group("sim", context_settings=CONTEXT_SETTINGS)
def sim() -> None:
    """Simulate a multi-chip accelerator: benches, your own programs, machines.

    Exit codes: 0 success; 1 wrong numbers; 2 a bad setting, file or name, and nothing ran; 124 a
    time limit, or a deadlock without a root cause; else that of the rank that failed first.
    """


sim.add_command(cluster)
sim.add_command(compare)


class _BenchCommand(click.Command):
    """Its help lists the parameters of the bench that is named beside `--help`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = [word for word in args if not word.startswith("-")]
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not ctx.obj:
            return
        from rankwise.sim.benches import NAMES  # noqa: PLC0415  # not for the help alone
        from rankwise.sim.benches.programs import shipped_program  # noqa: PLC0415  # the same

        name = next((word for word in ctx.obj if word in NAMES), None)
        if name is None:
            return
        rows = [
            (each.name, each.expected + _default_in_words(each.default))
            for each in shipped_program(name).parameters.all
        ]
        with formatter.section(f"Parameters of {name}, for --set and --sweep"):
            formatter.write_dl(rows)


def _default_in_words(default: Any) -> str:
    return "" if default is None else f"  [default: {default}]"


@sim.command("bench", cls=_BenchCommand, context_settings=CONTEXT_SETTINGS)
@click.argument("name", required=False, shell_complete=complete_benches)
@simulation_options
@click.pass_context
def bench(ctx: click.Context, /, name: str | None, **options: Any) -> int:
    """Run the bench NAME; without a name, list them.

    A bench checks its numbers against numpy, and compares its time with the best that the machine
    can do.
    """
    if name is None:
        if given := _given(ctx, options):
            named = next(each for each in ctx.command.params if each.name == given[0])
            raise click.UsageError(
                f"{named.opts[0]} is given, but no bench; rankwise sim bench lists them", ctx
            )
        return _list_benches()
    return _simulate(name, is_file=False, **options)


class _RunCommand(click.Command):
    """It says where words go that look like options and are none of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            program = next((each for each in words if each.endswith(".py")), None)
            if program is None or error.possibilities:
                raise
            name = error.option_name
            if "--triton" in words:
                hint = f"arguments of the script come after --: {program} -- {name} …"
            else:
                hint = f"parameters of the program are set with --set {name.lstrip('-')}=VALUE"
            raise click.UsageError(f"no such option {name!r}; {hint}", ctx) from None


@sim.command("run", cls=_RunCommand, context_settings=CONTEXT_SETTINGS)
@click.argument("program", metavar="PROGRAM.py", shell_complete=complete_files)
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
@click.option(
    "--triton",
    is_flag=True,
    help="Run an unmodified script that imports triton: kernels are emulated on the CPU, or run on "
    "a simulated machine with --topology.",
)
@click.option(
    "--check-compile",
    is_flag=True,
    help="With --triton: pass each kernel to the installed triton's front end too, and fail with "
    "the line that it refuses. Needs no GPU.",
)
@simulation_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    program: str,
    arguments: tuple[str, ...],
    *,
    triton: bool,
    check_compile: bool,
    **options: Any,
) -> int:
    """Run a program of your own.

    It defines run(torch), or worker(rank, world_size, torch), which runs once per SIP. With
    --triton it is any script. NAME.et runs the Chakra traces NAME.0.et and so on.
    """
    if not triton:
        if check_compile:
            raise ConfigError("--check-compile is for kernels of a script: add --triton")
        if arguments:
            raise ConfigError(
                f"{arguments[0]!r} comes after the program, which takes no arguments",
                hint="--set KEY=VALUE sets its parameters",
            )
        return _simulate(program, is_file=True, **options)
    given = _given(ctx, options)
    _check_options_of_triton(given)
    with _shown_to_triton() if check_compile else nullcontext():
        if "topology" in given:
            return _simulate(program, is_file=True, arguments=arguments, **options)
        return _emulate(program, arguments, time_limits(options["max_time"]).real_s)


def _machine(name: str) -> "str | Topology":
    """A node of a machine that exists; the name itself, if it is a preset's or a file's."""
    if name not in MACHINES:
        return name
    from rankwise.simranks.prediction.machines.catalogue import named_machine, open_machine  # noqa: PLC0415  # not for --help

    return open_machine(name, 1, named_machine(name).node_size)


def _shown_to_triton() -> AbstractContextManager[None]:
    from rankwise.sim.triton.compile_check import check_installed, kernels_shown_to_triton  # noqa: PLC0415  # not for --help

    check_installed()
    return kernels_shown_to_triton(lambda line: click.echo(line, err=True))


def _emulate(program: str, arguments: tuple[str, ...], limit_s: float | None) -> int:
    """Run a script that says `import triton`, without a machine."""
    from rankwise.cli.sim_progress import progress_shown  # noqa: PLC0415  # not for --help
    from rankwise.sim.benches.triton_script import TritonScript  # noqa: PLC0415  # the same
    from rankwise.sim.runtime.wall_limit import wall_limit  # noqa: PLC0415  # the same

    limit = wall_limit(limit_s, remedy="a larger --max-time real:…")
    with _failures_shown(program) as end, limit, progress_shown() as tell:
        tell(f"{program} is emulated")
        TritonScript(program, arguments).run(None, {})
    return end.code


def _given(ctx: click.Context, options: Iterable[str]) -> list[str]:
    """Which of them are on the command line, by name."""
    there = click.core.ParameterSource.COMMANDLINE
    return [name for name in options if ctx.get_parameter_source(name) is there]


def _check_options_of_triton(given: Sequence[str]) -> None:
    """Refuse options that would do nothing."""
    of_programs = {"sweep": "--sweep", "results": "--results", "timing_only": "--timing-only"}
    for name, option in of_programs.items():
        if name in given:
            raise ConfigError(f"{option} has no meaning with --triton")
    of_machines = {
        "fields": "--set",
        "faults": "--faults",
        "ccl": "--ccl",
        "trace": "--trace",
        "chakra": "--chakra",
        "report": "--report",
        "detect_races": "--detect-races",
    }
    for name in given:
        if name in of_machines and "topology" not in given:
            raise ConfigError(
                f"{of_machines[name]} needs a machine, and --triton alone has none",
                hint="name one: --topology default",
            )


@sim.command(
    "topology",
    help=f"Draw MACHINE: a preset ({PRESETS_IN_WORDS}) or a YAML file.",
    short_help="Draw the machine of a preset or a file.",
    context_settings=CONTEXT_SETTINGS,
)
@click.argument("machine", shell_complete=complete_machines)
@click.option(
    "--svg", metavar="FILE", shell_complete=complete_files, help="Write the drawing as SVG instead."
)
@click.option(
    "--yaml",
    is_flag=True,
    help="Print the machine as a topology file, to edit.",
)
@click.option(
    "--set",
    "fields",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a field, such as system.sips.count=8.",
)
def topology(*, machine: str, svg: str | None, yaml: bool, fields: tuple[str, ...]) -> None:
    """Draw a machine."""
    from rankwise.cli.sim_progress import terminal_width  # noqa: PLC0415  # not for --help
    from rankwise.sim.benches.session import topology_with  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.machine_drawing import as_svg, as_text  # noqa: PLC0415  # the same

    chosen = assignments("--set", fields, is_list=False)
    drawn = topology_with(_machine(machine), {each.key: each.values[0] for each in chosen})
    if yaml:
        from yaml import safe_dump  # noqa: PLC0415  # the same

        if svg is not None:
            raise ConfigError("--svg and --yaml exclude each other", hint="give one")
        spec = safe_dump(drawn.spec, sort_keys=False, default_flow_style=None, width=120)
        click.echo(spec, nl=False)
    elif svg is None:
        click.echo(as_text(drawn, terminal_width()))
    else:
        from rankwise.sim.reporting.files import write_text  # noqa: PLC0415  # the same

        write_text(svg, as_svg(drawn))
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
    arguments: tuple[str, ...] | None = None,
    sweep: tuple[str, ...],
    style: str,
    trace: str | None,
    chakra: str | None,
    report: str | None,
    results: str | None,
    **options: Any,
) -> int:
    settings = _settings(program, is_file=is_file, arguments=arguments, **options)
    swept = assignments("--sweep", sweep, is_list=True)
    for each in swept:
        if each.key in settings.fields:
            raise ConfigError(f"{each.key} is given by --set and by --sweep")
    if swept and (trace, chakra) != (None, None):
        raise ConfigError(
            "--trace and --chakra are for one run, and --sweep makes several",
            hint="run one point alone, with --set",
        )
    if results is not None and not swept:
        raise ConfigError("--results has no meaning without --sweep")
    with _failures_shown(program) as end:
        if swept:
            from rankwise.cli.sim_sweep import TableTarget, run_sweep  # noqa: PLC0415  # only here

            end.code = run_sweep(settings, points_of(swept), TableTarget(style, report, results))
        else:
            end.code = _run_one(settings, style, trace, chakra, report)
    return end.code


class _SimulationEnd:
    """How a simulation ended: its exit code."""

    code = 0


@contextmanager
def _failures_shown(program: str) -> Iterator[_SimulationEnd]:
    """Tell what the user's program fails with: its lines, and never ours."""
    end = _SimulationEnd()
    try:
        with _sigterm_shown():
            yield end
    except (click.ClickException, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001  # the program may raise anything
        from rankwise.cli.sim_failures import tell_failure  # noqa: PLC0415  # only here

        end.code = tell_failure(error, program)


@contextmanager
def _sigterm_shown() -> Iterator[None]:
    """Let a SIGTERM that ends this process leave a line and a whole terminal behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell_and_die(signum: int, _frame: FrameType | None) -> None:
        show_cursor = b"\x1b[?25h\r\n" if os.isatty(2) else b""  # a sign of life had hidden it
        with suppress(OSError):
            os.write(2, show_cursor + b"rankwise sim: ended by SIGTERM before the run was over\n")
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, tell_and_die)
    try:
        yield
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)


def _run_one(
    settings: "BenchSettings", style: str, trace: str | None, chakra: str | None, report: str | None
) -> int:
    from rankwise.cli.sim_progress import watched  # noqa: PLC0415  # not for --help
    from rankwise.sim.benches.session import BenchSession  # noqa: PLC0415  # the same
    from rankwise.sim.reporting.files import check_writable  # noqa: PLC0415  # the same

    for path in (trace, chakra, report):
        if path is not None:
            check_writable(path)
    if trace is not None and trace == report:
        raise ConfigError(
            f"--trace and --report are both {trace!r}, and would overwrite each other"
        )
    session = BenchSession(settings, with_messages=trace is not None)
    # Output for other programs holds nothing but results; for people, the program's own words
    # belong there.
    prints = nullcontext() if style == "table" else redirect_stdout(sys.stderr)
    try:
        with prints, watched(session.engine, settings.program):
            finished = session.run()
    except SimulationError as error:
        from rankwise.cli.sim_failures import in_text, tell_failure  # noqa: PLC0415  # only here

        code, told = tell_failure(error, settings.program), in_text(error, settings.program)
        # How far it has come is what the files are good for.
        _write_files(session.engine, settings.program, trace=trace, report=report, failure=told)
        return code
    if finished.results:
        _show(finished.results, style)
    elif style != "table":
        from rankwise.cli.sim_sweep import show_times  # noqa: PLC0415  # only here

        show_times([({}, finished.engine.now)], style)
    else:
        from rankwise.sim.hardware.quantities import format_picoseconds  # noqa: PLC0415  # the same

        click.echo(f"simulated time: {format_picoseconds(finished.engine.now)}")
        _show_what_holds_back(finished.engine)
    if chakra is not None:
        from rankwise.sim.reporting.chakra import write_chakra  # noqa: PLC0415  # the same

        click.echo(f"traces: {write_chakra(chakra, finished.engine)}", err=True)
    _write_files(finished.engine, settings.program, finished.results, trace=trace, report=report)
    return 0


def _show_what_holds_back(engine: "GraphEngine") -> None:
    """What costs most besides the work, of a program that has measured nothing itself."""
    from rankwise.sim.benches.spending import held_back_by  # noqa: PLC0415  # not for --help

    cause, share = held_back_by(engine)
    if cause:
        click.echo(f"held back by: {cause}, {share:.1%} of the devices' time")


def _write_files(
    engine: "GraphEngine",
    program: str,
    results: "Sequence[BenchResult]" = (),
    *,
    trace: str | None,
    report: str | None,
    failure: str = "",
) -> None:
    if trace is not None:
        from rankwise.sim.reporting.trace import write_trace  # noqa: PLC0415  # not for --help

        write_trace(trace, engine)
        click.echo(f"trace: {trace} (open it at https://ui.perfetto.dev)", err=True)
    if report is not None:
        from rankwise.sim.benches.spending import breakdown_of  # noqa: PLC0415  # the same
        from rankwise.sim.reporting.page import write_page  # noqa: PLC0415  # the same

        breakdown = breakdown_of(engine, program)
        write_page(report, program, engine, results, failure=failure, breakdown=breakdown)
        click.echo(f"report: {report}", err=True)


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
    arguments: tuple[str, ...] | None,
    topology: str,
    ccl: str | None,
    fields: tuple[str, ...],
    faults: tuple[str, ...],
    seed: int,
    timing_only: bool,
    detect_races: bool,
    max_time: tuple[str, ...],
) -> "BenchSettings":
    from rankwise.sim.benches.session import BenchSettings  # noqa: PLC0415  # not for --help
    from rankwise.sim.faults.reading import read_chip_faults  # noqa: PLC0415  # the same

    limits = time_limits(max_time)
    return BenchSettings(
        program=program,
        is_file=is_file,
        arguments=arguments,
        topology=_machine(topology),
        ccl=ccl,
        fields={each.key: each.values[0] for each in assignments("--set", fields, is_list=False)},
        faults=read_chip_faults(faults),
        seed=seed,
        has_data=not timing_only,
        detects_races=detect_races,
        virtual_limit_ps=limits.virtual_ps,
        real_limit_s=limits.real_s,
    )
