"""Blocks from nothing: program numbers, ranges, loops."""

import builtins
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.affine import Affine
from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.constants import MAKE_CONSTANT, NEEDS_CONSTANT, plain
from rankwise.sim.triton.execution import (
    Execution,
    KernelTypeError,
    KernelValueError,
    active,
    place,
)
from rankwise.sim.triton.promotion import common_type
from rankwise.sim.triton.tensor import scalar, tensor, to_tensor


def _grid_axis(axis: Any) -> int:
    axis = plain(axis)
    if axis not in (0, 1, 2):
        raise KernelValueError(f"{place()}: the grid has axes 0, 1 and 2, not {axis!r}")
    return int(axis)


def program_id(axis: Any) -> tensor:
    """This program's place along an axis of the grid."""
    return tensor(active().program_id(_grid_axis(axis)), t.int32, ())


def num_programs(axis: Any) -> tensor:
    """How many programs there are along an axis of the grid."""
    return scalar(active().launch.grid[_grid_axis(axis)], t.int32)


def arange(start: Any, end: Any) -> tensor:
    """The integers from `start` up to, not including, `end`; a power of two of them."""
    first, last = plain(start), plain(end)
    if isinstance(first, tensor) or isinstance(last, tensor):
        raise KernelTypeError(
            f"{place()}: arange {NEEDS_CONSTANT}",
            hint=f"{MAKE_CONSTANT}; or add the offset to the block",
        )
    size = int(last) - int(first)
    if size <= 0 or size & (size - 1):
        raise KernelValueError(
            f"{place()}: arange({first}, {last}) has {size} elements: it must be a power of two",
            hint="use triton.next_power_of_2 and mask the rest",
        )
    active().launch.saw_block(size)
    pattern = Affine(np.array([first], dtype=np.int64), (1,))
    return tensor(None, t.int32, (size,), affine=pattern)


def range(
    arg1: Any,
    arg2: Any = None,
    step: Any = None,
    num_stages: Any = None,
    loop_unroll_factor: Any = None,
    disallow_acc_multi_buffer: bool = False,
    flatten: bool = False,
    warp_specialize: bool = False,
    disable_licm: bool = False,
) -> Iterator[tensor]:
    """Count, from and to numbers that may differ between programs.

    Programs whose loops are equally long stay together, whatever they count from. On a simulated
    machine `num_stages` says how many turns of the loop may be under way at a time, for which the
    launch's `num_stages` stands in; the other hints are for a compiler, and change nothing here.
    """
    del loop_unroll_factor, disallow_acc_multi_buffer
    del flatten, warp_specialize, disable_licm
    start, end = (0, arg1) if arg2 is None else (arg1, arg2)
    bounds = [to_tensor(1 if bound is None else bound) for bound in (start, end, step)]
    return _count(bounds, plain(num_stages))


def _count(bounds: list[tensor], stages: int | None) -> Iterator[tensor]:
    type_ = t.int32
    for bound in bounds:
        if bound.shape or not bound.dtype.is_int():
            raise KernelTypeError(f"{place()}: {bound!r} is not a bound of a loop")
        common = common_type(type_, bound.dtype, divides=False)
        assert common is not None
        type_ = common
    execution = active()
    if execution.observer is not None and any(bound.token is not None for bound in bounds):
        execution.observer.settle()
    start, end, step = (in_type(bound, type_).data.astype(np.int64) for bound in bounds)
    if (step == 0).any():
        raise KernelValueError(f"{place()}: a loop with step 0 never ends")
    trips = execution.decide(np.maximum(0, -(-(end - start) // step)))
    current = start
    pipeline = _Pipeline(execution, stages)
    for _trip in builtins.range(int(trips)):
        pipeline.begin_turn()
        yield tensor(current.astype(type_.compute), type_, ())
        current = current + step


class _Pipeline:
    """Holds a loop back: a turn begins when the one `stages` turns before it is done."""

    def __init__(self, execution: Execution, stages: int | None) -> None:
        self._pacing = execution.pacing
        self._stages = execution.launch.stages if stages is None else max(1, int(stages))
        self._starts: deque[int] = deque()

    def begin_turn(self) -> None:
        """Wait until the turn may begin; on no machine, at once."""
        if self._pacing is None or self._stages is None:
            return
        now = self._pacing.mark()
        self._starts.append(now)
        if len(self._starts) > self._stages:
            self._starts.popleft()
            self._pacing.reach(self._starts[0])


def static_range(arg1: Any, arg2: Any = None, step: Any = None) -> Iterator[int]:
    """Count at compile time: the numbers are plain ones."""
    bounds = [plain(arg) for arg in (arg1, arg2, step)]
    if any(isinstance(bound, tensor) for bound in bounds):
        raise KernelTypeError(f"{place()}: static_range {NEEDS_CONSTANT}", hint=MAKE_CONSTANT)
    start, end = (0, bounds[0]) if bounds[1] is None else (bounds[0], bounds[1])
    return iter(builtins.range(start, end, 1 if bounds[2] is None else bounds[2]))
