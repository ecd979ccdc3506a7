"""`rankwise stacks`: where every rank of a run is, without stopping any of them.

Ranks that stand in the same place are shown once: of 64 ranks, 63 usually wait for the other one.
Frames of torch and rankwise are told in a line, but for `--json`.

Native frames are py-spy's work: it stops a process for some milliseconds, and reads its memory. The
ranks are not asked then, by a signal that ends a sleep of C.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rankwise.base.errors import RankwiseError
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.runs_here import (
    ANSWER_TIMEOUT_OPTION,
    RUN_ARGUMENT,
    agents_called,
    answers,
    deadline_after,
    print_json,
    ranks_and_pids,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.launch.control.server import Question

_OWN_NUMBER = re.compile(r"\b0x[0-9a-f]+\b|(?<=^Process )\d+|(?<=^Thread )\d+", re.MULTILINE)
"""What differs between ranks that stand at the same place: addresses, and numbers of threads."""

_IS_REFUSED = re.compile(rb"permission|not permitted", re.IGNORECASE)
"""How py-spy says that it may not look into a process."""
_RIGHT_TO_TRACE = (
    "it needs the right to trace: be root, or in a container add SYS_PTRACE; "
    "without --native no such right is needed"
)


class StacksUnavailable(RankwiseError):
    """Native frames cannot be had."""


@click.command("stacks", context_settings=CONTEXT_SETTINGS)
@RUN_ARGUMENT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per rank.")
@click.option(
    "--native",
    is_flag=True,
    help="Show frames of C and C++ too. Needs py-spy (pip install py-spy), which stops each rank "
    "for a moment.",
)
@ANSWER_TIMEOUT_OPTION
def stacks(run: str | None, *, as_json: bool, native: bool, timeout: Duration) -> None:
    """Print the Python stacks of every rank of RUN.

    RUN is a name that `rankwise ps` shows, the beginning of one, or the pid of an agent.
    Leave it out if there is one run. On several nodes, it shows the ranks on this machine.
    """
    from rankwise.launch.control.client import ask_all  # noqa: PLC0415  # not for --help

    deadline = deadline_after(timeout)
    question: Question = "ranks" if native else "stacks"
    replies = answers(ask_all(agents_called(run), question, deadline))
    ranks = sorted(
        chain.from_iterable(lines for _, lines in replies), key=lambda line: line["rank"]
    )
    if native:
        _show_native(ranks, deadline)
    if as_json:
        print_json(ranks)
    else:
        click.echo(render(ranks))


def _show_native(ranks: "Sequence[dict[str, Any]]", deadline: Instant) -> None:
    """Put native stacks into the answers, or why a rank has none.

    Raises:
        StacksUnavailable: no rank can be shown.
    """
    program = _find_py_spy()
    refusals = []
    for line in ranks:
        try:
            line["stacks"] = native_stacks(program, int(line["pid"]), deadline)
        except StacksUnavailable as error:
            refusals.append(error)
            line["stacks"] = f"  {error}"
    if refusals and len(refusals) == len(ranks):
        raise refusals[0]


def _find_py_spy() -> str:
    """Where py-spy is installed: beside this Python, or on the PATH."""
    beside = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("py-spy")
    if found is None:
        raise StacksUnavailable(
            "--native needs py-spy, which is not installed",
            hint=f"install it: {shlex.quote(sys.executable)} -m pip install py-spy",
        )
    return found


def native_stacks(program: str, pid: int, deadline: Instant) -> str:
    """The stacks of a process as py-spy shows them.

    Raises:
        StacksUnavailable: py-spy may not look into the process, or cannot.
    """
    patience = max(deadline - time.monotonic_ns(), SECOND) / SECOND
    command = [program, "dump", "--native", "--pid", str(pid), "--full-filenames"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        raise StacksUnavailable(
            f"py-spy did not return the stacks of process {pid} in {patience:.3g} s",
            hint="give it more time: --timeout 1m",
        ) from None
    except OSError as error:
        raise StacksUnavailable(f"{program} cannot be started: {error.strerror}") from error
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        raise StacksUnavailable(
            f"py-spy cannot read process {pid}: {told[0] if told else 'it tells no reason'}",
            hint=_RIGHT_TO_TRACE if _IS_REFUSED.search(done.stderr) else None,
        )
    return done.stdout.decode(errors="replace").rstrip("\n")


def render(ranks: "Sequence[dict[str, Any]]") -> str:
    """The stacks of all ranks as text, equal ones together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in ranks:
        groups.setdefault(_OWN_NUMBER.sub("…", str(line.get("stacks", ""))), []).append(line)
    return "\n\n".join(_render_group(group) for group in groups.values())


def _render_group(group: "Sequence[dict[str, Any]]") -> str:
    from rankwise.launch.telling.failure_report.stacks import folded_stacks  # noqa: PLC0415  # not for --help

    stacks = folded_stacks(str(group[0].get("stacks", "")).strip("\n")) or "  (no answer)"
    return f"{ranks_and_pids(group)}\n{stacks}"
