"""How a collective is laid out on the machine: over which lanes, through which queues."""

from collections.abc import Sequence
from typing import NamedTuple

from rankwise.sim.ccl.configuration import Algorithm, QueueLayout, check_against
from rankwise.sim.ccl.execution import lane_count, queues_per_pe
from rankwise.sim.ccl.lanes import suited_to
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.ccl.wire_classes import wire_classes
from rankwise.sim.hardware.hardware_machine import HardwareMachine


class LaneLayout(NamedTuple):
    """Over how many PEs of each rank messages are spread, and the queues between these."""

    lane_count: int
    queues: QueueLayout


def laid_out(  # noqa: PLR0917 (what a collective is, in its order)
    machine: HardwareMachine,
    plan: Plan,
    algorithm: Algorithm,
    item_bytes: int,
    sips: Sequence[int],
    fewest_pes: int,
) -> LaneLayout:
    """The layout of a collective.

    Args:
        machine: where it runs.
        plan: what its ranks do.
        algorithm: as it is configured.
        item_bytes: bytes per element.
        sips: the device of each rank.
        fewest_pes: how many PEs the rank has that has the fewest.

    Raises:
        ConfigError: the queues do not fit into a PE.
    """
    queues = algorithm.queues
    per_pe = queues_per_pe(plan)
    tcm = machine.topology.machine.pe.tcm.capacity
    check_against(queues, tcm, per_pe, f"algorithm {algorithm.name}")
    count = lane_count(plan, item_bytes, queues, fewest_pes)
    is_alike = wire_classes(machine.topology, sips, plan.symmetry) is not None
    between = plan.ways_of_one() if is_alike else plan.ways()
    ways = sorted({(sips[one], sips[other]) for one, other in between})
    return LaneLayout(count, suited_to(machine, queues, ways, count, per_pe))
