"""What the file of a machine says: the typed tree behind `RealMachine`.

Each figure carries its uncertainty and the key of its source, so that a table can show both. A
machine is a device, the host that feeds it, and levels of fabric from the inside out: devices of a
level reach each other at its rate. The last level has no size: there are as many of its units as a
run asks for.
"""

from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from rankwise.sim.hardware.specification import GraphOfLevel

Fraction01 = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_048_576)]
FITTED_MAX = 5
"""How many figures of a device may be fitted; see ADR 0071."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the file: frozen; unknown fields are refused."""


class Figure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A figure of a machine: `[value, uncertainty, source]` in the file.

    Attributes:
        value: in the unit that the name of its field ends with.
        within: its uncertainty, as a share of the value.
        source: a key of `sources`.
    """

    value: Positive
    within: Fraction01
    source: str


class FittedSpec(_Section, frozen=True, kw_only=True):
    """The figures that no data sheet has: at most five per device, none per source or model."""

    matrix: Figure
    """Share of the peak that a full wave of matrix tiles reaches."""
    attention: Figure
    """The same of flash attention forward, of the products that it does."""
    attention_backward: Figure
    memory: Figure
    """Share of the memory's bandwidth that elementwise operations reach."""
    kernel_us: Figure
    """What a kernel takes that does nothing."""


class DeviceSpec(_Section, frozen=True, kw_only=True):
    """One device."""

    capability: tuple[int, int] = (9, 0)
    """CUDA's name of the generation, which decides what torch chooses (`dispatch.yaml`)."""
    cuda_name: str | None = None
    """What `torch.cuda.get_device_name` tells; programs look a peak up by it."""
    sms: Count
    """Units that carry out tiles side by side."""
    tile: tuple[Count, Count] = (128, 256)
    """Rows and columns of the largest tile of a matrix product."""
    peak_tflops: dict[str, Figure]
    """Dense, by type, of the matrix engine; `f32` is what torch's default gives, without TF32."""
    vector_tflops: Figure
    """Of elementwise operations in f32."""
    functions: Figure | None = msgspec.field(default=None, name="functions_G_per_s")
    """How many values of a function such as `gelu` or `exp`; none: as fast as other operations."""
    memory_gib: Figure = msgspec.field(name="memory_GiB")
    """What torch finds free on an idle device."""
    bandwidth: Figure = msgspec.field(name="bandwidth_GBps")
    operands: dict[str, Figure] | None = msgspec.field(default=None, name="operands_GBps")
    """The rate at which a matrix product reads its factors before it computes, as CPUs do, by type;
    none: it does so meanwhile."""
    fitted: FittedSpec

    def __post_init__(self) -> None:
        if "f32" not in self.peak_tflops:
            raise ValueError("peak_tflops lacks f32, which stands for types that have no figure")


class LaunchSpec(_Section, frozen=True, kw_only=True):
    """How long the host needs to hand an operation over, by its class, in microseconds."""

    view: Figure
    """A view, or another operation that no kernel belongs to."""
    plain: Figure
    attention: Figure
    foreach: Figure
    fsdp: Figure
    """Beside each collective of FSDP: its hooks, copies and events."""
    dtensor: Figure
    """What an operation on a DTensor takes more than one on a plain tensor."""
    dtensor_update: Figure | None = None
    """The same in an optimizer, where no hooks of layers run; none: as elsewhere."""
    collective: Figure


class HostSpecOfMachine(_Section, frozen=True, kw_only=True):
    """The computer that feeds a device."""

    launch_us: LaunchSpec
    queue: Count = 1_024
    """How many launches may be pending before the host has to wait."""
    shared: Figure | None = None
    """How much of a collective's time computing loses that goes on meanwhile, as a share; none: a
    device has engines of their own for both."""
    late_us: Figure | None = None
    """How late the last rank comes to a collective after a millisecond of computing, in the mean;
    after T ms it is sqrt(T) times as much. None: ranks that do the same take the same time."""
    new_pages: Figure | None = msgspec.field(default=None, name="new_pages_GBps")
    """The rate at which a process gets memory that it has not had yet; none: a device's allocator
    keeps its memory."""


class LevelSpec(_Section, frozen=True, kw_only=True):
    """One level of the fabric."""

    name: str
    graph: GraphOfLevel | None = None
    """As in topology files. A switch at the first level and rails at others, if not given."""
    devices: Count | None = None
    """How many devices one unit of the level has; the last level has as many as a run asks for."""
    bandwidth: Figure = msgspec.field(name="bandwidth_GBps")
    """Per device and direction, as the sheet says."""
    reached: Figure
    """Share of it that rings reach."""
    latency_us: Figure
    """What one step between two devices takes, in the protocol for small messages."""
    start_us: Figure
    """What any collective takes that crosses this level, whatever its size."""
    multicast: Figure | None = None
    """Share of the bandwidth (as bus bandwidth) that all-reduce inside the switch reaches; none:
    the switch cannot reduce."""
    oversubscription: Positive = 1.0
    """How many times the links of the level below share one of this level."""


class ValidatedSpec(_Section, frozen=True, kw_only=True):
    """What predictions were checked against, and how far off they were."""

    low: Positive
    """Measured time divided by predicted time, of the runs checked, each with its source left out
    of the fit: the 10th percentile."""
    high: Positive
    """The 90th percentile."""
    runs: Count
    own: Annotated[int, msgspec.Meta(ge=0)]
    """How many of these runs were on this very machine; the others were on its relatives."""
    devices: Count
    """The most devices that a run checked had."""
    dtypes: tuple[str, ...]
    against: str
    """What the runs checked are, in a few words."""


class RealMachine(_Section, frozen=True, kw_only=True):
    """A whole file: a machine that exists."""

    name: str
    title: str
    status: Literal["validated", "sheet only", "calibrated"]
    software: str
    """The generation of software for which the fitted figures hold."""
    sources: dict[str, str]
    device: DeviceSpec
    host: HostSpecOfMachine
    levels: tuple[LevelSpec, ...]
    cost_model: str | None = None
    """The plug-in that prices operations which have no formula, or that it knows better."""
    validated: ValidatedSpec | None = None
    collectives: Literal["nccl", "gloo"] = "nccl"
    """The library whose algorithms the fabric carries out."""
    residuals: dict[str, float] = msgspec.field(default_factory=dict)
    """How far the measurements of a calibration lie from what the figures give, by kind."""

    def __post_init__(self) -> None:
        if not self.levels or self.levels[-1].devices is not None:
            raise ValueError("levels: the last one has no devices: a run says how many there are")
        if any(level.devices is None for level in self.levels[:-1]):
            raise ValueError("levels: each but the last needs devices")
        sizes = [level.devices or 0 for level in self.levels[:-1]]
        if any(outer % inner for inner, outer in pairwise(sizes)):
            raise ValueError(f"levels: {sizes} devices do not fit into each other")
        if missing := sorted({each.source for _, each in figures_of(self)} - self.sources.keys()):
            raise ValueError(f"sources lacks {', '.join(missing)}")

    @property
    def node_size(self) -> int:
        """How many devices a node has."""
        return self.levels[0].devices or 1


def figures_of(part: object, path: str = "") -> list[tuple[str, Figure]]:
    """All figures of a machine, with the path of each."""
    if isinstance(part, Figure):
        return [(path, part)]
    if isinstance(part, msgspec.Struct):
        names = zip(part.__struct_fields__, part.__struct_encode_fields__, strict=True)
        found = [(told, getattr(part, name)) for name, told in names]
    elif isinstance(part, dict):
        found = list(part.items())
    elif isinstance(part, tuple):
        found = [(str(index), each) for index, each in enumerate(part)]
    else:
        return []
    dot = f"{path}." if path else ""
    return [each for name, value in found for each in figures_of(value, f"{dot}{name}")]
