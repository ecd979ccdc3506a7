"""Pictures of runs as lines of text, 80 columns wide: what `rankwise top --once` prints.

The screen shows the same head and the same cells.
"""

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple

from rankwise.base.units import duration_from_seconds, format_bytes, format_duration
from rankwise.base.wording import counted, ranges_of, ranks_in_words
from rankwise.launch.telling.failure_report.text import printable
from rankwise.tui.picture import NOTABLE_S, Row, RunPicture, State, arranged

WIDTH = 80
CALL_WIDTH_MAX = 40
XIDS_SHOWN = 4

_SHARE_SHOWN = 0.01


class Column(NamedTuple):
    """A column of the table: its head, its width, and whether numbers stand in it."""

    head: str
    width: int
    is_number: bool = False


RANKS, STATE, STEPS, CALL, LATE, CPU, MEMORY, GPU, BUSY, HEAT = COLUMNS = (
    Column("RANKS", 12),
    Column("STATE", 14),
    Column("STEPS/S", 7, is_number=True),
    Column("COLLECTIVE", 23),
    Column("LATE", 5, is_number=True),
    Column("CPU", 5, is_number=True),
    Column("MEMORY", 8, is_number=True),
    Column("GPU", 8, is_number=True),
    Column("BUSY", 4, is_number=True),
    Column("TEMP", 4, is_number=True),
)
"""With the gaps between them, and without the GPU's three, these fit into 80 columns."""
_HEADS_OF_POOL = {RANKS.head: "WORKERS", STEPS.head: "CALLS/S", CALL.head: "TASK"}
_OF_GPUS = (GPU, BUSY, HEAT)


def columns_for(rows: Iterable[Row], width: int = WIDTH) -> tuple[Column, ...]:
    """The columns that have something in them; the collective makes room, or takes what is left."""
    rows = tuple(rows)
    empty = {column for column in _OF_GPUS if all(_cell(row, column.head) == "-" for row in rows)}
    columns = tuple(column for column in COLUMNS if column not in empty)
    others = sum(column.width + 1 for column in columns if column is not CALL)
    call = CALL._replace(width=min(max(width - others, 12), CALL_WIDTH_MAX))
    return tuple(call if column is CALL else column for column in columns)


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """What stands in the columns, each cut or padded to its width."""
    return [_fitted(_cell(row, column.head), column) for column in columns]


def heading(columns: Sequence[Column], *, is_pool: bool = False) -> list[str]:
    """The heads of the columns, as wide as these."""
    names = _HEADS_OF_POOL if is_pool else {}
    return [_fitted(names.get(column.head, column.head), column) for column in columns]


def head(picture: RunPicture, width: int = WIDTH) -> list[str]:
    """The lines above the ranks of a run."""
    status = picture.status
    name = printable((status and status.run_id) or picture.run.run_id)
    if status is None:
        return _wrapped([name, f"pid {picture.run.pid}", picture.end or picture.problem], width)
    state = "silent" if picture.problem else status.state
    facts = [name, f"pid {picture.run.pid}", picture.end or state]
    if status.pool is not None:
        pool = status.pool
        facts += [
            f"pool of {counted(status.nproc, 'worker')}",
            f"{pool.queued} queued",
            f"{pool.done} done",
            f"{pool.failed} failed" if pool.failed else "",
            f"age {_time(status.age_s)}",
            printable(status.program),
        ]
        return _wrapped(facts, width)
    if status.round is not None:
        facts += [f"node {status.node_rank} of {status.nodes}", f"round {status.round}"]
    facts += [
        f"{status.nproc} of {status.world_size} ranks"
        if status.nodes > 1
        else counted(status.nproc),
        _restarts(status.restarts, status.restarts_max),
        f"age {_time(status.age_s)}",
        printable(status.program),
    ]
    lines = _wrapped(facts, width)
    if status.failures:
        counts = ", ".join(f"{count} {cause}" for cause, count in sorted(status.failures.items()))
        lines += _wrapped([f"failed so far: {counts}", printable(status.latest_failure)], width)
    if told := _who_waits(picture.rows):
        lines += _wrapped([told], width)
    for told in dict.fromkeys(status.xids[-XIDS_SHOWN:]):
        lines += _wrapped([told], width)
    if told := _whose_gpus_are_flawed(picture.rows):
        lines += _wrapped([told], width)
    if told := _whose_gpus_are_slow(picture.rows):
        lines += _wrapped([told], width)
    if picture.lacks_gpus:
        lines += _wrapped([picture.lacks_gpus], width)
    return lines


def table(rows: Sequence[Row], *, is_pool: bool = False) -> list[str]:
    """Rows as lines, below the heads of the columns; a line more for the reason of a failure."""
    columns = columns_for(rows)
    lines = [" ".join(heading(columns, is_pool=is_pool)).rstrip()]
    for row in rows:
        lines.append(" ".join(cells(row, columns)).rstrip())
        if row.why and row.state in (State.FAILED, State.HUNG):
            lines.append(_cut(f"  {printable(row.why)}", WIDTH))
    return lines


def page(pictures: Sequence[RunPicture]) -> str:
    """All runs, as text."""
    if not pictures:
        return "no runs"
    return "\n\n".join("\n".join([*head(picture), *_table_of(picture)]) for picture in pictures)


def _table_of(picture: RunPicture) -> list[str]:
    is_pool = picture.run.is_pool
    return table(arranged(picture.rows), is_pool=is_pool) if picture.rows else []


def _cell(row: Row, name: str) -> str:
    if name == RANKS.head:
        return _ranks_cell(row)
    if name == STATE.head:
        return str(row.state) if row.for_s is None else f"{row.state} {_time(row.for_s)}"
    if name == STEPS.head:
        return "-" if row.step_rate is None else f"{row.step_rate:.3g}"
    if name == CALL.head:
        return printable(row.call) or "-"
    if name == LATE.head:
        # Less than a hundredth is what any rank costs the others.
        return "-" if (row.late_share or 0.0) < _SHARE_SHOWN else f"{row.late_share:.0%}"
    if name == CPU.head:
        return "-" if row.cpu_percent is None else f"{row.cpu_percent:.0f}%"
    if name == BUSY.head:
        return "-" if row.gpu_busy is None else f"{row.gpu_busy:.0%}"
    if name == HEAT.head:
        return "-" if row.gpu_celsius is None else f"{row.gpu_celsius}C"
    size = row.memory_bytes if name == MEMORY.head else row.gpu_bytes
    return "-" if size is None else _size(size)


def _ranks_cell(row: Row) -> str:
    if len(row.ranks) == 1:
        return f"{'  ' * row.depth}{row.ranks[0]}"
    text = f"{'+' if row.is_folded else '-'} {ranges_of(row.ranks)}"
    return text if len(text) <= RANKS.width else f"{text[0]} {len(row.ranks)} ranks"


def _who_waits(rows: Iterable[Row]) -> str:
    rows = list(rows)
    awaited = [row.ranks[0] for row in rows if row.state is State.AWAITED]
    waiting = [row.ranks[0] for row in rows if row.state is State.WAITING]
    if not awaited or not waiting:
        return ""
    longest = max(row.for_s or 0.0 for row in rows if row.state is State.AWAITED)
    verb = "waits" if len(waiting) == 1 else "wait"
    told = f"{ranks_in_words(waiting)} {verb} for {ranks_in_words(awaited)}"
    return f"{told}, for {_time(longest)} (see rankwise why)"


def _whose_gpus_are_flawed(rows: Iterable[Row]) -> str:
    errors = {row.ranks[0]: row.gpu_errors for row in rows if row.gpu_errors}
    if not errors:
        return ""
    has = "has" if len(errors) == 1 else "have"
    gpus = "the GPU" if len(errors) == 1 else "the GPUs"
    told = counted(sum(errors.values()), "uncorrectable memory error")
    return f"{gpus} of {ranks_in_words([*errors])} {has} had {told} since the driver was loaded"


def _whose_gpus_are_slow(rows: Iterable[Row]) -> str:
    """A power cap is usual at full load, so it is not told."""
    slow = {row.ranks[0]: [why for why in row.gpu_slow if why != "power cap"] for row in rows}
    ranks = [rank for rank, reasons in slow.items() if reasons]
    if not ranks:
        return ""
    reasons = dict.fromkeys(why for rank in ranks for why in slow[rank])
    are = "is" if len(ranks) == 1 else "are"
    gpus = "the GPU" if len(ranks) == 1 else "the GPUs"
    return f"{gpus} of {ranks_in_words(ranks)} {are} throttled ({', '.join(reasons)})"


def _restarts(count: int, most: int) -> str:
    return f"restarts {count} of {most}" if most else f"restarts {count}"


def _time(seconds: float) -> str:
    """A duration in as few letters as can be told: whole seconds are enough here."""
    if seconds < NOTABLE_S:
        return format_duration(duration_from_seconds(round(seconds, 2)))
    minutes, whole = divmod(int(seconds), 60)
    if not minutes:
        return f"{whole} s"
    if minutes < 60:
        return f"{minutes}m{whole:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m"


def _size(size: int) -> str:
    """At most 8 letters: `1023 MiB`, `1.25 GiB`."""
    if size >= 1 << 30:
        return f"{size / (1 << 30):.3g} GiB"
    return f"{size >> 20} MiB" if size >= 1 << 20 else format_bytes(size)[: MEMORY.width]


def _fitted(text: str, column: Column) -> str:
    text = _cut(text, column.width)
    return text.rjust(column.width) if column.is_number else text.ljust(column.width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _wrapped(facts: Iterable[str], width: int) -> list[str]:
    """Facts side by side, as many as fit into a line; one that is too long is broken at spaces."""
    lines = [""]
    for fact in filter(None, facts):
        joined = f"{lines[-1]}  {fact}" if lines[-1] else fact
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines += wrap(fact, width, initial_indent="  ", subsequent_indent="  ")
    return [line for line in lines if line]
