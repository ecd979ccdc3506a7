import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from rankwise.cli.main import command_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("cli_reference.py", "cli"),
        ("python_reference.py", "python-reference"),
        ("python_reference.py health", "health"),
        ("python_reference.py journal", "journal"),
        ("python_reference.py vocabulary", "development/journal"),
        ("python_reference.py plug-ins", "development/plug-ins"),
        ("cli_reference.py cluster", "development/cluster-options"),
        ("settings_reference.py settings", "settings"),
        ("settings_reference.py exit-codes", "exit-codes"),
    ],
)
def test_the_references_are_current(command: str, page: str) -> None:
    tool, *words = command.split()
    done = subprocess.run(
        [sys.executable, f"tools/{tool}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    written = f"docs/{page}.md"
    assert (ROOT / written).read_text() == done.stdout, (
        f"write it anew: python tools/{command} > {written}"
    )


def test_every_example_of_an_option_is_accepted_by_its_command() -> None:
    examples = runpy.run_path(str(ROOT / "tools" / "cli_examples.py"))["EXAMPLES"]
    parsed = [
        option_given(path.split(), example) for path, of_command in examples.items()
        for example in of_command if example != "--help-all"
    ]  # fmt: skip

    assert len(parsed) > 100
    assert all(parsed)


def option_given(path: list[str], example: str) -> str:
    """The option of a command that an example gives, parsed as from the command line."""
    command: click.Command | None = command_line
    context = click.Context(command_line)
    for word in path:
        assert isinstance(command, click.Group)
        command = command.get_command(context, word)
    assert command is not None
    operands = {"completion": ["bash"], "replay": ["."], "compare": ["a", "b"]}.get(path[-1], [])
    required = {"manifest kubernetes": ["--image", "x"], "manifest slurm": ["--nodes", "2"]}
    words = [*required.get(" ".join(path), []), *shlex.split(example), *operands]
    if any(isinstance(each, click.Argument) and each.required for each in command.params):
        words += [] if operands else ["script.py"]
    parsed = command.make_context(path[-1], words)
    word = example.partition("=")[0].split()[0]
    (option,) = (each for each in command.params if word in each.opts)
    given = parsed.get_parameter_source(str(option.name))
    assert given is click.core.ParameterSource.COMMANDLINE, f"{path}: {example} gives {given}"
    return word
