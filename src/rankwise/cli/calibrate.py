"""`rankwise calibrate`: measure this machine, and write it as one that predictions can run on.

The measurements are a program of some ranks, which `rankwise run` starts: on a CPU with gloo, on
GPUs with NCCL where torch finds them. With `--from` nothing is measured: the fabric of a machine is
fitted to a published log of nccl-tests.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
import msgspec

from rankwise.base.errors import ConfigError
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.launch.options import MACHINES
from rankwise.launch.telling.status_line import shown, wipe

if TYPE_CHECKING:
    from rankwise.simranks.prediction.machines.description import RealMachine

_PROGRAM = "rankwise.simranks.torch.calibration"
_SECONDS_MAX = 150.0
"""Torch's start and what is not measured fit into the rest of three minutes on an idle machine."""


@click.command("calibrate", context_settings=CONTEXT_SETTINGS)
@click.option(
    "-o", "--output", metavar="FILE", default="machine.yaml", show_default=True,
    help="Where to write the machine: then run --on sim:FILE.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(1, _SECONDS_MAX), default=30.0, show_default=True,
    help="For the measurements, beside the start of torch.",
)  # fmt: skip
@click.option(
    "--timeout", metavar="DURATION", default="170s", show_default=True,
    help="End after this time; a busy machine may need longer for the same measurements.",
)  # fmt: skip
@click.option(
    "--nproc-per-node", "ranks", type=click.IntRange(1, 64), default=2, show_default=True,
    help="How many ranks measure collectives; with GPUs, one for each.",
)  # fmt: skip
@click.option(
    "--from", "logs", metavar="LOG", multiple=True,
    help="Fit the fabric to the output of a program of nccl-tests, and measure nothing here. May be"
    " given several times, for logs of the same ranks.",
)  # fmt: skip
@click.option(
    "--like", metavar="MACHINE",
    help=f"The machine whose fabric --from replaces: {', '.join(MACHINES)}, or a file.",
)  # fmt: skip
def calibrate(
    output: str,
    logs: tuple[str, ...],
    like: str | None,
    *,
    seconds: float,
    timeout: str,
    ranks: int,
) -> int:
    """Measure this machine, and write it as a machine for `--on sim:FILE`, with residuals."""
    _check(output, logs, like)
    real = (
        _from_logs(logs, like or "", Path(output).stem)
        if logs
        else _measured(seconds, timeout, ranks, Path(output).stem)
    )
    from rankwise.simranks.prediction.machines.calibration import machine_text  # noqa: PLC0415  # not for --help

    try:
        Path(output).write_text(machine_text(real), "utf-8")
    except OSError as error:
        raise ConfigError(f"-o {output} cannot be written: {error}") from error
    for kind, residual in real.residuals.items():
        click.echo(f"{kind:<20}  off by {100 * residual:5.1f} % on average")
    click.echo(f"wrote {output}: rankwise run --on sim:{shlex.quote(output)} ...")
    return 0


def _check(output: str, logs: tuple[str, ...], like: str | None) -> None:
    if not output.endswith((".yaml", ".yml")):
        raise ConfigError(f"-o is {output}, expected a name that ends with .yaml")
    if not Path(output).absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {Path(output).absolute().parent}")
    if bool(logs) != bool(like):
        given, lacking = ("--from", "--like MACHINE") if logs else ("--like", "--from LOG")
        raise ConfigError(f"{given} needs {lacking}: a log tells of a fabric, and not of devices")


def _from_logs(logs: tuple[str, ...], like: str, name: str) -> "RealMachine":
    from rankwise.sim.files import read_text  # noqa: PLC0415  # not for --help
    from rankwise.simranks.prediction.machines.calibration import with_collectives  # noqa: PLC0415  # the same
    from rankwise.simranks.prediction.machines.catalogue import named_machine  # noqa: PLC0415  # the same
    from rankwise.simranks.prediction.machines.nccl_logs import read_nccl_tests  # noqa: PLC0415  # the same

    points = []
    for log in logs:
        try:
            points += read_nccl_tests(read_text(log), log)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--from {log} cannot be read: {error}") from error
    if len({(each.nodes, each.per_node) for each in points}) > 1:
        raise ConfigError(
            "--from: the logs are of different numbers of ranks or nodes, expected the same ones",
            hint="fit one level at a time: the result can be the --like of the next",
        )
    real = with_collectives(named_machine(like), points, ", ".join(logs))
    return msgspec.structs.replace(real, name=name)


def _measured(seconds: float, timeout: str, ranks: int, name: str) -> "RealMachine":
    from rankwise.cli.sim_progress import FiguresOfOther  # noqa: PLC0415  # not for --help
    from rankwise.simranks.prediction.machines.calibration import (  # noqa: PLC0415  # the same
        Measurements,
        machine_of,
        progress_of,
    )

    with TemporaryDirectory(prefix="rankwise-calibrate-") as folder:
        path = Path(folder, "measurements.json")
        command = [
            sys.executable, "-m", "rankwise", "run", "--nproc-per-node", str(ranks), "--no-prefix",
            "--timeout", timeout, "-m", _PROGRAM, str(path), str(seconds),
        ]  # fmt: skip
        with shown(FiguresOfOther("calibrate", progress_of(path)).in_words):
            code = _run_telling(command)
        if code:
            raise ConfigError(
                f"the measurements have failed with exit code {code}",
                hint="torch is needed here (pip install 'rankwise[torch]'); on a busy machine give"
                " it longer, --timeout 10m",
            )
        results: Measurements = msgspec.json.decode(path.read_bytes(), type=Measurements)
    return machine_of(results, name)


def _run_telling(command: list[str]) -> int:
    """Run a command and pass on what it writes to stderr, which may be below a line of progress."""
    child = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert child.stderr is not None, "it is a pipe"
    try:
        while data := os.read(child.stderr.fileno(), 1 << 16):
            wipe()
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        return child.wait()
    except BaseException:  # Ctrl-C, of which the child knows itself
        child.wait()
        raise
    finally:
        child.stderr.close()
