"""What a shell may complete behind `rankwise sim`: benches, machines, files, values for `--set`.

Values come with their keys (`m=512`, `dtype=bf16`), because a key alone is no word of the command
line. A program of the user's is never executed for it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

from rankwise.base.errors import RankwiseError

_FILE = "file"


def benches(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The benches, with what each is about."""
    from rankwise.sim.benches.programs import summaries  # noqa: PLC0415  # not for --help

    return [
        CompletionItem(name, help=summary)
        for name, summary in summaries()
        if name.startswith(incomplete)
    ]


def machines(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Presets, what installed packages offer, and files."""
    from rankwise.sim.hardware.plugins import plugin_names  # noqa: PLC0415  # not for --help
    from rankwise.sim.hardware.topology import GROUP, PRESETS  # noqa: PLC0415  # the same

    names = [name for name in (*PRESETS, *plugin_names(GROUP)) if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type=_FILE)]


def files(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """All files."""
    return [CompletionItem(incomplete, type=_FILE)]


def fields(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Parameters of the bench, fields of its machine, and of the collectives, with their values."""
    words: list[str] = []
    # Before an option that lacks its value, click has not dealt out the arguments yet.
    for name in (ctx.params.get("name"), *ctx.args):
        words += _parameters(name)
    with suppress(RankwiseError):
        words += _machine_fields(ctx.params.get("topology") or "default")
    words += _collective_fields()
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _parameters(bench: str | None) -> Iterator[str]:
    from rankwise.sim.benches import NAMES  # noqa: PLC0415  # not for --help
    from rankwise.sim.benches.programs import shipped_program  # noqa: PLC0415  # the same

    if bench not in NAMES:
        return
    for parameter in shipped_program(bench).parameters.all:
        values = parameter.choices or ("" if parameter.default is None else parameter.default,)
        yield from (f"{parameter.name}={value}" for value in values)


def _machine_fields(topology: str) -> Iterator[str]:
    from rankwise.sim.hardware.topology import load_topology  # noqa: PLC0415  # not for --help

    yield from _leaves(load_topology(topology).spec, "")


def _leaves(tree: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        elif isinstance(value, str | int | float):
            yield f"{path}{name}={value:g}" if isinstance(value, float) else f"{path}{name}={value}"


def _collective_fields() -> Iterator[str]:
    from rankwise.sim.ccl.configuration import SHIPPED, QueueLayout  # noqa: PLC0415  # not for --help

    yield from (f"algorithm={name}" for name in SHIPPED)
    yield "world_size="
    for name in QueueLayout.__struct_fields__:
        value = getattr(QueueLayout(), name)
        yield f"{name}={'' if value is None else value}"
