"""`rankwise machines`: the real machines that a run can be predicted on.

Without a name it lists them; with one it shows each figure with its uncertainty and its source.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from rankwise.base.errors import ConfigError
from rankwise.base.wording import counted
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.launch.options import MACHINES

if TYPE_CHECKING:
    from rankwise.simranks.prediction.machines.description import Figure, RealMachine


def _names(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    names = [name for name in MACHINES if name.startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


@click.command("machines", context_settings=CONTEXT_SETTINGS)
@click.argument("name", required=False, metavar="[MACHINE]", shell_complete=_names)
@click.option(
    "--yaml", "as_yaml", is_flag=True,
    help="Print the file of MACHINE, to change it and run --on sim:FILE.",
)  # fmt: skip
def machines(name: str | None, *, as_yaml: bool) -> int:
    """List the real machines that `rankwise run --on sim:MACHINE` predicts on.

    With MACHINE, a name or a file that `rankwise calibrate` has written: show each figure with its
    uncertainty and its source.
    """
    from rankwise.simranks.prediction.machines.catalogue import named_machine  # noqa: PLC0415  # not for --help

    if as_yaml:
        from rankwise.simranks.prediction.machines.calibration import machine_text  # noqa: PLC0415  # rare

        if name is None:
            raise ConfigError("--yaml needs MACHINE: rankwise machines h100-sxm --yaml")
        click.echo(machine_text(named_machine(name)), nl=False)
        return 0
    if name is not None:
        _show(named_machine(name))
        return 0
    rows: list[tuple[str, ...]] = [
        ("machine", "bf16", "memory", "bandwidth", "in a node", "between nodes", "figures")
    ]
    rows += [_row(named_machine(each)) for each in MACHINES]
    _print_table(rows)
    click.echo("\nrankwise machines MACHINE shows the source and the uncertainty of each figure")
    return 0


def _row(real: "RealMachine") -> tuple[str, ...]:
    device, inner, outer = real.device, real.levels[0], real.levels[-1]
    checked = real.validated
    told = "sheet only, not validated"
    if real.status == "calibrated":
        told = "calibrated"
    elif checked is not None:
        told = f"checked against {counted(checked.own, 'run')}"
        if not checked.own:
            told = "not checked; efficiencies of similar devices"
    return (
        real.name,
        f"{device.peak_tflops.get('bf16', device.peak_tflops['f32']).value:,.5g} TFLOPS",
        f"{device.memory_gib.value:.5g} GiB",
        f"{device.bandwidth.value:,.5g} GB/s",
        f"{inner.devices or 1} x {inner.bandwidth.value:.4g} GB/s",
        f"{outer.bandwidth.value:.4g} GB/s",
        told,
    )


def _show(real: "RealMachine") -> None:
    from rankwise.simranks.prediction.machines.description import figures_of  # noqa: PLC0415  # see above

    click.echo(f"{real.name}: {real.title}")
    facts: list[tuple[str, str]] = [
        ("status", real.status if real.status != "sheet only" else "sheet only, not validated")
    ]
    facts.append(("efficiencies hold for", real.software))
    checked = real.validated
    if checked is not None:
        facts.append(("checked against", checked.against))
        told = f"measured times are {checked.low:.2f} to {checked.high:.2f} of predicted ones"
        facts.append(("interval", f"{told} (10th to 90th percentile of {checked.runs} runs)"))
    facts += [
        (f"residual of {kind}", f"{100 * each:.0f} %") for kind, each in real.residuals.items()
    ]
    _print_table(facts, indent="  ")
    click.echo()
    rows = [("figure", "value", "within", "source")]
    rows += [(_describe(path, real), *_cells(figure)) for path, figure in figures_of(real)]
    _print_table(rows)
    click.echo("\nsources")
    _print_table(list(real.sources.items()), indent="  ")


def _describe(path: str, real: "RealMachine") -> str:
    """The path of a figure; that of a level by its name."""
    parts = path.split(".")
    if parts[0] == "levels":
        parts = [real.levels[int(parts[1])].name, *parts[2:]]
    return ".".join(parts)


def _cells(figure: "Figure") -> tuple[str, str, str]:
    return f"{figure.value:,.5g}", f"{100 * figure.within:.3g} %", figure.source


def _print_table(rows: Sequence[Sequence[str]], indent: str = "") -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo((indent + "  ".join(cells)).rstrip())
