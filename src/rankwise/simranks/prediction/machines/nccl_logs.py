"""Read what programs of nccl-tests and rccl-tests print: times of collectives by size.

A log may hold the tables of several programs. The columns follow the heading: releases differ in
whether they name a reduction and a root. Launchers put a prefix before each line, such as
`[1,0]<stdout>:`. The out-of-place time counts; where it is `N/A`, the time in place.

Figures that a log has twice must agree: a time with its bandwidth, and the list of ranks with the
ratio of the two bandwidths. Else the list was shortened, or the figures have other units. No row
takes no time.
"""

import re
from typing import NamedTuple

from rankwise.base.errors import ConfigError
from rankwise.base.wording import counted
from rankwise.simranks.prediction.machines.calibration import MeasuredCollective

_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s")
_HEADING = re.compile(r"#\s+(?:size|bytes)\s.*\btime\b")
_ROW = re.compile(r"(?:^|[\s:])(\d+)\s+(\d+)\s+([a-z]\w*\s.*)$")
_NAME = re.compile(r"\b(\w+?)_perf(?:_mpi)?\b")
_TIMES = ("time", "algbw", "busbw", "wrong")
_WORDS: tuple[str, ...] = ("type", "redop", "root", *_TIMES, *_TIMES)
"""The columns after size and count, if a heading is lacking."""
_KINDS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip
_FACTORS_OF_ALL_REDUCE = 2
_COARSE_GBPS = 1.0
"""Below this bandwidth two decimals are too few to check a row by."""
_AGREES = 0.03


class _Row(NamedTuple):
    """A row of a table, in the units of the log."""

    size: int
    redop: str
    time_us: float
    algbw: float
    busbw: float
    is_out_of_place: bool


class _Table(NamedTuple):
    """The rows of one program, and on which hosts its ranks were, in the order of ranks."""

    name: str | None
    hosts: tuple[str, ...]
    rows: list[_Row]


def read_nccl_tests(text: str, source: str) -> list[MeasuredCollective]:
    """The points of a log, by kind and size.

    Raises:
        ConfigError: it has no points, does not say which ranks there were, or contradicts itself.
    """
    tables = [table for table in _tables(text) if table.rows]
    if not tables:
        raise _not_a_log(source, "no table of sizes and times")
    points: list[MeasuredCollective] = []
    others: list[str] = []
    for table in tables:
        if len(table.hosts) < 2:
            raise _not_a_log(source, "no list of two or more ranks")
        kind = _kind_of(table, source)
        if kind is None:
            others.append(f"{table.name}_perf")
            continue
        _check(table, kind, source)
        points += _points(table, kind)
    if not points:
        lacking = f"only {', '.join(sorted(set(others)))}" if others else "no row with a time"
        raise ConfigError(
            f"{source} has {lacking}, expected one of {', '.join(f'{n}_perf' for n in _KINDS)}"
        )
    return points


def _not_a_log(source: str, lacking: str) -> ConfigError:
    return ConfigError(
        f"{source} has {lacking}, expected the output of a program of nccl-tests",
        hint="keep the whole output, with the lines `#  Rank  0 ... on HOST device ...`",
    )


def _tables(text: str) -> list[_Table]:
    """The tables of a log: a list of ranks or a heading begins one."""
    tables: list[_Table] = []
    name: str | None = None
    hosts: list[str] = []
    columns = _WORDS
    for line in text.splitlines():
        if found := _RANK.search(line):
            if int(found[1]) == 0:
                hosts = []
            hosts.append(found[2])
        elif _HEADING.search(line):
            columns = _columns(line)
            tables.append(_Table(name, tuple(hosts), []))
        elif found := _ROW.search(line):
            if not tables or tables[-1].hosts != tuple(hosts):
                tables.append(_Table(name, tuple(hosts), []))
            row = _row(int(found[1]), found[3].split(), columns)
            if row is not None:
                tables[-1].rows.append(row)
        elif found := _NAME.search(line):
            name = found[1]
    return tables


def _columns(heading: str) -> tuple[str, ...]:
    """What stands in the columns after size and count."""
    words = heading.partition("#")[2].split()[2:]
    told = {"op": "redop", "error": "wrong", "res": "wrong"}
    return tuple(told.get(word.strip("#"), word.strip("#")) for word in words)


def _row(size: int, cells: list[str], columns: tuple[str, ...]) -> _Row | None:
    """A row whose out-of-place or, if that is lacking, in-place time is a number."""
    if len(cells) < columns.index("busbw") + 1 or not size:
        return None
    redop = cells[columns.index("redop")] if "redop" in columns else ""
    places = [place for place, word in enumerate(columns) if word == "time"]
    for number, place in enumerate(places):
        figures = [_number(cell) for cell in cells[place : place + 3]]
        if len(figures) == 3 and None not in figures:
            time_us, algbw, busbw = (each or 0.0 for each in figures)
            return _Row(size, redop, time_us, algbw, busbw, number == 0)
    return None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _kind_of(table: _Table, source: str) -> str | None:
    """The collective of a table; None for one that predictions do not know."""
    if table.name is not None:
        return _KINDS.get(table.name)
    named = [kind for name, kind in _KINDS.items() if name in source.lower()]
    if named:
        return max(named, key=len)
    rows = [row for row in table.rows if row.algbw >= _COARSE_GBPS]
    count = len(table.hosts)
    whole = _FACTORS_OF_ALL_REDUCE * (count - 1) / count
    if rows and rows[-1].redop not in {"", "none"} and _agrees(rows[-1], whole):
        return "all_reduce"
    raise ConfigError(
        f"{source} does not name its program, expected a line with all_reduce_perf or the like",
        hint="put the name into that of the file: all_gather.log",
    )


def _check(table: _Table, kind: str, source: str) -> None:
    """Let what is said twice agree.

    Raises:
        ConfigError: it does not.
    """
    count = len(table.hosts)
    factor = 1.0 if kind in {"broadcast", "reduce"} else (count - 1) / count
    factor *= _FACTORS_OF_ALL_REDUCE if kind == "all_reduce" else 1
    for row in table.rows:
        if not row.time_us > 0:
            raise ConfigError(
                f"{source}: {row.size:,} bytes take {row.time_us:g} us, expected a time above 0"
            )
        if row.algbw < _COARSE_GBPS:
            continue
        told = row.size / row.time_us / 1e3
        if not 0.4 < told / row.algbw < 2.5:
            raise ConfigError(
                f"{source}: {row.size:,} bytes in {row.time_us:g} us are {told:,.4g} GB/s, and the"
                f" row says {row.algbw:g}, expected times in microseconds"
            )
        # Releases before 2020 counted the share (n - 1) / n of a gather in both bandwidths.
        if not _agrees(row, factor) and not (factor < 1 and _agrees(row, 1.0)):
            raise ConfigError(
                f"{source} lists {counted(count, 'rank')} of {kind}, and its bandwidths,"
                f" {row.algbw:g} and {row.busbw:g} GB/s, are not of so many",
                hint="keep the whole list of ranks",
            )


def _agrees(row: _Row, factor: float) -> bool:
    return abs(row.busbw / row.algbw / factor - 1) < _AGREES


def _points(table: _Table, kind: str) -> list[MeasuredCollective]:
    count = len(table.hosts)
    nodes = len(set(table.hosts))
    share = count if kind == "all_gather" else 1
    return [
        MeasuredCollective(
            kind=kind, size=row.size // share, nodes=nodes, per_node=count // nodes,
            seconds=row.time_us * 1e-6,
        )
        for row in table.rows
        if row.size >= share
    ]  # fmt: skip
