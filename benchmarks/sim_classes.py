"""Predictions in which some ranks stand for all, beside those in which every rank runs.

Eight layouts of a small decoder on 64 H100 (`programs/transformer.py` and `programs/parallel.py`):
how many ranks run, in how many classes, the CPU time of the whole command, and the largest
difference of any figure of the two predictions: of times as shares of the step, of others as shares
of the figure.
"""

import json
import math
import resource
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from measuring import (
    PROGRAMS,
    RANKWISE,
    Table,
    arguments,
    describe_machine,
    environment,
    ratio,
    scratch_directory,
    seconds,
)

RANKS, RANKS_IF_QUICK = 64, 16
PER_NODE = 8
FIELDS = ("layout", "ranks that run", "classes", "CPU", "every rank", "times", "difference")
PARTS_OF_A_STEP = (
    "computing_s", "communication_s", "exposed_communication_s", "waiting_s", "bubble_s",
)  # fmt: skip
LAYOUTS = {
    "DDP": "transformer.py --parallel ddp",
    "FSDP2": "transformer.py",
    "ZeRO 1": "parallel.py --data zero1",
    "TP 4 x FSDP2": "parallel.py --tp 4",
    "TP 4 x FSDP2, compiled, float8": "parallel.py --tp 4 --compile yes --float8 yes",
    "PP 4 x FSDP2": "parallel.py --pp 4 --microbatches 4",
    "PP 2 x TP 4 x FSDP2": "parallel.py --pp 2 --tp 4 --microbatches 2",
    "PP 2 x TP 4 x ZeRO 1, interleaved": (
        "parallel.py --pp 2 --tp 4 --microbatches 2 --stages-per-rank 2"
        " --schedule Interleaved1F1B --data zero1"
    ),
}


class Predicted(NamedTuple):
    """A prediction, and the CPU time of its command."""

    document: Mapping[str, Any]
    cpu_s: float


def predict(words: str, ranks: int, *more: str) -> Predicted:
    """What is predicted of a program with two steps."""
    program, *options = words.split()
    with scratch_directory() as directory:
        answer = Path(directory) / "answer.json"
        command = [
            *RANKWISE, "run", "--on", "sim:h100-sxm", f"--nnodes={ranks // PER_NODE}",
            f"--nproc-per-node={PER_NODE}", "--timing-only", "--no-prefix", "--prediction",
            str(answer), *more, str(PROGRAMS / program), *options, "--steps=2",
        ]  # fmt: skip
        before = cpu_of_children()
        subprocess.run(command, env=environment(), check=True, capture_output=True)
        return Predicted(json.loads(answer.read_text("utf-8")), cpu_of_children() - before)


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference of a figure that is of all ranks together.

    A microsecond of waiting may be a half of all waiting, so parts of a step are compared with it.
    """
    step = max(one["step_time_s"], other["step_time_s"])
    found = [apart(*pair) for pair in pairs(*(figures_of(each) for each in (one, other)))]
    found += [
        abs(here - there) / step
        for here, there in pairs(*(times_of(each) for each in (one, other)))
    ]
    return max(found)


def pairs(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(one.get(key, 0.0), other.get(key, 0.0)) for key in sorted(one.keys() | other.keys())]


def times_of(document: Mapping[str, Any]) -> dict[str, float]:
    """The parts of a step."""
    parts = {name: document[name] for name in PARTS_OF_A_STEP}
    return {**parts, **document["exposed_communication_by_kind_s"]}


def figures_of(document: Mapping[str, Any]) -> dict[str, float]:
    left_out = {"checked_ranks", "peak_rank", "bubble", *PARTS_OF_A_STEP}
    return {
        name: value
        for name, value in document.items()
        if isinstance(value, int | float) and name not in left_out
    }


def apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), math.ulp(0.0))


def main() -> None:
    options = arguments(__doc__, repetitions=1)
    describe_machine()
    ranks = RANKS_IF_QUICK if options.quick else RANKS
    table = Table(f"Classes of ranks, {ranks} devices", FIELDS, options.json)
    for name, words in LAYOUTS.items():
        few, every = predict(words, ranks), predict(words, ranks, "--every-rank")
        table.row(
            name, f"{few.document['checked_ranks']} of {ranks}",
            str(len(few.document["classes"])), seconds(few.cpu_s), seconds(every.cpu_s),
            ratio(every.cpu_s, few.cpu_s), f"{difference(few.document, every.document):.1e}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
