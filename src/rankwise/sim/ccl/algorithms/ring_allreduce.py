# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Ring all-reduce, written twice: as data, and as the kernel that a rank's PEs run (`kernel`).

The data, and what it does in which order: `rankwise.core.collectives.algorithms.ring_allreduce`.
"""

import rankwise.sim.triton.language as tl
from rankwise.core.collectives.algorithms.ring_allreduce import COLLECTIVE, part, program, rounds
from rankwise.sim.ccl.combining import combined
from rankwise.sim.triton import cdiv, jit, next_power_of_2

__all__ = ["COLLECTIVE", "kernel", "part", "program", "rounds"]


@jit
def kernel(
    workspace, elements: tl.constexpr, size: tl.constexpr, position: tl.constexpr, left, right,
    OP: tl.constexpr, LANES: tl.constexpr, SLOT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The same, by a program of one rank: it has a share of every part, of some slots.

    In step i it sends its share of part `position - i` on, and that of the part before comes in.
    So what comes in is what is sent in the next step, as many messages later as a share has slots;
    as many are sent before the first is received, but no more than the queue takes.
    """
    share: tl.constexpr = cdiv(cdiv(elements, size), LANES)
    slots: tl.constexpr = cdiv(share, SLOT)
    BLOCK: tl.constexpr = next_power_of_2(min(share, SLOT))
    messages: tl.constexpr = 2 * (size - 1) * slots
    ahead: tl.constexpr = min(slots, SLOTS)
    for message in tl.static_range(min(ahead, messages)):
        _send(workspace, right, position, message, elements, size, slots, LANES, SLOT, BLOCK)
    for message in tl.static_range(messages):
        step: tl.constexpr = message // slots
        places, inside, is_empty = _slot(
            position - step - 1, message % slots, elements, size, LANES, SLOT, BLOCK
        )
        if not is_empty:
            if step < size - 1:
                mine = tl.load(workspace + places, mask=inside)
                block = combined(mine, tl.recv(left, (BLOCK,), mine.dtype), OP)
            else:
                block = tl.recv(left, (BLOCK,), workspace.dtype.element_ty)
            if ahead == slots and message + ahead < messages:
                tl.send(right, block, mask=inside, sem="relaxed")
            tl.store(workspace + places, block, mask=inside)
        if ahead < slots and message + ahead < messages:
            _send(
                workspace,
                right,
                position,
                message + ahead,
                elements,
                size,
                slots,
                LANES,
                SLOT,
                BLOCK,
            )


@jit
def _send(
    workspace, right, position, message, elements, size, slots, LANES, SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Send a message whose slot is in memory."""
    places, inside, is_empty = _slot(
        position - message // slots, message % slots, elements, size, LANES, SLOT, BLOCK
    )
    if not is_empty:
        tl.send(right, tl.load(workspace + places, mask=inside), mask=inside, sem="relaxed")


@jit
def _slot(part, slot, elements, size, LANES, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """The places of a slot of this program's share of a part, which of them count, and if none."""
    which: tl.constexpr = (part + 2 * size) % size
    start: tl.constexpr = elements * which // size
    length: tl.constexpr = elements * (which + 1) // size - start
    lane = tl.program_id(0)
    first = start + length * lane // LANES + slot * SLOT
    stop = min(start + length * (lane + 1) // LANES, first + SLOT)
    places = first + tl.arange(0, BLOCK)
    return places, places < stop, first >= stop
