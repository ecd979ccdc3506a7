"""Writes docs/cli.md, the reference of the command line, from the commands themselves.

    python tools/cli_reference.py > docs/cli.md
    python tools/cli_reference.py cluster > docs/development/cluster-options.md

A test compares the pages with what this writes.
"""

import re
import runpy
import sys
from pathlib import Path

import click

from rankwise.cli.main import SUBCOMMANDS, command_line
from rankwise.cli.options import OptionWithVariable
from rankwise.cli.run import EXAMPLES
from rankwise.launch.options import GROUPS

EXAMPLES_OF_OPTIONS: dict[str, tuple[str, ...]] = runpy.run_path(
    str(Path(__file__).with_name("cli_examples.py"))
)["EXAMPLES"]

INTRODUCTION = """\
# Command line

<!-- Written by `python tools/cli_reference.py`; change the commands, not this page. -->

Each command explains its options with `--help`; `rankwise run --help-all` explains all options of
`rankwise run`.

| command | what it does |
| --- | --- |
"""

RUN_RULES = """\
**Spelling.** Options may have dashes or underscores, and may be cut to any beginning that fits
one option only (`--redirect=3`). The value is the next word, or glued on (`-r 3`, `-r3`,
`--tee=3`). The first word that is neither option nor value is SCRIPT; everything after it belongs
to the script. In its arguments `${local_rank}` stands for the worker's local rank, and `$$` for a
dollar sign.

**Environment.** Each option has a variable: `PET_` and its name, such as `PET_NPROC_PER_NODE`.
Some have a second one. The command line wins, and an empty variable counts as unset. For options
without value, give 0 or 1, true or false, yes or no.

**Errors** in options, script and directories are found before the start: one line, exit code 2.
See [exit codes](exit-codes.md).

Differences from torchrun: [coming from torchrun](coming-from/torchrun.md#differences).
"""
RUN = """\
`RUN` is a name that `rankwise ps` shows, the beginning of one, or the pid of an agent. Leave it out
if there is one run. On several nodes, `rankwise logs`, `stacks` and `top` show the ranks on this
machine.

"""
TEXT_OF_RUN = re.compile(
    r"\n*^ *RUN is a name that `rankwise ps` shows, the beginning of one, or the pid of an agent\."
    r"\s*"
    r"(?:Leave it out if there is one run\.\s*)?"
    r"(?:On several nodes, it shows the ranks on this machine\.\s*)?",
    re.MULTILINE,
)
CLUSTER = """\
# Options of rankwise sim cluster

<!-- Written by `python tools/cli_reference.py cluster`; change the command, not this page. -->

[The simulated cluster](cluster-simulation.md) explains the command.

"""
FOR_DEVELOPERS = {"rankwise sim cluster": "development/cluster-options.md"}


def reference() -> str:
    """The whole page."""
    context = click.Context(command_line, info_name="rankwise")
    rows = (
        f"| [`rankwise {name}`](#rankwise-{name}) | {found.summary} |"
        for name, found in SUBCOMMANDS.items()
    )
    sections = [_section(name, context) for name in SUBCOMMANDS]
    return INTRODUCTION + "\n".join(rows) + "\n\n" + RUN + "\n".join(sections)


def _section(name: str, parent: click.Context) -> str:
    command = command_line.get_command(parent, name)
    assert command is not None, "the table of subcommands names it"
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f"## rankwise {name}\n",
        f"```text\nrankwise {name} {usage}\n```\n",
        f"{_prose(command.help or '')}\n",
    ]
    if name == "run":
        parts += [
            f"```text\n{EXAMPLES}```\n",
            RUN_RULES,
            *_groups(command, context),
        ]
    else:
        parts += _plain_options(command, context)
    if isinstance(command, click.Group):
        parts += [_nested(each, context) for each in command.commands.values() if not each.hidden]
    return "\n".join(parts)


def _nested(command: click.Command, parent: click.Context) -> str:
    """A command of a group, under a heading of its own."""
    context = click.Context(command, info_name=command.name, parent=parent)
    if page := FOR_DEVELOPERS.get(context.command_path):
        summary = _prose(command.help or "").partition("\n")[0]
        return f"### {context.command_path}\n\n{summary} For developers: [options]({page}).\n"
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f"### {context.command_path}\n",
        f"```text\n{context.command_path} {usage}\n```\n",
        f"{_prose(command.help or '')}\n",
        *_plain_options(command, context),
    ]
    return "\n".join(parts)


def cluster() -> str:
    """The page of `rankwise sim cluster`."""
    context = click.Context(command_line, info_name="rankwise")
    group = command_line.get_command(context, "sim")
    assert isinstance(group, click.Group), "it has the subcommand"
    context = click.Context(group, info_name="sim", parent=context)
    command = group.commands["cluster"]
    context = click.Context(command, info_name="cluster", parent=context)
    return CLUSTER + "\n".join(
        [f"{_prose(command.help or '')}\n", *_plain_options(command, context)]
    )


def _groups(command: click.Command, context: click.Context) -> list[str]:
    tables = []
    options = [option for option in command.params if isinstance(option, OptionWithVariable)]
    for group in GROUPS:
        rows = ["| option | meaning | example |", "| --- | --- | --- |"]
        rows += [_row(option, context) for option in options if option.row.group == group]
        tables.append(f"### {group}\n\n" + "\n".join(rows) + "\n")
    return tables


def _row(option: OptionWithVariable, context: click.Context) -> str:
    default = f" Default: {option.default_in_words}." if option.default_in_words else ""
    variables = [f"`{name}`" for name in option.variables[1:]]
    also = f" Also {', '.join(variables)}." if variables else ""
    meaning = _cell(f"{option.help}{default}{also}")
    return f"| {_code(option.spelling(context))} | {meaning} | {_example('run', option)} |"


def _example(path: str, option: click.Option) -> str:
    for example in EXAMPLES_OF_OPTIONS[path]:
        if example.replace("=", " ", 1).split()[0] in option.opts:
            return _code(example)
    raise LookupError(f"rankwise {path}: {option.opts} has no example in tools/cli_examples.py")


def _plain_options(command: click.Command, context: click.Context) -> list[str]:
    path = context.command_path.removeprefix("rankwise ")
    options = [each for each in command.params if isinstance(each, click.Option)]
    if path == "sim run":
        shared = EXAMPLES_OF_OPTIONS["sim bench"]
        options = [each for each in options if not _is_among(each, shared)]
    rows = [
        f"| {_code(record[0])} | {_cell(record[1])} | {_example(path, option)} |"
        for option in options
        if (record := option.get_help_record(context))
    ]
    if not rows:
        return []
    table = "\n".join(["| option | meaning | example |", "| --- | --- | --- |", *rows]) + "\n"
    more = "It also takes the options of [rankwise sim bench](#rankwise-sim-bench).\n"
    return [table, more] if path == "sim run" else [table]


def _is_among(option: click.Option, examples: tuple[str, ...]) -> bool:
    return any(example.split()[0] in option.opts for example in examples)


def _prose(text: str) -> str:
    text = TEXT_OF_RUN.sub("\n\n", text)
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(cluster() if "cluster" in sys.argv[1:] else reference(), end="")
