"""`rankwise run --on sim:MACHINE --sweep`: a prediction for each combination of arguments.

Each is a run of its own in a process of its own, as many at a time as there are cores. A key is an
argument of the program: its value replaces `{key}` wherever that stands behind the script, or else
`--key VALUE` is added. The keys of `_OF_RANKWISE` are options of rankwise itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import ConfigError
from rankwise.cli.sim_options import assignments, points_of
from rankwise.launch.options import SWEEP, options_refused

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions

_OF_RANKWISE = {
    "machine": "--on=sim:",
    "nproc-per-node": "--nproc-per-node=",
    "nnodes": "--nnodes=",
}
"""Keys, and what their values are put behind."""
_OWN = ("--sweep", "--results", "--report", "--format")


def sweep(options: "RunOptions", words: Sequence[str]) -> int:
    """Run what the options ask for; returns the exit code.

    Raises:
        ConfigError: a value cannot be used.
    """
    from rankwise.cli.run_files import check_files  # noqa: PLC0415  # only here
    from rankwise.cli.sim_progress import counted  # noqa: PLC0415  # the same
    from rankwise.cli.sim_sweep import TableTarget, show  # noqa: PLC0415  # the same
    from rankwise.simranks.run.sweeps import sweep_commands  # noqa: PLC0415  # the same

    label = options.label("sweep")
    swept = assignments(label, options.sweep, is_list=True)
    keys = [each.key for each in swept]
    machine = (options.on or "").partition(":")[2]
    if not machine and "machine" not in keys:
        raise ConfigError(
            f"{label} needs a machine: expected --on sim:MACHINE, a preset or a topology file"
        )
    for option in options_refused(SWEEP):
        if option.name in options.origins:
            raise ConfigError(
                f"{options.label(option.name)} {option.refused[SWEEP]}, and {label} makes several",
                hint="run one combination alone",
            )
    check_files(options)
    points = points_of(swept)
    commands = [_command(words, point) for point in points]
    used = [options.training_script, machine, options.values, *options.faults]
    with counted(len(points)) as progress:
        done = sweep_commands(
            commands,
            points,
            files=[each for each in used if Path(each).is_file()],
            results=options.results,
            progress=progress,
            title=options.training_script,
        )
    return show(done, TableTarget(options.format, options.report, options.results))


def _command(words: Sequence[str], point: Mapping[str, str]) -> list[str]:
    end = list(words).index("--")
    own = [_OF_RANKWISE[key] + value for key, value in point.items() if key in _OF_RANKWISE]
    replaced = {*_OWN, *(word.partition("=")[0] for word in own)}
    kept = [word for word in words[:end] if word.partition("=")[0] not in replaced]
    script, *arguments = words[end + 1 :]
    for key, value in point.items():
        if key in _OF_RANKWISE:
            continue
        if any(f"{{{key}}}" in word for word in arguments):
            arguments = [word.replace(f"{{{key}}}", value) for word in arguments]
        else:
            arguments += [f"--{key}", value]
    return ["run", *kept, *own, "--", script, *arguments]
