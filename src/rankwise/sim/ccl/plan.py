"""A collective, planned: the checked programs of all ranks and where the operands lie.

Plans depend on sizes alone, so they are kept and used again.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.core.collectives.program import Instruction, Send, Span, Task
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.core.collectives.workspace import REDUCING, frame_elements, operand_of, result_of
from rankwise.sim.ccl.algorithm_modules import (
    AlgorithmError,
    algorithm_module,
    instructions_of,
    scratch_of,
)
from rankwise.sim.ccl.configuration import Algorithm
from rankwise.sim.ccl.reductions import finish
from rankwise.sim.ccl.rehearsal import Schedule, rehearse, schedule_of
from rankwise.sim.triton.dtypes import Array, dtype


class Request(NamedTuple):
    """What ranks want together.

    Attributes:
        module: the importable name of the algorithm.
        collective: which collective it is.
        size: how many ranks take part.
        elements: elements per rank: of an operand, or of a block where operands have blocks.
        root: the root of a broadcast or a reduction.
        ring: the ranks in the order of the ring; empty for their own.
        homes: the device of each rank; empty if each has one of its own.
    """

    module: str
    collective: str
    size: int
    elements: int
    root: int = 0
    ring: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()

    def task(self, rank: int) -> Task:
        """What the program of one rank is given."""
        return Task(rank, self.size, self.elements, self.root, self.ring, self.homes)


def requested(  # noqa: PLR0917 (what a call says, in its order)
    algorithm: Algorithm,
    collective: str,
    elements: int,
    root: int,
    homes: tuple[int, ...],
    grid: tuple[int, int] | None,
) -> Request:
    """What ranks on the given devices want of an algorithm; `grid` is the shape of the SIPs."""
    follows_grid = algorithm.topology in {"mesh_2d", "torus_2d"}
    ring = _snake(homes, grid[1]) if follows_grid and grid else ()
    return Request(algorithm.module, collective, len(homes), elements, root, ring, homes)


def _snake(homes: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """The ranks along the rows of the grid of SIPs, every other row backwards."""

    def place(rank: int) -> tuple[int, int, int]:
        row, column = divmod(homes[rank], columns)
        return row, -column if row % 2 else column, rank

    return tuple(sorted(range(len(homes)), key=place))


class Plan(NamedTuple):
    """The programs of all ranks, the lengths of their workspaces, and what is calculated there.

    An algorithm that is a kernel alone has empty programs: who talks to whom is not known before.
    """

    request: Request
    programs: tuple[tuple[Instruction, ...], ...]
    lengths: tuple[int, ...]
    schedule: Schedule

    def results(
        self,
        operands: Sequence[Array],
        op: ReduceOp,
        kind: dtype,
        *,
        may_overwrite: bool = False,
    ) -> list[Array | None]:
        """Work out every rank's result from every rank's operand, in the compute type of `kind`.

        None where a rank has no result: at a reduction, all but the root. With `may_overwrite`, the
        operands may be used as workspaces, and results may lie in them.
        """
        workspaces = [
            self.workspace(rank, operand, kind, may_overwrite=may_overwrite)
            for rank, operand in enumerate(operands)
        ]
        rehearse(self.schedule, workspaces, op, kind)
        return [self.values(rank, space, op, kind) for rank, space in enumerate(workspaces)]

    def workspace(
        self, rank: int, operand: Array, kind: dtype, *, may_overwrite: bool = False
    ) -> Array:
        """A rank's workspace at the beginning, which may be the operand itself if it may."""
        length, place = self.lengths[rank], self.operand(rank)
        if place == (0, length):
            return operand.astype(kind.compute, copy=not may_overwrite)
        space = np.zeros(length, kind.compute)
        space[place.start : place.stop] = operand
        return space

    def values(self, rank: int, workspace: Array, op: ReduceOp, kind: dtype) -> Array | None:
        """A rank's result from its workspace at the end; None if it has none."""
        lies = self.result(rank)
        if lies is None:
            return None
        values = workspace[lies.start : lies.stop]
        if self.request.collective in REDUCING:
            values = finish(op, kind, values, self.request.size)
        return values

    def operand(self, rank: int) -> Span:
        """Where the operand of a rank lies in its workspace."""
        return operand_of(self.request.collective, self.request.task(rank))

    def result(self, rank: int) -> Span | None:
        """Where the result of a rank lies; None if it has none."""
        return result_of(self.request.collective, self.request.task(rank))

    def ways(self) -> set[tuple[int, int]]:
        """From whom to whom messages go; round the ring, where that is not known."""
        ways = {
            (rank, each.peer)
            for rank, program in enumerate(self.programs)
            for each in program
            if isinstance(each, Send)
        }
        tasks = map(self.request.task, range(self.request.size))
        return ways or {(task.rank, task.at(task.position + 1)) for task in tasks}

    @property
    def longest_message(self) -> int:
        """Elements of the longest message; of a workspace, where messages are not known."""
        known = [
            each.span.length
            for program in self.programs
            for each in program
            if isinstance(each, Send)
        ]
        return max(known or self.lengths)

    def elements_sent(self) -> dict[tuple[int, int], int]:
        """How many elements go from whom to whom: what the laws of an algorithm are about."""
        return {
            (rank, peer): count
            for rank in range(len(self.programs))
            for peer, count in self.elements_sent_by(rank).items()
        }

    def elements_sent_by(self, rank: int) -> dict[int, int]:
        """How many elements a rank sends to whom."""
        sent: dict[int, int] = {}
        for instruction in self.programs[rank]:
            if isinstance(instruction, Send):
                sent[instruction.peer] = sent.get(instruction.peer, 0) + instruction.span.length
        return sent


@lru_cache(maxsize=256)
def plan(request: Request) -> Plan:
    """Have an algorithm write the programs of all ranks, and check that they fit.

    Raises:
        ConfigError: the algorithm is for another collective, has failed (with the line of its
            module), or its programs do not fit.
    """
    module = algorithm_module(request.module)
    if request.collective != module.COLLECTIVE:
        raise ConfigError(
            f"algorithm {request.module} is for {module.COLLECTIVE}, not for {request.collective}"
        )
    if not 0 <= request.root < request.size:
        raise ConfigError(f"root {request.root} is none of ranks 0 to {request.size - 1}")
    programs, lengths = [], []
    for rank in range(request.size):
        task = request.task(rank)
        has_program = hasattr(module, "program")
        instructions = instructions_of(module, task) if has_program else iter(())
        programs.append(tuple(each for each in instructions if not _is_empty(each)))
        lengths.append(frame_elements(request.collective, task) + scratch_of(module, task))
    try:
        schedule = schedule_of(programs, lengths)
    except ConfigError as error:
        raise AlgorithmError(
            f"algorithm {request.module} with {request.size} ranks: {error}"
        ) from None
    return Plan(request, tuple(programs), tuple(lengths), schedule)


def _is_empty(instruction: Instruction) -> bool:
    """Whether nothing moves: both ends leave such a message out, because lengths agree."""
    start, stop = instruction[1]  # of every instruction, where it writes or what it sends
    return start == stop
