"""`rankwise diff`: the same program on simulated ranks and on processes, compared bit for bit.

Exit codes: 0 both runs are equal; 1 they differ, or one of them failed; 2 a wrong command line.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from rankwise.base.errors import ConfigError
from rankwise.base.wording import counted
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.options import complete_file
from rankwise.cli.program_check import python_script
from rankwise.launch.telling.status_line import wipe

if TYPE_CHECKING:
    from rankwise.simranks.run.comparison import Difference, Events

_PROGRAM = Path(__file__).parents[1] / "collectives" / "recorded_program.py"
_SIMULATED, _REAL = "simulated ranks", "processes"
_WAYS = {_SIMULATED: ["--on=sim"], _REAL: ["--standalone", "--quiet"]}
_LOSSES_SHOWN = 20


@click.command(
    "diff",
    short_help="Compare a program on simulated ranks and on processes, bit for bit.",
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
)
@click.option(
    "--nproc-per-node",
    metavar="N",
    type=click.IntRange(1, 4096),
    default=2,
    help="Number of ranks. [default: 2]",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a Python module.")
@click.argument("script", shell_complete=complete_file)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def diff(*, nproc_per_node: int, module: bool, script: str, args: tuple[str, ...]) -> int:
    """Run SCRIPT on simulated ranks and on processes, and show the first difference.

    It compares, bit for bit: operands and results of each collective and message, the value of each
    backward(), all parameters after each step of an optimizer, and the arrays, tensors, modules and
    optimizers in the script's globals at its end. Programs of torch use gloo in both runs.
    """
    from rankwise.cli.sim_progress import progress_shown  # noqa: PLC0415  # not for --help
    from rankwise.simranks.run import comparison  # noqa: PLC0415  # the same

    if not module:
        python_script(script, args)  # refuses what is none
    words = ["module" if module else "script", script, *args]
    with _ended_by_signals(), _temporary_folder() as place:
        folder = Path(place)
        with progress_shown() as tell:
            codes = []
            for way in _WAYS:
                tell(f"{script} on {way}")
                codes.append(_run(way, folder, nproc_per_node, words))
        simulated, real = (comparison.read_events(folder / way, nproc_per_node) for way in _WAYS)
        if all(codes):
            simulated, real = comparison.events_in_both(simulated, real)
        difference = comparison.first_difference(simulated, real)
        _show_losses(simulated, real)
        for line in comparison.left_out(simulated):
            click.echo(line)
        if difference is None:
            events = sum(map(len, simulated))
            if any(codes):
                click.echo(f"until they failed, both runs are equal: {events} events")
            elif not events:
                click.echo("nothing to compare: the program has no operations and no results")
            else:
                click.echo(
                    f"equal, bit for bit: {events} events of {counted(nproc_per_node)}, each with "
                    "all its tensors"
                )
            return int(any(codes))
        if difference.tensor is not None:
            _run_again(difference, folder, nproc_per_node, words)
        captured = [comparison.read_captured(folder / way) for way in _WAYS]
        click.echo(f"different: {comparison.describe(difference, (captured[0], captured[1]))}")
    return 1


@contextmanager
def _temporary_folder() -> Iterator[str]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="rankwise-diff-")
    except OSError as error:
        raise ConfigError(
            f"the records of both runs need a temporary directory: {error.strerror}",
            hint="set TMPDIR to a directory that can be written to",
        ) from None
    with folder as place:
        yield place


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a signal that would end this process end the run that goes on, and remove the records."""

    def end(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)  # `timeout` sends two
        with suppress(OSError):
            os.write(2, f"rankwise diff: stopped by {signal.Signals(signum).name}\n".encode())
        raise click.exceptions.Exit(128 + signum)

    before = {
        each: signal.signal(each, end)
        for each in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _run(way: str, folder: Path, size: int, words: list[str], capture: str = "") -> int:
    """Run the program in one way; what it says is shown if it fails. Returns its exit code."""
    place = folder / way
    place.mkdir(exist_ok=True)
    child = subprocess.Popen(
        [
            sys.executable, "-m", "rankwise", "run", *_WAYS[way], f"--nproc-per-node={size}",
            *(_import_once(folder / _SIMULATED) if way == _REAL else ()), str(_PROGRAM), *words,
        ],
        env={**os.environ, "RANKWISE_RECORD": str(place), "RANKWISE_RECORD_CAPTURE": capture},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        _, told = child.communicate()
    except BaseException:
        child.terminate()
        # The signal may have come when all was read, before that was noted.
        with suppress(ValueError):
            child.communicate()
        child.wait()
        raise
    if child.returncode and not capture:
        sys.stderr.flush()
        name = f"-m {words[1]}" if words[0] == "module" else words[1]
        wipe()
        sys.stderr.buffer.write(told.replace(os.fsencode(_PROGRAM), os.fsencode(name)))
        click.echo(f"the run on {way} failed with exit code {child.returncode}", err=True)
    return child.returncode


def _import_once(records: Path) -> list[str]:
    """Fork the processes from one that has imported what is slow to import and will be needed."""
    from rankwise.simranks.world.rank_events import IMPORTED  # noqa: PLC0415  # not for --help

    file = records / IMPORTED
    modules = file.read_text() if file.exists() else ""  # none if the simulated ranks failed
    return ["--start-method=forkserver", f"--preload={modules}"] if modules else []


def _run_again(difference: "Difference", folder: Path, size: int, words: list[str]) -> None:
    """Run both once more, to keep the tensor that differs."""
    capture = f"{difference.rank}/{difference.number}/{difference.tensor}"
    for way in _WAYS:
        _run(way, folder, size, words, capture)


def _show_losses(simulated: "Events", real: "Events") -> None:
    """A line per step, with the first rank whose losses differ, or the first rank."""
    losses = [
        [[event.shown for event in rank if event.shown] for rank in run]
        for run in (simulated, real)
    ]
    count = max(len(of_rank) for run in losses for of_rank in run)
    for step in range(min(count, _LOSSES_SHOWN)):
        mine, others = (
            [(of_rank[step : step + 1] or ["none"])[0] for of_rank in run] for run in losses
        )
        rank = next((rank for rank, value in enumerate(mine) if value != others[rank]), 0)
        verdict = "equal on all ranks" if mine == others else f"{others[rank]} as a process"
        click.echo(f"loss #{step + 1}: {mine[rank]} on rank {rank}, {verdict}")
    if count > _LOSSES_SHOWN:
        click.echo(f"… and {count - _LOSSES_SHOWN} more losses")
