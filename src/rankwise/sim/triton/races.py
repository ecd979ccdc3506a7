"""The race detector: which program used which element last, and whether that was ordered.

Every program has a vector clock: how much of each program's work it knows to have happened. An
atomic operation publishes the clock of the program that makes it at that address, and takes over
what others have published there. A store is a race if the last store to, or load from, one of its
elements is not known to its program; a load, if the last store is not. Of the loads of an element
only the latest is remembered, so that a race between a store and an earlier load may be missed;
what is reported is one.
"""

from typing import NamedTuple

import numpy as np

from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import DataRace, Execution, kernel_frames, place
from rankwise.sim.triton.memory import Buffer, Target
from rankwise.sim.triton.tensor import tensor


class _Shadow(NamedTuple):
    """For each byte of a buffer: who stored and who loaded it last, when, and at which line."""

    writer: Array
    written: Array
    write_line: Array
    reader: Array
    read: Array
    read_line: Array


class RaceDetector:
    """Watches one launch, whose programs run one by one."""

    def __init__(self, program_count: int) -> None:
        self._clocks = np.zeros((program_count, program_count), np.int64)
        np.fill_diagonal(self._clocks, 1)
        self._published: dict[int, Array] = {}
        self._shadows: dict[int, _Shadow] = {}

    def on_load(
        self, execution: Execution, target: Target, pointer: tensor, mask: tensor | None
    ) -> None:
        """Check a load, and remember it."""
        me, addresses = self._touched(execution, target, pointer, mask)
        shadow = self._shadow_of(target.buffer)
        self._check(execution, target, addresses, shadow.writer, shadow.written, shadow.write_line)
        shadow.reader[addresses] = me
        shadow.read[addresses] = self._clocks[me, me]
        shadow.read_line[addresses] = _line()

    def on_store(
        self, execution: Execution, target: Target, pointer: tensor, mask: tensor | None
    ) -> None:
        """Check a store, and remember it."""
        me, addresses = self._touched(execution, target, pointer, mask)
        shadow = self._shadow_of(target.buffer)
        self._check(execution, target, addresses, shadow.writer, shadow.written, shadow.write_line)
        self._check(execution, target, addresses, shadow.reader, shadow.read, shadow.read_line)
        shadow.writer[addresses] = me
        shadow.written[addresses] = self._clocks[me, me]
        shadow.write_line[addresses] = _line()

    def on_atomic(self, execution: Execution, target: Target, pointer: tensor) -> None:
        """Order the program after those that were at these addresses, and publish its work."""
        me = int(execution.programs[0])
        clock = self._clocks[me]
        for index in np.unique(pointer.data).tolist():
            address = target.buffer.address + index * target.element.itemsize
            known = self._published.get(address)
            if known is not None:
                np.maximum(clock, known, out=clock)
            self._published[address] = clock.copy()
        clock[me] += 1

    def _touched(
        self, execution: Execution, target: Target, pointer: tensor, mask: tensor | None
    ) -> tuple[int, Array]:
        index = pointer.data
        if mask is not None:
            index = np.broadcast_to(index, mask.data.shape)[mask.data]
        size = target.element.itemsize
        start = index.reshape(-1) * size
        offsets = (start[:, None] + np.arange(size)).reshape(-1)
        return int(execution.programs[0]), offsets

    def _shadow_of(self, buffer: Buffer) -> _Shadow:
        found = self._shadows.get(buffer.address)
        if found is None or len(found.writer) < buffer.size_bytes:
            size = buffer.size_bytes
            found = _Shadow(
                np.full(size, -1, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int32),
                np.full(size, -1, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int32),
            )  # fmt: skip
            self._shadows[buffer.address] = found
        return found

    def _check(
        self,
        execution: Execution,
        target: Target,
        addresses: Array,
        who: Array,
        when: Array,
        line: Array,
    ) -> None:
        me = int(execution.programs[0])
        others = who[addresses]
        unknown = (others >= 0) & (others != me)
        unknown &= when[addresses] > self._clocks[me][np.maximum(others, 0)]
        if not unknown.any():
            return
        at = int(addresses[np.flatnonzero(unknown)[0]])
        other = int(who[at])
        width, height, _depth = execution.launch.grid
        their_id = (other % width, other // width % height, other // (width * height))
        raise DataRace(
            f"{place()}: {target.action} of element {at // target.element.itemsize} of buffer "
            f'"{target.buffer.name}" by program {execution.coordinates(0)} races with program '
            f"{their_id}, which used it at line {int(line[at])}",
            hint="order them with an atomic, or give each program elements of its own",
        )


def _line() -> int:
    innermost = next(iter(kernel_frames()), None)
    return 0 if innermost is None else innermost.f_lineno
