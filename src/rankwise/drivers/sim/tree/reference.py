"""What a run must come to: the same tasks, one after the other, without a machine.

Which tasks are killed or cancelled depends on time, so the reference is told. All else follows: a
task that reads bytes which somebody has failed to write is skipped, and every other one completes
with values that are known.
"""

from collections.abc import Mapping, Sequence

from rankwise.core.tree.vocabulary import Access, Drained, EndCause
from rankwise.drivers.sim.invariants import InvariantBroken
from rankwise.drivers.sim.tree.memory import Cell, Cells, cells_of

UNFORESEEABLE = (EndCause.DIED, EndCause.LOST, EndCause.CANCELLED)


class SubmittedTask:
    """A task as it was submitted, with what has happened to it.

    Its accesses to slabs name the allocation as their space, since the same bytes may be given out
    several times.
    """

    __slots__ = ("accesses", "begun", "ended", "is_broken", "number", "raises", "seen", "width")

    def __init__(
        self, number: int, accesses: tuple[Access, ...], width: int, *, raises: bool
    ) -> None:
        self.number = number
        self.accesses = accesses
        self.width = width
        self.raises = raises
        self.begun = 0
        self.ended = 0
        self.seen: list[int] = []
        self.is_broken = False
        """Whether a member could not meet the others, because one of them died."""


def judge(tasks: Sequence[SubmittedTask], cells: Cells, drained: Drained) -> dict[Cell, int]:
    """Compare a run with the reference.

    Returns:
        The cells whose value is certain, with their values.

    Raises:
        InvariantBroken: a task ran twice, or not although it should, or saw wrong values.
    """
    if drained.task_count != len(tasks):
        raise InvariantBroken(f"{drained.task_count} tasks are told of {len(tasks)}")
    causes = {unfinished.number: unfinished.cause for unfinished in drained.unfinished}
    if len(causes) != len(drained.unfinished):
        raise InvariantBroken("a task is told twice")
    reference, tainted = _run_in_order(tasks, causes)
    for task in tasks:
        _judge_count(task, causes.get(task.number))
    for cell, value in reference.values.items():
        if cell not in tainted and cells.values.get(cell, 0) != value:
            raise InvariantBroken(f"cell {cell} has another value than it should")
    return {cell: value for cell, value in cells.values.items() if cell not in tainted}


def _run_in_order(
    tasks: Sequence[SubmittedTask], causes: Mapping[int, EndCause]
) -> tuple[Cells, set[Cell]]:
    cells, tainted = Cells(), set[Cell]()
    for task in tasks:
        told = causes.get(task.number)
        reads = [cell for a in task.accesses if a.reads for cell in cells_of(a)]
        writes = [cell for a in task.accesses if a.writes for cell in cells_of(a)]
        expected: EndCause | None = None
        if told in UNFORESEEABLE or (task.is_broken and told is EndCause.RAISED):
            expected = told
        elif any(cell in tainted for cell in reads):
            expected = EndCause.SKIPPED
        elif task.raises:
            expected = EndCause.RAISED
        if told is not expected:
            raise InvariantBroken(f"task {task.number} is told {told}, expected {expected}")
        if expected is not None:
            tainted.update(writes)
            continue
        seen = cells.read(task.accesses)
        if seen != task.seen:
            raise InvariantBroken(f"task {task.number} saw what it should not have seen")
        cells.write(task.accesses, task.number, seen)
        tainted.difference_update(writes)
    return cells, tainted


def _judge_count(task: SubmittedTask, cause: EndCause | None) -> None:
    match cause:
        case None:
            is_right = task.begun == task.ended == task.width
        case EndCause.SKIPPED:
            is_right = task.begun == 0
        case EndCause.RAISED:
            is_right = task.begun == task.width or task.is_broken
        case _:
            is_right = task.begun <= task.width
    if not is_right:
        raise InvariantBroken(
            f"task {task.number} began {task.begun} and ended {task.ended} of {task.width} times, "
            f"and is told {cause or 'completed'}"
        )
