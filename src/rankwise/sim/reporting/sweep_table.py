"""What a sweep gives: a table with a row per result, for people, programs and notebooks."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec

from rankwise.sim.reporting.results import FIGURES

Value = str | int | float | bool | None
BENCH, TIME, PREDICTION = "bench", "time", "prediction"


class SweptCase(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of values, and what it gave.

    Attributes:
        point: the values, by key, as text.
        rows: results: figures by name.
        devices: how many devices the machine has.
        failure: what it failed with; empty if it did not.
    """

    point: dict[str, str]
    rows: list[Mapping[str, Value]] = []
    devices: int = 0
    failure: str = ""


class SweepTable(Sequence[dict[str, Value]]):
    """The results of a sweep, in the order of its combinations: a sequence of rows.

    A row is a mapping from the names of columns to values: first the keys of the sweep, as numbers
    where they are some, then the figures in base units.

    Args:
        keys: what was varied.
        cases: of each combination that was run.
        kind: `bench` for measurements, `time` for programs that measure nothing, `prediction`.
        title: what was run.
        total: how many combinations the sweep has; some were not run if it was interrupted.
    """

    def __init__(
        self, keys: Sequence[str], cases: Sequence[SweptCase], kind: str, title: str, total: int = 0
    ) -> None:
        self.keys = tuple(keys)
        self.cases = tuple(cases)
        self.kind = kind
        self.title = title
        self.total = total or len(cases)
        self._rows = [
            {**{key: number_of(text) for key, text in case.point.items()}, **row}
            for case in cases
            for row in case.rows
        ]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns."""
        if self.kind == BENCH:
            return (*self.keys, *FIGURES)
        return (
            *self.keys,
            *dict.fromkeys(name for case in self.cases for row in case.rows for name in row),
        )

    @property
    def failures(self) -> list[tuple[dict[str, str], str]]:
        """The combinations that failed, and with what."""
        return [(case.point, case.failure) for case in self.cases if case.failure]

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return iter(self._rows)

    def to_csv(self) -> str:
        """The table as CSV; no newline at the end."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for case in self.cases:
            for row in case.rows:
                cells: Mapping[str, Value] = {**row, **case.point}
                writer.writerow([cells.get(name, "") for name in self.columns])
        return text.getvalue().rstrip("\n")

    def to_json(self) -> str:
        """The table as a list of objects; values of keys are text, as they were given."""
        rows = [{**case.point, **row} for case in self.cases for row in case.rows]
        return msgspec.json.format(msgspec.json.encode(rows)).decode()

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")  # not a dependency
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "to_pandas() needs pandas: pip install pandas", name="pandas"
            ) from None
        return pandas.DataFrame(self._rows, columns=list(self.columns))

    def to_html(self) -> str:
        """A page with the table and its plots."""
        from rankwise.sim.reporting.sweep_page import sweep_page  # noqa: PLC0415  # it draws

        return sweep_page(self)

    def _repr_html_(self) -> str:
        from rankwise.sim.reporting.sweep_page import in_notebook  # noqa: PLC0415  # the same

        return in_notebook(self)

    def __repr__(self) -> str:
        return f"<SweepTable of {self.title}: {len(self)} rows over {', '.join(self.keys)}>"


def number_of(text: str) -> int | float | str:
    """A value of a key as a number, if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
