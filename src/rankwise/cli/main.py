"""The `rankwise` command: finds the subcommand, and turns each error into one line.

A subcommand's module is imported when it is asked for, so that `rankwise --help` costs little more
than starting Python. Exit codes: 0 success, 1 the output cannot be written, 2 wrong usage (nothing
was started), 130 interrupted before anything ran, 141 the reader of the output has gone; what else
a subcommand returns is its own, see there.
"""

import atexit
import errno
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, cast

import click

import rankwise
from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.drivers.real.early_signals import INTERRUPTED, be_interruptible
from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS
from rankwise.launch.run.standard_streams import flush_standard_streams, give_up


class Subcommand(NamedTuple):
    """Where a subcommand is found, and what the list of commands says about it."""

    module: str
    name_in_module: str
    summary: str


SUBCOMMANDS = {
    "run": Subcommand(
        "rankwise.cli.run", "run", "Run a program as a gang of workers (takes torchrun's flags)."
    ),
    "sim": Subcommand(
        "rankwise.cli.sim", "sim", "Simulate programs of many ranks on a multi-chip accelerator."
    ),
    "machines": Subcommand(
        "rankwise.cli.machines", "machines", "List the real machines that runs are predicted on."
    ),
    "calibrate": Subcommand(
        "rankwise.cli.calibrate",
        "calibrate",
        "Measure this machine, to predict runs on it.",
    ),
    "diff": Subcommand(
        "rankwise.cli.diff",
        "diff",
        "Compare a program on simulated ranks and on processes, bit for bit.",
    ),
    "replay": Subcommand(
        "rankwise.cli.replay",
        "replay",
        "Show the states of a run's agents again, from its journal.",
    ),
    "report": Subcommand(
        "rankwise.cli.report",
        "report",
        "Write a page about a run, or its timeline, from its journal.",
    ),
    "manifest": Subcommand(
        "rankwise.cli.manifest", "manifest", "Write manifests for Kubernetes or SLURM."
    ),
    "ps": Subcommand("rankwise.cli.ps", "ps", "List the runs on this machine."),
    "top": Subcommand("rankwise.cli.top", "top", "Show the ranks of a run live, problems first."),
    "logs": Subcommand("rankwise.cli.logs", "logs", "Show the output of the ranks of a run."),
    "stop": Subcommand("rankwise.cli.stop", "stop", "Stop a run, and wait for its end."),
    "stacks": Subcommand(
        "rankwise.cli.stacks", "stacks", "Print the Python stacks of every rank of a run."
    ),
    "why": Subcommand(
        "rankwise.cli.why",
        "why",
        "Explain why a run makes no progress: which rank waits for which.",
    ),
    "doctor": Subcommand(
        "rankwise.cli.doctor", "doctor", "Check this machine for what rankwise needs."
    ),
    "completion": Subcommand(
        "rankwise.cli.completion",
        "completion",
        "Complete words in a shell: print the script, or install it.",
    ),
    "man": Subcommand("rankwise.cli.completion", "man", "Print the man page, or install it."),
}

_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""How click asks for the help when there is nothing but the command's name; 8.1 shows it itself."""
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _with_dashes(name: str) -> str:
    """An option's name as the help has it: torchrun's users write underscores as well."""
    return name.replace("_", "-")


CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "token_normalize_func": _with_dashes,
}


class LazyGroup(click.Group):
    """A group that knows its subcommands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """All names, in the order in which a newcomer meets them."""
        return list(SUBCOMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        cmd_name: str,
    ) -> click.Command | None:
        """Import the subcommand."""
        found = SUBCOMMANDS.get(cmd_name)
        if found is None:
            return None
        command = getattr(import_module(found.module), found.name_in_module)
        if cmd_name != "run":  # which still has a part of itself to import
            begin_work()
        return cast("click.Command", command)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read what stands before the subcommand; options of `run` belong after it."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            import shlex  # noqa: PLC0415  # for mistakes

            from rankwise.launch.options import OPTIONS  # noqa: PLC0415  # for mistakes

            name = error.option_name.replace("_", "-")
            if name not in {option.flag for option in OPTIONS}:
                raise
            written = shlex.join(["rankwise", "run", *words])
            told = f"no such option: {error.option_name}, write {written}"
            raise click.UsageError(told, ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; say which one a word may stand for that is none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from rankwise.cli.familiar_words import hint_on_command  # noqa: PLC0415  # for mistakes

            if hint := hint_on_command(args, SUBCOMMANDS):
                raise click.UsageError(f"no such command {args[0]!r}, {hint}", ctx) from None
            raise

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """List the subcommands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.summary) for name, found in SUBCOMMANDS.items()])


def _print_version(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"rankwise {rankwise.__version__}")
        ctx.exit()


@click.group("rankwise", cls=LazyGroup, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def command_line() -> None:
    """Run a program of many ranks on one machine, on many, or simulated, and know why it failed."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The whole command: never returns, never shows a traceback for the user's mistakes."""
    gc.disable()
    ensure_standard_streams()
    atexit.register(flush_standard_streams)
    status = invoke(sys.argv[1:] if arguments is None else arguments)
    # Only the interpreter's end is left: a late signal must not interrupt it.
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    _end(status)


def _end(status: int) -> NoReturn:
    """End this process as an interpreter does, but for taking all modules apart.

    That would take longer than all else at the end of a run, and free what the kernel frees anyway.
    """
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()  # noqa: SLF001  # as the interpreter does
    atexit._run_exitfuncs()  # noqa: SLF001  # the same
    os._exit(status & 0xFF)


def begin_work() -> None:
    """Be what an interpreter usually is, now that all is imported.

    Garbage is collected, but nothing of what has been imported: imports make many objects and no
    garbage, and looking through them takes a tenth of a start. Ctrl-C raises KeyboardInterrupt:
    Python loses one that is raised while it locks a module.
    """
    be_interruptible()
    gc.freeze()
    gc.enable()


def ensure_standard_streams() -> None:
    """Open what the caller has closed (`>&-`) on nothing.

    Otherwise the next pipe of this process gets its number, and output goes there.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)  # noqa: FBT003  # the standard library's signature
    os.close(opened)
    for name, mode, fd in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # for good


def invoke(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; errors are told on stderr."""
    try:
        status = _call(arguments)
        sys.stdout.flush()
    except _NO_ARGUMENTS as error:
        _tell(error.format_message())
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "rankwise"
        return _complain(path, f"{_one_line(error)} (try '{path} --help')", 2)
    except click.ClickException as error:
        return _complain("rankwise", error.format_message(), 1)
    except ConfigError as error:
        return _complain(_command_path(arguments), str(error), 2)
    except RankwiseError as error:
        return _complain(_command_path(arguments), str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        is_run = arguments[:1] == ["run"]
        if sys.stderr.isatty() or not is_run:
            _tell("")  # what follows must not stand behind the terminal's ^C
        if is_run:
            _tell(INTERRUPTED)
        return 128 + 2
    except BrokenPipeError:
        # The reader, `head` perhaps, has seen enough.
        give_up(sys.stdout)
        return 128 + 13
    except OSError as error:
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        give_up(sys.stdout)
        reason = f"the output cannot be written: {error.strerror}"
        return _complain(_command_path(arguments), reason, 1)
    return status if isinstance(status, int) else 0


def _call(arguments: Sequence[str]) -> object:
    """Do what `click.Command.main` does, which ends the process itself when a reader has gone."""
    if instruction := os.environ.get("_RANKWISE_COMPLETE"):
        from click.shell_completion import shell_complete  # noqa: PLC0415  # only for shells

        return shell_complete(command_line, {}, "rankwise", "_RANKWISE_COMPLETE", instruction)
    try:
        with command_line.make_context("rankwise", list(arguments)) as context:
            return command_line.invoke(context)
    except click.exceptions.Exit as ending:
        return ending.exit_code


def _command_path(arguments: Sequence[str]) -> str:
    """The command and its subcommands, as in `rankwise sim run`."""
    names = [name for name in arguments[:1] if name in SUBCOMMANDS]
    if names:
        found = SUBCOMMANDS[names[0]]
        command = getattr(sys.modules.get(found.module), found.name_in_module, None)
        if isinstance(command, click.Group):
            names += [name for name in arguments[1:2] if name in command.commands]
    return " ".join(["rankwise", *names])


def _complain(command_path: str, message: str, status: int) -> int:
    from rankwise.launch.telling.failure_report.text import printable  # noqa: PLC0415  # only for errors

    # Names of files may be no UTF-8, and hold what a terminal would obey.
    _tell(printable(f"{command_path}: error: {message}"))
    return status


def _tell(message: str) -> None:
    """Write a line to stderr; if that fails, the exit code still tells."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _one_line(error: click.UsageError) -> str:
    """Click's message without its habits: no capital, no full stop, the option's name in front."""
    if isinstance(error, click.BadParameter) and error.param is not None and error.message:
        is_argument = isinstance(error.param, click.Argument)
        own_name = error.param.human_readable_name if is_argument else error.param.opts[-1]
        return f"{error.param_hint or own_name}: {_uncapitalised(error.message.rstrip('.'))}"
    # Click lists an argument's choices on lines of their own.
    message = " ".join(error.format_message().replace(". Choose from:", ", choose from").split())
    return _uncapitalised(message.rstrip("."))


def _uncapitalised(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
