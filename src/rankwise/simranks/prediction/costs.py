"""What an operation takes on a device, and what ranks take together, in picoseconds.

An operation on a device takes what the driver needs to hand it over (`host.command_ns`), what the
engine needs to start, and what the roofline of the whole device gives for its operations and
bytes. A cost model of a plug-in (`pe.cost_model`) that has a method
`operation(name, flops, size, dtype)` is asked first; None leaves it to the roofline.

The time of a collective is computed at message level over the routes of the machine
(`ccl.message_timing`), on otherwise idle links. Of a ring, halving-doubling and, on a network of
levels, the hierarchical algorithm, the fastest one is taken.

**Faults of chips.** An operation is dealt to all PEs of a device in equal shares, so it takes as
long as the slowest of them. Messages pass slow links at their rates and go around dead ones. If a
link dies, a collective that is under way goes on around it with what is left of it; a message that
has begun arrives.
"""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

from rankwise.core.collectives.levels import grid_of_homes
from rankwise.sim.benches.bounds import Roofline, roofline_of
from rankwise.sim.ccl.message_model import Algorithm
from rankwise.sim.ccl.message_timing import NO_DAMAGE, placed_time
from rankwise.sim.hardware.cost_models import PluggedCosts, plugged_costs
from rankwise.sim.hardware.quantities import WIDTH_BYTES, picoseconds
from rankwise.sim.hardware.routing import axes_of
from rankwise.sim.hardware.topology import Topology

Engine = Literal["gemm", "math"]
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "barrier"})
_ANY_DTYPE = "f32"
"""For what the device has no engine for, such as complex numbers."""


INDUCTOR = "inductor"
"""The library that fused kernels of compiled graphs are said to be of."""


class DeviceOperation(NamedTuple):
    """One operation on a device.

    Attributes:
        name: torch's, such as `aten.mm`.
        engine: what carries it out.
        flops: operations on the engine: of `math`, one per element.
        size: bytes that it reads and writes.
        dtype: in the words of topologies.
        times: how many times as long it takes on its device as on one that is well.
        shapes: of the tensors that it takes, in order, those in lists too; of kernels of Triton,
            none.
        is_causal: whether it is attention that looks back only. `flops` count all of it.
    """

    name: str
    engine: Engine
    flops: int
    size: int
    dtype: str
    times: Fraction | int = 1
    shapes: tuple[tuple[int, ...], ...] = ()
    is_causal: bool = False


class DeviceCosts:
    """The costs of operations on one device of a machine."""

    def __init__(self, topology: Topology) -> None:
        spec = topology.machine
        self._topology = topology
        self._command = picoseconds(spec.system.host.command_ns)
        self._startup = {
            "gemm": picoseconds(spec.pe.gemm.startup_ns),
            "math": picoseconds(spec.pe.math.startup_ns),
        }
        self._factors = spec.pe.math.cost
        self._rooflines: dict[tuple[str, Engine, Fraction | int], Roofline] = {}

    def times(self, device: int) -> Fraction | int:
        """How many times as long everything takes on a device as on one that is well."""
        faults = self._topology.faults
        return 1 if faults is None else faults.slowest_pe(device)

    def bound(self, work: DeviceOperation) -> tuple[str, int]:
        """What limits it, `compute` or `memory`, and how long it takes at least."""
        flops = work.flops
        if work.engine == "math":
            flops = round(flops * self._factors.get(_operation(work.name), 1))
        limit = self._roofline(work.dtype, work.engine, work.times).bound(flops, work.size)
        return limit.name, limit.picoseconds

    def at_peak(self, work: DeviceOperation) -> int:
        """How long its products take at the peak of a device that is well."""
        if work.engine != "gemm":
            return 0
        return self._roofline(work.dtype, "gemm", 1).bound(work.flops, 0).picoseconds

    def time(self, work: DeviceOperation) -> int:
        """How long it takes."""
        answer = self._answer_of_plugin(work)
        if answer is not None:
            return math.ceil(answer * work.times)
        startup = math.ceil(self._startup[work.engine] * work.times)
        return self._command + startup + self.bound(work)[1]

    def launch(self, work: DeviceOperation, duration: int) -> int:
        """The part of its duration that is the command and the start of the engine."""
        most = self._command + math.ceil(self._startup[work.engine] * work.times)
        return max(0, min(most, duration - self.bound(work)[1]))

    def is_plugged(self, work: DeviceOperation) -> bool:
        """Whether a cost model of a plug-in says what it takes."""
        return self._answer_of_plugin(work) is not None

    def _answer_of_plugin(self, work: DeviceOperation) -> int | None:
        if self._plugged is None:
            return None
        return self._plugged.operation(work.name, work.flops, work.size, work.dtype)

    @cached_property
    def _plugged(self) -> PluggedCosts | None:
        return plugged_costs(self._topology.machine)

    def _roofline(self, dtype: str, engine: Engine, times: Fraction | int) -> Roofline:
        dtype = dtype if dtype in WIDTH_BYTES else _ANY_DTYPE
        found = self._rooflines.get((dtype, engine, times))
        if found is None:
            found = roofline_of(self._topology, dtype, engine=engine, times=times)
            self._rooflines[dtype, engine, times] = found
        return found


class NetworkCosts:
    """The costs of what ranks do together; rank r has device r."""

    def __init__(self, topology: Topology) -> None:
        faults = topology.faults
        self._sips = topology.machine.system.sips
        self._deaths = sorted({at for at, _ in faults.deaths if at}) if faults else []
        self._damages = [faults.damage(at) for at in (0, *self._deaths)] if faults else [NO_DAMAGE]
        self._known: dict[tuple[str, int, tuple[int, ...], int], int] = {}

    def time(self, kind: str, size: int, ranks: tuple[int, ...], begin: int = 0) -> int:
        """How long a collective takes.

        Args:
            kind: which one.
            size: bytes that a rank puts in; of a scatter, that it takes out.
            ranks: the members; of what has a root, that first.
            begin: when.

        Raises:
            Unreachable: links have died, and no way is left between two members.
        """
        now, share = begin, Fraction(1)
        whole = self._undisturbed(kind, size, ranks, begin)
        for death in self._deaths:
            if now < death < now + share * whole:
                share -= Fraction(death - now, whole)
                now, whole = death, self._undisturbed(kind, size, ranks, death)
        return now - begin + round(share * whole)

    def message_time(self, source: int, target: int, size: int, begin: int = 0) -> int:
        """How long a message takes from one rank to another that is sent at an instant.

        Raises:
            Unreachable: links have died, and no way is left.
        """
        if source == target:
            return 0
        return self._undisturbed("broadcast", size, (source, target), begin)

    def _undisturbed(self, kind: str, size: int, ranks: tuple[int, ...], begin: int) -> int:
        """How long it takes if no link dies meanwhile."""
        died = bisect_right(self._deaths, begin)
        key = (kind, size, ranks, died)
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = min(
                placed_time(kind, size, self._sips, ranks, algorithm, damage=self._damages[died])  # type: ignore[arg-type]
                for algorithm in self._algorithms(kind, ranks)
            )
        return time

    def _algorithms(self, kind: str, ranks: tuple[int, ...]) -> list[Algorithm]:
        if kind in _ROOTED:
            return ["rooted"]
        if kind == "all_to_all":
            return ["direct"]
        count, found = len(ranks), list[Algorithm](["ring"])
        if not count & (count - 1):
            found.append("halving_doubling")
        grid = grid_of_homes(ranks, axes_of(self._sips)) if self._sips.levels else None
        if grid is not None and len(grid.lengths) > 1:
            found.append("hierarchical")
        return found


def _operation(name: str) -> str:
    """The name of an elementwise operation in topologies: `exp` of `aten.exp_`."""
    return name.rpartition(".")[2].strip("_")
