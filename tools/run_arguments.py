"""Writes the typed texts of a run's options from their table, src/rankwise/launch/options.py.

    python tools/run_arguments.py

These are the fields of `RunOptions` in cli/run_job.py, of `SimulationOptions` in
simranks/run/simulation_options.py and of `LaunchConfig` in compat/torch/launcher/api.py, and the
arguments of `rankwise.run` in launch/api.py: two TypedDicts, the keywords of its signature, and
their lines in its docstring. Type checkers and `help()` read
them, so they are source text. A test compares the files with what this writes.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill

from rankwise.launch.launch_fields import LAUNCH_FIELDS, LaunchField
from rankwise.launch.options import ONLY_IN_PYTHON, OPTIONS, SIM, Argument, Option

SOURCE = Path(__file__).parents[1] / "src" / "rankwise"
BEGIN = "# Written by `python tools/run_arguments.py` from launch/options.py.\n"
END = "# The end of what is written.\n"
WIDTH = 100


def texts() -> dict[Path, str]:
    """The files as they must be."""
    api, run_job = SOURCE / "launch" / "api.py", SOURCE / "cli" / "run_job.py"
    launcher = SOURCE / "compat" / "torch" / "launcher" / "api.py"
    simulation = SOURCE / "simranks" / "run" / "simulation_options.py"
    return {
        run_job: _run_job(run_job.read_text()),
        api: _api(api.read_text()),
        launcher: _launcher(launcher.read_text()),
        simulation: _simulation(simulation.read_text()),
    }


def _run_job(source: str) -> str:
    fields = "".join(f"    {option.name}: {option.type}\n" for option in OPTIONS)
    return _between(source, f"    {BEGIN}", f"    {END}", fields)


def _launcher(source: str) -> str:
    indent = " " * 8
    fields = "".join(f"{indent}{_field(each)}\n" for each in LAUNCH_FIELDS)
    return _between(source, indent + BEGIN, indent + END, fields)


def _simulation(source: str) -> str:
    fields = "".join(
        f"    {option.name}: {option.type} = {_literal(option.initial)}\n"
        for option in OPTIONS
        if option.only == SIM
    )
    return _between(source, f"    {BEGIN}", f"    {END}", fields)


def _field(field: LaunchField) -> str:
    annotated = f"{field.name}: {field.type}"
    if field.is_required:
        return annotated
    if field.is_dictionary:
        return f"{annotated} = field(default_factory=dict)"
    return f"{annotated} = {_literal(field.default)}"


def _api(source: str) -> str:
    source = _between(source, BEGIN, END, _typed())
    keywords = "".join(
        f"    {name}: {argument.type} = {_literal(argument.default)},\n"
        for name, argument in _arguments()
    )
    begin = "    kwargs: Mapping[str, Any] | None = None,\n"
    source = _between(source, begin, "    **_others: Any,\n", keywords)
    lines = "".join(_documented(name, argument) for name, argument in _arguments())
    return _between(
        source,
        "        nprocs: number of ranks, at most 4096.\n",
        "        _others: any further name is refused.\n",
        lines,
    )


def _between(source: str, begin: str, end: str, text: str) -> str:
    """The source with a text between two lines, each of which it has once."""
    assert source.count(begin) == source.count(end) == 1, f"expected once: {begin}{end}"
    before, _, rest = source.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def _arguments() -> Iterator[tuple[str, Argument]]:
    for option in OPTIONS:
        if option.python is not None:
            yield option.python.name or option.name, option.python
    yield from ((argument.name, argument) for argument in ONLY_IN_PYTHON)


def _typed() -> str:
    """The names of choices, and the TypedDicts."""
    aliases = [
        f"{option.python.type}: TypeAlias = Literal[{', '.join(map(_literal, option.choices))}]\n"
        for option in OPTIONS
        if option.python is not None and option.choices and option.only == SIM
    ]
    simulated = [each for each in OPTIONS if each.python is not None and each.only == SIM]
    names = {option.name for option in simulated}
    others = [(name, each) for name, each in _arguments() if name not in names]
    return (
        "".join(aliases)
        + "\n\n"
        + _typed_dict(
            "class SimulationArguments(TypedDict, total=False):",
            "The keywords of `run` that are for simulated ranks only; see there.",
            ((option.name, _argument(option)) for option in simulated),
        )
        + "\n\n"
        + _typed_dict(
            "class RunArguments(SimulationArguments, total=False):",
            "The keywords of `run` that are the same for every function; see there.",
            iter(others),
        )
        + "\n\n"
    )


def _argument(option: Option) -> Argument:
    assert option.python is not None, "the caller has chosen such options"
    return option.python


def _typed_dict(head: str, docstring: str, rows: Iterator[tuple[str, Argument]]) -> str:
    fields = "".join(f"    {name}: {argument.type}\n" for name, argument in rows)
    return f'{head}\n    """{docstring}"""\n\n{fields}'


def _documented(name: str, argument: Argument) -> str:
    first, further = " " * 8, " " * 12
    text = f"{name}: {argument.help}"
    return (
        fill(
            text,
            WIDTH,
            initial_indent=first,
            subsequent_indent=further,
            break_on_hyphens=False,
            break_long_words=False,
        )
        + "\n"
    )


def _literal(value: object) -> str:
    """A value as `ruff format` leaves it."""
    return re.sub(r"^'(.*)'$", r'"\1"', repr(value))


def write(report: Callable[[str], None] = print) -> None:
    """Write the files that are not current."""
    for path, text in texts().items():
        if path.read_text() != text:
            path.write_text(text)
            report(f"written: {path.relative_to(SOURCE.parent)}")


if __name__ == "__main__":
    write()
