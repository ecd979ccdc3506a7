"""What a topology file may say: the typed tree behind `Topology`.

Field names are those of the file, units included. Counts that must fit each other are checked
where they meet. The tree is frozen: a machine is built from it and never changes it.
"""

import re
from math import prod
from typing import Annotated, Literal

import msgspec

from rankwise.sim.hardware.quantities import KIB, MIB, Rate, picoseconds

Count = Annotated[int, msgspec.Meta(ge=1, le=1_048_576)]
Amount = Annotated[float, msgspec.Meta(ge=1e-6, le=1e12)]
Delay = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Dtype = Literal["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "f8e4", "f8e5"]
Graph = Literal["ring_1d", "mesh_2d", "torus_2d", "fully_connected", "switch", "custom", "levels"]
GraphOfLevel = Literal[
    "ring_1d", "mesh_2d", "torus_2d", "fully_connected", "switch", "rails", "fat_tree"
]
Routing = Literal["static", "hashed"]
NETWORK_DEVICES_MOST = 1_048_576


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


class LevelOfNetwork(_Part, frozen=True, kw_only=True):
    """One level of the network: what connects units of the level below (devices, at the first)."""

    name: str = ""
    """Letters; switches are called by it."""
    count: Count
    """How many units of the level below one unit of this level connects."""
    graph: GraphOfLevel
    """`switch`: one for all devices of a unit. `rails`: a switch for each place in the units below.
    `fat_tree`: a leaf switch for each unit below, and spines. The others connect the devices that
    have the same place in the units below."""
    shape: tuple[Count, Count] | None = None
    """Rows and columns of a mesh or torus; their product is the count."""
    link: LinkSpec
    """Of each device to this level."""
    multicast: bool = False
    """Of a switch between single devices: it copies messages, and combines them on their way."""
    spines: Count = 1
    """Of a fat tree: switches that connect its leaves."""
    leaf: Count | None = None
    """Of a fat tree: devices at each leaf switch; those of a unit below, if not given."""
    oversubscription: Annotated[float, msgspec.Meta(ge=1, le=1_000_000)] = 1.0
    """Of a fat tree: bandwidth of a leaf's devices divided by that of its links to the spines."""
    routing: Routing = "static"
    """Of a fat tree: which spine a flow takes: destination modulo spines, or by the seed."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    """Of hashed routing."""

    def __post_init__(self) -> None:
        _check_shape(self.graph, self.shape, self.count, "units")
        if self.name and not (_NAME.fullmatch(self.name) and self.name not in _TAKEN):
            raise ValueError(
                f"name {self.name!r} is not a name of a level; expected letters, such as rails"
            )
        if self.graph != "fat_tree":
            given = [name for name, usual in _OF_FAT_TREES if getattr(self, name) != usual]
            if given:
                raise ValueError(f"{given[0]} is for graph fat_tree; the graph is {self.graph}")
        _check_multicast(self.multicast, self.graph)
        if self.seed and self.routing != "hashed":
            raise ValueError(f"seed is for routing hashed; the routing is {self.routing}")

    @property
    def words(self) -> str:
        """What it is, in a few words."""
        shape = f" {self.shape[0]} x {self.shape[1]}" if self.shape else ""
        tree = ""
        if self.graph == "fat_tree":
            tree = f" of {self.spines} spine{'s' * (self.spines > 1)}"
            if self.oversubscription > 1:
                tree += f", {self.oversubscription:g} to 1 oversubscribed"
        return f"{self.graph}{shape}{tree}{_MULTICAST * self.multicast}"


_OF_FAT_TREES = (
    ("spines", 1), ("leaf", None), ("oversubscription", 1.0), ("routing", "static"),
)  # fmt: skip
_MULTICAST = " with multicast"
_NAME = re.compile(r"[A-Za-z][A-Za-z_]*")
_TAKEN = frozenset({"sip", "host", "cube", "pe", "switch"})


def _check_multicast(multicast: bool, graph: str) -> None:
    if multicast and graph != "switch":
        raise ValueError(f"multicast is for graph switch; the graph is {graph}")


def _check_shape(graph: str, shape: tuple[int, int] | None, count: int, what: str) -> None:
    if graph in {"mesh_2d", "torus_2d"}:
        if shape is None:
            raise ValueError(f"graph {graph} needs a shape: [rows, columns]")
        if prod(shape) != count:
            raise ValueError(f"shape {list(shape)} does not hold {count} {what}")
    elif shape is not None:
        raise ValueError(f"shape is for mesh_2d and torus_2d; the graph is {graph}")


class SipsSpec(_Part, frozen=True, kw_only=True):
    """The accelerator devices of the system, and what connects them: one graph, or levels."""

    count: Count = 0
    """Devices; with levels it follows from them."""
    graph: Graph = "ring_1d"
    shape: tuple[Count, Count] | None = None
    """Rows and columns of a mesh or torus; their product is the count."""
    edges: tuple[tuple[int, int], ...] = ()
    """Pairs of SIPs that a link connects, for `graph: custom`."""
    link: LinkSpec | None = None
    """Of the one graph; with levels each has its own."""
    multicast: bool = False
    """Of the one switch: it copies messages, and combines them on their way."""
    levels: tuple[LevelOfNetwork, ...] = ()
    """From the inside out, such as a switch inside of a node, and rails between nodes."""

    def __post_init__(self) -> None:
        if self.levels or self.graph == "levels":
            self._check_levels()
            return
        if not self.count:
            raise ValueError("count or levels is missing: how many SIPs are there?")
        if self.link is None:
            raise ValueError("link is missing: what connects the SIPs?")
        _check_shape(self.graph, self.shape, self.count, "SIPs")
        _check_multicast(self.multicast, self.graph)
        if self.edges and self.graph != "custom":
            raise ValueError(f"edges are for graph custom; the graph is {self.graph}")
        for edge in self.edges:
            if edge[0] == edge[1] or not all(0 <= end < self.count for end in edge):
                raise ValueError(
                    f"edge {list(edge)} does not connect two of SIPs 0 to {self.count - 1}"
                )
        if self.graph == "custom":
            self._check_routable()

    def _check_levels(self) -> None:
        if not self.levels:
            raise ValueError("graph levels needs levels: a list of them, from the inside out")
        if self.graph not in {"ring_1d", "levels"}:
            raise ValueError(f"graph {self.graph} stands beside levels: each level has its graph")
        for field in ("shape", "edges", "link", "multicast"):
            if getattr(self, field):
                raise ValueError(f"{field} stands beside levels: give it to a level")
        count = prod(level.count for level in self.levels)
        if count > NETWORK_DEVICES_MOST:
            raise ValueError(
                f"levels make {count:,} SIPs, expected {NETWORK_DEVICES_MOST:,} at most"
            )
        if self.count not in {0, count}:
            counts = " x ".join(str(level.count) for level in self.levels)
            raise ValueError(f"count is {self.count}, but levels make {counts} = {count}")
        below = 1
        for number, level in enumerate(self.levels):
            if level.graph in {"rails", "fat_tree"} and below == 1 and level.leaf is None:
                more = ", or leaf: devices at a switch" if level.graph == "fat_tree" else ""
                raise ValueError(
                    f"levels[{number}] is {level.graph} of single SIPs: expected a level below with"
                    f" a count of 2 or more{more}"
                )
            if level.multicast and number:
                raise ValueError(
                    f"levels[{number}].multicast: expected on levels[0], a switch of single SIPs"
                )
            below *= level.count
            if level.leaf is not None and below % level.leaf:
                raise ValueError(
                    f"levels[{number}].leaf: {level.leaf} SIPs at a leaf do not divide {below}"
                )
        names = [each for each in (level.name for level in self.levels) if each]
        if len(set(names)) < len(names):
            raise ValueError(f"levels have one name twice: {', '.join(names)}")
        # The description of the machine (`Topology.spec`) has the count and the graph, too.
        msgspec.structs.force_setattr(self, "count", count)
        msgspec.structs.force_setattr(self, "graph", "levels")

    @property
    def fastest_link(self) -> LinkSpec:
        """Of all levels, the link with the highest bandwidth."""
        if self.link is not None:
            return self.link
        return max((level.link for level in self.levels), key=lambda link: link.bandwidth)

    @property
    def words(self) -> str:
        """What connects the SIPs, in a few words."""
        if self.levels:
            return ", ".join(
                f"{level.count} {'units' if number else 'SIPs'} in"
                f" {f'{level.name}: ' * bool(level.name)}{level.words}"
                for number, level in enumerate(self.levels)
            )
        graph = self.graph + _MULTICAST * self.multicast
        return f"{graph} {self.shape[0]} x {self.shape[1]}" if self.shape else graph

    @property
    def multicast_unit(self) -> int:
        """How many devices are at each switch that copies and combines; 0 if none does."""
        if self.levels:
            return self.levels[0].count if self.levels[0].multicast else 0
        return self.count if self.multicast else 0

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

    like: str = ""
    """A preset, whose sections stand for those that the file leaves out."""
    system: SystemSpec
    sip: SipSpec
    cube: CubeSpec
    pe: PeSpec
