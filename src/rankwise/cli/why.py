"""`rankwise why`: what a hang report would say now, without a hang and without disturbing the run.

The agent watches its ranks for half a second. A verdict counts only if it is the same at both
ends: every healthy rank is a little late now and then.
"""

from typing import TYPE_CHECKING, Any

import click

from rankwise.base.units import Duration, duration_from_seconds, format_duration
from rankwise.base.wording import BY_SIGNAL, ranks_in_words
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.runs_here import (
    ANSWER_TIMEOUT_OPTION,
    RUN_ARGUMENT,
    agents_called,
    answers,
    deadline_after,
    print_json,
    ranks_and_pids,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_DOES = {"advances": "making progress", "computes": "computing", "transfers": "reading or writing"}
"""What is progress."""
_STOPPED = f"it is {BY_SIGNAL}; `kill -CONT` resumes it"


@click.command("why", context_settings=CONTEXT_SETTINGS)
@RUN_ARGUMENT
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the verdict, then each rank.")
@ANSWER_TIMEOUT_OPTION
def why(run: str | None, *, as_json: bool, timeout: Duration) -> None:
    """Explain why RUN makes no progress: the missing rank, and the stack of each rank.

    The run continues. On several nodes, the first line is about all ranks, and names nodes
    without an answer; the stacks are those of this machine.

    RUN is a name that `rankwise ps` shows, the beginning of one, or the pid of an agent.
    Leave it out if there is one run.
    """
    from rankwise.launch.control.client import ask_all  # noqa: PLC0415  # not for --help

    replies = answers(ask_all(agents_called(run), "why", deadline_after(timeout)))
    header, ranks = together([lines for _, lines in replies])
    if as_json:
        print_json((header, *ranks))
    else:
        click.echo(render(header, ranks))


def together(
    told: "Sequence[Sequence[dict[str, Any]]]",
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was found, and the ranks of all agents here, which were asked at the same time."""
    headers = [header for header, *_ in told]
    header = max(headers, key=lambda each: bool(each["verdict"]))
    if "others" in header:  # are those that no agent here is
        elsewhere = [set(each.get("others", ())) for each in headers]
        others = [node for node in header["others"] if all(node in each for each in elsewhere)]
        header = header | {"others": others}
    if lacks := next((each["ledger"] for each in headers if "ledger" in each), ""):
        header = header | {"ledger": lacks}
    ranks = [line for _, *lines in told for line in lines]
    return header, sorted(ranks, key=lambda line: line["rank"])


def render(header: dict[str, Any], ranks: "Sequence[dict[str, Any]]") -> str:
    """The verdict, then where each rank stands: alike ones together, the fewest last."""
    alike: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for line in ranks:
        key = (line["doing"], line["waits_for"], line["is_stopped"], *line["frames"])
        alike.setdefault(key, []).append(line)
    groups = sorted(alike.values(), key=lambda group: (-len(group), group[0]["rank"]))
    told = [_verdict(header, ranks), *_about_nodes(header)]
    if lacks := header.get("ledger"):
        told.append(lacks)
    return "\n".join([*told, *(_render_group(group) for group in groups)])


def _about_nodes(header: dict[str, Any]) -> list[str]:
    """Of a run on several nodes: what of the others is known, and where the rest is told."""
    lines = []
    if silent := header.get("silent"):
        lines.append(f"not known are the calls of ranks on {', '.join(silent)}: no answer in time")
    if others := header.get("others"):
        lines.append(f"below are the ranks of this machine; the others are on {', '.join(others)}")
    return lines


def _verdict(header: dict[str, Any], ranks: "Sequence[dict[str, Any]]") -> str:
    if header["verdict"]:
        return str(header["verdict"])
    getting_on = [line["rank"] for line in ranks if line["doing"] in _DOES]
    if len(getting_on) == len(ranks):
        here = " of this machine" if header.get("others") else ""
        return f"every rank{here} makes progress"
    if getting_on:
        verb = "makes" if len(getting_on) == 1 else "make"
        return (
            f"{ranks_in_words(getting_on)} {verb} progress, and no call shows which rank is missing"
        )
    here = " of this machine" if header.get("others") else ""
    return f"no rank{here} makes progress, and no call shows which rank is missing"


def _render_group(group: "Sequence[dict[str, Any]]") -> str:
    first = group[0]
    waiting = [f"  waits for {first['waits_for']}"] if first["waits_for"] else []
    nothing = _STOPPED if first["is_stopped"] else "no stack is available"
    frames = first["frames"] or [f"  {nothing}"]
    lines = "\n".join(f"  {line}" for line in (*waiting, *frames))
    return f"{ranks_and_pids(group)}, {_what_they_do(group)}, innermost call first:\n{lines}"


def _what_they_do(group: "Sequence[dict[str, Any]]") -> str:
    doing = group[0]["doing"]
    if doing in _DOES:
        return _DOES[doing]
    longest = max((line["still_s"] for line in group if "still_s" in line), default=0)
    period = format_duration(duration_from_seconds(longest))
    if doing == "waits":
        return f"in a collective call for {period}"
    if (awaited_s := group[0].get("awaited_s")) is not None:
        period = format_duration(duration_from_seconds(awaited_s))
        return f"awaited for {period}"
    # Without a hang timeout, the first question begins the measurement.
    return f"no progress in the last {period}"
