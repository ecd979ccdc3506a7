"""The graph engine: takes commands, gives handles, runs the agenda until a handle completes.

A command becomes a process at once, but nothing happens until a caller waits: virtual time moves
only inside `wait` and `run`. Each process waits for the command before it in its stream and for the
handles that it names, pays for the driver (`host.command_ns`), occupies what it needs, has its
effect on the data at the instant of its completion, and is written to the op log in that order. So
the order of effects is the order of the log, and where two commands are not ordered by a stream or
by `after`, the program has left it open.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rankwise.base.errors import LocalProtocolError, TimeLimit
from rankwise.sim.hardware.commands import (
    Command,
    CommandHandle,
    Copy,
    KernelLaunch,
    MemoryRead,
    MemoryWrite,
    MmuMap,
    MmuUnmap,
    Run,
)
from rankwise.sim.hardware.environment import DealtPes, KernelEnvironment
from rankwise.sim.hardware.hardware_machine import HardwareMachine, Memory
from rankwise.sim.hardware.interleaving import dealt_in_turn
from rankwise.sim.hardware.links import CHUNKS_PER_FLOW_MAX
from rankwise.sim.hardware.memory import (
    AddressSpace,
    BadAddress,
    Bytes,
    Mapping,
    as_bytes,
    ways_between,
)
from rankwise.sim.hardware.op_log import Operand, OpLog
from rankwise.sim.hardware.peers import Peers
from rankwise.sim.hardware.quantities import exact_picoseconds, picoseconds
from rankwise.sim.hardware.replicas import Replicas
from rankwise.sim.hardware.shown import in_notebook
from rankwise.sim.hardware.topology import Topology, load_topology
from rankwise.sim.hardware.watchpoints import Watchpoints
from rankwise.sim.kernel import Future, Simulator, SourceLine, Steps, all_of, users_line


class GraphEngine:
    """A machine that carries out commands in simulated time.

    Args:
        topology: a topology object, or the name of a preset or file.
        enable_data: keep and compute data; if not, only time is simulated.
        time_limit: the last instant, in picoseconds, that may be reached.
        wall_limit_s: how many seconds of real time one wait may take.

    Attributes:
        replicas: the launches that were not simulated, since another device did the same.
        peers: the memory that devices share with each other.
        watchpoints: the programs that wait for memory to change.
    """

    def __init__(
        self,
        topology: Topology | str,
        enable_data: bool = True,
        *,
        time_limit: int | None = None,
        wall_limit_s: float | None = None,
    ) -> None:
        self.topology = load_topology(topology) if isinstance(topology, str) else topology
        self.enable_data = enable_data
        self.simulator = Simulator(
            time_limit=time_limit, wall_limit_s=wall_limit_s, written=exact_picoseconds
        )
        self.machine = HardwareMachine(self.simulator, self.topology)
        self.replicas: Replicas[Any] = Replicas(self.machine)
        self.replicas.are_allowed &= self.topology.faults is None  # else devices are not alike
        self.op_log = OpLog()
        self.peers = Peers()
        self.watchpoints = Watchpoints()
        self._spaces: dict[int, AddressSpace] = {}
        self._channels_of: dict[tuple[int, tuple[int, ...] | None], list[Memory]] = {}
        self._last_of_stream: dict[tuple[int, int], Future] = {}
        self._command_count = 0
        self._command_time = picoseconds(self.topology.machine.system.host.command_ns)

    def _repr_html_(self) -> str:
        return in_notebook("run_html", self)

    @property
    def now(self) -> int:
        """The current instant in picoseconds."""
        return self.simulator.now

    def space(self, sip: int) -> AddressSpace:
        """The virtual addresses of a SIP."""
        space = self._spaces.get(sip)
        if space is None:
            self.machine.sip(sip)  # refuses numbers that the system does not have
            space = self._spaces[sip] = AddressSpace(
                sip, self.watchpoints, has_data=self.enable_data
            )
        return space

    def map_host(
        self,
        sip: int,
        data: Bytes,
        *,
        cubes: Sequence[int] | None = None,
        address: int | None = None,
    ) -> Mapping:
        """Let bytes of the host lie on a SIP, in no time, over all channels of its cubes.

        Args:
            sip: its number.
            data: the bytes; what is stored there, the host sees.
            cubes: the cubes; None for all.
            address: where they begin; None for a place that is free.
        """
        hbm, space = self.topology.machine.cube.hbm, self.space(sip)
        places = self._channels(sip, None if cubes is None else tuple(cubes))
        granule, sizes = dealt_in_turn(data.size, hbm.interleave_bytes, len(places))
        start = space.reserve(data.size) if address is None else address
        mapping = space.map_places(start, list(zip(sizes, places, strict=False)), granule)
        if mapping.has_data:
            mapping.lie_in(data)
        return mapping

    def _channels(self, sip: int, cubes: tuple[int, ...] | None) -> list[Memory]:
        """The channels of a SIP that take turns, or of some of its cubes."""
        # Kept: each launch of a program that knows nothing of the machine asks for all of them.
        found = self._channels_of.get((sip, cubes))
        if found is None:
            spec = self.topology.machine
            of_sip = self.machine.sip(sip)
            found = self._channels_of[sip, cubes] = [
                of_sip.cube(cube).hbm(pe % spec.cube.hbm.channels)
                for pe in range(spec.cube.pes.count)
                for cube in (range(spec.sip.cubes.count) if cubes is None else cubes)
            ]
        return found

    def submit(self, command: Command, line: SourceLine | None = None) -> CommandHandle:
        """Take a command in; it is carried out during a wait.

        A deadlock report says that it was submitted at `line`: the caller's, unless given.
        """
        self.machine.sip(command.sip)
        kind = type(command).__name__
        name = f"{command.name or kind} #{self._command_count} on sip{command.sip}"
        future = self.simulator.future(name)
        handle = CommandHandle(self._command_count, command, self.now, future)
        self._command_count += 1
        stream = (command.sip, command.stream)
        before = [each.future for each in command.after if not each.is_done]
        last = self._last_of_stream.get(stream)
        if last is not None and not last.is_done:
            before.append(last)
        self._last_of_stream[stream] = future
        line = line or users_line()
        self.simulator.process(
            self._carry_out(handle, before), name, locate=lambda: "" if line is None else str(line)
        )
        return handle

    def wait(self, handle: CommandHandle) -> Any:
        """Run the agenda until the command is complete; return its value, raise its failure.

        Raises:
            Deadlock: it can never complete; lists everything that waits, and where.
        """
        if not isinstance(handle, CommandHandle):
            raise LocalProtocolError(f"engine.wait takes a handle of submit, not {handle!r}")
        if handle.is_done:
            return handle.value
        return self.simulator.run(handle.future)

    def run(self) -> None:
        """Run the agenda until nothing is left to do."""
        self.simulator.run()

    def _carry_out(self, handle: CommandHandle, before: list[Future]) -> Steps:
        try:
            for future in before:  # noqa: UP028 (the future's value comes back; a list takes none)
                yield future
            handle.started_at = self.now
            yield self._command_time
            touched = _touched_by(handle.command)
            self.replicas.begin_command(touched)
            try:
                value = yield from self._effect(handle, handle.command)
            finally:
                self.replicas.end_command(touched)
        except TimeLimit:
            raise  # no failure of the command, which was only running when the time was over
        except Exception as exception:  # noqa: BLE001 (it is raised where the handle is waited for)
            handle.completed_at = self.now
            handle.future.fail(exception)
        else:
            handle.completed_at = self.now
            handle.future.succeed(value)

    def _effect(self, handle: CommandHandle, command: Command) -> Steps:
        match command:
            case MmuMap():
                return self._map(handle, command)
            case MmuUnmap():
                return self._unmap(handle, command)
            case MemoryWrite():
                return self._write(handle, command)
            case MemoryRead():
                return self._read(handle, command)
            case Copy():
                return self._copy(handle, command)
            case KernelLaunch():
                return self._launch(handle, command)
            case Run():
                return self._run_process(handle, command)

    def _map(self, handle: CommandHandle, command: MmuMap) -> Steps:
        sip = self.machine.sip(command.sip)
        parts = command.places or ((command.size, command.cube, command.pe),)
        mapped = sum(size for size, _cube, _pe in parts)
        if mapped != command.size:
            raise BadAddress(f"{handle}: its places have {mapped} bytes, not {command.size}")
        cubes = [(size, sip.cube(number), pe) for size, number, pe in parts]
        places = [(size, cube.hbm(pe % cube.hbm_channels)) for size, cube, pe in cubes]
        self.space(command.sip).map_places(command.address, places, command.interleave)
        operand = self._operand(command.sip, command.address, command.size)
        self._log(handle, 0, writes=(operand,))
        yield from ()  # a generator that waits for nothing

    def _unmap(self, handle: CommandHandle, command: MmuUnmap) -> Steps:
        self.space(command.sip).unmap(command.address)
        self._log(handle, 0)
        yield from ()

    def _write(self, handle: CommandHandle, command: MemoryWrite) -> Steps:
        data = None if command.data is None else as_bytes(command.data)
        size = len(data) if data is not None else command.size
        if size is None:
            raise LocalProtocolError("MemoryWrite needs data, or a size where data is off")
        space = self.space(command.sip)
        yield from self._move_with_host(command.sip, command.address, size, is_write=True)
        if data is not None and size and space.mapping_at(command.address).has_data:
            space.write(command.address, data)
        self._log(handle, size, writes=(self._operand(command.sip, command.address, size),))
        # Handles live as long as their context, and with them would all that was ever written.
        handle.command = msgspec.structs.replace(command, data=None, size=size)

    def _read(self, handle: CommandHandle, command: MemoryRead) -> Steps:
        yield from self._move_with_host(command.sip, command.address, command.size, is_write=False)
        reads = (self._operand(command.sip, command.address, command.size),)
        self._log(handle, command.size, reads=reads)
        if self.enable_data:
            return self.space(command.sip).read(command.address, command.size)
        return None

    def _move_with_host(self, sip: int, address: int, size: int, *, is_write: bool) -> Steps:
        machine = self.machine
        shares = self.space(sip).shares(address, size) if size else []
        # All of them go over the one link with the host, so their chunks are bounded together.
        chunk = max(machine.topology.machine.system.chunk_bytes, -(-size // CHUNKS_PER_FLOW_MAX))
        flows = []
        for memory, count in shares:
            ends = (machine.host, memory) if is_write else (memory, machine.host)
            flows.append(machine.start_transfer(*ends, count, chunk))
        if flows:
            yield all_of(flows)

    def _copy(self, handle: CommandHandle, command: Copy) -> Steps:
        source, target = self.space(command.sip), self.space(command.destination_sip)
        between = ways_between(source, command.address, target, command.destination, command.size)
        flows = [self.machine.start_transfer(*ends, part) for ends, part in between.items()]
        if flows:
            yield all_of(flows)
        if self.enable_data:
            target.write(command.destination, source.read(command.address, command.size))
        self._log(
            handle,
            command.size,
            reads=(self._operand(command.sip, command.address, command.size),),
            writes=(self._operand(command.destination_sip, command.destination, command.size),),
        )

    def _launch(self, handle: CommandHandle, command: KernelLaunch) -> Steps:
        sip = self.machine.sip(command.sip)
        pes = DealtPes(sip, command.pes or range(self.topology.pe_count))
        name = command.name or getattr(command.kernel_fn, "__name__", "kernel")
        env = KernelEnvironment(self, command.sip, pes, name)
        value = yield from command.runner.run(
            env, command.kernel_fn, command.kernel_args, command.num_programs
        )
        self._log(handle, 0)
        return value

    def _run_process(self, handle: CommandHandle, command: Run) -> Steps:
        pes = DealtPes(self.machine.sip(command.sip), range(self.topology.pe_count))
        env = KernelEnvironment(self, command.sip, pes, command.name)
        value = yield from command.start(env)
        self._log(handle, 0)
        return value

    def _operand(self, sip: int, address: int, size: int) -> Operand:
        return Operand("hbm", f"sip{sip}", address, size)

    def _log(self, handle: CommandHandle, size: int, **operands: Any) -> None:
        command = handle.command
        kind = type(command).__name__
        assert handle.started_at is not None, "a command is logged after it has started"
        self.op_log.append(
            kind,
            command.name or kind,
            f"sip{command.sip}",
            handle.started_at,
            self.now,
            size=size,
            **operands,
        )


def _touched_by(command: Command) -> Sequence[int] | None:
    """The SIPs that a command touches by other ways than flows between SIPs; None for any."""
    match command:
        case MmuMap():
            return ()
        case Copy():
            return tuple(dict.fromkeys((command.sip, command.destination_sip)))
        case Run(is_confined=False):
            return None
        case _:
            return (command.sip,)
