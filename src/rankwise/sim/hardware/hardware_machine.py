"""A machine built from a topology: SIPs of cubes of PEs, and the links between them.

Everything is built when it is first used, so a system of thousands of PEs of which a program uses
ten costs what ten cost. Lists of built parts are in the order of the topology.

A path from one memory to another is: the memory that is read, the crossbar port of its side, the
die-to-die links to the package's gateway (cube 0), the links between SIPs, and down again. Where
two places share a part of the way (the PE, the cube, the SIP), the path begins and ends there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rankwise.base.errors import ConfigError
from rankwise.sim.hardware.cost_models import cost_model
from rankwise.sim.hardware.engines import GemmEngine, MathEngine
from rankwise.sim.hardware.faults import live_route
from rankwise.sim.hardware.links import FlowLane, Link, start_flow
from rankwise.sim.hardware.occupancy import PeOccupancy
from rankwise.sim.hardware.paths import Path
from rankwise.sim.hardware.quantities import Rate, picoseconds
from rankwise.sim.hardware.routing import Hop, link_of_hop, mesh_route, node_name
from rankwise.sim.kernel import Future, Server, Simulator, all_of

if TYPE_CHECKING:
    from rankwise.sim.hardware.samples import LinkSamples
    from rankwise.sim.hardware.specification import LinkSpec
    from rankwise.sim.hardware.topology import Topology

Part: TypeAlias = Link | GemmEngine | MathEngine
PartPlace: TypeAlias = tuple[str, int, int]
"""Where a part is on its SIP: of which kind, and two numbers."""
_FLOWS_PER_LOOK = 64
"""How many flows are kept before those that are done are left out."""
_PARTS_OF_PE = ("tcm_port", "dma_engine", "gemm_engine", "math_engine", "port_in", "port_out")


class SlotMessage(NamedTuple):
    """A slot that was sent from one PE to another; instants in picoseconds.

    Attributes:
        pace: how long its bytes took at the narrowest part of their way.
    """

    source: str
    destination: str
    size: int
    sent_at: int
    arrived_at: int
    pace: int


class Memory:
    """A place that bytes come from and go to.

    Attributes:
        space: `hbm`, `tcm` or `host`.
        sip, cube, pe: where it is; -1 where that does not apply. Of HBM, `pe` is the channel.
        port: the link through which everything that is read or written passes.
    """

    __slots__ = ("capacity", "cube", "pe", "port", "sip", "space")

    def __init__(
        self, space: str, place: tuple[int, int, int], capacity: int, port: Link | None
    ) -> None:
        self.space = space
        self.sip, self.cube, self.pe = place
        self.capacity = capacity
        self.port = port

    @property
    def name(self) -> str:
        """For people and for the op log."""
        if self.space == "host":
            return "host"
        return f"sip{self.sip}.cube{self.cube}.{self.space}{self.pe}"

    def __repr__(self) -> str:
        return f"<Memory {self.name}>"


class Pe:
    """One processing element: scratch memory, DMA, GEMM and math engine.

    Attributes:
        dma_turn: decides which memories stand for others in the next DMA.
        dma_paths: the ways that its DMA has taken, from memory to memory.
    """

    def __init__(self, cube: "Cube", number: int) -> None:
        machine = cube.machine
        simulator, spec = machine.simulator, machine.topology.machine.pe
        self.machine = machine
        self.cube = cube
        self.number = number
        self.name = name = f"{cube.name}.pe{number}"
        self._dma_name = f"dma of {name}"
        self.dma_paths: dict[tuple[Memory, Memory], Path] = {}
        self.dma_turn = number
        place = (cube.sip.number, cube.number, number)
        self.tcm_port = machine.link(
            f"{name}.tcm", Rate.of_gigabytes_per_second(spec.tcm.bandwidth), spec.tcm.latency_ns
        )
        self.tcm = Memory("tcm", place, spec.tcm.capacity, self.tcm_port)
        self.dma_engine = machine.link(
            f"{name}.dma", Rate.of_gigabytes_per_second(spec.dma.bandwidth), spec.dma.setup_ns
        )
        faults = machine.topology.faults
        costs = machine.costs if faults is None else faults.costs(name, machine.costs)
        self.gemm_engine = GemmEngine(simulator, f"{name}.gemm", costs)
        self.math_engine = MathEngine(simulator, f"{name}.math", costs)
        machine.servers += [self.gemm_engine, self.math_engine]
        port = machine.topology.machine.cube.pes.link
        self.port_in = machine.link(f"{name}.in", port.rate, port.latency_ns)
        self.port_out = machine.link(f"{name}.out", port.rate, port.latency_ns)

    @property
    def hbm(self) -> Memory:
        """The HBM channel next to it."""
        return self.cube.hbm(self.number % self.cube.hbm_channels)

    def start_dma(
        self, size: int, source: Memory | None = None, destination: Memory | None = None
    ) -> Future:
        """Begin a DMA, by default from its HBM channel into its TCM; the future is its end.

        Several overlap, and share links.
        """
        path = self._dma_path(source or self.hbm, destination or self.tcm)
        return self.machine.start_flow(path, size, name=self._dma_name)

    def start_dmas(self, shares: list[tuple[Memory, int]], *, is_load: bool) -> Future:
        """Begin one DMA between several memories and its TCM: how many bytes with each.

        It is timed in as many flows as it has chunks, at most: memories whose share is less are
        drawn together, and stand for each other in turn, which costs no more than one flow and
        keeps their loads even.
        """
        if len(shares) > 1:
            shares = self._drawn_together(shares)
        paths = [
            (self._dma_path(*((memory, self.tcm) if is_load else (self.tcm, memory))), size)
            for memory, size in shares
        ]
        if len(paths) == 1:
            ((path, size),) = paths
            return self.machine.start_flow(path, size, name=self._dma_name)
        return all_of([
            self.machine.start_flow(path, size, name=self._dma_name, is_alone=False)
            for path, size in paths
        ])  # fmt: skip

    def start_copies(self, ways: list[tuple[tuple[Memory, Memory], int]]) -> Future:
        """Begin one DMA from memories to memories: how many bytes from which to which."""
        return all_of([
            self.machine.start_flow(
                self._dma_path(*ends), size, name=self._dma_name, is_alone=len(ways) == 1
            )
            for ends, size in ways
        ])  # fmt: skip

    def _drawn_together(self, shares: list[tuple[Memory, int]]) -> list[tuple[Memory, int]]:
        total = sum(size for _, size in shares)
        flows = -(-total // self.machine.topology.machine.system.chunk_bytes)
        if len(shares) <= flows:
            return shares
        self.dma_turn += 1
        drawn = []
        for flow in range(flows):
            group = shares[len(shares) * flow // flows : len(shares) * (flow + 1) // flows]
            memory, _ = group[self.dma_turn % len(group)]
            drawn.append((memory, sum(size for _, size in group)))
        return drawn

    def _dma_path(self, source: Memory, destination: Memory) -> Path:
        path = self.dma_paths.get((source, destination))
        if path is None or path.is_broken:
            way = self.machine.path(source, destination)
            sips = tuple(sorted({self.cube.sip.number, *way.sips}))
            path = Path([self.dma_engine, *way], sips)
            self.dma_paths[source, destination] = path
        return path

    def __repr__(self) -> str:
        return f"<Pe {self.name}>"


class Cube:
    """One die: PEs, HBM channels, and the crossbar between them."""

    def __init__(self, sip: "Sip", number: int) -> None:
        self.machine = sip.machine
        self.sip = sip
        self.number = number
        self.name = f"{sip.name}.cube{number}"
        spec = self.machine.topology.machine.cube
        self.pe_count = spec.pes.count
        self.hbm_channels = spec.hbm.channels
        self._pes: dict[int, Pe] = {}
        self._channels: dict[int, Memory] = {}

    def pe(self, number: int) -> Pe:
        """The PE of that number."""
        if number not in self._pes:
            _check_number("PE", number, self.pe_count, self.name)
            self._pes[number] = Pe(self, number)
        return self._pes[number]

    def pes_in_use(self) -> Iterator[Pe]:
        """The PEs that have been used."""
        return iter(self._pes.values())

    @property
    def used_count(self) -> int:
        """How many of its channels and PEs have been used."""
        return len(self._channels) + len(self._pes)

    def parts(self) -> Iterator[tuple[PartPlace, Part]]:
        """What has been used of it, wires to other cubes not included."""
        for channel, memory in self._channels.items():
            assert memory.port is not None, "channels have ports"
            yield ("hbm", self.number, channel), memory.port
        for number, pe in self._pes.items():
            for kind in _PARTS_OF_PE:
                yield (kind, self.number, number), getattr(pe, kind)

    def hbm(self, channel: int) -> Memory:
        """The HBM channel of that number."""
        if channel not in self._channels:
            _check_number("HBM channel", channel, self.hbm_channels, self.name)
            spec = self.machine.topology.machine.cube.hbm
            port = self.machine.link(
                f"{self.name}.hbm{channel}",
                Rate.of_gigabytes_per_second(spec.bandwidth),
                spec.latency_ns,
            )
            share = spec.capacity // spec.channels
            self._channels[channel] = Memory(
                "hbm", (self.sip.number, self.number, channel), share, port
            )
        return self._channels[channel]


class Sip:
    """One device: a mesh of cubes.

    Attributes:
        occupancy: which of its PEs have a program.
    """

    def __init__(self, machine: "HardwareMachine", number: int) -> None:
        self.machine = machine
        self.number = number
        self.name = f"sip{number}"
        self.cube_count = machine.topology.machine.sip.cubes.count
        self.occupancy = PeOccupancy()
        self._cubes: dict[int, Cube] = {}
        self._parts: dict[PartPlace, Part] = {}
        self._parts_count = 0

    def cube(self, number: int) -> Cube:
        """The cube of that number."""
        if number not in self._cubes:
            _check_number("cube", number, self.cube_count, self.name)
            self._cubes[number] = Cube(self, number)
        return self._cubes[number]

    def pe(self, index: int) -> Pe:
        """The PE of that index over all cubes, cube by cube."""
        cube, number = divmod(index, self.machine.topology.machine.cube.pes.count)
        return self.cube(cube).pe(number)

    def parts(self) -> dict[PartPlace, Part]:
        """What has been used of it: links inside of it, and engines; not to be changed."""
        wires = self.machine.wires_inside(self.number)
        count = len(wires) + sum(cube.used_count for cube in self._cubes.values())
        if count != self._parts_count:  # each launch asks, and few use something for the first time
            self._parts_count, self._parts = count, {}
            for cube in self._cubes.values():
                self._parts.update(cube.parts())
            self._parts.update(wires)
        return self._parts

    def part(self, place: PartPlace) -> Part:
        """The part at a place."""
        kind, one, other = place
        if kind == "die":
            return self.machine.wire("die", self.number, one, other)
        cube = self.cube(one)
        if kind == "hbm":
            port = cube.hbm(other).port
            assert port is not None, "channels have ports"
            return port
        part: Part = getattr(cube.pe(other), kind)
        return part

    def pes_in_use(self) -> Iterator[Pe]:
        """The PEs that have been used."""
        for cube in self._cubes.values():
            yield from cube.pes_in_use()


@dataclass(slots=True)
class MessageWaits:
    """Picoseconds that messages between PEs took besides what links between SIPs need for them.

    Sums over all messages and all queues.

    Attributes:
        queues: how many queues there have been.
        credits: senders waited for a free slot, and to go on when there was one.
        ways: the latency of their ways inside of the devices.
        dma: what was to be sent or combined was not yet in scratch memory.
        math: the math engine combined.
    """

    queues: int = 0
    credits: int = 0
    ways: int = 0
    dma: int = 0
    math: int = 0

    def copy(self) -> "MessageWaits":
        """As they are now."""
        return replace(self)

    def __sub__(self, before: "MessageWaits") -> "MessageWaits":
        """What has come since."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return MessageWaits(*(now - then for now, then in pairs))


class HardwareMachine:
    """All that takes time, for one simulation.

    Attributes:
        links: every link that has been used, in the order of first use.
        servers: every GEMM and math engine that has been used, likewise.
        costs: how long work takes on the engines.
        messages: every message through a queue between PEs, as it arrives; None to keep none.
        samples: of what links have carried, for a trace; None to take none.
        waits: what messages through queues, and their data, have waited for.
        fidelities: by algorithm of a collective, the levels on which it was simulated.
        rerouted: happens when a link dies next; then another future stands here.
        on_touch: is told of devices before a flow from elsewhere comes to them.
    """

    def __init__(self, simulator: Simulator, topology: "Topology") -> None:
        self.simulator = simulator
        self.topology = topology
        self.links: list[Link] = []
        self.servers: list[Server] = []
        self.messages: list[SlotMessage] | None = None
        self.samples: LinkSamples | None = None
        self.fidelities: dict[str, str] = {}
        self.waits = MessageWaits()
        self.costs = cost_model(topology.machine)
        self.host = Memory("host", (-1, -1, -1), 0, None)
        self._sips: dict[int, Sip] = {}
        self._wires: dict[tuple[str, int, int, int], Link] = {}
        self._cube_wires: dict[tuple[int, int, int], list[Link]] = {}
        self._paths: dict[tuple[Memory, Memory], Path] = {}
        self._dead: set[Hop] = set()
        self._inside: dict[int, dict[PartPlace, Part]] = {}
        self.on_touch: Callable[[tuple[int, ...]], None] | None = None
        self._coming: dict[int, list[Future]] = {}
        """By SIP, the flows that were not begun by a launch inside of it, some of them done."""
        self._looked_at: dict[int, int] = {}
        self.rerouted = simulator.future("the death of a link")
        for instant, hops in () if topology.faults is None else topology.faults.deaths:
            if instant:
                simulator.call_at(instant, self._kill, hops)
            else:
                self._kill(hops)

    def sip(self, number: int) -> Sip:
        """The SIP of that number."""
        if number not in self._sips:
            _check_number("SIP", number, self.topology.sip_count, f"system {self.topology.name}")
            self._sips[number] = Sip(self, number)
        return self._sips[number]

    def link(self, name: str, rate: Rate, latency_ns: float) -> Link:
        """Make a link that the machine knows of."""
        if self.topology.faults is not None:
            rate = self.topology.faults.slowed(name, rate)
        link = Link(self.simulator, name, rate, picoseconds(latency_ns))
        self.links.append(link)
        return link

    def start_transfer(
        self, source: Memory | Pe, destination: Memory | Pe, size: int, chunk: int | None = None
    ) -> Future:
        """Move bytes between memories without a DMA engine; a PE stands for its TCM.

        The future happens when the last byte has arrived: on otherwise idle links, after the sum of
        the path's latencies + size / lowest bandwidth.
        """
        source = source.tcm if isinstance(source, Pe) else source
        destination = destination.tcm if isinstance(destination, Pe) else destination
        if source is destination:
            size *= 2  # read and written through one port
        path = self.path(source, destination)
        if len(path.sips) == 1 and self.on_touch is not None:
            self.on_touch(path.sips)
        flow = self.start_flow(path, size, chunk, _Transfer(source, destination))
        if len(path.sips) == 1:
            self._note(path.sips, flow)
        return flow

    def start_flow(
        self,
        path: Path,
        size: int,
        chunk: int | None = None,
        name: object = "",
        *,
        is_alone: bool = True,
        lane: FlowLane | None = None,
    ) -> Future:
        """Send bytes over links; the future happens when the last byte has arrived.

        `is_alone=False` foretells that others share a link of it, which makes it no different, but
        cheaper to simulate.
        """
        chunk = chunk or self.topology.machine.system.chunk_bytes
        sips = path.sips
        if len(sips) < 2:
            return start_flow(
                self.simulator, path, size, chunk, name, may_be_express=is_alone, lane=lane
            )
        if self.on_touch is not None:
            self.on_touch(sips)
        flow = start_flow(
            self.simulator, path, size, chunk, name, may_be_express=is_alone, lane=lane
        )
        self._note(sips, flow)
        return flow

    def _note(self, sips: tuple[int, ...], flow: Future) -> None:
        """Keep a flow that was not begun by a launch inside of its own device."""
        for sip in sips:
            coming = self._coming.setdefault(sip, [])
            coming.append(flow)
            if len(coming) >= self._looked_at.get(sip, _FLOWS_PER_LOOK):
                coming[:] = [each for each in coming if not each.is_done]
                self._looked_at[sip] = 2 * len(coming) + _FLOWS_PER_LOOK

    def is_idle(self, sip: int) -> bool:
        """Whether nothing is under way on a device, except what has not asked for a part yet."""
        now = self.simulator.now
        return all(each.is_done for each in self._coming.get(sip, ())) and all(
            part.is_idle(now) for part in self.sip(sip).parts().values()
        )

    def path(self, source: Memory, destination: Memory) -> Path:
        """The links from one memory to another, the ports of both included."""
        key = (source, destination)
        path = self._paths.get(key)
        if path is None or path.is_broken:
            sips = tuple(sorted({source.sip, destination.sip} - {-1}))
            path = self._paths[key] = Path(self._find_path(source, destination), sips)
        return path

    def _find_path(self, source: Memory, destination: Memory) -> list[Link]:
        ends = [each.port for each in (source, destination) if each.port is not None]
        if source is destination:
            return ends[:1]
        beside = self._are_beside(source, destination)
        wires = [] if beside else self._wires_between(source, destination)
        first = ends[:1] if source.port is not None else []
        last = ends[-1:] if destination.port is not None else []
        return [*first, *wires, *last]

    def _are_beside(self, source: Memory, destination: Memory) -> bool:
        """Whether they are a PE's TCM and its HBM channel, which need no crossbar."""
        return (
            (source.sip, source.cube) == (destination.sip, destination.cube)
            and source.space != destination.space
            and source.pe % self.topology.machine.cube.hbm.channels
            == destination.pe % self.topology.machine.cube.hbm.channels
        )

    def _wires_between(self, source: Memory, destination: Memory) -> list[Link]:
        wires = []
        if source.space == "tcm":
            wires.append(self.sip(source.sip).cube(source.cube).pe(source.pe).port_out)
        if source.sip == destination.sip:
            wires += self.cube_links(source.sip, source.cube, destination.cube)
        else:
            if source.space == "host":
                wires.append(self.wire("pcie", -1, -1, destination.sip))
            else:
                wires += self.cube_links(source.sip, source.cube, 0)
            if destination.space == "host":
                wires.append(self.wire("pcie", -1, source.sip, -1))
            else:
                if source.space != "host":
                    wires += self.sip_links(source.sip, destination.sip)
                wires += self.cube_links(destination.sip, 0, destination.cube)
        if destination.space == "tcm":
            wires.append(
                self.sip(destination.sip).cube(destination.cube).pe(destination.pe).port_in
            )
        return wires

    def cube_links(self, sip: int, source: int, destination: int) -> list[Link]:
        """The links between two cubes of a SIP, in the order in which they are crossed."""
        key = (sip, source, destination)
        wires = self._cube_wires.get(key)
        if wires is None:
            nodes = mesh_route(source, destination, self.topology.machine.sip.cubes.shape[1])
            pairs = zip([source, *nodes], nodes, strict=False)
            wires = [self.wire("die", sip, one, other) for one, other in pairs]
            self._cube_wires[key] = wires
        return wires

    def sip_links(self, source: int, destination: int) -> list[Link]:
        """The links between two SIPs alone, in the order in which they are crossed."""
        sips = self.topology.machine.system.sips
        nodes = live_route(sips, source, destination, self._dead)
        hops = zip([source, *nodes], nodes, strict=False)
        return [self.wire("sip", -1, one, other) for one, other in hops]

    @property
    def combines_in_switches(self) -> bool:
        """Whether switches copy and combine messages.

        With dead links, ways may go round a switch: then each message goes by itself.
        """
        faults = self.topology.faults
        unit = self.topology.machine.system.sips.multicast_unit
        return bool(unit) and (faults is None or not faults.deaths)

    def _kill(self, hops: Sequence[Hop]) -> None:
        """Let wires between SIPs die: what begins now takes other ways."""
        self._dead.update(hops)
        dead = {self.wire("sip", -1, *hop) for hop in hops}
        pes = (pe for sip in self._sips.values() for pe in sip.pes_in_use())
        for paths in (self._paths, *(pe.dma_paths for pe in pes)):
            for path in paths.values():
                path.is_broken |= not dead.isdisjoint(path)
        self.rerouted, before = self.simulator.future("the death of a link"), self.rerouted
        before.succeed()

    def wires_inside(self, sip: int) -> dict[PartPlace, Part]:
        """The links between cubes of a SIP that have been used."""
        return self._inside.get(sip, {})

    def wire(self, kind: str, sip: int, source: int, destination: int) -> Link:
        """The link between neighbours: SIPs, cubes of a SIP (`die`), or host and SIP (`pcie`)."""
        key = (kind, sip, source, destination)
        wire = self._wires.get(key)
        if wire is None:
            spec: LinkSpec
            match kind:
                case "sip":
                    sips = self.topology.machine.system.sips
                    spec = link_of_hop(sips, (source, destination))
                    name = f"{node_name(sips, source)}->{node_name(sips, destination)}"
                case "die":
                    spec = self.topology.machine.sip.cubes.link
                    name = f"sip{sip}.cube{source}->cube{destination}"
                case _:
                    spec = self.topology.machine.system.host.link
                    name = f"sip{source}->host" if destination < 0 else f"host->sip{destination}"
            wire = self._wires[key] = self.link(name, spec.rate, spec.latency_ns)
            if kind == "die":
                self._inside.setdefault(sip, {})[kind, source, destination] = wire
        return wire

    def utilisation(self) -> dict[str, float]:
        """The share of the time up to now in which each used resource was busy, from 0 to 1."""
        now = self.simulator.now
        parts: list[Link | Server] = [*self.links, *self.servers]
        return {part.name: part.busy / now if now else 0.0 for part in parts}


class _Transfer(NamedTuple):
    """The name of a transfer, which is only written when it is read."""

    source: Memory
    destination: Memory

    def __str__(self) -> str:
        return f"transfer from {self.source.name} to {self.destination.name}"


def _check_number(what: str, number: int, count: int, where: str) -> None:
    if not 0 <= number < count:
        raise ConfigError(f"{where} has no {what} {number}: they are 0 to {count - 1}")
