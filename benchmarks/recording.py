"""What it costs to record a run (`--trace`), beside the same run that records nothing.

    python benchmarks/recording.py [--repetitions 5] [--quick]

Two ranks reduce 4 KiB by gloo, as fast as they can: the worst case for a recorder, since each call
is entered and read. With and without `--trace` by turns, medians: time and CPU time of a rank per
call, and CPU time of all else (the agent, imports, the trace's making) per run.
"""

import resource
import statistics
import sys
import tempfile
from pathlib import Path

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    Table,
    arguments,
    describe_machine,
    output_of_run,
)

PROGRAM = str(PROGRAMS / "reducing.py")
CALLS = 10_000
RANKS = 2
PATIENCE = 600.0


def measured(calls: int, *flags: str) -> tuple[float, float, float]:
    """Seconds per call, of CPU per call, and of CPU beside the ranks' loops per run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ranks_flag = ("--nproc-per-node", str(RANKS))
    words = (*ranks_flag, "--no-prefix", *flags, PROGRAM, str(calls))
    told = output_of_run(*words, patience_s=PATIENCE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    ranks = [tuple(map(float, line.split())) for line in told.splitlines()]
    took, used = (statistics.mean(each) for each in zip(*ranks, strict=True))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, used, cpu - used * calls * RANKS


def main() -> None:
    options = arguments(__doc__, repetitions=5)
    if not HAS_TORCH:
        sys.exit("torch is not installed")
    calls = CALLS // 10 if options.quick else CALLS
    describe_machine()
    table = Table(
        f"{calls:,} all_reduces of 4 KiB by gloo, {RANKS} ranks",
        ("run", "per call", "CPU per call and rank", "CPU of all else"),
        options.json,
    )
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "plain": (),
            "--trace": ("--trace", str(Path(folder, "run.json.gz"))),
            "--log-dir": ("--log-dir", folder),
        }
        samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
        for _ in range(options.repetitions):
            for name, flags in kinds.items():
                samples[name].append(measured(calls, *flags))
    for name, rows in samples.items():
        took, used, rest = (statistics.median(each) for each in zip(*rows, strict=True))
        table.row(name, f"{took * 1e6:.0f} us", f"{used * 1e6:.0f} us", f"{rest:.2f} s")


if __name__ == "__main__":
    main()
