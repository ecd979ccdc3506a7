"""Published training runs and collectives, beside what is predicted of them.

- **runs**: step times and memory of published runs, predicted with `rankwise run --timing-only` of
  `programs/transformer.py` or `programs/parallel.py` with the flags of each framework. The toy is
  6 N tokens / one efficiency, the same for all runs. Each row counts for its gates; rows that lack
  what a model needs are shown, not counted.
- **fit**: the figures of devices that fit best, and the errors with each source left out of the
  fit. It takes three predictions of each run.
- **layouts**: one model on 64 devices in many layouts, `programs/parallel.py`: whether pairs of
  layouts that differ by over 20 % are in the right order, each with its best published row.
- **collectives**: curves of NCCL; of each fabric one was fitted, the others are predicted.

A prediction takes half a minute to two minutes of CPU; answers are kept in `build/foresight` by the
figures of the machine.
"""

import hashlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from measuring import PROGRAMS, RANKWISE, Table, arguments

import rankwise
from rankwise.simranks.prediction.machines.calibration import machine_text
from rankwise.simranks.prediction.machines.catalogue import named_machine
from rankwise.simranks.prediction.machines.description import Figure, RealMachine
from rankwise.simranks.prediction.machines.fabric import FabricPrices

HERE = Path(__file__).parent
ANSWERS = HERE.parent / "build" / "foresight"
STEPS = 2
OUT_OF_MEMORY = 77
"""The exit code of a run whose device is full."""
POWER_OF_500_W = (500 / 700) ** (1 / 3)
FITTED = {"hopper": (0.5, 0.8), "ampere": (0.6, 0.9)}
FIGURES = ("matrix", "memory")
BEST = {"hopper": 0.803, "ampere": 0.869}
"""The best published product, as a share of the peak: what a device without a run of its own is
fitted by, in proportion to the other kind."""
KINDS = {989.0: "hopper", 312.0: "ampere"}
"""By the peak in bf16."""
_COLLECTIVES = {"all_reduce": "all_reduce", "all_gather": "all_gather", "alltoall": "all_to_all"}
MEMORY_TRIED = (0.75, 0.80, 0.85, 0.90)


class Gate(NamedTuple):
    """The errors of rows of a kind that are wanted at most: the median, and nine in ten."""

    name: str
    median: float
    percentile: float


GATES = {
    "eager": Gate("time: eager FSDP or DDP", 0.10, 0.20),
    "split": Gate("time: compiled, tensor or pipeline parallel", 0.15, 0.25),
    "nanotron": Gate("time: nanotron", 0.15, 0.30),
}
MEMORY = Gate("reserved memory, torchtitan", 0.08, 0.15)


class Row(NamedTuple):
    """A published run that is predicted."""

    published: Mapping[str, Any]
    flops: float

    @property
    def real(self) -> RealMachine:
        """The machine that it ran on."""
        return named_machine(self.published["machine"])

    @property
    def kind(self) -> str:
        """The kind of device."""
        return KINDS[self.real.device.peak_tflops["bf16"].value]


def published_runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((HERE / "foresight_runs.json").read_text("utf-8"))
    return runs


def rows_of_runs() -> list[Row]:
    return [
        Row(run, toy_flops(run["words"]) * run["tokens"])
        for run in published_runs()
        if "words" in run
    ]


def predict(row: Row, real: RealMachine) -> dict[str, Any]:
    """What is predicted of a run on a machine."""
    ranks, words = row.published["devices"], row.published["words"].split()
    program = row.published.get("program", "transformer.py")
    run = Run(row.published["id"], program, words, ranks)
    return predict_run(run, real, row.published.get("environment", {}))


class Run(NamedTuple):
    """A program, and how many ranks run it."""

    name: str
    program: str
    words: Sequence[str]
    ranks: int


def predict_run(run: Run, real: RealMachine, settings: Mapping[str, str]) -> dict[str, Any]:
    """The same of a program; answers are kept."""
    text = machine_text(real)
    told = f"{rankwise.__version__} {' '.join(run.words)} {settings} {text}"
    key = hashlib.sha256(told.encode())
    answer = ANSWERS / f"{run.name}-{key.hexdigest()[:12]}.json"
    if not answer.exists():
        ANSWERS.mkdir(parents=True, exist_ok=True)
        machine = answer.with_suffix(".yaml")
        machine.write_text(text, "utf-8")
        part = answer.with_suffix(".part")  # a run that is interrupted leaves what it has
        per_node = min(run.ranks, real.node_size)
        command = [
            *RANKWISE, "run", "--on", f"sim:{machine}", f"--nnodes={run.ranks // per_node}",
            f"--nproc-per-node={per_node}", "--timing-only", "--no-prefix",
            "--prediction", str(part), str(PROGRAMS / run.program), *run.words,
            f"--steps={STEPS}",
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **settings}
        )
        if done.returncode == OUT_OF_MEMORY:
            answer.write_text(json.dumps({"step_time_s": math.inf, "is_full": True}), "utf-8")
        elif not done.returncode:
            part.rename(answer)
        else:
            sys.exit(f"{shlex.join(command)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    if not found.get("is_full") and not found["steps"]:
        sys.exit(f"{run.name}: the prediction tells of no step: a rank steps no optimizer")
    return found


def toy_flops(words: str) -> float:
    """6 N per token, with all weights."""
    given = dict(zip(*[iter(words.split())] * 2, strict=True))
    layers, hidden, ffn = (int(given[f"--{name}"]) for name in ("layers", "hidden", "ffn"))
    share = int(given["--kv-heads"]) / int(given["--heads"])
    networks = 2 if given.get("--mlp") == "gelu" else 3
    per_layer = hidden * hidden * (2 + 2 * share) + networks * hidden * ffn
    embeddings = int(given["--vocab"]) * hidden * (1 if given.get("--tie") == "yes" else 2)
    return 6 * (layers * per_layer + embeddings)


def machine_with(real: RealMachine, figures: Mapping[str, float]) -> RealMachine:
    """A machine with other fitted figures; those of 500 W follow from those of 700 W."""
    power = POWER_OF_500_W if real.name.endswith("500w") else 1.0
    shares = {"matrix": figures["matrix"] * power, "memory": figures["memory"]}
    fitted = msgspec.structs.replace(
        real.device.fitted, **{name: Figure(each, 0.1, "fit") for name, each in shares.items()}
    )
    device = msgspec.structs.replace(real.device, fitted=fitted)
    return msgspec.structs.replace(real, device=device)


def predicted_ms(row: Row, figures: Mapping[str, float] | None = None) -> float:
    """Milliseconds of a step; with the figures that ship if none are given."""
    real = row.real if figures is None else machine_with(row.real, figures)
    return float(predict(row, real)["step_time_s"]) * 1e3


def error(predicted: float, row: Row) -> float:
    return predicted / float(row.published["step_ms"]) - 1


def counted(rows: Sequence[Row], gate: str = "eager") -> list[Row]:
    """The rows of a gate; what is fitted are eager runs."""
    return [row for row in rows if gate in row.published.get("gates", ())]


def toy_ms(row: Row, efficiency: float) -> float:
    peak: float = named_machine(row.published["machine"]).device.peak_tflops["bf16"].value
    return float(row.flops / (peak * 1e12 * efficiency) * 1e3)


def toy_efficiency(rows: Sequence[Row]) -> float:
    """The one that fits all counted runs best."""
    return statistics.median(
        toy_ms(row, 1.0) / float(row.published["step_ms"]) for row in counted(rows)
    )


def show_runs(rows: Sequence[Row], table: Table) -> None:
    efficiency = toy_efficiency(rows)
    ran = []
    for row in rows:
        told = f"{row.published['id']}: {row.published['model']}, {row.published['devices']} x"
        told += f" {row.published['machine']}"
        published = f"{row.published['step_ms']:,.0f} ms"
        if predict(row, row.real).get("is_full"):
            table.row(told, published, "out of memory", "", "", "", gates_of(row))
            continue
        ran.append(row)
        ours, toy = predicted_ms(row), toy_ms(row, efficiency)
        table.row(
            told, published, f"{ours:,.0f} ms", f"{100 * error(ours, row):+.1f} %",
            f"{100 * error(toy, row):+.1f} %", memory_of(row), gates_of(row),
        )  # fmt: skip
    for run in published_runs():
        if "words" not in run:
            name = f"{run['id']}: {run['model']}, {run['devices']} x {run['gpu']}"
            published = f"{run['step_ms']:,.0f} ms"
            table.row(name, published, "not predicted", "", "", "", f"none: {run['left_out']}")
    for key, gate in GATES.items():
        of_gate = counted(ran, key)
        toys = [abs(error(toy_ms(row, efficiency), row)) for row in of_gate]
        show_gate(gate, [abs(error(predicted_ms(row), row)) for row in of_gate], toys, table)
    reserved = [row for row in ran if is_gated_memory(row)]
    show_gate(MEMORY, [abs(memory_error(row)) for row in reserved], [], table)
    table.row(
        "rows that ran and are called out of memory", "", f"{len(rows) - len(ran)} of {len(rows)}",
        "", "", "", "",
    )  # fmt: skip
    ratios = [float(row.published["step_ms"]) / predicted_ms(row) for row in counted(ran)]
    ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
    table.row("measured / predicted, eager", "", "", ends, "", "", "")


def show_gate(gate: Gate, errors: Sequence[float], toys: Sequence[float], table: Table) -> None:
    """Show the median and the 90th percentile of errors beside what is wanted of them."""
    for name, of, target in (
        ("median", statistics.median, gate.median),
        ("90th percentile", percentile, gate.percentile),
    ):
        ours = f"{100 * of(errors):.1f} %" if errors else "-"
        toy = f"{100 * of(toys):.1f} %" if toys else ""
        wanted = f"{100 * target:.0f} %"
        table.row(f"{gate.name}: {name} of {len(errors)}", "", "", ours, toy, "", wanted)


def gates_of(row: Row) -> str:
    """The gates that a row counts for, or why it counts for none."""
    gates = [GATES[each].name for each in row.published.get("gates", ())]
    if is_gated_memory(row):
        gates.append(MEMORY.name)
    return "; ".join(gates) or f"none: {row.published['left_out']}"


def is_gated_memory(row: Row) -> bool:
    return row.published["set"] == "torchtitan" and row.published.get("memory_kind") == "reserved"


def memory_of(row: Row) -> str:
    """What a device holds at its peak, and what was published of it."""
    answer = predict(row, row.real)
    active, reserved = (answer[f"peak_{kind}_bytes"] / 2**30 for kind in ("active", "reserved"))
    ours = f"{active:.1f} GiB active, {reserved:.1f} reserved"
    if "memory_GiB" not in row.published:
        return ours
    kind = row.published["memory_kind"] or "unknown kind"
    error = f" ({100 * memory_error(row):+.1f} %)" if kind == "reserved" else ""
    return f"{ours}{error}; {row.published['memory_GiB']:.1f} {kind}"


def memory_error(row: Row) -> float:
    """Of reserved memory: what is predicted, by torch's allocator, against what was published."""
    reserved: float = predict(row, row.real)["peak_reserved_bytes"] / 2**30
    return reserved / float(row.published["memory_GiB"]) - 1


def percentile(values: Sequence[float], share: float = 0.9) -> float:
    """The value that so many do not exceed, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def fit(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The figures of each kind of device with the least sum of squared logarithms of errors.

    The memory's share is one for both kinds, as their controllers are alike. A kind without a run
    gets the matrix share of the other in proportion to their best published products.
    """
    rows = counted(rows)
    best: tuple[float, dict[str, dict[str, float]]] | None = None
    for memory in MEMORY_TRIED:
        found: dict[str, dict[str, float]] = {}
        whole = 0.0
        for kind, (low, high) in FITTED.items():
            of_kind = [row for row in rows if row.kind == kind]
            if of_kind:
                matrix, loss = least(partial(loss_of, of_kind, memory), low, high)
                found[kind] = {"matrix": matrix, "memory": memory}
                whole += loss
        for kind in FITTED:
            if kind not in found:
                other = next(iter(found))
                share = found[other]["matrix"] * BEST[kind] / BEST[other]
                found[kind] = {"matrix": share, "memory": memory}
        if best is None or whole < best[0]:
            best = whole, found
    assert best is not None, "there are values to try"
    return best[1]


def loss_of(rows: Sequence[Row], memory: float, matrix: float) -> float:
    return squares(rows, {"matrix": matrix, "memory": memory})


def squares(rows: Sequence[Row], figures: Mapping[str, float]) -> float:
    return sum(math.log(1 + error(estimated_ms(row, figures), row)) ** 2 for row in rows)


_KNOWN: dict[str, tuple[float, float, float]] = {}


def estimated_ms(row: Row, figures: Mapping[str, float]) -> float:
    """As `predicted_ms`, from three predictions.

    A step that its device bounds takes a constant, and parts in proportion to the inverse of each
    share.
    """
    name = row.published["id"]
    if name not in _KNOWN:
        matrix, memory = 1 / 0.6, 1 / 0.8
        base = predicted_ms(row, {"matrix": 0.6, "memory": 0.8})
        of_matrix = (base - predicted_ms(row, {"matrix": 0.7, "memory": 0.8})) / (matrix - 1 / 0.7)
        of_memory = (base - predicted_ms(row, {"matrix": 0.6, "memory": 0.9})) / (memory - 1 / 0.9)
        _KNOWN[name] = base - of_matrix * matrix - of_memory * memory, of_matrix, of_memory
    constant, of_matrix, of_memory = _KNOWN[name]
    return constant + of_matrix / figures["matrix"] + of_memory / figures["memory"]


def least(loss: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Where a function of one valley is least, to a hundredth, and how much that is."""
    while high - low > 0.01:
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if loss(first) < loss(second):
            high = second
        else:
            low = first
    middle = round((low + high) / 2, 3)
    return middle, loss(middle)


def show_fit(rows: Sequence[Row], table: Table) -> None:
    for kind, figures in fit(rows).items():
        table.row(
            f"fitted on all: {kind}",
            *(f"{name} {each:.3f}" for name, each in figures.items()),
            "",
            "",
        )
    errors = []
    for left_out in sorted({row.published["set"] for row in counted(rows)}):
        others = [row for row in rows if row.published["set"] != left_out]
        found = fit(others)
        for row in counted(rows):
            if row.published["set"] == left_out:
                ours = estimated_ms(row, found[row.kind])
                errors.append(abs(error(ours, row)))
                name = f"without {left_out}: {row.published['id']}"
                table.row(
                    name, f"{row.published['step_ms']:,.0f} ms",
                    f"{ours:,.0f} ms", f"{100 * error(ours, row):+.1f} %", "",
                )  # fmt: skip
    table.row(
        "median with its source left out", "", "", f"{100 * statistics.median(errors):.1f} %", ""
    )


def show_collectives(table: Table) -> None:
    for curve in json.loads((HERE / "foresight_collectives.json").read_text("utf-8")):
        real = named_machine(curve["machine"])
        nodes, local = curve["nodes"], curve["devices"] // curve["nodes"]
        fabric = FabricPrices(real, local)
        kind = _COLLECTIVES[curve["kind"]]
        errors = []
        for size, microseconds in curve["points"]:
            ways = fabric.choices(
                kind, size // curve["devices"] if kind == "all_gather" else size, nodes, local
            )
            if curve.get("algorithm", "").startswith("Ring"):
                ways.pop("multicast", None)
            errors.append(min(ways.values()) * 1e6 / microseconds - 1)
        sizes = [abs(each) for each in errors]
        large = [
            abs(e) for e, (size, _) in zip(errors, curve["points"], strict=True) if size >= 1 << 26
        ]
        table.row(
            f"{curve['id']}: {kind}, {curve['devices']} x {curve['machine']}",
            "fitted" if curve["is_fitted"] else "predicted", str(len(errors)),
            f"{100 * statistics.median(sizes):.1f} %",
            f"{100 * statistics.median(large):.1f} %" if large else "-", curve.get("note", ""),
        )  # fmt: skip


def show_layouts(table: Table) -> None:
    """One model in many layouts: is the faster one of two told?

    The least expensive predictions come first, so that an interrupted run has most of them.
    """
    document = json.loads((HERE / "foresight_layouts.json").read_text("utf-8"))
    best: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in sorted(document["rows"], key=lambda row: float(row["tokens_per_s_per_gpu"])):
        best[row["dp"], row["tp"], row["pp"]] = row
    pairs: list[tuple[float, float]] = []
    right = apart = 0
    for row in sorted(best.values(), key=lambda row: int(row["ga"]) * int(row["tp"])):
        published, ours = float(row["tokens_per_s_per_gpu"]), layout_rate(row, document["model"])
        for other, predicted in pairs:
            if max(published, other) > APART * min(published, other):
                apart += 1
                right += (published > other) == (ours > predicted)
        pairs.append((published, ours))
        table.row(
            f"{row['id']}: dp {row['dp']}, tp {row['tp']}, pp {row['pp']}",
            f"{published:,.0f}", f"{ours:,.0f}", f"{100 * (published / ours - 1):+.1f} %",
            f"{right} of {apart} pairs",
        )  # fmt: skip


APART = 1.2
"""Published rates of a pair differ by at least so much, or its order is not asked for."""


def with_memory(real: RealMachine, factor: float) -> RealMachine:
    memory = real.device.memory_gib
    larger = msgspec.structs.replace(memory, value=memory.value * factor)
    return msgspec.structs.replace(
        real, device=msgspec.structs.replace(real.device, memory_gib=larger)
    )


def layout_rate(row: Mapping[str, Any], model: Mapping[str, int]) -> float:
    """Tokens per second and device that are predicted of a layout."""
    words = [word for name, value in model.items() for word in (f"--{name}", str(value))]
    words += ["--tp", str(row["tp"]), "--pp", str(row["pp"]), "--batch", str(row["microbatch"])]
    words += ["--microbatches", str(row["ga"]), "--norm", "fused-rms", "--rotary", "fused"]
    words += ["--data", "zero1" if row["zero_stage"] else "replicate"]
    words += ["--cut", "products"] if row["pp"] > 1 else []
    ranks = int(row["dp"] * row["tp"] * row["pp"])
    run, real = Run(row["id"], "parallel.py", words, ranks), named_machine("h100-sxm")
    found = predict_run(run, real, {})
    if found.get("is_full"):
        # torch's stages keep a buffer for each microbatch that arrives; nanotron's do not.
        found = predict_run(run, with_memory(real, 2.0), {})
    seconds = float(found["step_time_s"])
    tokens = row["dp"] * row["microbatch"] * row["ga"] * model["sequence"]
    return float(tokens / seconds / ranks)


PARTS = ("runs", "fit", "layouts", "collectives")
LAYOUTS = ("layout", "published tokens/s", "predicted", "error of time", "right order so far")
CURVES = ("curve", "was", "points", "median error", "from 64 MiB on", "note")
RUNS = ("run", "published", "predicted", "error", "toy", "memory", "gates, or wanted at most")


def main() -> None:
    options = arguments(__doc__, repetitions=1, parts=PARTS, quick_parts=("collectives",))
    if "collectives" in options.only:
        show_collectives(Table("Collectives", CURVES, options.json))
    if "layouts" in options.only:
        show_layouts(Table("Layouts of one model on 64 devices", LAYOUTS, options.json))
    rows = rows_of_runs()
    if "runs" in options.only:
        show_runs(rows, Table("Published runs", RUNS, options.json))
    if "fit" in options.only:
        show_fit(rows, Table("Fit", ("what", "published", "predicted", "error", ""), options.json))


if __name__ == "__main__":
    main()
