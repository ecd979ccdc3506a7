"""`rankwise ps`: which runs there are on this machine, and how they are.

Memory and CPU time, which agents do not know without looking, are looked up here: each rank leads a
session, and what is in it belongs to that rank.
"""

import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

import click

from rankwise.base.units import (
    SECOND,
    Duration,
    duration_from_seconds,
    format_bytes,
    format_duration,
)
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.runs_here import deadline_after, print_json

PATIENCE = Duration(2 * SECOND)
_COLUMNS = (
    "RUN", "PID", "NODE", "ROUND", "RANKS", "STATE", "RESTARTS", "CPU", "MEMORY", "AGE", "PROGRAM"
)  # fmt: skip
_ONLY_IF_KNOWN = ("NODE", "ROUND")
"""Columns that are left out where no run has anything in them."""


@click.command("ps", context_settings=CONTEXT_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
def ps(*, as_json: bool) -> None:
    """List your runs and pools (rankwise.Pool) on this machine; for root, the runs of all users.

    Each line is an agent. On several nodes it has the rank of the node, the round and its ranks,
    and the members of the round below. CPU is the average of the ranks and their children (200% is
    two cores), MEMORY their resident memory.
    """
    rows = _statuses()
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo("no runs")
        return
    header, *lines = _table([_COLUMNS, *(_shown(row) for row in rows)])
    click.echo(header)
    for row, line in zip(rows, lines, strict=True):
        click.echo(line)
        if "lineup" in row:
            click.echo(f"  round {row['round']}: {_printable(row['lineup'])}")
        if row.get("log_dir"):
            click.echo(f"  logs: {_printable(row['log_dir'])}")


def _statuses() -> list[dict[str, Any]]:
    """One dict per run: what its agent says, and always `run_id`, `pid` and `state`."""
    from rankwise.launch.control.client import (  # noqa: PLC0415  # not for --help
        NotGenuine,
        RunSuspended,
        RunUnreachable,
        ask_all,
        list_pools,
        list_runs,
    )

    deadline = deadline_after(PATIENCE)
    rows = []
    for reply in ask_all(list_runs() + list_pools(), "status", deadline):
        row: dict[str, Any] = {"run_id": reply.run.run_id, "pid": reply.run.pid}
        try:
            for line in reply.lines():
                row |= line
        except NotGenuine:
            continue
        except RunSuspended:
            row["state"] = "suspended"
        except RunUnreachable:
            row["state"] = "silent"
        row.setdefault("state", "unknown")
        rows.append(row)
    _add_usage(rows)
    return sorted(rows, key=lambda row: (row["run_id"], row.get("node_rank", row["pid"])))


def _add_usage(rows: Iterable[dict[str, Any]]) -> None:
    """Add to each run and each of its workers what its processes use, as far as that is seen."""
    rows = [row for row in rows if row.get("workers")]
    if not rows:
        return
    from rankwise.drivers.real.process_work import usage_by_session  # noqa: PLC0415  # not for --help

    sessions = usage_by_session()
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for row in rows:
        used = []
        for worker in row["workers"]:
            usage = sessions.get(worker["pid"])
            if usage is not None:
                worker |= {"cpu_s": round(usage.cpu_s, 2), "memory_bytes": usage.memory_bytes}
                used.append(usage)
        if used:
            age_s = max(now_s - min(usage.began_s for usage in used), 0.01)
            row["cpu_percent"] = round(100 * sum(usage.cpu_s for usage in used) / age_s, 1)
            row["memory_bytes"] = sum(usage.memory_bytes for usage in used)


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    age = row.get("age_s")
    is_round = "round" in row
    cpu, memory = row.get("cpu_percent"), row.get("memory_bytes")
    return (
        _printable(row["run_id"]),
        str(row["pid"]),
        f"{row['node_rank']} of {row['nodes']}" if is_round else "-",
        str(row["round"]) if is_round else "-",
        _ranks(row),
        str(row["state"]),
        _restarts(row),
        "-" if cpu is None else f"{cpu:.0f}%",
        "-" if memory is None else format_bytes(memory),
        "-" if age is None else format_duration(duration_from_seconds(age)),
        _printable(row.get("program", "-")),
    )


def _restarts(row: dict[str, Any]) -> str:
    """How many there were, and how many there may be."""
    if "restarts" not in row:
        return "-"
    most = row.get("restarts_max", 0)
    return f"{row['restarts']} of {most}" if most else str(row["restarts"])


def _ranks(row: dict[str, Any]) -> str:
    """The ranks on this node, and how many the job has; how many it may have, while it has none."""
    if "pool" in row:
        return f"{len(row['workers'])} of {row['nproc']} workers"
    if "first_rank" not in row:
        return f"0 of {row['nproc']}" if "nproc" in row else "-"
    first, last = row["first_rank"], row["first_rank"] + row["nproc"] - 1
    ranks = str(first) if first == last else f"{first}-{last}"
    return f"{ranks} of {row['world_size']}" if "round" in row else ranks


def _printable(text: Any) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in str(text))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns side by side; on a terminal the last one is cut where the line would break."""
    columns = [
        column
        for column in zip(*rows, strict=True)
        if column[0] not in _ONLY_IF_KNOWN or any(cell != "-" for cell in column[1:])
    ]
    widths = [max(map(len, column)) for column in columns]
    room = _terminal_width() - sum(widths[:-1]) - 2 * len(widths[:-1])
    *others, last = columns
    columns = [*others, tuple(_cut(cell, room) for cell in last)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20


def _cut(text: str, width: int) -> str:
    """The end of a text, which is what tells programs apart; some of it in any case."""
    width = max(width, 8)
    return text if len(text) <= width else "…" + text[1 - width :]
