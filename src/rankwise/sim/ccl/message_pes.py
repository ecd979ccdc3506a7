"""The PEs of a collective by messages: which they are, and what they need for a slot."""

from collections import Counter
from typing import NamedTuple

from rankwise.sim.ccl.execution import TCM_SHARE
from rankwise.sim.hardware.hardware_machine import HardwareMachine
from rankwise.sim.hardware.paths import Path


class Lanes(NamedTuple):
    """The lanes of one rank: PEs of a device, by their numbers on it."""

    sip: int
    pes: tuple[int, ...]


class Elements(NamedTuple):
    """What a collective does with its elements.

    Attributes:
        item_bytes: bytes per element.
        dtype: the element type, as the machine's engines call it.
        operation: what the math engine does to combine.
    """

    item_bytes: int
    dtype: str
    operation: str


class PeTimes:
    """What the PE of a lane needs for one slot."""

    def __init__(self, machine: HardwareMachine, lanes: Lanes, lane: int, work: Elements) -> None:
        self._pe = pe = machine.sip(lanes.sip).pe(lanes.pes[lane])
        self._work = work
        self._load = Path([pe.dma_engine, *machine.path(pe.hbm, pe.tcm)])
        self._store = Path([pe.dma_engine, *machine.path(pe.tcm, pe.hbm)])
        spec = machine.topology.machine
        channels = Counter(
            (number // spec.cube.pes.count, number % spec.cube.pes.count % spec.cube.hbm.channels)
            for number in lanes.pes
        )
        self._sharing_channel = max(channels.values())
        self.keeps_bytes = pe.tcm.capacity // TCM_SHARE

    def load(self, size: int) -> int:
        """Bring it from the HBM into scratch memory."""
        return _time_of(self._load, size)

    def store(self, size: int) -> int:
        """Bring it from scratch memory into the HBM."""
        return _time_of(self._store, size)

    def moving(self, size: int) -> int:
        """Bring it into scratch memory, without the latency."""
        return self.load(size) - self.load(0)

    def combine(self, size: int) -> int:
        """Combine it with as many bytes that are there."""
        elements = size // self._work.item_bytes
        return self._pe.math_engine.duration(elements, self._work.operation, self._work.dtype)

    def pass_on(self, size: int, *, combines: bool, loads_first: bool) -> int:
        """Be busy with it, where the PE is busiest: what it takes in, it stores and sends."""
        pe, loads = self._pe, 1 + combines + loads_first  # with the operand
        assert pe.tcm.port is not None, "memories of a PE have ports"
        assert pe.hbm.port is not None, "memories of a PE have ports"
        return max(
            pe.dma_engine.rate.time_for(loads * size),
            pe.hbm.port.rate.time_for(loads * size * self._sharing_channel),
            pe.tcm.port.rate.time_for((2 + loads) * size),
            self.combine(size) if combines else 0,
        )

    def rates(self, lanes: int) -> "PeRates":
        """Picoseconds for each byte of a message that is spread over so many lanes."""
        pe = self._pe
        assert pe.hbm.port is not None, "memories of a PE have ports"
        return PeRates(
            self._sharing_channel / float(pe.hbm.port.rate) / lanes,
            1 / float(pe.dma_engine.rate) / lanes,
            1 / float(pe.port_out.rate) / lanes,
        )


class PeRates(NamedTuple):
    """Picoseconds for each byte: through the HBM channels, the DMA engines, and the ports."""

    memory: float
    engine: float
    port: float


def _time_of(path: Path, size: int) -> int:
    assert path.slowest is not None, "there are links on the way"
    return path.latency + path.slowest.time_for(size)
