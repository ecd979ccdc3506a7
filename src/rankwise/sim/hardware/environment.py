"""What a kernel finds around it: the PEs it runs on, the memory it addresses, the log it fills."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from rankwise.sim.hardware.footprint import Footprint
from rankwise.sim.hardware.memory import AddressSpace, Mapping, sip_of, ways_between
from rankwise.sim.hardware.op_log import OpLog
from rankwise.sim.kernel import Future, Simulator

if TYPE_CHECKING:
    from rankwise.sim.hardware.engine import GraphEngine
    from rankwise.sim.hardware.hardware_machine import HardwareMachine, Pe, Sip


class KernelEnvironment:
    """One launch, as its runner sees it.

    Attributes:
        sip: the number of the SIP.
        pes: the PEs that programs are dealt to (`occupancy`).
        space: the SIP's virtual addresses.
        queues: what connects its programs with others; None for the queues between all PEs.
    """

    queues: Any = None

    def __init__(self, engine: "GraphEngine", sip: int, pes: "Sequence[Pe]", name: str) -> None:
        self.engine = engine
        self.sip = sip
        self.pes = pes
        self.name = name

    @property
    def simulator(self) -> Simulator:
        """The simulation that the launch is part of."""
        return self.engine.simulator

    @property
    def machine(self) -> "HardwareMachine":
        """The machine, for what is not on this SIP."""
        return self.engine.machine

    @property
    def space(self) -> AddressSpace:
        """The virtual addresses of the SIP."""
        return self.engine.space(self.sip)

    @property
    def op_log(self) -> OpLog:
        """Where operations are recorded."""
        return self.engine.op_log

    @property
    def enable_data(self) -> bool:
        """Whether there are bytes; if not, only time is simulated."""
        return self.engine.enable_data

    def pe_of(self, program: int) -> "Pe":
        """The PE by which a program is addressed, and on which it begins if that is free."""
        return self.pes[program % len(self.pes)]

    def name_of(self, kernel: str, program: int, pe: "Pe") -> str:
        """What deadlock reports call a program of a kernel that runs on a PE."""
        return f"{kernel}[{program}] on {pe.name}"

    def space_around(self, address: int) -> AddressSpace:
        """The virtual addresses among which one is: this SIP's, or those of a peer."""
        home = sip_of(address)
        is_own = home == self.sip or not home < self.engine.topology.sip_count
        return self.space if is_own or address in self.space else self.engine.space(home)

    def mapping_at(self, address: int) -> Mapping:
        """The mapping that an address lies in; raises `BadAddress` if there is none."""
        return self.space_around(address).mapping_at(address)

    def program_ended(self, dma_waited: int) -> None:
        """Note that a program has ended, and for how long it waited for loads and stores."""

    def start_copy(self, pe: "Pe", source: int, target: int, size: int) -> Future:
        """Begin to move bytes from memory to memory with the DMA engine of a PE. Time only."""
        spaces = self.space_around(source), self.space_around(target)
        ways = ways_between(spaces[0], source, spaces[1], target, size)
        return pe.start_copies(list(ways.items()))

    def start_dma(self, pe: "Pe", address: int, size: int | Footprint, *, is_load: bool) -> Future:
        """Begin the DMA of so many bytes, or of a footprint, into the TCM of a PE, or from it.

        Time only.
        """
        if isinstance(size, int):
            shares = self.space_around(address).shares(address, size)
        else:
            burst = self.engine.topology.machine.cube.hbm.burst_bytes
            shares = self.mapping_at(address).shares(*size.bursts(address, burst))
        return pe.start_dmas(shares, is_load=is_load)


class DealtPes(Sequence["Pe"]):
    """The PEs of a launch by position; each is built when it is first used.

    Attributes:
        indexes: their numbers on the SIP.
    """

    def __init__(self, sip: "Sip", indexes: "Sequence[int]") -> None:
        self._sip = sip
        self.indexes = indexes

    def on(self, sip: "Sip") -> "DealtPes":
        """The same positions on another SIP, or on that of another machine."""
        return DealtPes(sip, self.indexes)

    def __len__(self) -> int:
        return len(self.indexes)

    @overload
    def __getitem__(self, position: int) -> "Pe": ...
    @overload
    def __getitem__(self, position: slice) -> "DealtPes": ...
    def __getitem__(self, position: int | slice) -> "Pe | DealtPes":
        if isinstance(position, slice):
            return DealtPes(self._sip, self.indexes[position])
        return self._sip.pe(self.indexes[position])
