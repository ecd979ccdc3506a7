"""Step times on this machine's CPU, beside what is predicted of them on the machine as calibrated.

Eight programs (`programs/layouts.py`: DDP, FSDP2, tensor parallel and a pipeline of two ranks, each
of a perceptron and a decoder) over gloo. A pair is `rankwise calibrate` of 5 seconds and a
measurement, one after the other; pairs of the programs take turns. The calibration measures no
shape that a program has.

An idle probe, fixed work of two processes, runs before, between and after. If its time changes by
over 10 %, the machine has changed meanwhile, and the pair is void. The work has parts, and the
median part counts: a process that ran for a moment does not void a pair. The work takes 3 s, about
as long as the steps that are measured. A probe of 0.3 s shows moments of a virtual machine's
neighbours: on an idle machine, three of them 7 s apart changed by over 10 % in 31 % of 320 trials,
and three of 3 s in 5 %. The time of a program with fewer than five valid pairs is "not measured".

The CPU time of a rank can be compared on a busy machine, too: with the time that is predicted for
computing. It has what gloo copies and adds as well, which a prediction counts as communication.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from measuring import (
    PROGRAMS,
    RANKWISE,
    Table,
    arguments,
    describe_machine,
    environment,
    output_of_run,
    scratch_directory,
)

RANKS = 2
SECONDS = 5
CHANGE_MAX = 0.10
VALID_MIN = 5
PROBE_LOOPS, PROBE_PARTS = 400_000, 301
PATIENCE_S = 300.0
NAMES = tuple(
    f"{layout}-{model}"
    for layout in ("ddp", "fsdp2", "tp", "pipeline")
    for model in ("mlp", "decoder")
)


class Pair(NamedTuple):
    """A calibration and a measurement.

    Attributes:
        change: how much longer the slowest probe of this pair took than its fastest, as a share.
        measured, predicted: seconds of a step.
        cpu, computing: seconds of CPU time, and what was predicted for computing.
    """

    change: float
    measured: float
    cpu: float
    predicted: float
    computing: float

    @property
    def is_valid(self) -> bool:
        """Whether the machine was left alone."""
        return self.change <= CHANGE_MAX


def busy_loops(loops: int) -> float:
    """Do fixed work in parts; gives the seconds of the median part."""
    spent = []
    for _ in range(PROBE_PARTS):
        begun, found = time.perf_counter(), 0
        for each in range(loops):
            found ^= each
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def probe(processes: ProcessPoolExecutor) -> float:
    """How long the fixed work takes on as many CPUs as there are ranks."""
    return max(processes.map(busy_loops, [PROBE_LOOPS] * RANKS))


def change_of(probes: Sequence[float]) -> float:
    """By how much the time of probes changes, as a share of the least."""
    return max(probes) / min(probes) - 1


def calibrate(machine: Path, seconds: float) -> None:
    done = subprocess.run(
        [*RANKWISE, "calibrate", "-o", str(machine), "--seconds", str(seconds),
         "--nproc-per-node", str(RANKS)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"rankwise calibrate failed:\n{done.stderr}")


def words_of(name: str, steps: int) -> list[str]:
    layout, _, model = name.partition("-")
    return [str(PROGRAMS / "layouts.py"), layout, model, "--steps", str(steps)]


def measure(name: str) -> tuple[float, float]:
    """The median step of a run on processes, and its CPU time."""
    out = output_of_run(
        "--nproc-per-node", str(RANKS), "--no-prefix", *words_of(name, 7), patience_s=PATIENCE_S
    )
    lines = [line for line in out.splitlines() if line.startswith("[[")]
    wall, cpu = map(statistics.median, json.loads(lines[-1]))
    return wall, cpu


def predict(name: str, machine: Path) -> tuple[float, float]:
    """Seconds of a step on the machine that was calibrated, and those for computing."""
    answer = machine.with_suffix(".json")
    output_of_run(
        "--on", f"sim:{machine}", "--nproc-per-node", str(RANKS), "--no-prefix", "--timing-only",
        "--every-rank", "--prediction", str(answer), *words_of(name, 3), patience_s=PATIENCE_S,
    )  # fmt: skip
    found = json.loads(answer.read_text("utf-8"))
    return found["step_time_s"], found["computing_s"]


def pair_of(name: str, probed: Callable[[], float], seconds: float) -> Pair:
    with scratch_directory() as folder:
        machine = folder / "this.yaml"
        probes = [probed()]
        calibrate(machine, seconds)
        probes.append(probed())
        measured, cpu = measure(name)
        probes.append(probed())
        return Pair(change_of(probes), measured, cpu, *predict(name, machine))


def show(name: str, pairs: Sequence[Pair], table: Table) -> None:
    valid = [each for each in pairs if each.is_valid]
    ratios = sorted(each.predicted / each.measured for each in valid)
    if len(valid) < VALID_MIN:
        told = ("", "", "not measured", "")
    else:
        told = (
            f"{1e3 * statistics.median(each.measured for each in valid):,.0f} ms",
            f"{1e3 * statistics.median(each.predicted for each in valid):,.0f} ms",
            f"{statistics.median(ratios):.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        )
    of_cpu = [each.computing / each.cpu for each in pairs]
    least_to_most = f"{statistics.median(of_cpu):.2f}, {min(of_cpu):.2f} to {max(of_cpu):.2f}"
    table.row(name, f"{len(valid)} of {len(pairs)}", *told, least_to_most)


COLUMNS = (
    "program", "valid pairs", "measured step", "predicted", "median of predicted / measured",
    "least to most", "computing / CPU time, all pairs",
)  # fmt: skip


def main() -> None:
    options = arguments(__doc__, repetitions=7, parts=NAMES, quick_parts=("ddp-mlp",))
    describe_machine()
    pairs: dict[str, list[Pair]] = {name: [] for name in options.only}
    with (
        ExitStack() as stack,
        ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as processes,
    ):
        stack.callback(show_all, pairs, options.json)  # what there is, if it is ended before
        probe(processes)  # starts them
        for _ in range(options.repetitions):
            for name, found in pairs.items():
                found.append(pair_of(name, lambda: probe(processes), SECONDS))
                last = found[-1]
                print(
                    f"{name}: the probe changed by {100 * last.change:.0f} %, measured"
                    f" {last.measured:.3f} s, predicted {last.predicted:.3f} s; CPU time"
                    f" {last.cpu:.3f} s, computing {last.computing:.3f} s",
                    flush=True,
                    file=sys.stderr,
                )


def show_all(pairs: Mapping[str, Sequence[Pair]], json_file: Path | None) -> None:
    table = Table("Predicted and measured on this CPU", COLUMNS, json_file)
    for name, found in pairs.items():
        if found:
            show(name, found, table)


if __name__ == "__main__":
    main()
