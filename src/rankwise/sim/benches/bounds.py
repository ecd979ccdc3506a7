"""How fast a task could be at best: rooflines for kernels, alpha-beta for collectives.

**Roofline.** A kernel needs at least its floating-point operations over the rate of the engines and
at least its bytes over the bandwidth of the memory, of all PEs of the devices that it may use. What
it needs of the math engine is counted apart, as exponentials take several times as long as sums.

**Alpha-beta.** A collective needs at least what its chain of messages costs in latency alone, where
each message waits for those that it depends on, and at least the bytes of the busiest link between
devices over its bandwidth, plus one latency. For a ring of n ranks with S bytes those are 2 (n - 1)
alpha and 2 (n - 1) S / (n B) + alpha, the two halves of the usual closed form; they overlap, since
slots are passed on while later ones still come in. The lower bound is the larger one of the two;
the alpha-beta law is the chain of latencies and the time of the bytes, one after the other: for the
ring 2 (n - 1) (alpha + S / (n B)).
"""

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from rankwise.core.collectives.program import Receive, Send
from rankwise.sim.ccl.execution import dependencies
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.hardware.cost_models import RateTable
from rankwise.sim.hardware.hardware_machine import HardwareMachine
from rankwise.sim.hardware.quantities import PICOSECONDS_PER_SECOND
from rankwise.sim.hardware.topology import Topology


class Bound(NamedTuple):
    """What limits a task, and how many picoseconds it takes at least.

    Attributes:
        law: of a collective, the picoseconds of its alpha-beta law; 0 of other tasks.
    """

    name: str
    picoseconds: int
    law: int = 0


class Roofline(NamedTuple):
    """What some devices can do per second: operations on one engine, bytes of their memory."""

    flops_per_second: float
    bytes_per_second: float

    def bound(self, flops: int, size: int) -> Bound:
        """The bound for a task."""
        computing = round(PICOSECONDS_PER_SECOND * flops / self.flops_per_second)
        moving = round(PICOSECONDS_PER_SECOND * size / self.bytes_per_second)
        return Bound("compute", computing) if computing > moving else Bound("memory", moving)


def roofline_of(
    topology: Topology,
    dtype: str,
    *,
    engine: Literal["gemm", "math"] = "gemm",
    sips: int = 1,
    times: Fraction | int = 1,
) -> Roofline:
    """The roofline of some devices, for one dtype and one of the two engines.

    All PEs do an equal share, and take so many `times` as long as they should.
    """
    spec, clock = topology.machine, topology.machine.system.clock
    pes = float(sips * topology.pe_count / times)
    per_cycle = (
        spec.pe.gemm.flops_per_cycle if engine == "gemm" else spec.pe.math.elements_per_cycle
    )
    rate = float(RateTable(per_cycle, clock, f"the {engine} engine")[dtype])
    memory = sips * spec.sip.cubes.count * spec.cube.hbm.channels * spec.cube.hbm.bandwidth
    engines = pes * min(spec.pe.dma.bandwidth, spec.pe.tcm.bandwidth)
    return Roofline(pes * rate * PICOSECONDS_PER_SECOND, min(memory, engines) * 1e9)


def math_bound(topology: Topology, dtype: str, operations: Mapping[str, int]) -> Bound:
    """The time that the math engines of a device need for so many elements of each operation."""
    costs = topology.machine.pe.math.cost
    elements = sum(count * costs.get(operation, 1) for operation, count in operations.items())
    rate = roofline_of(topology, dtype, engine="math").flops_per_second
    return Bound("math", round(PICOSECONDS_PER_SECOND * elements / rate))


def alpha_beta_bound(
    machine: HardwareMachine, plan: Plan, homes: tuple[int, ...], item_bytes: int
) -> Bound:
    """The bound for a collective.

    Args:
        machine: where it runs.
        plan: what its ranks do.
        homes: the device of every rank.
        item_bytes: bytes per element.
    """
    chain = _chain_of_latencies(machine, plan, homes)
    with_latency, moving = _busiest(machine, plan, homes, item_bytes)
    return Bound("alpha-beta", max(chain, with_latency), chain + moving)


def _busiest(
    machine: HardwareMachine, plan: Plan, homes: tuple[int, ...], item_bytes: int
) -> tuple[int, int]:
    """How long the bytes of the busiest link take, with the latency of their way and without."""
    carried = _saved_by_switches(machine, plan, homes, item_bytes)
    longest = moving = 0
    for (source, target), elements in plan.elements_sent().items():
        path = machine.sip_links(homes[source], homes[target])
        for link in path:
            carried[link.name] = carried.get(link.name, 0) + elements * item_bytes
            busy = link.rate.time_for(max(0, carried[link.name]))
            longest = max(longest, busy + sum(each.latency for each in path))
            moving = max(moving, busy)
    return longest, moving


def _saved_by_switches(
    machine: HardwareMachine, plan: Plan, homes: tuple[int, ...], item_bytes: int
) -> dict[str, int]:
    """By link, less than nothing: what crosses it once and counts for each of several ranks."""
    if not machine.combines_in_switches or plan.rounds is not None:
        return {}
    unit = machine.topology.machine.system.sips.multicast_unit
    saved: dict[str, int] = {}
    for rank, home in enumerate(homes):
        copied, combined = plan.saved_by_switches(rank)
        other = next((each for each in homes if each != home and each // unit == home // unit), -1)
        if other >= 0:
            saved[machine.sip_links(home, other)[0].name] = -copied * item_bytes
            saved[machine.sip_links(other, home)[-1].name] = -combined * item_bytes
    return saved


def _chain_of_latencies(machine: HardwareMachine, plan: Plan, homes: tuple[int, ...]) -> int:
    """The instant at which the last rank is done if only the latency between devices took time."""
    if plan.rounds and plan.part_elements.all():
        return _chain_round_a_ring(machine, plan, homes)
    needs = [dependencies(program) for program in plan.programs]
    ends: list[list[int]] = [[] for _ in plan.programs]
    mail: dict[tuple[int, int], deque[int]] = {}
    runnable = deque(range(len(plan.programs)))
    waiting: dict[tuple[int, int], int] = {}
    while runnable:
        rank = runnable.popleft()
        done = ends[rank]
        while len(done) < len(plan.programs[rank]):
            step = len(done)
            instruction = plan.programs[rank][step]
            start = max((done[need.step] for need in needs[rank][step]), default=0)
            if isinstance(instruction, Send):
                way = (rank, instruction.peer)
                path = machine.sip_links(homes[rank], homes[instruction.peer])
                arrival = start + sum(link.latency for link in path)
                mail.setdefault(way, deque()).append(arrival)
                if way in waiting:
                    runnable.append(waiting.pop(way))
            elif isinstance(instruction, Receive):
                way = (instruction.peer, rank)
                if not mail.get(way):
                    waiting[way] = rank
                    break
                start = max(start, mail[way].popleft())
            done.append(start)
    return max((instant for each in ends for instant in each), default=0)


def _chain_round_a_ring(machine: HardwareMachine, plan: Plan, homes: tuple[int, ...]) -> int:
    """The same for a ring, whose messages each wait for the one of the round before."""
    assert plan.rounds is not None, "it is a ring"
    ring = plan.ring
    latencies = np.array(
        [
            sum(link.latency for link in machine.sip_links(homes[one], homes[other]))
            for one, other in zip(ring, (*ring[1:], ring[0]), strict=True)
        ],
        np.int64,
    )
    instants = np.zeros_like(latencies)
    for _ in plan.rounds:
        instants = np.roll(instants + latencies, 1)
    return int(instants.max())
