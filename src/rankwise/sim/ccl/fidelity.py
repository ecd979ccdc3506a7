"""How exactly a collective is simulated: as kernels, queue by queue, or by messages.

========= ================================================== ==================================
level     what is simulated                                  which algorithms have it
========= ================================================== ==================================
`kernel`  programs on PEs (`kernel_execution`)               those whose module has a `kernel`
`queue`   every slot of every queue (`execution`)            those that have a `program`
`message` the rounds of a ring at once, or each message as   those that have a `program`
          a flow, on shares of links (`message_execution`)
========= ================================================== ==================================

`fidelity` of `ccl.yaml` names one of them, or `auto`, which is exact where that is cheap: the
kernel up to `KERNEL_SLOTS_MOST` slots that all ranks send together, queues up to `QUEUE_SLOTS_MOST`
(some two seconds of CPU), and messages beyond, where they are known to differ by less than 3 %:
each rank has a device of its own, no part is empty, no link dies (credits then wait among the data
of other ranks), jitter is 20 % at most, collectives that could meet have lanes enough to leave room
in their PEs (`may_fill_pes`) and hold up all ways of a ring alike (`may_get_out_of_step`), and the
numbers of slots and the sizes of chunks are those that suit the machine. A collective that is no
ring must also lie among recorded cases with such errors (`message_errors`), and no other group may
be under way. Kernel and queue agree within 2 %. Numbers are equal to the bit on every level.

A fidelity for one algorithm must be possible. One for all is a wish: an algorithm that has no such
level takes what `auto` gives it, and the result says which.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction
from types import ModuleType

from rankwise.core.collectives.program import Send
from rankwise.core.collectives.workspace import blocks_in
from rankwise.sim.ccl.algorithm_modules import algorithm_module, is_ours
from rankwise.sim.ccl.configuration import Algorithm, Level, QueueLayout, levels_of
from rankwise.sim.ccl.message_errors import known_error
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.hardware.faults import ChipFaults
from rankwise.sim.hardware.quantities import exactly
from rankwise.sim.hardware.routing import sip_edges
from rankwise.sim.hardware.specification import MachineSpec

ERROR_MOST = 0.03
"""Part of the time by which messages may differ from queues where `auto` uses them."""

KERNEL_SLOTS_MOST = 1_024
QUEUE_SLOTS_MOST = 16_384
_USUAL = QueueLayout()
JITTER_MOST = 20
"""Percent; with 100, messages are 3.1 % off on `torus16`."""


def level_of(
    algorithm: Algorithm,
    module: ModuleType,
    plan: Plan,
    item_bytes: int,
    lane_count: int,
    *,
    machine: MachineSpec | None = None,
    faults: ChipFaults | None = None,
    is_disturbed: Callable[[], bool] | None = None,
) -> Level:
    """The level on which a collective runs.

    Args:
        algorithm: as configured.
        module: that of the algorithm.
        plan: what its ranks want.
        item_bytes: bytes per element.
        lane_count: over how many PEs of each rank messages are spread.
        machine: where it runs; without it, of programs no errors are known.
        faults: of the machine.
        is_disturbed: tells whether it, with what it meets, could fill its PEs (`may_fill_pes`) or
            get out of step (`may_get_out_of_step`).
    """
    possible = levels_of(module)
    for level in possible:
        if level == algorithm.fidelity:
            return level
    if len(possible) == 1:
        return possible[0]
    slot_size = algorithm.queues.slot_size
    if "kernel" in possible and not has_more_slots(
        plan, item_bytes, lane_count, slot_size, KERNEL_SLOTS_MOST
    ):
        return "kernel"
    if (
        "message" in possible
        and _suits_messages(algorithm, plan)
        and (faults is None or not (faults.deaths or faults.jitter_percent > JITTER_MOST))
        and has_more_slots(plan, item_bytes, lane_count, slot_size, QUEUE_SLOTS_MOST)
        and (plan.rounds is not None or _is_close(algorithm, plan, item_bytes, lane_count, machine))
        and (is_disturbed is None or not is_disturbed())
    ):
        return "message"
    return "queue"


def fewest_lanes(lane_count: int, algorithms: Iterable[Algorithm]) -> int:
    """The lanes of a collective, or fewer if one that it can meet is configured to have fewer.

    The first lanes of all collectives are the same PEs: if a narrow one fills them, a wide one is
    held up there, too. By messages, it has been 33 % off. A collective whose lanes are not
    configured has few of them only if it is short.
    """
    return min(lane_count, *(each.queues.n_lanes or lane_count for each in algorithms), lane_count)


Ring = Sequence[AbstractSet[Hashable]]
"""The wires of each way from a member of a ring to the next one."""


def may_get_out_of_step(ring: Ring, others: Sequence[Ring]) -> bool:
    """Whether a ring could be held up on one of its ways and not on another one.

    By messages, all ways of a ring have one speed. That is right where they meet the same others,
    and these do not get out of step themselves: then all are held up at the same time. Else the
    ranks wait for each other in turn, and a ring takes longer than its slowest way does: rings that
    meet on some of their ways have been 9 % off, six of them 35 %.

    Args:
        ring: the one in question.
        others: those that it could meet, directly or through others.
    """
    rings = [ring, *others]
    users: dict[Hashable, set[int]] = {}
    for number, each in enumerate(rings):
        for wire in {wire for way in each for wire in way}:
            users.setdefault(wire, set()).add(number)
    seen, waiting = {0}, [0]
    while waiting:
        number = waiting.pop()
        met = [{other for wire in way for other in users[wire]} - {number} for way in rings[number]]
        if any(each != met[0] for each in met):
            return True
        waiting += sorted(met[0] - seen)
        seen |= met[0]
    return False


def may_fill_pes(spec: MachineSpec, lane_count: int, groups: int) -> bool:
    """Whether collectives of some groups, over so many lanes each, could fill parts of a PE.

    They take the same lanes, and each has a wire of the device for itself at best. To combine a
    byte, a lane loads it to send it, loads the operand, and stores the result. Where HBM channels
    are full, messages have been 15 to 40 % off.

    Args:
        spec: the machine.
        lane_count: over how many PEs of a device the narrowest of them is spread.
        groups: how many have ranks on one device.
    """
    if groups == 1:
        return False  # its collectives follow each other
    cube, sips = spec.cube, spec.system.sips
    arriving = groups * exactly(sips.fastest_link.bandwidth)
    if sips.link is not None:  # between levels, devices have wires of several kinds
        wires = Counter(sip for edge in sip_edges(sips) for sip in edge if sip < sips.count)
        arriving = min(groups, max(wires.values(), default=1)) * exactly(sips.link.bandwidth)
    in_a_cube = min(lane_count, cube.pes.count)
    lanes_of_channel = -(-in_a_cube // cube.hbm.channels)
    channel = exactly(cube.hbm.bandwidth) / lanes_of_channel
    narrowest = min(channel, exactly(spec.pe.dma.bandwidth))
    return Fraction(_MOVED_TO_COMBINE * arriving, lane_count) > narrowest


_MOVED_TO_COMBINE = 3


def is_short(plan: Plan, item_bytes: int, lane_count: int, slot_size: int) -> bool:
    """Whether a collective is small enough for a kernel: others meet it for a moment at most."""
    return not has_more_slots(plan, item_bytes, lane_count, slot_size, KERNEL_SLOTS_MOST)


def _suits_messages(algorithm: Algorithm, plan: Plan) -> bool:
    """Whether the message level is known to differ little."""
    queues, homes = algorithm.queues, plan.request.homes
    return (
        queues.n_slots is None
        and queues.vc_chunk_size is None
        and len(set(homes)) == len(homes)
        and (plan.rounds is None or bool(plan.part_elements.all()))
    )


def _is_close(
    algorithm: Algorithm, plan: Plan, item_bytes: int, lane_count: int, machine: MachineSpec | None
) -> bool:
    """Whether the errors of a program are recorded, and below the limit."""
    queues, request = algorithm.queues, plan.request
    if machine is None or not request.homes or not is_ours(algorithm_module(request.module)):
        return False
    if (queues.slot_size, queues.buffer_kind) != (_USUAL.slot_size, _USUAL.buffer_kind):
        return False
    size = request.elements * blocks_in(request.collective, request.size) * item_bytes
    name = request.module.rpartition(".")[2]
    error = known_error(name, machine, request.size, lane_count, size)
    return error is not None and error < ERROR_MOST


def has_more_slots(plan: Plan, item_bytes: int, lane_count: int, slot_size: int, most: int) -> bool:
    """Whether all ranks together send more slots than so many."""

    def slots_of(elements: int) -> int:
        return max(lane_count, -(-elements * item_bytes // slot_size))

    if plan.rounds is not None:
        # In each round every part is sent by some rank.
        parts = sum(slots_of(elements) for elements in plan.part_elements.tolist() if elements)
        return len(plan.rounds) * parts > most
    slots = 0
    alike = [plan.model] * plan.request.size if plan.symmetry is not None else None
    for program in alike or plan.programs:
        slots += sum(slots_of(each.span.length) for each in program if isinstance(each, Send))
        if slots > most:
            return True
    return False
