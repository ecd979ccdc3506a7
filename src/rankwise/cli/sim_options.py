"""The options that `rankwise sim bench` and `rankwise sim run` share, and what they mean."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import click

from rankwise.base.errors import ConfigError
from rankwise.launch.options import PRESETS_IN_WORDS

Command = TypeVar("Command", bound=Callable[..., Any])

_LIMIT = re.compile(r"(?:(virtual|real):)?(\d+\.?\d*|\.\d+)\s*(ps|ns|us|ms|s|m|h|)")
_PICOSECONDS = {
    "ps": 1, "ns": 10**3, "us": 10**6, "ms": 10**9, "s": 10**12, "": 10**12, "m": 60 * 10**12,
    "h": 3600 * 10**12,
}  # fmt: skip


class TimeLimits(NamedTuple):
    """How long a run may take."""

    virtual_ps: int | None
    real_s: float | None


class Assignment(NamedTuple):
    """`key=value` from `--set`, or `key=a,b,c` from `--sweep`."""

    key: str
    values: tuple[str, ...]


def time_limits(texts: tuple[str, ...]) -> TimeLimits:
    """Read `--max-time`: `5ms` limits both clocks, `virtual:5ms` and `real:60s` one of them."""
    virtual: int | None = None
    real: float | None = None
    for text in texts:
        found = _LIMIT.fullmatch(text.strip())
        if found is None or not float(found[2]):
            raise ConfigError(
                f"--max-time is {text!r}, expected a time such as 30s, virtual:5ms or real:2m"
            )
        picoseconds = round(float(found[2]) * _PICOSECONDS[found[3]])
        if found[1] != "real":
            virtual = picoseconds
        if found[1] != "virtual":
            real = picoseconds / 10**12
    return TimeLimits(virtual, real)


def assignments(option: str, texts: tuple[str, ...], *, is_list: bool) -> list[Assignment]:
    """Split `key=value`, or `key=a,b,c`, at its first `=`."""
    found: dict[str, Assignment] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        values = tuple(part.strip() for part in value.split(",")) if is_list else (value.strip(),)
        if not equals or not key or not all(values):
            wanted = "key=a,b,c" if is_list else "key=value"
            raise ConfigError(f"{option} is {text!r}, expected {wanted}")
        if key in found:
            raise ConfigError(f"{option} gives {key} twice")
        found[key] = Assignment(key, values)
    return list(found.values())


def points_of(swept: list[Assignment]) -> list[dict[str, str]]:
    """Every combination of the values, the last key varying fastest."""
    from rankwise.simranks.run.sweeps import points_of as combinations  # noqa: PLC0415  # not for --help

    return combinations({each.key: each.values for each in swept})


def simulation_options(command: Command) -> Command:
    """Add the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _lazily(name: str) -> Callable[..., Any]:
    """A function of `sim_completion`, which is imported when a shell asks."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Any:
        return getattr(import_module("rankwise.cli.sim_completion"), name)(
            ctx, parameter, incomplete
        )

    return complete


complete_benches, complete_machines = _lazily("benches"), _lazily("machines")
complete_files, complete_fields = _lazily("files"), _lazily("fields")


_OPTIONS = (
    click.option(
        "--topology",
        default="default",
        show_default=True,
        metavar="MACHINE",
        shell_complete=complete_machines,
        help=f"The machine: a preset ({PRESETS_IN_WORDS}) or a YAML file.",
    ),
    click.option(
        "--ccl",
        metavar="FILE",
        shell_complete=complete_files,
        help="Configuration of the collectives.  [default: ./ccl.yaml]",
    ),
    click.option(
        "--set",
        "fields",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete_fields,
        help="Set a parameter of the program (m=512), a field of the topology "
        "(system.sips.count=8) or of the collectives (n_slots=8, ccl.algorithms.NAME.FIELD=…).",
    ),
    click.option(
        "--sweep",
        multiple=True,
        metavar="KEY=A,B,C",
        shell_complete=complete_fields,
        help="Run once per value, on all cores; several sweeps give every combination.",
    ),
    click.option(
        "--results",
        metavar="FILE",
        shell_complete=complete_files,
        help="With --sweep: keep each result in FILE, and run only what it lacks.",
    ),
    click.option(
        "--faults",
        multiple=True,
        metavar="FAULT",
        shell_complete=complete_files,
        help="A fault of the machine, such as slow:link=sip0-sip1,times=4, jitter:percent=5,seed=1 "
        "or kill:link=sip0-sip1,at=20us; or a file of them.",
    ),
    click.option(
        "--seed", metavar="N", default=0, show_default=True, help="Seed of random tensors."
    ),
    click.option(
        "--timing-only", is_flag=True, help="Compute times only, without numbers: faster."
    ),
    click.option(
        "--detect-races",
        is_flag=True,
        help="Fail on a data race between two programs of kernels.",
    ),
    click.option(
        "--max-time",
        multiple=True,
        metavar="TIME",
        help="Time limit, simulated and real (30s), or one of them (virtual:5ms, real:2m).",
    ),
    click.option(
        "--format",
        "style",
        type=click.Choice(["table", "csv", "json"]),
        default="table",
        show_default=True,
        help="Format of the results.",
    ),
    click.option(
        "--trace",
        metavar="FILE",
        shell_complete=complete_files,
        help="Write a timeline for Perfetto (.json or .json.gz).",
    ),
    click.option(
        "--chakra",
        metavar="NAME.et",
        shell_complete=complete_files,
        help="Write Chakra execution traces, NAME.0.et and so on, one per SIP.",
    ),
    click.option(
        "--report",
        metavar="FILE",
        shell_complete=complete_files,
        help="Write an HTML page about the run, or about the sweep, with plots.",
    ),
)
