"""What a bench measured, as a value; as cells of a table, and as CSV."""

import csv
import io
from collections.abc import Mapping, Sequence

import msgspec

from rankwise.sim.hardware.quantities import PICOSECONDS_PER_SECOND, format_picoseconds

HELD_BACK, FIDELITY = "held back by", "fidelity"
LOWER_BOUND, LAW = "lower bound", "alpha-beta law"
COLUMNS = ("bench", "case", "simulated", "FLOP/s", "bytes/s", "bound", LOWER_BOUND, LAW, "reached",
           HELD_BACK, FIDELITY)  # fmt: skip
"""The heads of the table."""
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        bench: the program's name.
        case: what it was about: sizes, dtype, algorithm.
        time_ps: simulated picoseconds.
        flops: floating-point operations that the task needs, on any unit.
        bytes: bytes that the task has to move: to and from memory for kernels, of one rank's
            operand for collectives.
        bound: what limits the task on this machine: `compute`, `memory`, or `alpha-beta`.
        bound_ps: how long it would take if nothing but that mattered; 0 if unknown.
        law_ps: of a collective, its alpha-beta law: the chain of latencies, and then the bytes of
            the busiest link. Slots overlap both, so a run may be faster; 0 of other tasks.
        held_back_by: the resource that costs most of the rest, where less than 90 % of the bound
            were reached: `credits`, `links`, `DMA`, `math`, `wave tail` and others.
        fidelity: how exactly its collectives were simulated: `kernel`, `queue`, `message`.
        is_checked: whether the numbers were compared with numpy's; not if only time was simulated.
    """

    bench: str
    case: str
    time_ps: int
    flops: int
    bytes: int
    bound: str
    bound_ps: int
    law_ps: int = 0
    held_back_by: str = ""
    is_checked: bool
    fidelity: str = ""

    @property
    def seconds(self) -> float:
        """Simulated seconds."""
        return self.time_ps / PICOSECONDS_PER_SECOND

    @property
    def flops_per_second(self) -> float:
        """Achieved."""
        return self.flops / self.seconds if self.time_ps else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Achieved."""
        return self.bytes / self.seconds if self.time_ps else 0.0

    @property
    def ratio(self) -> float:
        """The share of the bound that was reached: 1 is as fast as the model allows."""
        return self.bound_ps / self.time_ps if self.time_ps else 1.0

    def _repr_html_(self) -> str:
        from rankwise.sim.reporting.notebook import result_html  # noqa: PLC0415  # it imports us

        return result_html(self)

    def as_row(self) -> dict[str, str | int | float | bool]:
        """All figures by name, the derived ones too: for CSV and JSON."""
        fields: dict[str, str | int | float | bool] = msgspec.structs.asdict(self)
        return {
            **fields,
            "seconds": self.seconds,
            "flops_per_second": self.flops_per_second,
            "bytes_per_second": self.bytes_per_second,
            "ratio": self.ratio,
        }


def format_rate(rate: float, unit: str) -> str:
    """Write a rate for people: `1.25 TFLOP/s`; a dash for none."""
    for factor, prefix in _PREFIXES:
        if rate >= factor:
            return f"{rate / factor:.4g} {prefix}{unit}"
    return f"{rate:.4g} {unit}" if rate else "-"


def cells_of(result: BenchResult) -> tuple[str, ...]:
    """A result as the cells of a row, in the order of `COLUMNS`."""
    return (
        result.bench,
        result.case,
        format_picoseconds(result.time_ps),
        format_rate(result.flops_per_second, "FLOP/s"),
        format_rate(result.bytes_per_second, "B/s"),
        result.bound,
        format_picoseconds(result.bound_ps) if result.bound_ps else "-",
        format_picoseconds(result.law_ps) if result.law_ps else "-",
        f"{100 * result.ratio:.1f} %" if result.bound_ps else "-",
        result.held_back_by,
        result.fidelity,
    )


def tells(head: str, cells: Sequence[str]) -> bool:
    """Whether a column says something: fidelity, where it differs or is not the most exact."""
    if head == FIDELITY:
        return any("message" in cell for cell in cells) or len(set(cells)) > 1
    if head == LAW:
        return any(cell != "-" for cell in cells)
    return head != HELD_BACK or any(cells)


def as_csv(results: Sequence[BenchResult], labels: Sequence[tuple[str, Sequence[str]]] = ()) -> str:
    """Results as CSV with all figures in base units, labels in front; no newline at the end."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(head for head, _ in labels), *FIGURES])
    for index, result in enumerate(results):
        row = result.as_row()
        writer.writerow([*(cells[index] for _, cells in labels), *(row[name] for name in FIGURES)])
    return text.getvalue().rstrip("\n")


def time_row(time_ps: int) -> dict[str, int | float]:
    """The figures of a program that measured nothing: it has taken its time all the same."""
    return {"time_ps": time_ps, "seconds": time_ps / PICOSECONDS_PER_SECOND}


def times_as_csv(rows: Sequence[Mapping[str, str | int | float]]) -> str:
    """Rows of the same columns, each ending in a `time_row`, as CSV; no newline at the end."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return text.getvalue().rstrip("\n")


FIGURES = (
    *BenchResult.__struct_fields__, "seconds", "flops_per_second", "bytes_per_second", "ratio",
)  # fmt: skip
"""The names in `BenchResult.as_row`, in its order."""
