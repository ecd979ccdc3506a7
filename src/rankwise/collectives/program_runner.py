"""Arrays through programs: lays operands into workspaces, in chunks, and takes results out.

How a program is carried out is the transport's: between nodes by messages (`tcp`), over a segment
in rounds (`shared_memory`). A long array is cut into chunks, each of which is a collective of its
own, so that scratch memory stays in the caches; reductions are in the order that an algorithm's
docstring says, chunk by chunk.
"""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import numpy as np

from rankwise.collectives.ordered_reductions import Reduction
from rankwise.collectives.transport import Flat
from rankwise.core.collectives.player import PlayedInstruction, steps_of
from rankwise.core.collectives.program import Fold, Instruction, Task
from rankwise.core.collectives.workspace import (
    REDUCING,
    blocks_in,
    blocks_out,
    frame_elements,
    operand_of,
    result_of,
)

CarryOut = Callable[[ModuleType, Task, Flat, Reduction | None], None]
"""Plays a rank's program of an algorithm on a workspace."""

_KEPT_BYTES_MAX = 1 << 24
"""A scratch workspace that is no larger is kept for the next operation."""


@lru_cache(maxsize=1024)
def instructions_for(algorithm: ModuleType, task: Task) -> tuple[Instruction, ...]:
    """The program of one rank, without instructions that move nothing."""
    return tuple(each for each in algorithm.program(task) if each[1][0] != each[1][1])


@lru_cache(maxsize=1024)
def steps_for(algorithm: ModuleType, task: Task) -> tuple[PlayedInstruction, ...]:
    """The program of one rank, prepared for a `Player`."""
    return steps_of(instructions_for(algorithm, task))


def fold_spans(workspace: Flat, fold: Fold, reduction: Reduction) -> None:
    """Carry out a `Fold`, in the arrays' own dtype; its target is one of its sources at most."""
    first, *others = [workspace[start:stop] for start, stop in fold.sources]
    target = workspace[fold.target.start : fold.target.stop]
    if len(others) == 0:
        np.copyto(target, first)
        return
    # The target may be any of the sources, so the sum grows elsewhere until the last of them.
    total = first
    for place, other in enumerate(others):
        is_last = place == len(others) - 1
        if is_last:
            reduction.ufunc(total, other, out=target)
        elif total is first:
            total = reduction.ufunc(total, other)
        else:
            reduction.ufunc(total, other, out=total)


class ProgramRunner:
    """Carries out collectives among `size` ranks by programs."""

    def __init__(
        self,
        rank: int,
        size: int,
        carry_out: CarryOut,
        elements_max: Callable[[ModuleType, Task, int], int],
    ) -> None:
        """Play programs with `carry_out`, of no more than `elements_max(…)` elements at a time."""
        self._rank = rank
        self._size = size
        self._carry_out = carry_out
        self._elements_max = elements_max
        self._scratch = np.empty(0, np.uint8)

    def run(
        self,
        algorithm: ModuleType,
        source: Flat,
        result: Flat,
        reduction: Reduction | None = None,
        root: int = 0,
    ) -> None:
        """Carry out the algorithm's collective; of a mean, the division is the caller's."""
        collective = algorithm.COLLECTIVE
        if collective not in REDUCING:
            source, result = source.view(np.uint8), result.view(np.uint8)
        elements = source.size // blocks_in(collective, self._size)
        sources = source.reshape(-1, elements)
        results = result.reshape(blocks_out(collective, self._size), -1)
        task = Task(self._rank, self._size, elements, root)
        most = self._elements_max(algorithm, task, source.itemsize)
        for start in range(0, elements, most):
            end = min(start + most, elements)
            self._run_chunk(
                algorithm,
                task._replace(elements=end - start),
                sources[:, start:end],
                results[:, start:end],
                reduction,
            )

    def _run_chunk(
        self,
        algorithm: ModuleType,
        task: Task,
        sources: Flat,
        results: Flat,
        reduction: Reduction | None,
    ) -> None:
        collective = algorithm.COLLECTIVE
        length = frame_elements(collective, task)
        ask = getattr(algorithm, "scratch_elements", None)
        scratch = ask(task) if ask is not None else 0
        is_in_place = scratch == 0 and results.flags.c_contiguous and results.size == length
        workspace = (
            results.reshape(-1) if is_in_place else self._workspace(length + scratch, results.dtype)
        )
        operand = operand_of(collective, task)
        place = workspace[operand.start : operand.stop].reshape(sources.shape)
        if not (is_in_place and _address(place) == _address(sources)):
            np.copyto(place, sources)
        self._carry_out(algorithm, task, workspace, reduction)
        lies = result_of(collective, task)
        if lies is not None and not is_in_place:
            np.copyto(results, workspace[lies.start : lies.stop].reshape(results.shape))

    def _workspace(self, length: int, dtype: "np.dtype[np.generic]") -> Flat:
        needed = length * dtype.itemsize
        if needed > _KEPT_BYTES_MAX:
            return np.empty(length, dtype)
        if self._scratch.size < needed:
            self._scratch = np.empty(needed, np.uint8)
        return self._scratch[:needed].view(dtype)


def _address(array: Flat) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
