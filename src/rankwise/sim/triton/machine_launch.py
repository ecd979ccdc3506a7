"""One launch of a kernel on a simulated machine.

What programs look at again and again, they wait for: the next change of memory, by a kernel, a copy
or the host. If none can come, the simulation itself finds the deadlock, and names the line.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.hardware.environment import DealtPes, KernelEnvironment
from rankwise.sim.hardware.memory import SIP_STRIDE, sip_of
from rankwise.sim.hardware.memory import Mapping as HostMapping
from rankwise.sim.hardware.occupancy import ProgramsOnPes
from rankwise.sim.hardware.op_log import Operand
from rankwise.sim.kernel import Future, Process, Steps, park, start_fiber
from rankwise.sim.triton.access_trace import AccessTrace, calculate_traced
from rankwise.sim.triton.dtypes import dtype, dtype_named
from rankwise.sim.triton.execution import ACTIVE, Execution, Launch, Operation
from rankwise.sim.triton.jit import BoundLaunch, JITFunction
from rankwise.sim.triton.launch_arguments import TensorDescriptor, storage_around, tensor_around
from rankwise.sim.triton.launch_replay import (
    RecordedOperation,
    Recording,
    Recordings,
    key_of,
    recorded,
)
from rankwise.sim.triton.memory import Buffer
from rankwise.sim.triton.peers import LaunchPeers, LaunchRank, SignalAwaited
from rankwise.sim.triton.queues import LaunchQueues, PeQueues, ProgramQueues
from rankwise.sim.triton.races import LaunchRaces, RaceDetector
from rankwise.sim.triton.timing import ProgramClock
from rankwise.sim.triton.wait_addresses import AwaitedChange, LastWriters

if TYPE_CHECKING:
    from rankwise.sim.hardware.hardware_machine import HardwareMachine, Pe
    from rankwise.sim.hardware.replicas import Original


class DevicePointer(msgspec.Struct, frozen=True):
    """An argument that lies in simulated memory.

    Attributes:
        address: the virtual address of its first byte, on the SIP of the launch.
        dtype: the type of its elements, or its name.
        elements: how many it has; up to the end of the mapping if None.
        name: how messages call it.
    """

    address: int
    dtype: Any
    elements: int | None = None
    name: str = ""


class _SharedState:
    """What the launches on one machine have in common."""

    def __init__(self, machine: "HardwareMachine") -> None:
        self.queues = PeQueues(machine)
        self.recordings = Recordings()
        self.setters = LastWriters()
        self.races: RaceDetector | None = None


_SHARED: "WeakKeyDictionary[HardwareMachine, _SharedState]" = WeakKeyDictionary()


def _shared_state(machine: "HardwareMachine") -> _SharedState:
    shared = _SHARED.get(machine)
    if shared is None:
        shared = _SHARED[machine] = _SharedState(machine)
    return shared


def watch_races(machine: "HardwareMachine") -> RaceDetector:
    """Watch all launches on a machine from now on, also for races between ranks."""
    shared = _shared_state(machine)
    shared.races = shared.races or RaceDetector()
    return shared.races


def unread_messages(machine: "HardwareMachine") -> list[str]:
    """What the kernels of a machine have sent to each other and never received."""
    shared = _SHARED.get(machine)
    return [] if shared is None else shared.queues.unread()


class MachineLaunch:
    """A launch, from its arguments to what it leaves in memory and in the op log."""

    def __init__(
        self,
        env: KernelEnvironment,
        ahead: int,
        is_representative_of: KernelEnvironment | None,
        place: LaunchRank,
        part: int | None = None,
    ) -> None:
        self._env = env
        self._part = part
        self._ahead = ahead
        self._is_representative_of = is_representative_of
        self._simulator = env.simulator
        self._buffers: dict[str, Buffer] = {}
        self._behind: dict[str, Buffer] = {}
        """By parameter, where `_buffers` is by name."""
        self._races: LaunchRaces | None = None
        self._function: JITFunction
        self._given: dict[str, Any] = {}
        self._sizes = (1, 1, 1)
        self._numbers: Sequence[int] = ()
        self._pes: Sequence[Pe] = env.pes
        self._stages: int | None = None
        self._recordings: tuple[Recording, ...] | None = None
        self._host_mappings: list[HostMapping] = []
        self.original: Original[MachineLaunch] | None = None
        """Notes what this launch does, for its replicas."""
        self._programs: ProgramsOnPes | None = None
        self._key: Hashable = None
        self._skip = 0
        self._places: dict[str, str] = {}
        """Of operations of an original, by theirs: there are few places and many operations."""
        self._shared = _shared_state(env.machine)
        self._rank = place

    @cached_property
    def _peers(self) -> LaunchPeers:
        return LaunchPeers(self._env, self._rank, self._shared.setters, self._registered)

    @cached_property
    def _channels(self) -> ProgramQueues:
        # A collective brings queues of its own, and a workspace of its own.
        queues = self._env.queues or LaunchQueues(
            self._shared.queues, self._env.machine, self._env.pe_of, prod(self._sizes)
        )
        return ProgramQueues(queues, self._wait_for_others)

    def prepare(self, launch: BoundLaunch) -> None:
        """Take the kernel's arguments, and see whether it can be a repetition."""
        function, self._sizes, self._stages = launch.function, launch.sizes, launch.stages
        given = {name: self._argument(name, value) for name, value in launch.given.items()}
        self._function, self._given = function, given
        everything = range(prod(self._sizes))
        self._numbers, self._pes = everything, self._env.pes
        # A repeated launch is not looked at, so that its races would be missed.
        if not self._env.enable_data and self._shared.races is None:
            if self._part is not None:
                self._numbers, self._pes = _programs_of(self._part, everything, self._env.pes)
            key = key_of(function, given, self._sizes, self._stages)
            self._key = key and (key, self._part)
            self._recordings = self._shared.recordings.find(self._key, self._recorded)
        if self._recordings is None or not (self.is_whole or _are_equal(self._recordings)):
            # Programs that depend on each other run all, or none; others take any free PE.
            if not self.is_whole:
                self._recordings = None
            self._numbers, self._pes = everything, self._env.pes

    @property
    def is_whole(self) -> bool:
        """Whether it runs all programs of its grid."""
        return len(self._numbers) == prod(self._sizes)

    def likeness(self) -> Hashable:
        """All that its times follow from, apart from its SIP; None if there is more to them."""
        env = self._env
        if not isinstance(env.pes, DealtPes) or env.queues is not None:
            return None
        known = self._known()
        if known is None:
            return None
        lie = []
        for name, buffer in self._behind.items():
            mapping = env.mapping_at(buffer.address)
            memories = mapping.places.memories
            if any(memory.sip != env.sip for memory in memories):
                return None
            places = tuple((memory.cube, memory.pe) for memory in memories)
            since = buffer.address - mapping.start, mapping.start - env.sip * SIP_STRIDE
            lie.append((name, since, mapping.size, mapping.places.layout, places))
        pes = [env.pe_of(number) for number in range(min(prod(self._sizes), len(env.pes)))]
        dealt = tuple((index, pe.dma_turn) for index, pe in zip(env.pes.indexes, pes, strict=False))
        return known, self._ahead, tuple(lie), len(env.pes), dealt

    def _known(self) -> Hashable:
        """What its programs do, as far as that follows from its arguments; None if it does not."""
        function, given, env = self._function, self._given, self._env
        if not env.enable_data:
            return None if self._recordings is None else self._key
        if self._shared.races is not None or 0 in self._sizes:
            return None
        if function.waits():
            return None
        key: Hashable = key_of(function, given, self._sizes, self._stages)
        return key

    def calculate(self) -> tuple[Hashable, Callable[[], None]] | None:
        """Calculate what it stores: its trace, and what takes that back; None if it has none."""
        if self._env.engine.watchpoints.are_awaited():
            return None  # a program would see the numbers before their time
        trace, take_back = self.calculate_traced()
        if take_back is None:
            return None
        if not trace.keeps_programs_apart():
            take_back()
            return None
        return trace.digest, take_back

    def is_apart_from(self, others: "Sequence[MachineLaunch]") -> bool:
        """Whether it was given other memory of the host than launches that go on."""
        return not _share_memory([self, *others])

    def carry_out(self, skip: int) -> Future:
        """Begin after all; the first so many operations are in the op log already."""
        self._skip = skip
        outer, ACTIVE.execution = ACTIVE.execution, None
        try:
            return self._simulator.process(self.all_steps(), self._env.name)
        finally:
            ACTIVE.execution = outer

    def calculate_traced(self) -> tuple[AccessTrace, Callable[[], None] | None]:
        """Calculate what it stores: its access trace, and what takes that back if it has one."""
        launch, body = self._function.prepared(self._given, self._sizes)
        trace = AccessTrace(self._env.sip * SIP_STRIDE)
        return trace, calculate_traced(launch, body, trace)

    def runs_of_bytes(self) -> Iterator[tuple[int, int, int]]:
        """Where the host keeps the memory that it was given: first byte, end, address there."""
        for buffer in self._behind.values():
            start = int(buffer.flat.__array_interface__["data"][0])
            yield start, start + buffer.size_bytes, buffer.address

    def all_steps(self) -> Steps:
        """Run all programs; if one fails, or the launch is cancelled, the others are ended."""
        programs = self._programs = self._start()
        try:
            yield programs.done
        except Exception as exception:
            programs.end(LocalProtocolError(f"another program of the launch failed: {exception}"))
            raise
        self.end()

    def _start(self) -> ProgramsOnPes:
        """Have a process begin for each program: a fiber, or the repetition of a recorded one."""
        function, given, sizes, stages = self._function, self._given, self._sizes, self._stages
        if self._recordings is not None:
            return self._on_pes(len(self._recordings), self._repeated(self._recordings))
        launch, body = function.prepared(given, sizes, self._shared.setters)
        launch.computes = self._env.enable_data
        launch.may_spin_wait = function.waits()
        launch.changes = lambda: self._env.engine.watchpoints.changes
        launch.stages = stages
        launch.memory.elsewhere = self._behind_address
        launch.peers, launch.channels = lambda: self._peers, lambda: self._channels
        # A trial of a configuration runs alone: no peer would answer.
        if self._is_representative_of is not None:
            launch.peers, launch.prints = None, _print_nothing
        count = prod(sizes)
        # The workspace of a collective has no other user.
        if self._shared.races is not None and self._env.queues is None:
            launch.races = self._shared.races.launch(count, self._rank.rank, self._run_of)
        self._races = launch.races
        return self._on_pes(count, partial(self._fiber, launch, body))

    def _on_pes(self, count: int, begin: "Callable[[int, Pe], Process]") -> ProgramsOnPes:
        env = self._env
        # Collectives have lanes of their own: whether they are kernels must make no difference.
        occupancy = None if env.queues is not None else env.machine.sip(env.sip).occupancy
        return ProgramsOnPes(
            self._simulator,
            occupancy,
            self._pes,
            count,
            begin,
            are_addressed=self._function.exchanges(),
        )

    def _fiber(self, launch: Launch, body: Callable[[], Any], number: int, pe: "Pe") -> Process:
        name = self._env.name_of(launch.name, number, pe)
        return start_fiber(self._simulator, self._program, launch, body, number, pe, name=name)

    def _recorded(self) -> tuple[Recording, ...] | None:
        launch, body = self._function.prepared(self._given, self._sizes)
        launch.computes = False
        launch.stages = self._stages
        # A program that cannot be recorded may have taken a lock before that was found.
        before = [(buffer.flat, buffer.flat.copy()) for buffer in self._behind.values()
                  if not buffer.dtype.is_floating()]  # fmt: skip
        found = recorded(launch, body, self._numbers, self._behind)
        for flat, values in before:
            flat[:] = values
        return found

    def _repeated(self, recordings: tuple[Recording, ...]) -> "Callable[[int, Pe], Process]":
        """What begins a program of a recording."""
        name = self._function.__name__

        def begin(number: int, pe: "Pe") -> Process:
            steps = self._clock(pe, _nobody_waits).repeat(recordings[number], self._placed)
            told = self._env.name_of(name, self._numbers[number], pe)
            return self._simulator.process(steps, told)

        return begin

    def _placed(self, step: RecordedOperation) -> Operation:
        """The operation of a recorded step, in the memory of this launch."""
        if not step.parameter:
            return step.operation
        buffer = self._behind[step.parameter]
        return msgspec.structs.replace(
            step.operation, buffer=buffer.name, address=buffer.address + step.offset
        )

    def _program(self, launch: Launch, body: Callable[[], Any], number: int, pe: "Pe") -> None:
        execution = Execution(
            launch,
            np.array([number], np.int64),
            wait=self._wait_for_change,
            name=self._env.name_of(launch.name, number, pe),
        )
        clock = self._clock(pe, lambda future: _wait_for(execution, future))
        execution.observer = execution.pacing = clock
        ACTIVE.execution = execution
        try:
            with np.errstate(all="ignore"):
                body()
                clock.finish()
            self._env.program_ended(clock.dma_waited)
        finally:
            ACTIVE.execution = None

    def _clock(self, pe: "Pe", wait: Callable[[Future], Any]) -> ProgramClock:
        start_dma = partial(self._env.start_dma, pe)
        return ProgramClock(self._simulator, pe, start_dma, wait, self._log, self._ahead)

    def _wait_for_change(self, change: object) -> None:
        if isinstance(change, AwaitedChange) and not change.is_certain:
            return  # to look again takes time, in which others go on
        execution = ACTIVE.execution
        assert execution is not None, "only a running program waits"
        future = Future(self._simulator, change)
        watchpoints = self._env.engine.watchpoints
        if isinstance(change, SignalAwaited):
            watchpoints.watch(future, change.word.address, change.word.element.itemsize)
        else:
            # It may look at several words in turn.
            watchpoints.watch_everything(future)
        self._wait_for_others(execution, future)

    def _wait_for_others(self, execution: Execution, future: Future) -> Any:
        """Leave a program's fiber, and its PE, until another program has done something."""
        clock, programs = execution.observer, self._programs
        assert isinstance(clock, ProgramClock), "a program runs in simulated time"
        assert programs is not None, "it has begun"
        if future.is_done:
            return _wait_for(execution, future)
        return programs.wait(clock.pe, partial(_wait_for, execution, future))

    def _log(self, operation: Operation, place: str, start: int, end: int) -> None:
        if self._skip:
            self._skip -= 1
            return
        self.log_at(operation.address, operation, place, start, end)
        if self.original is not None:
            self.original.note((operation, place), start, end)

    def log_replica(self, entry: Any, start: int, end: int, sip: int) -> None:
        """Write an operation of a launch on another SIP to the op log, as one of this."""
        operation, place = entry
        own = self._env.sip
        address = operation.address + (own - sip) * SIP_STRIDE
        image_place = self._places.get(place)
        if image_place is None:
            image_place = self._places[place] = f"sip{own}{place.removeprefix(f'sip{sip}')}"
        self.log_at(address, operation, image_place, start, end)

    def log_at(self, address: int, operation: Operation, place: str, start: int, end: int) -> None:
        """Write an operation to the op log, at an address of this launch."""
        env = self._env
        writes = operation.kind in ("store", "atomic", "copy")
        reads = operation.kind in ("load", "atomic")
        at: tuple[Operand, ...] = ()
        if writes or reads:
            home = sip_of(address)
            if home != env.sip:
                home = env.space_around(address).sip
            at = (Operand("hbm", f"sip{home}", address, operation.size_bytes),)
        m, n, k = operation.shape or (0, 0, 0)
        env.op_log.append(
            operation.kind,
            f"{env.name}.{operation.name}",
            place,
            start,
            end,
            size=operation.size_bytes,
            flops=2 * m * n * k or (operation.elements if operation.kind == "math" else 0),
            reads=at if reads else (),
            writes=at if writes else (),
        )
        if writes and operation.changes_memory:
            env.engine.watchpoints.changed(address, _extent_bytes(operation))

    def end(self) -> None:
        """All programs have come to their end."""
        if self._races is not None:
            self._races.ended()

    def take_back(self) -> None:
        """Let host memory that was mapped for this launch lie on the host alone."""
        for mapping in self._host_mappings:
            self._env.space.unmap(mapping.start)
        self._host_mappings.clear()

    def _behind_address(self, address: int) -> Buffer | None:
        """The buffer that a bare address lies in: symmetric memory, or a tensor of the host."""
        found = self._peers.behind(address)
        if found is None:
            found = tensor_around(address)
            if found is not None:
                self._map_storage(address)
                if self._is_representative_of is not None:
                    found = _apart(found)
                found = self._registered(found)
        return found

    def _map_storage(self, address: int) -> None:
        """Let all of a tensor's storage lie here: others may be views of it, and overlap."""
        if any(mapping.start <= address < mapping.end for mapping in self._host_mappings):
            return
        storage = storage_around(address)
        assert storage is not None, "a tensor was found there"
        address = storage.ctypes.data
        self._host_mappings.append(
            self._env.engine.map_host(self._env.sip, storage, address=address)
        )

    def _run_of(self, buffer: Buffer) -> tuple[int, int]:
        mapping = self._env.mapping_at(buffer.address)
        return mapping.start, mapping.size

    def _argument(self, name: str, value: Any) -> Any:
        """Tensors of the runtime and device pointers as buffers; anything else as it is."""
        if isinstance(value, DevicePointer):
            buffer = self._buffer(value.name or name, value.address, value.dtype, value.elements)
        elif hasattr(value, "address") and hasattr(value, "kind") and hasattr(value, "numel"):
            buffer = self._buffer(value.name or name, value.address, value.kind, value.numel())
            buffer.first = getattr(value, "first", 0)
        elif isinstance(value, TensorDescriptor):
            described = copy(value)
            described.base = self._argument(name, value.base)
            return described
        elif type(value) in {tuple, list}:
            return tuple(self._argument(f"{name}[{at}]", each) for at, each in enumerate(value))
        else:
            return value
        if buffer.name in self._buffers:
            buffer.name = f"{buffer.name} ({name})"
        self._buffers[buffer.name] = self._behind[name] = buffer
        return buffer

    def _registered(self, buffer: Buffer) -> Buffer:
        """A buffer that no argument has named."""
        whole = f"{buffer.name} at {buffer.address:#x}, {buffer.flat.size} {buffer.dtype}"
        for name in (buffer.name, whole):
            known = self._buffers.get(name)
            if known is None:
                buffer.name = name
                self._buffers[name] = buffer
                return buffer
            if _extent(known) == _extent(buffer):
                return known
        return buffer

    def _buffer(self, name: str, address: int, named: Any, elements: int | None) -> Buffer:
        type_ = named if isinstance(named, dtype) else dtype_named(str(named))
        mapping = self._env.mapping_at(address)
        size = mapping.end - address if elements is None else elements * type_.itemsize
        if address + size > mapping.end:
            raise LocalProtocolError(
                f"argument {name!r} has {size} bytes at {address:#x}, beyond the end of its "
                f"mapping at {mapping.end:#x}"
            )
        size = size // type_.itemsize * type_.itemsize
        if mapping.has_data:
            start = address - mapping.start
            flat = mapping.data[start : start + size].view(type_.storage)
        elif self._is_representative_of is not None and not type_.is_floating():
            flat = (
                self._is_representative_of.space_around(address)
                .read(address, size)
                .view(type_.storage)
            )
        else:
            # Never touched, so it takes no memory: it only has the right size.
            flat = np.zeros(size // type_.itemsize, type_.storage)
        return Buffer(name, flat, type_, address)


def _apart(buffer: Buffer) -> Buffer:
    """What a trial sees of memory that a pointer leads to: what it stores there, it alone sees.

    It takes a signal, for instance, for which a kernel of another rank waits.
    """
    is_seen = not buffer.dtype.is_floating()
    flat = buffer.flat.copy() if is_seen else np.zeros_like(buffer.flat)
    return Buffer(buffer.name, flat, buffer.dtype, buffer.address)


def _programs_of(
    part: int, everything: Sequence[int], pes: "Sequence[Pe]"
) -> "tuple[Sequence[int], Sequence[Pe]]":
    """The programs of so many PEs, evenly spread; all where that would be much of the grid."""
    used = min(len(everything), len(pes))
    if 4 * part > used:
        return everything, pes
    chosen = [(2 * turn + 1) * used // (2 * part) for turn in range(part)]
    numbers = tuple(number for number in everything if number % len(pes) in chosen)
    return numbers, [pes[position] for position in chosen]


def _are_equal(recordings: Iterable[Recording]) -> bool:
    """Whether programs do the same, but for where: then a PE does its share of the grid."""

    def work(step: RecordedOperation | int | None) -> Hashable:
        if not isinstance(step, RecordedOperation):
            return step
        done = step.operation
        return done.kind, done.name, done.shape, step.after

    return len({tuple(map(work, each)) for each in recordings}) <= 1


def _share_memory(launches: Iterable[MachineLaunch]) -> bool:
    """Whether two of them, or one in two places, have been given the same memory of the host."""
    runs = sorted((*run, at) for at, each in enumerate(launches) for run in each.runs_of_bytes())
    end, owner = 0, (-1, 0)
    for start, stop, address, at in runs:
        if start < end and (at, start - address) != owner:
            return True
        if stop > end:
            end, owner = stop, (at, start - address)
    return False


def _extent_bytes(operation: Operation) -> int:
    """How far it is from the lowest byte that an operation touches to the end of the highest."""
    footprint = operation.footprint
    return operation.size_bytes if footprint is None else int(footprint.offsets[-1]) + footprint.run


def _extent(buffer: Buffer) -> tuple[int, int, dtype]:
    return buffer.address, buffer.size_bytes, buffer.dtype


def _nobody_waits(_future: Future) -> None:
    raise AssertionError("a repeated program waits in simulated time, not in a greenlet")


def _print_nothing(_text: str) -> None:
    """What a trial would print is printed by the launch that it is a trial of."""


def _wait_for(execution: Execution, future: Future) -> Any:
    """Leave a program's fiber until a future has happened."""
    ACTIVE.execution = None
    try:
        return park(future)
    finally:
        ACTIVE.execution = execution
