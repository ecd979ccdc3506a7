"""`rankwise ps`: which runs there are on this machine, and how they are."""

import time
from typing import Any

import click

from rankwise.base.units import SECOND, Instant, duration_from_seconds, format_duration
from rankwise.cli.main import CONTEXT_SETTINGS

PATIENCE = 2 * SECOND
_COLUMNS = ("RUN", "PID", "NODE", "ROUND", "NPROC", "RANKS", "STATE", "AGE", "PROGRAM")


@click.command("ps", context_settings=CONTEXT_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
def ps(*, as_json: bool) -> None:
    """List your runs on this machine (root sees everybody's).

    A line is an agent: of a run on several nodes, with the node's rank, the round, and the ranks
    that it has in it; below it who is in the round, who came and who left. While nodes meet, it has
    none.
    """
    rows = _statuses()
    if as_json:
        import msgspec  # noqa: PLC0415  # only here

        for row in rows:
            click.echo(msgspec.json.encode(row).decode())
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


def _statuses() -> list[dict[str, Any]]:
    """One dict per run: what its agent says, and always `run_id`, `pid` and `state`."""
    from rankwise.launch.control import RunUnreachable, ask_all, list_runs  # noqa: PLC0415  # not for --help

    deadline = Instant(time.monotonic_ns() + PATIENCE)
    rows = []
    for heard in ask_all(list_runs(), "status", deadline):
        row: dict[str, Any] = {"run_id": heard.run.run_id, "pid": heard.run.pid}
        try:
            for line in heard.lines():
                row |= line
        except RunUnreachable:
            row["state"] = "silent"
        row.setdefault("state", "unknown")
        rows.append(row)
    return sorted(rows, key=lambda row: (row["run_id"], row.get("node_rank", row["pid"])))


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    age = row.get("age_s")
    is_round = "round" in row
    return (
        _printable(row["run_id"]),
        str(row["pid"]),
        f"{row['node_rank']} of {row['nodes']}" if is_round else "-",
        str(row["round"]) if is_round else "-",
        str(row.get("nproc", "-")),
        _ranks(row),
        str(row["state"]),
        "-" if age is None else format_duration(duration_from_seconds(age)),
        _printable(row.get("program", "-")),
    )


def _ranks(row: dict[str, Any]) -> str:
    """The ranks on this node, and how many the job has; `-` while it has none."""
    if "first_rank" not in row:
        return "-"
    first, last = row["first_rank"], row["first_rank"] + row["nproc"] - 1
    ranks = str(first) if first == last else f"{first}-{last}"
    return f"{ranks} of {row['world_size']}" if "round" in row else ranks


def _printable(text: Any) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in str(text))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
