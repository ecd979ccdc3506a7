"""The `rankwise` command: finds the subcommand, and turns whatever goes wrong into one line.

A subcommand's module is imported when it is asked for, so that `rankwise --help` costs little more
than starting Python. Exit codes: 0 success, 2 wrong usage (nothing was started), 130 interrupted
before anything ran; what else a subcommand returns is its own, see there.
"""

import errno
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
    "replay": Subcommand(
        "rankwise.cli.replay",
        "replay",
        "Show the states of a run's agents again, from its journal.",
    ),
    "manifest": Subcommand(
        "rankwise.cli.manifest", "manifest", "Write manifests for Kubernetes that run a job there."
    ),
    "ps": Subcommand("rankwise.cli.ps", "ps", "List the runs on this machine."),
    "stacks": Subcommand(
        "rankwise.cli.stacks", "stacks", "Show where every rank of a run is, in Python stacks."
    ),
    "doctor": Subcommand(
        "rankwise.cli.doctor", "doctor", "Check this machine for what rankwise needs."
    ),
    "completion": Subcommand(
        "rankwise.cli.completion", "completion", "Print the completion script for a shell."
    ),
}

_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""How click asks for the help when there is nothing but the command's name; 8.1 shows it itself."""
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


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
        return cast("click.Command", command)

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
    """Run a program of many ranks, and see what became of it."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script: never returns, never shows a traceback for the user's mistakes."""
    ensure_standard_streams()
    status = invoke(sys.argv[1:] if arguments is None else arguments)
    # All is over but the interpreter's end: a second Ctrl-C that comes late shall not tear into it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def ensure_standard_streams() -> None:
    """Open what the caller has closed (`>&-`) on nothing.

    Otherwise the next pipe that somebody makes gets its number, and output goes there.
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
        status = command_line.main(list(arguments), prog_name="rankwise", standalone_mode=False)
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
        return 128 + 2
    except BrokenPipeError:
        # The reader, `head` perhaps, has seen enough.
        _give_up_stdout()
        return 128 + 13
    except OSError as error:
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        _give_up_stdout()
        reason = f"the output cannot be written: {error.strerror}"
        return _complain(_command_path(arguments), reason, 1)
    return status if isinstance(status, int) else 0


def _give_up_stdout() -> None:
    """Write to nowhere from now on: Python must not flush its buffer into a broken stream again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command_path(arguments: Sequence[str]) -> str:
    subcommand = next((name for name in arguments[:1] if name in SUBCOMMANDS), "")
    return f"rankwise {subcommand}".rstrip()


def _complain(command_path: str, message: str, status: int) -> int:
    from rankwise.launch.failure_report.text import printable  # noqa: PLC0415  # only for errors

    # Names of files may be no UTF-8, and hold what a terminal would obey.
    _tell(printable(f"{command_path}: error: {message}"))
    return status


def _tell(message: str) -> None:
    """Say something on stderr; whoever has made that unwritable still gets the exit code."""
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
