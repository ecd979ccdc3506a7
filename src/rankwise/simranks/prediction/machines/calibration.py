"""From measurements to a machine: the figures that fit them best, and how far off each kind is.

The measurements are seconds of operations of known size. A figure is the one with the least mean
error of its kind, in the prices that predictions use (`DevicePrices`, `FabricPrices`): what they
cannot describe stays as the residual, which the file keeps.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rankwise.base.errors import ConfigError
from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.prediction.machines.description import (
    Figure,
    LevelSpec,
    RealMachine,
    figures_of,
)
from rankwise.simranks.prediction.machines.device import DevicePrices
from rankwise.simranks.prediction.machines.fabric import FabricPrices

MEASURED = "measured"
ASSUMED = "assumed"
_SOURCES = {
    MEASURED: "measured by rankwise calibrate on this machine",
    ASSUMED: "not measured: as inside of the node",
}
_STEPS = 61
"""How many values of a figure are tried, from a third to three times the first guess."""
_MOVING_BYTES = 1 << 19
"""Elementwise operations that move at least so many bytes tell the rate of the memory."""


class MeasuredProduct(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix product that was measured."""

    dtype: str
    rows: int
    inner: int
    columns: int
    seconds: float

    def work(self) -> DeviceOperation:
        """As an operation."""
        shapes = ((self.rows, self.inner), (self.inner, self.columns))
        flops = 2 * self.rows * self.inner * self.columns
        width = 4 if self.dtype == "f32" else 2
        size = width * (sum(rows * columns for rows, columns in shapes) + self.rows * self.columns)
        return DeviceOperation("aten.mm", "gemm", flops, size, self.dtype, shapes=shapes)


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one layer that was measured."""

    dtype: str
    batch: int
    heads: int
    length: int
    width: int
    is_backward: bool
    seconds: float

    def work(self) -> DeviceOperation:
        """As an operation."""
        shape = (self.batch, self.heads, self.length, self.width)
        products = 5 if self.is_backward else 2
        flops = 2 * products * self.batch * self.heads * self.length**2 * self.width
        size = (4 if self.dtype == "f32" else 2) * 4 * math.prod(shape)
        name = "aten.attention_backward" if self.is_backward else "aten.attention"
        return DeviceOperation(
            name, "gemm", flops, size, self.dtype, shapes=(shape,) * 3, is_causal=True
        )


class Elementwise(msgspec.Struct, frozen=True, kw_only=True):
    """An elementwise operation that was measured, with the bytes that it moves."""

    name: str
    size: int
    seconds: float

    def work(self) -> DeviceOperation:
        """As an operation."""
        return DeviceOperation(f"aten.{self.name}", "math", 1, self.size, "f32")


class MeasuredCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that was measured; `size` is what a rank puts in."""

    kind: str
    size: int
    nodes: int
    per_node: int
    seconds: float


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """All that a calibration measures.

    Attributes:
        is_queueing: whether launches queue, as on a GPU.
        empty: seconds of the smallest operation, on the device.
        launches: seconds of the host by class of launch.
        shared: how much of a collective's time computing loses that goes on meanwhile; None: a
            device has engines of their own for both.
        new_pages: bytes per second of memory that a process has not had yet; None: a device's
            allocator keeps its memory.
        functions: values per second of a function such as `gelu`; None: as other operations.
        late: seconds by which the last rank comes late to a collective after a second of computing;
            None: not measured.
    """

    device: str
    software: str
    sms: int
    memory_bytes: int
    is_queueing: bool
    ranks: int
    empty: float
    launches: dict[str, float]
    products: list[MeasuredProduct]
    attention: list[Attention]
    elementwise: list[Elementwise]
    collectives: list[MeasuredCollective]
    shared: float | None = None
    new_pages: float | None = None
    functions: float | None = None
    late: float | None = None


def progress_of(path: Path) -> Path:
    """The file beside the measurements that says how many figures are there: `done total`."""
    return path.with_suffix(".progress")


def machine_of(measured: Measurements, name: str) -> RealMachine:
    """The machine that fits the measurements best."""
    kernel = max(measured.empty, 1e-9)
    peaks: dict[str, float] = {}
    for each in measured.products:
        rate = each.work().flops / each.seconds
        peaks[each.dtype] = max(rate, peaks.get(each.dtype, 0.0))
    # Of what takes little more than an empty kernel, the launch is most of the time.
    moving = [each for each in measured.elementwise if each.seconds > 4 * kernel]
    bandwidth = max(each.size / each.seconds for each in moving or measured.elementwise)
    tree = _tree(measured, name, peaks, bandwidth, kernel)
    fitted = tree["device"]["fitted"]

    def prices() -> DevicePrices:
        return DevicePrices(msgspec.convert(tree, RealMachine).device)

    residuals = {}
    # Small ones take their launch and their start.
    large = [each for each in measured.elementwise if each.size >= _MOVING_BYTES]
    for field, works in (
        ("memory", large or measured.elementwise),
        ("matrix", measured.products),
        ("attention", [each for each in measured.attention if not each.is_backward]),
        ("attention_backward", [each for each in measured.attention if each.is_backward]),
    ):
        if not works:
            continue
        error = _error_of_works(prices, works)
        if field == "matrix" and "operands_GBps" in tree["device"]:
            fitted[field] = [1.0, 0.0, MEASURED]
            _fit_types(tree["device"], measured.products, prices)
            residuals[field] = error()
        else:
            residuals[field] = _fit(fitted, field, error)
    if measured.collectives:
        residuals["collectives"] = _fit_level(tree, measured.collectives)
        # The fabric between nodes was not measured: it is assumed to be as fast as inside of one.
        inside, between = tree["levels"]
        for field in ("bandwidth_GBps", "reached", "latency_us", "start_us"):
            between[field] = [inside[field][0], 1.0, ASSUMED]
    tree["residuals"] = {kind: round(each, 3) for kind, each in residuals.items()}
    return msgspec.convert(tree, RealMachine)


def _error_of_works(
    prices: Callable[[], DevicePrices], works: Sequence[MeasuredProduct | Attention | Elementwise]
) -> Callable[[], float]:
    """The mean error of the prices of some measurements, as they are now."""

    def error() -> float:
        present = prices()
        return _mean_error((present.time(each.work()) / 1e12, each.seconds) for each in works)

    return error


def _fit_types(
    device: dict[str, Any],
    products: Sequence[MeasuredProduct],
    prices: Callable[[], DevicePrices],
) -> None:
    """Fit how fast a processor computes products of each type, and reads their factors.

    Types have libraries of their own, which bring factors into their order in ways of their own.
    """
    for dtype in device["operands_GBps"]:
        error = _error_of_works(prices, [each for each in products if each.dtype == dtype])
        for _ in range(3):  # each changes what is best for the other
            _fit(device["operands_GBps"], dtype, error)
            _fit(device["peak_tflops"], dtype, error)


def _mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    errors = [abs(math.log(max(ours, 1e-12) / measured)) for ours, measured in pairs]
    return statistics.fmean(errors)


def _fit(section: dict[str, Any], field: str, error: Callable[[], float]) -> float:
    """Set a figure to the value with the least error, and return that error."""
    guess = section[field][0]
    # Between a third and three times the guess, as errors are factors.
    tried = [guess * 3 ** (2 * step / (_STEPS - 1) - 1) for step in range(_STEPS)]

    def error_at(value: float) -> float:
        section[field] = [value, section[field][1], section[field][2]]
        return error()

    errors = {value: error_at(value) for value in tried}
    # Where the figure does not matter, the guess is as good as any.
    best = min(tried, key=lambda value: (errors[value], abs(math.log(value / guess))))
    section[field] = [best, min(1.0, round(errors[best], 3)), MEASURED]
    return errors[best]


def _fit_level(tree: dict[str, Any], measured: Sequence[MeasuredCollective]) -> float:
    """Fit the level that collectives cross: what they take at least, and the rate they reach."""
    index = 0 if all(each.nodes == 1 for each in measured) else -1
    level = tree["levels"][index]
    small = min(measured, key=lambda each: (each.size, each.seconds))
    level["start_us"] = [max(small.seconds * 1e6, 1e-3), 0.2, MEASURED]
    level["latency_us"] = [level["start_us"][0] / 50, 0.5, MEASURED]

    def error() -> float:
        fabric = FabricPrices(msgspec.convert(tree, RealMachine), measured[0].per_node)
        pairs = (
            (
                min(fabric.choices(each.kind, each.size, each.nodes, each.per_node).values()),
                each.seconds,
            )
            for each in measured
        )
        return _mean_error(pairs)

    residual = error()
    for _ in range(3):  # each changes what is best for the others
        for field in ("reached", "start_us", *(["multicast"] if "multicast" in level else [])):
            residual = _fit(level, field, error)
    return residual


def _tree(
    measured: Measurements,
    name: str,
    peaks: dict[str, float],
    bandwidth: float,
    kernel: float,
) -> dict[str, Any]:
    """The machine with first guesses, as its file has it."""

    def figure(value: float, within: float = 0.1, source: str = MEASURED) -> list[Any]:
        return [max(value, 1e-9), within, source]

    fastest = max((_bus_rate(each) for each in measured.collectives), default=1e9)
    levels = [
        {
            "name": name_of_level, "bandwidth_GBps": figure(fastest / 1e9, source=source),
            "reached": figure(0.8, source=source), "latency_us": figure(1.0, source=source),
            "start_us": figure(10.0, source=source),
        }
        for name_of_level, source in (("node", MEASURED), ("between nodes", ASSUMED))
    ]  # fmt: skip
    levels[0]["devices"] = measured.ranks  # type: ignore[assignment]  # a tree of a file
    launches = {kind: figure(seconds * 1e6, 0.3) for kind, seconds in measured.launches.items()}
    types = sorted(peaks)
    # A machine needs one for f32, which stands for types that were not measured.
    peaks.setdefault("f32", max(peaks.values()))
    return {
        "name": name,
        "title": f"{measured.device}, {measured.ranks} per node",
        "status": "calibrated",
        "software": measured.software,
        "sources": dict(_SOURCES),
        "device": ({"cuda_name": measured.device} if measured.is_queueing else {})
        | {
            "sms": measured.sms,
            "tile": [128, 256] if measured.is_queueing else [16, 16],
            "peak_tflops": {dtype: figure(peak / 1e12) for dtype, peak in sorted(peaks.items())},
            "vector_tflops": figure(max(peaks.values()) / 1e12),
            "memory_GiB": figure(measured.memory_bytes / 2**30, 0.01),
            "bandwidth_GBps": figure(bandwidth / 1e9),
        }
        | (
            {}
            if measured.is_queueing
            else {"operands_GBps": {dtype: figure(bandwidth / 4e9) for dtype in types}}
        )
        | (
            {}
            if measured.functions is None
            else {"functions_G_per_s": figure(measured.functions / 1e9, 0.3)}
        )
        | {
            "fitted": {
                "matrix": figure(0.8), "attention": figure(0.4), "attention_backward": figure(0.3),
                "memory": figure(0.8), "kernel_us": figure(kernel * 1e6, 0.3),
            },
        },
        # A device that is its host's own processor takes no operation before the last is done.
        "host": {"launch_us": launches, "queue": 1_024 if measured.is_queueing else 1}
        | ({} if measured.shared is None else {"shared": figure(measured.shared, 0.2)})
        # Of a millisecond: the root of a thousandth of a second.
        | ({} if not measured.late else {"late_us": figure(measured.late * 1e6 * 1e-3**0.5, 0.3)})
        | (
            {}
            if measured.new_pages is None
            else {"new_pages_GBps": figure(measured.new_pages / 1e9, 0.3)}
        ),
        "levels": levels,
        "collectives": "nccl" if measured.is_queueing else "gloo",
    }  # fmt: skip


def _bus_rate(each: MeasuredCollective) -> float:
    """Bytes per second of a rank's link, as nccl-tests count them."""
    count = each.nodes * each.per_node
    whole = each.size * count if each.kind == "all_gather" else each.size
    factor = 2 if each.kind == "all_reduce" else 1
    return factor * whole * (count - 1) / count / each.seconds


def machine_text(real: RealMachine) -> str:
    """A machine as the text of its file."""
    tree = {name: each for name, each in msgspec.to_builtins(real).items() if each is not None}
    return yaml.dump(_rounded(tree), Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """YAML in which each figure stands on one line."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
        """Write what is there twice twice."""
        return True


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    is_flat = not any(isinstance(each, dict | list) for each in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_flat)


_Dumper.add_representer(list, _represent_list)


def _rounded(part: Any) -> Any:
    """The same with four digits, without what is None."""
    if isinstance(part, float):
        return float(f"{part:.4g}")
    if isinstance(part, dict):
        return {name: _rounded(each) for name, each in part.items() if each is not None}
    if isinstance(part, list | tuple):
        return [_rounded(each) for each in part]
    return part


def with_collectives(
    real: RealMachine, points: Sequence[MeasuredCollective], source: str
) -> RealMachine:
    """A machine whose fabric has been fitted to measured collectives.

    Raises:
        ConfigError: the machine's nodes have fewer devices.
    """
    if points[0].per_node > real.node_size:
        raise ConfigError(
            f"{source} has {points[0].per_node} ranks per node, and a node of {real.name} has"
            f" {real.node_size} devices"
        )
    tree = msgspec.to_builtins(real)
    tree["levels"] = [
        {name: each for name, each in level.items() if each is not None} for level in tree["levels"]
    ]
    tree["sources"][MEASURED] = f"fitted on {source}"
    residual = _fit_level(tree, points)
    tree["residuals"] = {**tree["residuals"], "collectives": round(residual, 3)}
    tree["status"], tree["validated"] = "calibrated", None
    used = {figure.source for _, figure in figures_of(msgspec.convert(tree, RealMachine))}
    tree["sources"] = {key: told for key, told in tree["sources"].items() if key in used}
    return msgspec.convert(tree, RealMachine)


__all__ = [
    "Attention",
    "Elementwise",
    "Figure",
    "LevelSpec",
    "MeasuredCollective",
    "MeasuredProduct",
    "Measurements",
    "machine_of",
    "machine_text",
    "with_collectives",
]  # fmt: skip
