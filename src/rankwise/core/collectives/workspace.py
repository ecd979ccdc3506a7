"""Where operands and results lie in a workspace: the table of `program`, as functions."""

from rankwise.core.collectives.program import Span, Task

BLOCKS_IN = {"reduce_scatter", "all_to_all", "scatter"}
"""Collectives whose operands have a block for each rank."""
_BLOCKS_OUT = {"all_gather", "all_to_all", "gather"}
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}


def blocks_in(collective: str, size: int) -> int:
    """How many blocks an operand has."""
    return size if collective in BLOCKS_IN else 1


def blocks_out(collective: str, size: int) -> int:
    """How many blocks a result has."""
    return size if collective in _BLOCKS_OUT else 1


def frame_elements(collective: str, task: Task) -> int:
    """Elements of a workspace before the scratch of the algorithm."""
    if collective == "barrier":
        return max(1, task.elements)
    blocks = (collective in BLOCKS_IN) + (collective in _BLOCKS_OUT)
    return task.elements * task.size * blocks if blocks else task.elements


def operand_of(collective: str, task: Task) -> Span:
    """Where the operand of a rank lies in its workspace."""
    if collective in {"all_gather", "gather"}:
        return task.block(task.rank)
    return Span(0, task.elements * blocks_in(collective, task.size))


def result_of(collective: str, task: Task) -> Span | None:
    """Where the result of a rank lies in its workspace; None if it has none."""
    match collective:
        case "reduce_scatter" | "scatter":
            return task.block(task.rank)
        case "all_to_all":
            length = task.size * task.elements
            return Span(length, 2 * length)
        case "all_gather":
            return Span(0, task.size * task.elements)
        case "gather":
            return Span(0, task.size * task.elements) if task.rank == task.root else None
        case "reduce":
            return Span(0, task.elements) if task.rank == task.root else None
        case "barrier":
            return None
        case _:
            return Span(0, task.elements)
