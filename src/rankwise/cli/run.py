"""`rankwise run`: starts a gang of workers and ends as they did.

The exit codes are explained in `exit_codes.py`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rankwise.base.errors import ConfigError
from rankwise.cli.exit_codes import (
    EXIT_CODE_OF_A_LATECOMER,
    EXIT_CODE_OF_A_TIMEOUT,
    EXIT_CODE_OF_ANOTHER_JOB,
)
from rankwise.cli.main import CONTEXT_SETTINGS, begin_work
from rankwise.cli.options import OptionWithVariable, complete_file, values_from
from rankwise.cli.spelling import Flag, SpellingError, in_strict_spelling
from rankwise.drivers.real.early_signals import (
    end_on_sigterm,
    hold_interrupts,
    leave_alone,
    outlive_user_signals,
)
from rankwise.launch.options import GROUPS, OPTIONS, SIM, SWEEP

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rankwise.base.failure import Outcome
    from rankwise.cli.run_job import RunOptions
    from rankwise.launch.run.job import Job
    from rankwise.launch.run.log_layout import LogPlaces

STRICT_WORDS = "rankwise.cli.run.words"
"""Where in click's `Context.meta` the words are, in strict spelling."""

EXAMPLES = """\
  rankwise run --nproc-per-node 4 train.py --epochs 3
  rankwise run --nproc-per-node gpu --start-method forkserver --preload torch train.py
  rankwise run --nproc-per-node 8 --tee 3 --log-dir logs -m mypackage.train
  rankwise run --nproc-per-node 4 --max-restarts 3 --hang-timeout 5m train.py
  rankwise run --nproc-per-node 2 --no-python ./prepare.sh
"""

RUN_OPTIONS = tuple(map(OptionWithVariable, OPTIONS))

_HELP = Flag("--help", "-h", takes_value=False, is_torchrun=True)
_HELP_ALL = Flag("--help-all", None, takes_value=False, is_torchrun=False)
_SHOWS_ALL = "rankwise.cli.run.shows_all"
"""Where in click's `Context.meta` it says that the help is to explain every option."""


class RunCommand(click.Command):
    """A command that reads flags as torchrun does and shows them in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the environment, then the command line, which wins.

        `ctx.obj` is the environment if it is another one than this process's.
        """
        environ: Mapping[str, str] = os.environ if ctx.obj is None else ctx.obj
        options = _options(self)
        try:
            args = in_strict_spelling(
                args, [_HELP, _HELP_ALL, *(option.flag for option in options)]
            )
            ctx.meta[STRICT_WORDS] = tuple(args)
            ctx.default_map = values_from(environ, options)
        except SpellingError as error:
            if not ctx.resilient_parsing:  # completion meets unfinished words
                raise click.UsageError(str(error), ctx) from None
        except click.UsageError as error:
            if not ctx.resilient_parsing:
                raise click.UsageError(error.message, ctx) from None
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter:
            raise click.UsageError("no script given", ctx) from None
        except click.BadParameter as error:
            error.param_hint = _origin(error.param, ctx, environ)
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list["CompletionItem"]:
        """Complete options up to the script; what follows it is not ours."""
        has_script = ctx.params.get("training_script") is not None
        if has_script and incomplete.startswith("-"):
            return []
        return super().shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Explain the options that most people need and name the others, or explain all."""
        if ctx.meta.get(_SHOWS_ALL):
            for group, options in _by_group(self).items():
                with formatter.section(group):
                    formatter.write_dl([option.get_help_record(ctx) for option in options])
            return
        needed = [option for option in _options(self) if option.row.brief is not None]
        with formatter.section("Options"):
            formatter.write_dl([(each.brief_spelling(ctx), str(each.row.brief)) for each in needed])
        formatter.write_paragraph()
        formatter.write("More options, which --help-all explains:\n")
        for group, options in _by_group(self).items():
            names = [each.flag.long for each in options if each.row.brief is None]
            if names:
                formatter.write(
                    fill(
                        f"{group}: {' '.join(names)}",
                        formatter.width,
                        initial_indent="  ",
                        subsequent_indent="    ",
                        break_on_hyphens=False,
                    )
                )
                formatter.write("\n")

    def format_epilog(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """Show the exit codes and the examples as they are written."""
        formatter.write_paragraph()
        formatter.write_text(
            "Words after SCRIPT belong to the script. Each option has a variable: PET_ and its "
            "name, such as PET_NPROC_PER_NODE; the command line wins. Exit codes: that of the "
            "worker that failed first; 124 after a hang or --timeout; 128 plus the number of a "
            "signal; 2 if nothing was started; 75 if the job succeeded without this node."
        )
        formatter.write_paragraph()
        formatter.write("Examples:\n" + EXAMPLES)


def _show_all_help(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _check_one_place(words: Sequence[str]) -> None:
    """Refuse --on sim beside --on ray; of two machines the last one is meant, as ever."""
    ours = words[: words.index("--")] if "--" in words else words
    places = [word.removeprefix("--on=") for word in ours if word.startswith("--on=")]
    if len({place.partition(":")[0] for place in places}) > 1:
        given = " and ".join(f"--on {place}" for place in places)
        raise ConfigError(f"{given} exclude each other: each says where the ranks run")


@click.command(
    "run",
    cls=RunCommand,
    params=[
        *RUN_OPTIONS,
        click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all_help,
            help="Explain every option, grouped by purpose.",
        ),
    ],
    options_metavar="[OPTIONS]",
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
)
@click.argument("training_script", metavar="SCRIPT", shell_complete=complete_file)
@click.argument(
    "training_script_args",
    metavar="[ARGS]...",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=complete_file,
)
@click.pass_context
def run(ctx: click.Context, /, **_values: Any) -> int:
    """Run SCRIPT on many ranks: on this machine, on several nodes, or simulated.

    Takes torchrun's options, also abbreviated or with underscores.
    """
    from rankwise.cli.run_job import job_from  # noqa: PLC0415  # not needed for --help

    options = options_in(ctx)
    outlive_user_signals()
    end_on_sigterm()
    _check_one_place(ctx.meta[STRICT_WORDS])
    if options.on is not None and options.on.startswith("sim"):
        from rankwise.cli.on_sim import simulate  # noqa: PLC0415  # only there

        if options.sweep:
            from rankwise.cli.run_sweep import sweep  # noqa: PLC0415  # rare

            begin_work()
            return sweep(options, ctx.meta[STRICT_WORDS])
        options.refuse_without(SWEEP)
        return exit_code(simulate(options, ctx.meta[STRICT_WORDS], os.environ))
    for option in OPTIONS:
        if option.only == SIM and (given := options.origins.get(option.name)):
            raise ConfigError(f"{given} is for simulated ranks", hint="give --on sim as well")
    if options.on is not None:
        from rankwise.cli.on_ray import run_elsewhere  # noqa: PLC0415  # only there

        begin_work()
        leave_alone()
        return run_elsewhere(options, ctx.meta[STRICT_WORDS], os.environ)
    words = ctx.meta[STRICT_WORDS]
    options, of_scheduler = _completed_by_scheduler(options, os.environ, words)
    if _meets_by_plugin(options):
        from rankwise.cli.torch_plugins import launch_with_handler  # noqa: PLC0415  # rare

        begin_work()
        leave_alone()
        return launch_with_handler(options)
    job = _with_master_bound(job_from(options, os.environ))
    how = ""
    if job.start_method == "auto":
        from rankwise.launch.fork_server import with_automatic_start  # noqa: PLC0415  # not for --help

        job, how = with_automatic_start(job, os.environ)
    files = None
    if options.report is not None or options.trace is not None:
        from rankwise.cli.run_files import RunFiles  # noqa: PLC0415  # rarely asked for

        files = RunFiles(options, job)
        job = files.job
    with suppress(OSError):  # the run goes on although its notices cannot be written
        told = [how] if how and job.verbose else []
        for notice in [*of_scheduler, *notices(options, job), *told]:
            from rankwise.launch.telling.notices import notice as written  # noqa: PLC0415  # not for --help

            print(written(job, notice), end="", file=sys.stderr, flush=True)
    outcome = _supervise(job, options.event_log_handler, None if files is None else files.places)
    if files is not None:
        files.write()
    return exit_code(outcome)


def _with_master_bound(job: "Job") -> "Job":
    """The job with the address of this machine that its master's name means, if it needs one.

    It is looked up here, where every signal still ends this process at once.
    """
    is_alone = job.cluster is None or job.cluster.is_alone
    if not is_alone or job.master_port is not None or job.master_addr == job.master_bind:
        return job
    from msgspec.structs import replace  # noqa: PLC0415  # rare

    from rankwise.launch.run.master_port import address_here  # noqa: PLC0415  # the same

    return replace(job, master_bind=address_here(job.master_addr))


def _supervise(job: "Job", event_log_handler: str, places: "LogPlaces | None") -> "Outcome":
    """Run the job in this process, which ends with it."""
    if job.logs.log_specs is None and event_log_handler == "null":
        from rankwise.launch.fork_server import hosting_for  # noqa: PLC0415  # not for --help

        leave_alone(job.signals)
        hold_interrupts()
        started = None
        with suppress(OSError):  # it is tried again where the reason can be told
            started = hosting_for(job)  # it starts on another core while we import the rest
        from rankwise.launch.run.supervision import supervise  # noqa: PLC0415  # see above

        begin_work()
        return supervise(job, places, started=started, ends_process=True)
    from rankwise.cli.torch_plugins import supervise_with_plugins  # noqa: PLC0415  # rare

    begin_work()
    leave_alone()
    return supervise_with_plugins(job, event_log_handler, places)


def _meets_by_plugin(options: "RunOptions") -> bool:
    """Whether several nodes meet through a plug-in handler for torchrun."""
    from rankwise.cli.node_flags import BACKENDS  # noqa: PLC0415  # not needed for --help

    if options.rdzv_backend in BACKENDS or options.nnodes in ("1", "1:1"):
        return False
    from rankwise.cli.torch_plugins import is_rendezvous_plugin  # noqa: PLC0415  # rare

    return is_rendezvous_plugin(options.rdzv_backend)


def config_from_cli(argv: Sequence[str], environ: Mapping[str, str]) -> "Job":
    """The job that `rankwise run` with these words and this environment would run.

    Nothing is started. Whether scripts and directories exist is looked up on this machine.

    Raises:
        click.UsageError: the words cannot be read.
        ConfigError: a value cannot be used.
    """
    from rankwise.cli.run_job import job_from  # noqa: PLC0415  # not needed for --help

    options, _ = _completed_by_scheduler(parse(argv, environ), environ, argv)
    return job_from(options, environ)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> "RunOptions":
    """The options as given, before anything is made of them; raises `click.UsageError`."""
    return options_in(run.make_context("rankwise run", list(argv), obj=environ))


def options_in(ctx: click.Context) -> "RunOptions":
    """The values that click has found, typed, and where each came from."""
    from rankwise.cli.run_job import RunOptions  # noqa: PLC0415  # not needed for --help

    environ: Mapping[str, str] = os.environ if ctx.obj is None else ctx.obj
    origins = {
        str(option.name): _origin(option, ctx, environ)
        for option in RUN_OPTIONS
        if ctx.get_parameter_source(str(option.name)) is not ParameterSource.DEFAULT
    }
    return RunOptions(**ctx.params, origins=origins)


def _completed_by_scheduler(
    options: "RunOptions", environ: Mapping[str, str], words: Sequence[str]
) -> tuple["RunOptions", list[str]]:
    """The options with what SLURM knows of this node's place in a job, and what to tell of it."""
    if "SLURM_JOB_ID" not in environ:
        return options, []
    from rankwise.cli.slurm import completed  # noqa: PLC0415  # only under SLURM

    options, notice = completed(options, environ, words)
    return options, [notice] if notice and not options.quiet else []


def notices(options: "RunOptions", job: "Job") -> list[str]:
    """What the user should know of decisions that rankwise has made, unless it is to be quiet."""
    if not job.console:
        return []
    from rankwise.cli.node_flags import endpoint_notice  # noqa: PLC0415  # not for --help
    from rankwise.launch.run.thread_limit import VARIABLE, thread_notice  # noqa: PLC0415  # the same

    told = []
    if (limit := job.environment.get(VARIABLE)) is not None:
        told.append(thread_notice(limit, job.gang.size))
    if misplaced := _note_on_options_of_script(options):
        told.append(misplaced)
    if job.cluster is not None and not job.cluster.is_alone:
        from rankwise.cli.several_nodes import secrecy_notices  # noqa: PLC0415  # only for several

        return [*told, *secrecy_notices(job.cluster)]
    endpoint = endpoint_notice(
        backend=options.rdzv_backend,
        endpoint=options.rdzv_endpoint,
        is_standalone=options.standalone,
    )
    return [*told, endpoint] if endpoint else told


def _note_on_options_of_script(options: "RunOptions") -> str | None:
    if not any(word.startswith("--") for word in options.training_script_args):
        return None
    from rankwise.cli.familiar_words import note_on_options_of_script  # noqa: PLC0415  # not for --help

    return note_on_options_of_script(
        options.training_script,
        options.training_script_args,
        {option.flag for option in OPTIONS},
        {f"--{name.replace('_', '-')}" for name in options.origins},
    )


def exit_code(outcome: "Outcome") -> int:
    """The exit code that tells a shell what became of the run."""
    from rankwise.base.failure import TIME_LIMIT_SIGNAL, Absence, FailureCause, OutcomeStatus  # noqa: PLC0415  # not needed for --help

    if outcome.absence is Absence.ANOTHER_JOB:
        return EXIT_CODE_OF_ANOTHER_JOB
    if outcome.absence is Absence.TOO_LATE:
        return EXIT_CODE_OF_A_LATECOMER
    match outcome.status:
        case OutcomeStatus.SUCCEEDED:
            return 0
        case OutcomeStatus.STOPPED if outcome.stop_signal == TIME_LIMIT_SIGNAL:
            return EXIT_CODE_OF_A_TIMEOUT
        case OutcomeStatus.STOPPED:
            return 128 + outcome.stop_signal if outcome.stop_signal else 1
        case OutcomeStatus.FAILED:
            root_cause = outcome.failures[0] if outcome.failures else None
            if root_cause is None:
                return 1
            if root_cause.cause is FailureCause.HUNG:
                return EXIT_CODE_OF_A_TIMEOUT  # the worker's own code tells how we ended it
            if root_cause.cause is FailureCause.OUT_OF_STEP:
                return 1  # whatever it ended with, as a success perhaps
            if root_cause.exit is None:
                return 1
            if root_cause.cause is FailureCause.RAISED and root_cause.ended_by_us:
                return 1  # what it would have ended with
            return root_cause.exit.shell_code or 1


def _options(command: click.Command) -> list[OptionWithVariable]:
    return [option for option in command.params if isinstance(option, OptionWithVariable)]


def _by_group(command: click.Command) -> dict[str, list[OptionWithVariable]]:
    options = _options(command)
    return {group: [each for each in options if each.row.group == group] for group in GROUPS}


def _origin(
    parameter: click.Parameter | None, ctx: click.Context, environ: Mapping[str, str]
) -> str:
    """How a value was given: by which variable, or by which option."""
    if not isinstance(parameter, OptionWithVariable):
        return "SCRIPT"
    if ctx.get_parameter_source(str(parameter.name)) is ParameterSource.DEFAULT_MAP:
        return parameter.variable_set(environ) or parameter.flag.long
    return parameter.flag.long
