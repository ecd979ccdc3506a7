"""Kernels of Triton in programs of simulated ranks.

A program that says `import triton` finds the emulator, which computes on the rank's own memory.
Nothing else is needed where no machine is modelled.

On a modelled machine a launch also takes time, which goes by on the clock of its rank as that of an
operation of torch does. How long is found by a trial: the same launch on a machine of its own,
where the arguments lie as on the device and nothing else goes on. A trial computes nothing, so the
numbers are always the emulator's, and it costs a hundred times the CPU time of the emulation. So
there is one for each kind of launch: equal kernels, grids, whole numbers, and sizes and types of
tensors; the next launch of that kind takes the same time, on whatever rank. What of its time
depends on the contents of its tensors is that of the first launch.

A launch that cannot be tried, since it waits for others, is charged by what it does, as far as it
has come whenever it waits or others are told of its stores: what its programs calculate and move,
as one operation of those sizes; what they move from and to the memory of others, as messages, which
go on meanwhile; and the waits themselves. A line says so.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from rankwise.base.errors import RankwiseError
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.environment import DealtPes, KernelEnvironment
from rankwise.sim.hardware.op_log import OpLog
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.runtime.context import RuntimeContext
from rankwise.sim.runtime.host_tensors import buffers_behind, mapped_on_device
from rankwise.sim.runtime.placement import DeviceSelector
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import SHORT_NAMES
from rankwise.sim.triton.execution import Operation
from rankwise.sim.triton.jit import BoundLaunch, CompiledKernel
from rankwise.sim.triton.kernel_runner import bind_on, tried
from rankwise.sim.triton.launch_arguments import HOST_MACHINE, OTHERS, Arguments, TensorDescriptor
from rankwise.sim.triton.launch_replay import key_of
from rankwise.sim.triton.triton_shim import installed
from rankwise.simranks.prediction.clocks import Passage, Prediction, PricedWork, RankClock
from rankwise.simranks.prediction.costs import DeviceOperation, Engine
from rankwise.simranks.world.changes import MemoryChange
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import SimulatedWorld

_KEY = "kernels"
_WELL = -1


def find_triton(world: SimulatedWorld, say: Callable[[str], None]) -> Callable[[], None]:
    """Let the ranks of a world import Triton and launch kernels; returns what undoes it.

    Called by the rank that runs. `say` tells the user what could not be done.
    """
    prediction = world.prediction
    times = None if prediction is None else KernelTimes(prediction, say)
    world.own_state.add(_Launchers(world, times))
    stack = ExitStack()
    stack.enter_context(installed(models_cuda=False))
    return stack.close


class _Launchers:
    """Has the launches of each rank, which is a thread, go to a device of its own.

    Args:
        times: what launches take; None is no time.
    """

    def __init__(self, world: SimulatedWorld, times: "KernelTimes | None") -> None:
        self._world = world
        self._times = times

    def move_in(self, rank: Rank) -> None:
        """Direct the launches of a thread, once."""
        if _KEY in rank.own_state:
            return
        rank.own_state[_KEY] = True
        clock = meter = None
        if self._times is not None:
            clock = self._world.prediction.clock_of(rank)
            meter = Meter(self._world.prediction, clock, self._world.changes.owner_of)
            HOST_MACHINE.set(_Launcher(self._times, meter))
        OTHERS.set(_OtherRanks(self._world, clock, meter))

    def move_out(self, rank: Rank) -> None:
        """It stays so."""


class _OtherRanks:
    """The ranks beside one, for its kernels that wait for theirs; an `Others`."""

    def __init__(
        self, world: SimulatedWorld, clock: RankClock | None, meter: "Meter | None"
    ) -> None:
        self._world = world
        self._clock = clock
        self._meter = meter

    def wait(self, awaited: str) -> None:
        """Let other ranks run until memory has changed, and go on no earlier than that."""
        change, changes = MemoryChange(awaited), self._world.changes
        self._charge()
        with changes.awaited_by_kernel(change):
            self._world.scheduler.wait(change)
        if self._clock is not None:
            self._clock.wait_until(changes.time)

    def notify(self) -> None:
        """Wake the ranks that wait for memory to change."""
        self._charge()
        self._world.changes.made_by_kernel(0 if self._clock is None else self._clock.time)

    def _charge(self) -> None:
        if self._meter is not None:
            self._meter.charge()


class Meter:
    """Counts what launches of one rank do that cannot be tried; an `Observer`.

    Args:
        prediction: knows what that takes.
        clock: of the rank.
        owner_of: tells whose shared memory has an address.
    """

    def __init__(
        self, prediction: Prediction, clock: RankClock, owner_of: Callable[[int], int | None]
    ) -> None:
        self.clock = clock
        self._prediction = prediction
        self._owner_of = owner_of
        self._name, self._dtype = "", ""
        self._begin_again()

    def begin(self, name: str, dtype: str) -> None:
        """What is counted from now on is of this operation, on elements of this type."""
        self._name, self._dtype = name, dtype

    def operation(self, operation: Operation) -> None:
        """Count an operation of a program."""
        times = len(operation.programs)
        if operation.kind in _ACCESSES:
            size = times * operation.size_bytes
            owner = self._owner_of(operation.address)
            if owner in {None, self.clock.number}:
                self._size += size
            else:
                self._moved[owner] = self._moved.get(owner, 0) + size
        elif operation.shape is not None:
            self._products += 2 * times * math.prod(operation.shape)
        else:
            self._elements += times * operation.elements

    def settle(self) -> None:
        """Whatever was counted has happened."""

    def charge(self) -> None:
        """Let the time pass of what was counted since the last time.

        Products and elementwise work have engines of their own, so the longer of both counts.
        """
        begun, network = self.clock.time, 0
        counted: list[tuple[Engine, int]] = [("gemm", self._products), ("math", self._elements)]
        works = [
            DeviceOperation(self._name, engine, flops, self._size, self._dtype)
            for engine, flops in counted
            if flops or (self._size and engine == "math")
        ]
        if works:
            bound = self._prediction.costs.bound
            self.clock.compute(self.clock.bound(max(works, key=lambda work: bound(work)[1])))
        for owner, size in self._moved.items():
            network += self._prediction.network.message_time(owner, self.clock.number, size, begun)
        passage = Passage(None, sum(self._moved.values()), begun)
        passage.begins_at, passage.ends_at = begun, begun + network
        passage.kind = "accesses of kernels to other devices"
        self.clock.communicate(network)
        self.clock.wait(passage)
        self._begin_again()

    def _begin_again(self) -> None:
        self._size = self._products = self._elements = 0
        self._moved: dict[int, int] = {}


class _Launcher:
    """Where one rank launches kernels; a `HostMachine`."""

    def __init__(self, times: "KernelTimes", meter: Meter) -> None:
        self._times = times
        self._meter = meter

    @property
    def now(self) -> int:
        """The rank's time, in picoseconds."""
        return self._meter.clock.time

    def launch(self, kernel: Any, grid: Any, *args: Any, **meta: Any) -> Any:
        """Run a kernel, and let the rank's time go on by what it takes."""
        return self._times.run(kernel, grid, args, meta, self._meter)


class KernelTimes:
    """Runs launches in the emulator, and knows how long they take on a device of the machine."""

    def __init__(self, prediction: Prediction, say: Callable[[str], None]) -> None:
        self._prediction = prediction
        self._say = say
        # By device, if faults are inside of it; all that are well are alike.
        self._prices: dict[int, _Prices] = defaultdict(_Prices)
        self._contexts: dict[int, RuntimeContext] = {}
        self._complained_of: set[str] = set()
        self._untried: set[Hashable] = set()
        """Families of launches that cannot be tried."""
        self._command = picoseconds(prediction.topology.machine.system.host.command_ns)
        self._started = PricedWork(
            DeviceOperation("triton.launch", "math", 0, 0, ""), self._command
        )

    def run(
        self,
        kernel: Any,
        grid: Any,
        args: tuple[Any, ...],
        meta: Mapping[str, Any],
        meter: Meter,
    ) -> CompiledKernel:
        """Run a launch of a rank, and let its time go on by what it takes."""
        faults, device = self._prediction.topology.faults, meter.clock.device
        place = device if faults is not None and faults.is_inside(device) else _WELL
        prices = self._prices[place]
        context = self._contexts.get(place)
        if context is None:
            engine = GraphEngine(self._prediction.topology)
            context = RuntimeContext(engine, DeviceSelector(device), ccl={})
            self._contexts[place] = context
        with mapped_on_device(context, args, meta) as (on_device, by_name):
            environment = _environment(context, getattr(kernel, "__name__", "kernel"))
            launch = bind_on(environment, kernel, on_device, by_name, grid)
            if 0 in launch.sizes:
                launch.emulate()
                return launch.compiled()
            kind = _kind_of(launch)
            priced = prices.find(kind)
            if priced is None and kind.family not in self._untried:
                priced = self._priced(kind, launch, _tried(environment, launch))
                if priced is not None:
                    prices.keep(kind, priced)
            # Others are told of its stores as soon as it is over.
            meter.clock.compute(priced or self._started)
            # The emulator has the better words, if the kernel is to blame.
            if priced is not None:
                launch.emulate()
                return launch.compiled()
            work = _work(launch, None)
            meter.begin(work.name, work.dtype)
            launch.emulate(meter)
            meter.charge()
            return launch.compiled()

    def _priced(
        self,
        kind: "_LaunchKind",
        launch: BoundLaunch,
        trial: GraphEngine | Exception,
    ) -> PricedWork | None:
        if isinstance(trial, GraphEngine):
            work = _work(launch, trial.op_log)
            priced = PricedWork(work, self._command + trial.now)
            self._prediction.note(priced)
            return priced
        self._untried.add(kind.family)
        name = launch.function.__name__
        if name not in self._complained_of:
            self._complained_of.add(name)
            text = trial.message if isinstance(trial, RankwiseError) else str(trial)
            why, _, _ = text.partition("\n")
            machine = self._prediction.topology.name
            self._say(
                f"kernel {name} cannot be simulated alone on {machine}; its time is estimated from"
                f" its bytes, operations and waits: {why}"
            )
        return None


def _environment(context: RuntimeContext, name: str) -> KernelEnvironment:
    device = context.current_stream().device
    sip = context.engine.machine.sip(device.sip)
    return KernelEnvironment(context.engine, device.sip, DealtPes(sip, device.pes), name)


def _tried(environment: KernelEnvironment, launch: BoundLaunch) -> GraphEngine | Exception:
    """The machine of a trial, or why there cannot be one."""
    try:
        return tried(environment, launch)
    except (RankwiseError, ArithmeticError, LookupError, TypeError, ValueError) as problem:
        return problem


class _LaunchKind(NamedTuple):
    """What launches have in common that take the same time.

    Attributes:
        family: all but the whole numbers among the arguments that are no constants of the kernel.
        numbers: those that can decide the time, by the kernel's parameter.
    """

    family: Hashable
    numbers: tuple[tuple[str, Hashable], ...]


def _kind_of(launch: BoundLaunch) -> _LaunchKind:
    function, sizes, stages = launch.function, launch.sizes, launch.stages
    seen = {name: _seen(name, plain(value)) for name, value in launch.given.items()}
    numbers = {
        name: each
        for name, each in seen.items()
        if type(each) is int and name not in function.constants
    }
    others = {name: float if type(each) is float else each for name, each in seen.items()}
    others |= dict.fromkeys(numbers, int)
    known = key_of(function, others, sizes, stages)
    # Other values that a kernel knows are taken to stay as they are.
    family = known or (function, tuple(map(repr, others.items())), sizes, stages)
    return _LaunchKind(family, tuple(numbers.items()))


def _seen(name: str, value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        shape, strides, block = value.shape, value.strides, value.block_shape
        return (_seen(name, value.base), *map(tuple, (shape, strides, block)), value.padding)
    if isinstance(value, (tuple, list)):
        return tuple(_seen(name, each) for each in value)
    if isinstance(value, np.generic):
        return value.item()
    buffer = Arguments().buffer(name, value)
    return value if buffer is None else (buffer.dtype.name, len(buffer.flat))


class _Prices:
    """What kinds of launches take.

    Numbers such as seeds and counters of steps differ from launch to launch, and decide nothing.
    Where two launches that took the same time differed in a number alone, only its two leading bits
    are looked at from then on. So a number that does decide, such as a length that grows by one, is
    tried again before it is half as large again. If the time is another one then, all of it counts.
    """

    def __init__(self) -> None:
        self._known: dict[_LaunchKind, PricedWork] = {}
        self._indifferent: dict[Hashable, set[str]] = defaultdict(set)
        self._decisive: dict[Hashable, set[str]] = defaultdict(set)
        self._latest: dict[Hashable, tuple[_LaunchKind, PricedWork]] = {}

    def find(self, kind: _LaunchKind) -> PricedWork | None:
        """What a launch takes, if that is known."""
        return self._known.get(self._reduced(kind))

    def keep(self, kind: _LaunchKind, priced: PricedWork) -> None:
        """Note what a launch takes."""
        before, took = self._latest.get(kind.family, (kind, priced))
        self._latest[kind.family] = kind, priced
        numbers = set(self._reduced(before).numbers) ^ set(self._reduced(kind).numbers)
        differing = {name for name, _ in numbers}
        indifferent, decisive = self._indifferent[kind.family], self._decisive[kind.family]
        if took.duration == priced.duration:
            indifferent |= differing - decisive
        elif differing <= indifferent:
            indifferent -= differing
            decisive |= differing
        self._known[self._reduced(kind)] = priced

    def _reduced(self, kind: _LaunchKind) -> _LaunchKind:
        indifferent = self._indifferent[kind.family]
        return _LaunchKind(
            kind.family,
            tuple(
                (name, _leading_bits(number) if name in indifferent else number)
                for name, number in kind.numbers
            ),
        )


def _leading_bits(number: Hashable) -> Hashable:
    """The two leading bits of a number, and how many follow; equal to no number itself."""
    assert isinstance(number, int), "looked at once"
    following = max(0, number.bit_length() - 2)
    return number >> following, following


def _work(launch: BoundLaunch, op_log: OpLog | None) -> DeviceOperation:
    """What a launch is told as: with what has been logged of it, or else with its arguments."""
    buffers = buffers_behind(launch.given.values()).values()
    largest = max(buffers, key=lambda each: each.size_bytes, default=None)
    dtype = "" if largest is None else SHORT_NAMES.get(largest.dtype.name, largest.dtype.name)
    engine: Engine = "math"
    flops = 0 if largest is None else len(largest.flat)
    size = sum({each.address: each.size_bytes for each in buffers}.values())
    if op_log is not None:
        products = sum(each.flops for each in op_log if each.kind == "dot")
        if products:
            engine = "gemm"
        flops = products or sum(each.flops for each in op_log)
        size = sum(each.bytes for each in op_log if each.kind in _ACCESSES)
    return DeviceOperation(f"triton.{launch.function.__name__}", engine, flops, size, dtype)


_ACCESSES = frozenset({"load", "store", "atomic"})
