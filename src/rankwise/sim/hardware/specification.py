"""What a topology file may say: the typed tree behind `Topology`.

Field names are those of the file, units included. Counts that must fit each other are checked
where they meet. The tree is frozen: a machine is built from it and never changes it.
"""

from math import prod
from typing import Annotated, Literal

import msgspec

from rankwise.sim.hardware.quantities import KIB, MIB, Rate, picoseconds

Count = Annotated[int, msgspec.Meta(ge=1, le=1_048_576)]
Amount = Annotated[float, msgspec.Meta(ge=1e-6, le=1e12)]
Delay = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Dtype = Literal["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "f8e4", "f8e5"]
Graph = Literal["ring_1d", "mesh_2d", "torus_2d", "fully_connected", "switch", "custom"]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the file: frozen; unknown fields are refused."""


class LinkSpec(_Part, frozen=True, kw_only=True):
    """A connection; its bandwidth holds for each direction by itself."""

    bandwidth: Amount = msgspec.field(name="bandwidth_GBps")
    latency_ns: Delay

    @property
    def rate(self) -> Rate:
        """Bytes per picosecond."""
        return Rate.of_gigabytes_per_second(self.bandwidth)

    @property
    def latency(self) -> int:
        """Picoseconds."""
        return picoseconds(self.latency_ns)


class SipsSpec(_Part, frozen=True, kw_only=True):
    """The accelerator devices of the system, and what connects them."""

    count: Count
    graph: Graph = "ring_1d"
    shape: tuple[Count, Count] | None = None
    """Rows and columns of a mesh or torus; their product is the count."""
    edges: tuple[tuple[int, int], ...] = ()
    """Pairs of SIPs that a link connects, for `graph: custom`."""
    link: LinkSpec

    def __post_init__(self) -> None:
        if self.graph in {"mesh_2d", "torus_2d"}:
            if self.shape is None:
                raise ValueError(f"graph {self.graph} needs a shape: [rows, columns]")
            if prod(self.shape) != self.count:
                raise ValueError(f"shape {list(self.shape)} does not hold {self.count} SIPs")
        elif self.shape is not None:
            raise ValueError(f"shape is for mesh_2d and torus_2d; the graph is {self.graph}")
        if self.edges and self.graph != "custom":
            raise ValueError(f"edges are for graph custom; the graph is {self.graph}")
        for edge in self.edges:
            if edge[0] == edge[1] or not all(0 <= end < self.count for end in edge):
                raise ValueError(
                    f"edge {list(edge)} does not connect two of SIPs 0 to {self.count - 1}"
                )
        if self.graph == "custom":
            self._check_routable()

    def _check_routable(self) -> None:
        reached = [0]
        for sip in reached:
            for edge in self.edges:
                if sip in edge:
                    other = edge[0] if edge[1] == sip else edge[1]
                    if other not in reached:
                        reached.append(other)
        lost = [sip for sip in range(self.count) if sip not in reached]
        if lost:
            raise ValueError(f"edges leave no route from SIP 0 to SIP {lost[0]}")


class HostSpec(_Part, frozen=True, kw_only=True):
    """The computer that the SIPs are plugged into."""

    link: LinkSpec
    """PCIe: one such link per SIP."""
    command_ns: Delay = 500.0
    """What the driver needs to hand a command to a SIP."""


class SystemSpec(_Part, frozen=True, kw_only=True):
    """The outermost level."""

    name: str = ""
    clock: Amount = msgspec.field(name="clock_GHz", default=1.0)
    chunk_bytes: Count = 4_096
    """Pieces in which transfers move: what two flows take turns with."""
    sips: SipsSpec
    host: HostSpec


class MeshSpec(_Part, frozen=True, kw_only=True):
    """Equal things in rows and columns, with links between neighbours."""

    shape: tuple[Count, Count]
    link: LinkSpec

    @property
    def count(self) -> int:
        """How many there are."""
        return prod(self.shape)


class SipSpec(_Part, frozen=True, kw_only=True):
    """One device: a mesh of cubes."""

    cubes: MeshSpec


class PesSpec(_Part, frozen=True, kw_only=True):
    """The processing elements of a cube; each has a link to the cube's crossbar."""

    count: Count
    link: LinkSpec


class HbmSpec(_Part, frozen=True, kw_only=True):
    """The memory of a cube. PE number i is next to channel i modulo the channels."""

    channels: Count
    capacity_mib: Count = msgspec.field(name="capacity_MiB")
    """Of the whole cube."""
    bandwidth: Amount = msgspec.field(name="bandwidth_GBps")
    """Of one channel."""
    latency_ns: Delay
    burst_bytes: Count = 64
    """What it gives or takes at once: kernels pay for whole bursts."""
    interleave_bytes: Count = 4_096
    """What channels take turns with, where nothing says which addresses are whose."""

    def __post_init__(self) -> None:
        if self.interleave_bytes % self.burst_bytes:
            raise ValueError(
                f"interleave_bytes is {self.interleave_bytes}, not a multiple of burst_bytes,"
                f" {self.burst_bytes}"
            )

    @property
    def capacity(self) -> int:
        """Bytes per cube."""
        return self.capacity_mib * MIB


class CubeSpec(_Part, frozen=True, kw_only=True):
    """One die with memory: PEs, HBM channels and the crossbar between them."""

    pes: PesSpec
    hbm: HbmSpec


class TcmSpec(_Part, frozen=True, kw_only=True):
    """The scratch memory of a PE."""

    capacity_kib: Count = msgspec.field(name="capacity_KiB")
    bandwidth: Amount = msgspec.field(name="bandwidth_GBps")
    latency_ns: Delay

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self.capacity_kib * KIB


class DmaSpec(_Part, frozen=True, kw_only=True):
    """The engine that moves bytes in and out of a PE."""

    bandwidth: Amount = msgspec.field(name="bandwidth_GBps")
    setup_ns: Delay


class GemmSpec(_Part, frozen=True, kw_only=True):
    """The matrix engine."""

    flops_per_cycle: dict[Dtype, Amount]
    tile: tuple[Count, Count, Count] = (16, 16, 16)
    """m, n and k are rounded up to multiples of these."""
    startup_ns: Delay = 0.0

    def __post_init__(self) -> None:
        if not self.flops_per_cycle:
            raise ValueError("flops_per_cycle names no dtype")


class MathSpec(_Part, frozen=True, kw_only=True):
    """The vector engine."""

    elements_per_cycle: dict[Dtype, Amount]
    cost: dict[str, Amount] = msgspec.field(default_factory=dict)
    """How many times as long as an addition an operation takes; 1 for those that are not named."""
    startup_ns: Delay = 0.0

    def __post_init__(self) -> None:
        if not self.elements_per_cycle:
            raise ValueError("elements_per_cycle names no dtype")


class IpcqSpec(_Part, frozen=True, kw_only=True):
    """Queues of fixed slots between PEs."""

    slots: Count = 4
    slot_bytes: Count = 4_096
    credit_bytes: Count = 16
    wake_ns: Delay = 20.0
    """How long a sleeping sender needs to go on when a credit comes."""
    poll_ns: Delay = 4.0
    """How often a spinning sender looks."""


class PeSpec(_Part, frozen=True, kw_only=True):
    """One processing element."""

    tcm: TcmSpec
    dma: DmaSpec
    gemm: GemmSpec
    math: MathSpec
    cost_model: str = "table"
    """How long work takes on both engines: by the figures above, or by a plug-in's model."""
    ipcq: IpcqSpec = msgspec.field(default_factory=IpcqSpec)


class MachineSpec(_Part, frozen=True, kw_only=True):
    """A whole topology file."""

    system: SystemSpec
    sip: SipSpec
    cube: CubeSpec
    pe: PeSpec
