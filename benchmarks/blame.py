"""Who is blamed for a failure, and how soon: rankwise, and torchrun with torch's flight recorder.

    python benchmarks/blame.py [--quick] [--only exits_with_3,comes_too_late] [--json figures.json]

The programs are those of tests/corpus: of each it is known who is to blame. Under torchrun every
rank writes its flight recorder to a file twice a second (`programs/recorded.py`), and torch's own
analyser reads the files when the run is over. Seconds are counted from when the fault begins, which
the program tells by a line, to the root cause in the output. Collectives have a time-out of 5 s,
but where the program chooses another; who has said nothing after 30 s has said nothing.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    TORCHRUN,
    Table,
    arguments,
    describe_machine,
    environment,
    scratch_directory,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "corpus"))
from corpus import PRELOADED, Program, programs  # it lies beside the tests

TIME_OUT_S, PATIENCE_S, START_S = 5.0, 30.0, 120.0
ANALYSER = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
ROOT_CAUSE = re.compile(r"^root cause: (.*)$", re.MULTILINE)
FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\):.*?\brank +: (\d+)", re.DOTALL)
MISSING = re.compile(r"missing ranks:? *\{([0-9, ]+)\}", re.IGNORECASE)
DIFFERING = re.compile(r"[Cc]ulprit rank[s:]* *\{?([0-9, ]+)")
QUICK = (
    "calls_another_operation_numpy",
    "exits_with_3",
    "is_stuck_in_a_lock",
    "leaves_the_loop_early_numpy",
)
"""What `--quick` plays: only the second is of torch."""
NAMED, INNOCENT, NOTHING = "culprit", "innocent", "nothing"


class Told(NamedTuple):
    """What a run has written, and how long after the fault its last word, or root cause, came."""

    text: str
    after_s: float | None


def run(command: Sequence[str], program: Program, end: re.Pattern[str], **added: str) -> Told:
    """Run a command, and read what it writes until it ends, or has said nothing for too long."""
    process = subprocess.Popen(
        command,
        env=environment(**{**program.environment, "PATIENCE": str(patience_of(program)), **added}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    began: float | None = None
    told: float | None = None
    timer = Timer(START_S, end_all, (process,))
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if told is None and line.rstrip().endswith("now"):  # a report tells the last lines too
                began = time.monotonic()
                timer.cancel()
                timer = Timer(PATIENCE_S, end_all, (process,))
                timer.start()
            if told is None and end.search(line):
                told = time.monotonic()
        process.wait()
    finally:
        timer.cancel()
        end_all(process)
    told = told if told is not None else time.monotonic()
    return Told("".join(lines), None if began is None else told - began)


def end_all(process: "subprocess.Popen[str]") -> None:
    """Nothing comes any more: end the launcher, which ends its ranks; then whatever is left."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def patience_of(program: Program) -> float:
    return min(float(program.patience), TIME_OUT_S)


def ours(program: Program) -> str:
    words = [*RANKWISE, "run", "--standalone", f"--nproc-per-node={program.ranks}"]
    if program.hang_timeout:
        words.append(f"--hang-timeout={program.hang_timeout:g}s")
    if program.is_of_torch:
        words += ["--start-method=forkserver", f"--preload={','.join(PRELOADED)}"]
    patience = str(patience_of(program))
    told = run(
        [*words, str(program.path)], program, ROOT_CAUSE, RANKWISE_COLLECTIVE_TIMEOUT=patience
    )
    if program.tells:
        return cell(NAMED if program.tells in told.text else NOTHING, told)
    found = ROOT_CAUSE.search(told.text)
    if found is None:
        return cell(NOTHING, told)
    root_cause = re.sub("^the gang hung: no progress for [^;]*; ", "", found[1])
    return cell(NAMED if program.names_the_culprit(root_cause) else INNOCENT, told)


def theirs(program: Program) -> tuple[str, str]:
    """What torchrun says, and what the analyser of the flight recorder does."""
    with scratch_directory() as folder:
        words = [*TORCHRUN, "--standalone", f"--nproc-per-node={program.ranks}"]
        told = run(
            [*words, str(PROGRAMS / "recorded.py"), str(program.path)],
            program,
            FIRST_FAILURE,
            RECORDER_FOLDER=str(folder),
            TORCH_FR_BUFFER_SIZE="2000",
        )
        analysed = subprocess.run(
            [*ANALYSER, "--allow-incomplete-ranks", "-p", "rank_", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
    found = FIRST_FAILURE.search(told.text)
    launcher = judged({int(found[1])} if found else set(), program)
    text = analysed.stdout + analysed.stderr
    if os.environ.get("SHOW"):
        print(told.text[-3000:], text[-3000:])
    named = {
        int(rank)
        for ranks in (*MISSING.findall(text), *DIFFERING.findall(text))
        for rank in re.findall(r"\d+", ranks)
    }
    return cell(launcher, told), judged(named, program)


def judged(named: set[int], program: Program) -> str:
    if not named:
        return NOTHING
    return NAMED if named <= {*program.blamed} else INNOCENT


def cell(verdict: str, told: Told) -> str:
    if verdict == NOTHING or told.after_s is None:
        return verdict
    return f"{verdict}, {told.after_s:.1f} s"


def main() -> None:
    culprits = programs("culprits")
    names = [each.name for each in culprits]
    options = arguments(__doc__, repetitions=1, parts=names, quick_parts=QUICK)
    describe_machine()
    columns = ("program", "kind", "rankwise", "torchrun", "flight recorder")
    table = Table("Who is blamed", columns, options.json)
    for program in culprits:
        if program.name not in options.only:
            continue
        if program.is_of_torch and HAS_TORCH:
            table.row(program.name, program.kind, ours(program), *theirs(program))
        elif not program.is_of_torch:
            table.row(program.name, program.kind, ours(program), "-", "-")


if __name__ == "__main__":
    main()
