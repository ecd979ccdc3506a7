"""Writes docs/cli.md, the reference of the command line, from the commands themselves.

    python tools/cli_reference.py > docs/cli.md

A test compares the page with what this writes.
"""

import click

from rankwise.cli.main import SUBCOMMANDS, command_line
from rankwise.cli.options import OptionWithVariable
from rankwise.cli.run import EXAMPLES
from rankwise.cli.run_options import GROUPS

INTRODUCTION = """\
# Command line

<!-- Written by `python tools/cli_reference.py`; change the commands, not this page. -->

| command | what it does |
| --- | --- |
"""

RUN_RULES = """\
**Spelling.** Every option is read as torchrun reads it: with dashes or underscores (`--log-dir`,
`--log_dir`), cut down to any beginning that fits one option only (`--redirect=3`), with the value
as the next word or glued on (`-r 3`, `-r3`, `--tee=3`). Options that torchrun does not have never
make one of its abbreviations ambiguous. The first word that is neither option nor value is
SCRIPT; everything after it belongs to the script, also `--help` and `--`; a note tells of options
of `rankwise run` there. In it `${local_rank}` stands for each worker's local rank and `$$` for a
dollar sign, as with torchrun.

**Environment.** Every option can be given by the variable named with it. The command line wins;
an empty variable counts as unset. Variables of options without value take a number (0 is false),
or true, false, yes, no.

**Before the start** the script, the log directory and all values are checked. An error is reported
in one line, with exit code 2.

**Exit code.** 0 when every worker succeeded, else that of the worker that failed first; [Exit
codes](exit-codes.md) has all of them.

**What differs from torchrun.**

- `--start-method` is `subprocess` by default; for scripts that is what torchrun's `spawn` does.
  `fork` means the fork server.
- A run without `--rdzv-id` gets a readable random name, and with `--standalone` a given name is
  kept.
- Exit codes tell what happened (torchrun: always 1).
- `--logs-specs` and `--numa-binding` can be given by environment too. `--numa-binding` needs
  neither GPU nor `numactl`.
- Local ranks in `--redirects` and `--tee` may have several digits.
- An unknown signal, a rank that does not exist, `--node-rank` on a single node: refused instead
  of ignored.
- Without `--master-port`, the port is free and stays reserved for the run.
- With the static rendezvous the nodes meet at `--master-addr` and `--master-port`, and rank 0
  listens on a free port of its own. Give `--rdzv-endpoint` and `--master-port` to choose both.
- On several nodes a run without `--rdzv-id` is called `none`. Where runs share a store, give each
  a name of its own.
"""


def reference() -> str:
    """The whole page."""
    context = click.Context(command_line, info_name="rankwise")
    rows = (
        f"| [`rankwise {name}`](#rankwise-{name}) | {found.summary} |"
        for name, found in SUBCOMMANDS.items()
    )
    sections = [_section(name, context) for name in SUBCOMMANDS]
    return INTRODUCTION + "\n".join(rows) + "\n\n" + "\n".join(sections)


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
            RUN_RULES,
            *_groups(command, context),
            f"### Examples\n\n```text\n{EXAMPLES}```\n",
        ]
    else:
        parts += _plain_options(command, context)
    if isinstance(command, click.Group):
        parts += [_nested(each, context) for each in command.commands.values()]
    return "\n".join(parts)


def _nested(command: click.Command, parent: click.Context) -> str:
    """A command of a group, under a heading of its own."""
    context = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f"### {context.command_path}\n",
        f"```text\n{context.command_path} {usage}\n```\n",
        f"{_prose(command.help or '')}\n",
        *_plain_options(command, context),
    ]
    return "\n".join(parts)


def _groups(command: click.Command, context: click.Context) -> list[str]:
    tables = []
    options = [option for option in command.params if isinstance(option, OptionWithVariable)]
    for group in GROUPS:
        rows = ["| option | meaning | default | variable |", "| --- | --- | --- | --- |"]
        for option in options:
            if option.group == group:
                spelled, _ = option.get_help_record(context)
                default = option.default_in_words or ""
                variables = ", ".join(f"`{name}`" for name in option.variables)
                cells = [_code(spelled), _cell(str(option.help)), _cell(default), variables]
                rows.append(f"| {' | '.join(cells)} |")
        tables.append(f"### {group}\n\n" + "\n".join(rows) + "\n")
    return tables


def _plain_options(command: click.Command, context: click.Context) -> list[str]:
    records = [
        record
        for parameter in command.params
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context))
    ]
    if not records:
        return []
    rows = ["| option | meaning |", "| --- | --- |"]
    rows += [f"| {_code(spelled)} | {_cell(text)} |" for spelled, text in records]
    return ["\n".join(rows) + "\n"]


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
