"""`rankwise completion SHELL` and `rankwise man`: shown, or installed where they are read."""

import os
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

import rankwise
from rankwise.base.errors import ConfigError
from rankwise.cli.main import CONTEXT_SETTINGS, SUBCOMMANDS, command_line

_SHELLS = {
    "bash": "bash-completion/completions/rankwise",
    "zsh": "zsh/site-functions/_rankwise",
    "fish": "fish/vendor_completions.d/rankwise.fish",
}
"""Where each shell looks for completions, below XDG_DATA_HOME."""

_installs = click.option(
    "--install",
    is_flag=True,
    help="Install it in the folder of your user account where it is searched.",
)


@click.command("completion", context_settings=CONTEXT_SETTINGS)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@_installs
def completion(shell: str, *, install: bool) -> None:
    """Print the completion script for SHELL, or install it."""
    shell_class = get_completion_class(shell)
    assert shell_class is not None, "click knows the three shells that the argument allows"
    script = shell_class(command_line, {}, "rankwise", "_RANKWISE_COMPLETE").source()
    if not install:
        click.echo(script)
        return
    path = _install(_SHELLS[shell], script)
    click.echo(f"completion of {shell}: {path}, for shells that are started from now on")
    if shell == "zsh":
        click.echo(
            f"unless it is there, add this to ~/.zshrc, before compinit: fpath+=({path.parent})"
        )


@click.command("man", context_settings=CONTEXT_SETTINGS)
@_installs
def man(*, install: bool) -> None:
    """Print the man page, or install it: rankwise man | man -l -."""
    page = "\n".join(_page()) + "\n"
    if install:
        click.echo(f"man page: {_install('man/man1/rankwise.1', page)}")
    else:
        click.echo(page, nl=False)


def _install(place: str, text: str) -> Path:
    folder = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    path = Path(folder).expanduser() / place
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}",
            hint="leave out --install to print it",
        ) from error
    return path


def _page() -> Iterator[str]:
    context = click.Context(command_line, info_name="rankwise")
    yield f'.TH RANKWISE 1 "" "rankwise {rankwise.__version__}" "User Commands"'
    yield from (".SH NAME", f"rankwise \\- {_roff(_first_line(command_line))}")
    yield from (".SH SYNOPSIS", ".B rankwise", "COMMAND [OPTIONS] [ARGUMENTS]", ".SH COMMANDS")
    for name in SUBCOMMANDS:
        command = command_line.get_command(context, name)
        assert command is not None, "the table of subcommands names it"
        yield from _section(command, click.Context(command, info_name=name, parent=context))


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    yield f".SS {_roff(usage)}"
    yield from _paragraphs(command.help or "")
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield from (".TP", f".B {_roff(record[0])}", _roff(record[1]))
    if isinstance(command, click.Group):
        for name, nested in command.commands.items():
            yield from _section(nested, click.Context(nested, info_name=name, parent=context))


def _first_line(command: click.Command) -> str:
    return (command.help or "").strip().partition("\n")[0].rstrip(".")


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield from (".PP", _roff(paragraph.replace("\b", "")))


def _roff(text: str) -> str:
    """Text of one paragraph, in one line, with what roff would take for its own escaped."""
    line = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    line = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in line)
    return f"\\&{line}" if line.startswith((".", "'")) else line
