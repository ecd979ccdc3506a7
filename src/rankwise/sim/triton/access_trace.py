"""Access trace of a launch: all that its time follows from, seen while it is calculated.

Programs that run in lockstep, outside of simulated time, calculate what they would calculate on a
machine. What they do there in which order, and so how long it takes, may follow from what they
load. But data gets there through a few doors alone: the addresses and masks of loads and stores,
values by which a kernel decides, and numbers that become part of the pattern of an index
(`affine`). Values that go through them are written down. Two launches of a kernel with equal
arguments and equal traces do the same operations in the same order, with the same sizes at the same
places: on machines in the same state they take the same time, whatever their data.

A trace says nothing where programs look at each other: at atomics, volatile loads and messages,
or where one uses what another has stored. Nor where a pointer is found in memory, becomes a number
or is printed. Such launches have none.
"""

from collections.abc import Callable
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rankwise.base.errors import TimeLimit
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import ACTIVE, Execution, Launch, MustInterleave
from rankwise.sim.triton.launching import run_in_lockstep
from rankwise.sim.triton.memory import AccessTarget
from rankwise.sim.triton.tensor import tensor


class _Use(NamedTuple):
    """A load or a store of a group of programs."""

    programs: Array
    target: AccessTarget
    pointer: tensor
    mask: tensor | None

    def elements(self) -> tuple[Array, Array]:
        """Which elements it touches, and for each of them the program that does."""
        shape = (len(self.programs), *self.target.shape)
        index: Array = np.broadcast_to(self.pointer.data, shape)
        who = np.broadcast_to(self.programs.reshape(-1, *(1,) * len(self.target.shape)), shape)
        if self.mask is None:
            return index.reshape(-1), who.reshape(-1)
        mask = np.broadcast_to(self.mask.data, shape)
        return index[mask], who[mask]


class AccessTrace:
    """What a launch has done, with its memory counted from an address on.

    Args:
        start: that address; traces of launches in different places can be equal.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._digest = blake2b()
        self._uses: list[_Use] = []

    @property
    def digest(self) -> bytes:
        """Equal for equal traces."""
        return self._digest.digest()

    def decided(self, values: Array) -> None:
        """Write numbers down by which programs have decided."""
        self._digest.update(f"{values.dtype.str}{values.shape}".encode())
        self._digest.update(values.tobytes())

    def uses(
        self, execution: Execution, target: AccessTarget, pointer: tensor, mask: tensor | None
    ) -> None:
        """Write a load or a store down: where, and under which mask."""
        self._uses.append(_Use(execution.programs, target, pointer, mask))
        place = target.buffer.address - self._start
        self._digest.update(f"{target.action} {place} {target.element} {target.shape}".encode())
        pattern = pointer.as_affine()
        if pattern is None:
            self.decided(pointer.data)
        else:
            self._digest.update(f"{pattern.strides}".encode())
            self.decided(pattern.base)
        if mask is None:
            return
        if mask.box is None:
            self.decided(mask.data)
            return
        for axis, bound in enumerate(mask.box.bounds):
            if bound is not None:
                self._digest.update(f"axis {axis}".encode())
                for edge in bound:
                    self.decided(edge)

    def keeps_programs_apart(self) -> bool:
        """Whether no program has used what another one has stored."""
        stored = {use.target.buffer.region for use in self._uses if use.target.action == "store"}
        return all(
            _are_apart([use for use in self._uses if use.target.buffer.region == region])
            for region in sorted(stored)
        )


def _are_apart(uses: list[_Use]) -> bool:
    """Whether each element is used by one program alone, if it is stored."""
    buffers = [use.target.buffer for use in uses]
    start = min(buffer.address for buffer in buffers)
    end = max(buffer.address + buffer.size_bytes for buffer in buffers)
    (size, *others) = {use.target.element.itemsize for use in uses}
    if others or any((buffer.address - start) % size for buffer in buffers):
        return False  # the same bytes as elements of different sizes
    owners = np.full((end - start) // size, -1, np.int64)
    for use in sorted(uses, key=lambda use: use.target.action, reverse=True):  # stores first
        index, who = use.elements()
        index = index + (use.target.buffer.address - start) // size
        if ((owners[index] != who) & (owners[index] != -1)).any():
            return False
        if use.target.action == "store":
            owners[index] = who
            if (owners[index] != who).any():
                return False
    return True


def calculate_traced(
    launch: Launch, body: Callable[[], Any], trace: AccessTrace
) -> Callable[[], None] | None:
    """Calculate what a launch stores, and write down its trace; return what takes that back.

    None, and nothing has changed, if it has no trace, or fails.
    """
    launch.access_trace = trace
    launch.may_spin_wait = True  # a program that waits for another one would block for ever
    launch.prints = launch.memory.elsewhere = _refuse
    kept: list[Execution] = []

    def finish(execution: Execution) -> None:
        execution.flush()
        kept.append(execution)

    def take_back() -> None:
        for execution in reversed(kept):
            execution.take_back()

    outer, is_whole = ACTIVE.execution, False
    programs = np.arange(prod(launch.grid), dtype=np.int64)
    try:
        with np.errstate(all="ignore"):
            left = run_in_lockstep(launch, body, programs, finish)
        is_whole = not len(left) and not launch.knows_addresses
    except TimeLimit:  # real time is up: a run on a machine would report it too late
        raise
    except Exception:  # noqa: BLE001 (the run on a machine raises it again)
        if ACTIVE.execution is not None and ACTIVE.execution is not outer:
            kept.append(ACTIVE.execution)
    finally:
        ACTIVE.execution = outer
    if not is_whole:
        take_back()
        return None
    return take_back


def _refuse(_given: object) -> NoReturn:
    raise MustInterleave
