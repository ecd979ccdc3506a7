"""A Llama of 1B parameters on one GPU: calibrate it, predict, measure, and compare time and peak.

    python benchmarks/foresight_gpu.py          # on a machine with a GPU; under eight minutes
    python benchmarks/foresight_gpu.py --quick  # a small model, on a CPU too: shows that it works

It measures eager and compiled training with two batch sizes. Compiled graphs are predicted as eager
code, so their rows are no check. It prints a Markdown table, for docs/development/machines.md, and
keeps it with the machine and all answers in `build/foresight_gpu`.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from measuring import PROGRAMS, RANKWISE, arguments, describe_machine, environment

KEPT = Path(__file__).parent.parent / "build" / "foresight_gpu"
LLAMA_1B = (
    "--layers 16 --hidden 2048 --heads 32 --kv-heads 8 --ffn 8192 --vocab 128256 --sequence 4096"
    " --tie yes --steps"
)
SMALL = (
    "--layers 2 --hidden 192 --heads 4 --kv-heads 2 --ffn 640 --vocab 1024 --sequence 192 --steps"
)
BATCHES = (1, 2)
MODES = ("eager", "compiled")
STEPS_MEASURED, STEPS_PREDICTED = 10, 2
CALIBRATION_S, CALIBRATION_QUICK_S = 60, 5
WHOLE_S = 480.0
COLUMNS = ("run", "measured", "predicted", "error", "peak allocated", "predicted", "error",
           "peak reserved", "predicted", "error")  # fmt: skip


class Row(NamedTuple):
    """A run: what was measured, and what is predicted; seconds and bytes."""

    name: str
    measured: tuple[float, int, int]
    predicted: tuple[float, int, int]

    def cells(self) -> tuple[str, ...]:
        """The cells of its table; a dash for memory that the device does not tell."""
        told: list[str] = [self.name]
        for measured, predicted, factor, unit in zip(
            self.measured, self.predicted, (1e3, 2**-30, 2**-30), ("ms", "GiB", "GiB"), strict=True
        ):
            told += (
                [f"{measured * factor:,.1f} {unit}", f"{predicted * factor:,.1f} {unit}",
                 f"{100 * (predicted / measured - 1):+.1f} %"]
                if measured else ["-", f"{predicted * factor:,.1f} {unit}", "-"]
            )  # fmt: skip
        return tuple(told)


class Clock:
    """What is left of eight minutes."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + WHOLE_S

    def left(self) -> float:
        """Seconds; at least one."""
        return max(1.0, self._ends_at - time.monotonic())


def run(clock: Clock, *words: str) -> str:
    """What `rankwise` prints with these words."""
    done = subprocess.run(
        [*RANKWISE, *words], env=environment(), capture_output=True, text=True, check=False,
        timeout=clock.left(),
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"rankwise {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def compared(clock: Clock, machine: Path, mode: str, batch: int, sizes: str) -> Row:
    words = [str(PROGRAMS / "one_gpu.py"), mode, "--batch", str(batch), *sizes.split()]
    common = ("--nproc-per-node=1", "--no-prefix")
    answer = KEPT / f"{mode}-{batch}.json"
    run(
        clock, "run", "--on", f"sim:{machine}", "--timing-only", *common,
        "--prediction", str(answer), *words, str(STEPS_PREDICTED),
    )  # fmt: skip
    out = run(clock, "run", *common, *words, str(STEPS_MEASURED))
    seconds, allocated, reserved = json.loads(
        next(line for line in reversed(out.splitlines()) if line.startswith("[["))
    )
    found = json.loads(answer.read_text("utf-8"))
    name = f"{mode}, batch {batch}" + (" (not modelled yet)" if mode == "compiled" else "")
    return Row(
        name,
        (statistics.median(seconds), allocated, reserved),
        (found["step_time_s"], found["peak_active_bytes"], found["peak_reserved_bytes"]),
    )


def main() -> None:
    options = arguments(__doc__, repetitions=1, parts=MODES, quick_parts=("eager",))
    describe_machine()
    KEPT.mkdir(parents=True, exist_ok=True)
    clock, machine = Clock(), KEPT / "this_gpu.yaml"
    seconds = CALIBRATION_QUICK_S if options.quick else CALIBRATION_S
    told = run(
        clock, "calibrate", "-o", str(machine), "--seconds", str(seconds), "--nproc-per-node=1"
    )
    print(told)
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    show(lines)
    for mode in options.only:
        for batch in BATCHES:
            row = compared(clock, machine, mode, batch, SMALL if options.quick else LLAMA_1B)
            lines.append(f"| {' | '.join(row.cells())} |")
            show(lines[-1:])
    (KEPT / "table.md").write_text("\n".join(lines) + "\n", "utf-8")
    print(f"\nkept in {KEPT}; {WHOLE_S - clock.left():.0f} s")


def show(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
