"""The runtime context: what a program of ranks receives as `torch`.

Everything that takes simulated time is a command to the engine, and everything that waits goes
through `wait`. Outside of ranks, `wait` runs the simulation until the command is complete. Inside
a rank it must not: a rank is a greenlet, the simulation is driven from one place, and other ranks
have work to submit first. So there the wait is *deferred*: it is put on a list, the rank gives way
to its parent, and the scheduler of the ranks resumes it at the instant of its command's completion.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
from greenlet import getcurrent

from rankwise.base.errors import ConfigError, Deadlock, LocalProtocolError, TimeLimit
from rankwise.base.suggestions import nearest
from rankwise.sim.ccl.choice import Chooser
from rankwise.sim.ccl.configuration import (
    CollectiveConfiguration,
    check_sizes_against,
    check_switches,
    load_configuration,
)
from rankwise.sim.hardware.commands import Command, CommandHandle, KernelLaunch, MmuMap
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.environment import DealtPes, KernelEnvironment
from rankwise.sim.hardware.shown import in_notebook
from rankwise.sim.kernel import SourceLine
from rankwise.sim.runtime import streams
from rankwise.sim.runtime.creation import TensorCreation
from rankwise.sim.runtime.distributed import Distributed
from rankwise.sim.runtime.multiprocessing import Multiprocessing
from rankwise.sim.runtime.placement import Device, DeviceSelector, DPPolicy, devices_for, layout_of
from rankwise.sim.runtime.tensor import Tensor
from rankwise.sim.triton.dtypes import dtype
from rankwise.sim.triton.kernel_runner import KernelRunner, bind_on
from rankwise.sim.triton.launch_arguments import TensorDescriptor
from rankwise.sim.triton.machine_launch import unread_messages, watch_races
from rankwise.sim.triton.peers import LaunchRank

_UNREAD_SHOWN = 8
_OPEN: "list[weakref.ref[RuntimeContext]]" = []
"""The contexts that are open, the innermost last; weak, so that none is kept alive by it."""


def active_context() -> "RuntimeContext":
    """The innermost context that is open."""
    while _OPEN:
        context = _OPEN[-1]()
        if context is not None:
            return context
        _OPEN.pop()
    raise LocalProtocolError(
        "no runtime context is open", hint="use it inside `with RuntimeContext(...) as torch:`"
    )


class RuntimeContext:
    """A machine, as programs see it.

    Args:
        engine: what carries commands out.
        target_device: which SIPs are used; ranks are dealt to them.
        correlation_id: a name for the run; it goes into the names of commands.
        spec: the machine's description; the engine's unless given.
        ccl: the configuration of collectives, a file or a mapping; `ccl.yaml` of the working
            directory if there is one, unless given.
        seed: what `rand` and `randn` draw from.
        detect_races: report two programs, of any rank, that use an element unordered, one of them
            writing; costs time, and every launch runs program by program.

    Attributes:
        rank_by_greenlet: which rank a greenlet runs, while ranks run.
        distributed: the collectives.
        multiprocessing: `spawn`.
        ops: `ops.symm_mem`, the collectives on symmetric memory.
        on_deferral: the scheduler of the ranks that run, which is told what each of them waits for.
    """

    def __init__(
        self,
        engine: GraphEngine,
        target_device: DeviceSelector | None = None,
        correlation_id: str = "",
        spec: Any = None,
        *,
        ccl: Any = None,
        seed: int = 0,
        detect_races: bool = False,
    ) -> None:
        if not isinstance(engine, GraphEngine):
            raise ConfigError(
                f"engine is {engine!r}, expected a GraphEngine", hint='GraphEngine("default")'
            )
        self.engine = engine
        self.target_device = target_device or DeviceSelector("all")
        self.correlation_id = correlation_id
        self.spec: Any = engine.topology.spec if spec is None else spec
        self.ccl: CollectiveConfiguration = (
            ccl if isinstance(ccl, CollectiveConfiguration) else load_configuration(ccl)
        )
        check_sizes_against(self.ccl, engine.topology.machine.pe.tcm.capacity)
        check_switches(self.ccl, engine.topology.machine.system.sips.multicast_unit)
        self.algorithms = Chooser(engine.machine, self.ccl)
        self.world_size = 1
        self.rank_by_greenlet: dict[Any, int] = {}
        self.races = watch_races(engine.machine) if detect_races else None
        self._completed: set[Any] = set()
        self._failures: dict[Any, BaseException] = {}
        self._given_up: set[CommandHandle] = set()
        self._pending_worker_waits: list[Any] = []
        self._awaited: dict[int, Any] = {}
        self.on_deferral: Callable[[int, Any], None] | None = None
        self._pending_collective_waits: list[Any] = []
        self._is_ending_ranks = False
        self._devices: dict[int, list[Device]] = {}
        self._streams = streams.StreamRegistry(self, engine.topology.machine.sip.cubes.count)
        self._tensor_count = 0
        creation = TensorCreation(self, seed)
        self.empty, self.empty_like = creation.empty, creation.empty_like
        self.zeros, self.zeros_like = creation.zeros, creation.zeros_like
        self.ones, self.full = creation.ones, creation.full
        self.rand, self.randn = creation.rand, creation.randn
        self.tensor, self.from_numpy = creation.tensor, creation.from_numpy
        self.manual_seed = creation.manual_seed
        self.distributed = Distributed(self)
        self.ops = SimpleNamespace(symm_mem=self.distributed.symmetric_operations)
        self.multiprocessing = Multiprocessing(self)
        self.float16, self.bfloat16, self.float32 = "f16", "bf16", "f32"
        self.int8, self.int32, self.int64 = "i8", "i32", "i64"

    if not TYPE_CHECKING:  # a type checker must still report missing names

        def __getattr__(self, name: str) -> Any:
            """Say that this is not all of torch, and where all of it runs."""
            if name.startswith("_"):
                raise AttributeError(name)
            meant = nearest(name, dir(self), 0.75)
            guess = f"did you mean {meant}? " if meant else ""
            raise AttributeError(
                f"the simulated torch has no {name!r}"
                f" ({guess}programs for PyTorch itself run with rankwise run --on sim)"
            )

    def _repr_html_(self) -> str:
        return in_notebook("run_html", self.engine)

    def __enter__(self) -> Self:
        _OPEN.append(weakref.ref(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _OPEN[:] = [ref for ref in _OPEN if ref() is not None and ref() is not self]
        if kind is None:
            self.drain_waits()
            self._streams.synchronize(without=self._given_up)
            self._refuse_unread_messages()

    def _refuse_unread_messages(self) -> None:
        """Refuse messages between kernels that no kernel has received."""
        unread = unread_messages(self.engine.machine)
        if unread:
            more = (
                f"; and {len(unread) - _UNREAD_SHOWN} more" if len(unread) > _UNREAD_SHOWN else ""
            )
            raise LocalProtocolError(
                f"data was sent that no rank received: {'; '.join(unread[:_UNREAD_SHOWN])}{more}",
                hint="every tl.send needs its tl.recv, in this launch or in another",
            )

    def wait(self, handle: Any, *, _meta: Any = None) -> None:
        """Wait until a command is complete; raise what it failed with.

        A command that was waited for already is complete, and costs nothing. In a rank the wait is
        deferred: the rank resumes at the instant at which the command is complete.
        """
        if handle in self._completed:
            self._raise_failure(handle)
            return
        if getcurrent().parent is None:
            self.complete(handle)
        else:
            if self._is_ending_ranks:
                raise SystemExit("this rank is ended, because another one has failed")
            self._pending_worker_waits.append(handle)
            self.note_deferral(self.rank, handle)
            self.give_way()
            # The scheduler that goes on with a rank has completed its wait, or has taken it off the
            # list. If it has done neither, the rank drives the engine itself.
            if handle in self._pending_worker_waits:
                self._pending_worker_waits.remove(handle)
                self.complete(handle)
            self._completed.add(handle)
        self._raise_failure(handle)

    def note_deferral(self, rank: int, handle: Any) -> None:
        """Note that a rank waits for a command, and have its scheduler told, if it has one."""
        self._awaited[rank] = handle
        if self.on_deferral is not None:
            self.on_deferral(rank, handle)

    def settle(self, handle: Any) -> None:
        """Take a command that is complete off the lists: its rank resumes."""
        self._carry_through(handle)  # which takes a collective off its list
        if handle in self._pending_worker_waits:
            self._pending_worker_waits.remove(handle)

    def awaited_by(self, rank: int) -> Any:
        """The command that a rank waited for last; None if it has waited for none."""
        return self._awaited.get(rank)

    def was_waited_for(self, handle: Any) -> bool:
        """Whether a command is complete, and was waited for."""
        return handle in self._completed

    def complete(self, handle: Any) -> None:
        """Run the simulation until a command is complete; only where it is driven from.

        A failure of the command is kept for those who wait for it.
        """
        try:
            self._carry_through(handle)
        except Deadlock:
            self.give_up()
            raise

    def _carry_through(self, handle: Any) -> None:
        if handle in self._completed:
            return
        try:
            self.engine.wait(handle)
        except (TimeLimit, Deadlock):
            raise  # it ends the run, or may yet be resolved, and is no failure of the command
        except Exception as failure:
            if not getattr(handle, "is_done", False):
                raise
            self._failures[handle] = failure
        self._completed.add(handle)
        if handle in self._pending_collective_waits:
            self._pending_collective_waits.remove(handle)

    def give_up(self) -> None:
        """Leave what is not complete now: why it never will be has been told.

        The end of the context does not wait for it, which would tell it again.
        """
        self._given_up.update(self._streams.unfinished())

    def _raise_failure(self, handle: Any) -> None:
        failure = self._failures.get(handle)
        if failure is not None:
            raise failure

    def give_way(self) -> None:
        """Leave the current rank for its parent, until the parent switches back."""
        if self._is_ending_ranks:
            raise SystemExit("this rank is ended, because another one has failed")
        parent = getcurrent().parent
        if parent is None:
            raise LocalProtocolError("only a rank can yield to other ranks")
        parent.switch()

    def drain_waits(self, *, with_collectives: bool = False) -> None:
        """Complete all deferred waits; only where the simulation is driven from.

        A wait that is stuck stays deferred if another one has been completed: the rank that goes on
        may submit what it takes, the kernel that sends a signal for instance.

        Args:
            with_collectives: complete those that ranks wait for, too.

        Raises:
            Deadlock: all that are left are stuck.
        """
        waits, collectives = self._pending_worker_waits, self._pending_collective_waits
        while handles := [*waits, *(collectives if with_collectives else ())]:
            stuck: Deadlock | None = None
            completed = 0
            for handle in handles:
                if stuck is not None and not handle.is_done:
                    continue
                try:
                    self._carry_through(handle)  # which takes a collective off its list
                except Deadlock as deadlock:
                    stuck = deadlock
                    continue
                if handle in waits:
                    waits.remove(handle)
                completed += 1
            if stuck is not None:
                if completed:
                    return
                self.give_up()
                raise stuck

    def drain_for_host_read(self) -> None:
        """Begin the barrier of a host read: no deferred wait is left when the host sees the value.

        Outside of ranks the waits are drained now. A rank waits for the work of its own device
        alone, which the read itself comes after. Pending collectives are not part of the barrier.
        """
        if getcurrent().parent is None:
            self.drain_waits()

    def synchronize(self) -> None:
        """Wait for everything that was submitted: by this rank, or outside of ranks by all."""
        if getcurrent().parent is None:
            self.drain_waits()
            self._streams.synchronize()
        else:
            self._streams.synchronize(self.device)

    @property
    def rank(self) -> int:
        """The rank that is running; 0 outside of ranks."""
        return self.rank_by_greenlet.get(getcurrent(), 0)

    @property
    def device(self) -> Device:
        """The device of the rank that is running."""
        return self.device_of(self.rank)

    def device_of(self, rank: int) -> Device:
        """The device of a rank."""
        devices = self._devices.get(self.world_size)
        if devices is None:
            topology = self.engine.topology
            devices = self._devices[self.world_size] = devices_for(
                self.world_size,
                self.target_device.sips(topology.sip_count),
                topology.machine.sip.cubes.count,
                topology.machine.cube.pes.count,
            )
        return devices[rank]

    def Stream(self, device: Device | None = None) -> streams.Stream:  # noqa: N802 (torch's name)
        """Make a stream of a device, this rank's by default."""
        return self._streams.make(device or self.device)

    def Event(self, *, enable_timing: bool = True) -> streams.Event:  # noqa: N802 (torch's name)
        """Make an event to record in a stream."""
        return streams.Event(self, enable_timing=enable_timing)

    def current_stream(self) -> streams.Stream:
        """The stream that this rank's commands go to."""
        return self._streams.current(self.rank, self.device)

    def default_stream(self, device: Device | None = None) -> streams.Stream:
        """The default stream of a device, this rank's by default."""
        return self._streams.default(device or self.device)

    def collective_stream(self, device: Device, series: str) -> streams.Stream:
        """The stream in which a device's collectives of one series run, in their order."""
        return self._streams.for_collectives(device, series)

    def stream(self, stream: streams.Stream) -> AbstractContextManager[streams.Stream]:
        """Let this rank's commands go to a stream for a while."""
        return self._streams.chosen(self.rank, stream)

    def stream_number(self) -> int:
        """What the engine calls the stream of this rank's commands."""
        return self.current_stream().number

    def submitted_to(self, *devices: Device) -> tuple[CommandHandle, ...]:
        """The latest commands of all streams of devices, collectives included."""
        return self._streams.latest(devices)

    def before_host_access(self, *devices: Device) -> tuple[CommandHandle, ...]:
        """The latest commands of all streams of devices: what a host access has to wait for.

        Collectives are not among them: a rank waits for its own with `work.wait()`, and which of
        the others' have begun is not the same for all ranks.
        """
        return self._streams.latest(devices, with_collectives=False)

    def touch(self, device: Device, handle: CommandHandle) -> None:
        """Note that a command of another device's stream reads or writes this device's memory."""
        self._streams.touch(device, handle)

    def submit(
        self, command: Command, stream: streams.Stream | None = None, line: SourceLine | None = None
    ) -> CommandHandle:
        """Give a command to the engine; it must be for the stream, by default the current one.

        `line` is the user's, if not the one that is being carried out.
        """
        stream = stream or self.current_stream()
        if stream.pending_dependencies:
            command = _with_dependencies(command, stream.pending_dependencies)
            stream.pending_dependencies = []
        handle = self.engine.submit(command, line)
        stream.last = handle
        return handle

    def allocate(
        self,
        shape: Sequence[int],
        kind: dtype,
        dp: DPPolicy | None = None,
        name: str | None = None,
        device: Device | None = None,
    ) -> Tensor:
        """Map the addresses of a tensor; its values are zero. Waits for the mapping."""
        lengths = tuple(int(length) for length in shape)
        if any(length < 0 for length in lengths):
            raise LocalProtocolError(f"a tensor's shape is {lengths}, expected no negative length")
        device = device or self.device
        name = name or f"tensor{self._tensor_count}"
        self._tensor_count += 1
        turns = self.engine.topology.machine.cube.hbm.interleave_bytes
        layout = layout_of(lengths, kind.itemsize, dp, device, turns)
        places = tuple(tuple(piece) for piece in (*layout.pieces, *layout.copies))
        size = sum(piece[0] for piece in places)
        address = self.engine.space(device.sip).reserve(size)
        if places:
            stream = self.current_stream()
            command = MmuMap(
                sip=device.sip,
                address=address,
                size=size,
                places=places,  # type: ignore[arg-type]
                interleave=layout.interleave,
                name=f"map {name}",
                stream=stream.number,
            )
            self.wait(self.submit(command, stream))
        return Tensor(self, lengths, kind, device=device, address=address, dp=dp, name=name)

    def launch(self, kernel: Any, grid: Any, *args: Any, **meta: Any) -> CommandHandle:
        """Run a kernel on the PEs of this rank's device, once per point of the grid.

        On the default stream, waits until it is complete; on another one, returns at once.

        Args:
            kernel: a function of the kernel language, under `triton.jit` or not.
            grid: how many programs: a number, up to three of them, or a function of the
                kernel's parameters by name that returns them.
            args: the kernel's arguments: tensors, numbers.
            meta: more of them, by name.
        """
        stream = self.current_stream()
        for argument in (*args, *meta.values()):
            self._check_argument(argument, stream.device)
        sip, name = stream.device.sip, getattr(kernel, "__name__", "kernel")
        pes = DealtPes(self.engine.machine.sip(sip), stream.pes)
        environment = KernelEnvironment(self.engine, sip, pes, name)
        launch = bind_on(environment, kernel, args, meta, grid)
        command = KernelLaunch(
            sip=sip,
            stream=stream.number,
            runner=KernelRunner(place=LaunchRank(self.rank, self.world_size)),
            kernel_fn=launch,
            num_programs=math.prod(launch.sizes),
            pes=stream.pes,
            name=name,
        )
        handle = self.submit(command, stream)
        if stream is self.default_stream():
            self.wait(handle)
        return handle

    def _check_argument(self, argument: Any, device: Device) -> None:
        if isinstance(argument, TensorDescriptor):
            argument = argument.base
        if isinstance(argument, Tensor):
            argument.check_usable(self)
            if not argument.is_within_reach_of(device.sip):
                raise LocalProtocolError(
                    f"{argument.name} is on {argument.device}, and the kernel would run on"
                    f" {device}",
                    hint="each rank makes its own tensors; move values with copy_, or with"
                    " torch.distributed; symm_mem.empty makes memory that kernels of all ranks use",
                )
        elif isinstance(argument, np.ndarray):
            raise LocalProtocolError(
                f"an array of shape {argument.shape} was given to a kernel on the device",
                hint="make a tensor of it first, with torch.from_numpy",
            )
        elif isinstance(argument, tuple | list):
            for each in argument:
                self._check_argument(each, device)

    @property
    def now(self) -> int:
        """The current instant of simulated time, in picoseconds."""
        return self.engine.now


def _with_dependencies(command: Command, handles: list[CommandHandle]) -> Command:
    return msgspec.structs.replace(command, after=(*command.after, *handles))
