"""Carrying a launch out: groups of programs in lockstep, or each program in a greenlet.

Lockstep is tried first. A few programs run to see how large the kernel's blocks are; the rest go in
groups whose blocks fit a cache. A group whose programs part ways is run again in parts; so are
programs that take locks, if several want the same one. When a kernel asks for it (a
compare-and-swap that finds a lock taken, a volatile load, a loop that looks at memory and sees the
same again), or from the start when each program is to be seen by itself, the programs that are left
run as greenlets: each goes on until it has looked at memory twice and seen the same, then the next
one.

Both are orders in which an accelerator could have run the programs, and the same in every run.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
from greenlet import greenlet

from rankwise.base.errors import Deadlock, Waiting
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import (
    ACTIVE,
    KERNEL_CODE,
    Execution,
    GroupSplit,
    InTurn,
    Launch,
    MustInterleave,
)
from rankwise.sim.triton.launch_arguments import OTHERS
from rankwise.sim.triton.poll_limits import TRIES
from rankwise.sim.triton.wait_addresses import AwaitedChange

_GROUP_ELEMENTS = 1 << 18
"""Elements of the largest block over a group: a megabyte of fp32, which a cache holds."""
_FIRST_GROUP = 4
_GROUP_LARGEST = 1 << 14
_IDLE_ROUNDS = 1000
"""Rounds without a change before it counts as a deadlock: programs may count their tries."""
_IDLE_ROUNDS_BEFORE_OTHERS = 1
"""The same, where others may change memory."""


def run_launch(launch: Launch, body: Callable[[], object], *, interleave: bool = False) -> None:
    """Run `body` for every program of the launch's grid."""
    width, height, depth = launch.grid
    programs = np.arange(width * height * depth, dtype=np.int64)
    outer = ACTIVE.execution
    try:
        with np.errstate(all="ignore"):
            is_watched = launch.observer is not None or launch.races is not None
            launch.may_spin_wait = interleave
            if OTHERS.get() is not None:  # their turn comes when no program here has anything to do
                launch.tries = TRIES
            rest = programs if is_watched else run_in_lockstep(launch, body, programs)
            if len(rest):
                _run_interleaved(launch, body, rest)
    finally:
        ACTIVE.execution = outer
    others = OTHERS.get()
    if others is not None:
        others.notify()


def run_in_lockstep(
    launch: Launch,
    body: Callable[[], object],
    programs: Array,
    finish: Callable[[Execution], None] = Execution.finish,
) -> Array:
    """Run groups until all are done; return the programs that have to be interleaved.

    Args:
        launch: what they run for.
        body: the kernel with its arguments.
        programs: their numbers.
        finish: stores what a group that has come to its end has kept to itself.
    """
    waiting = deque([programs])
    size = _FIRST_GROUP
    ways = 1
    while waiting:
        group = waiting.popleft()
        if len(group) > size:
            waiting.appendleft(group[size:])
            group = group[:size]
        execution = Execution(launch, group)
        ACTIVE.execution = execution
        try:
            body()
        except GroupSplit as split:
            execution.take_back()
            # Locks are taken late: a larger group would have calculated all that for nothing.
            if not isinstance(split, InTurn):
                ways = max(ways, len(split.parts))
            waiting.extendleft(group[part] for part in reversed(split.parts))
        except MustInterleave:
            execution.take_back()
            return np.sort(np.concatenate([group, *waiting]))
        else:
            finish(execution)
        fitting = _GROUP_ELEMENTS // launch.largest_block
        # Groups that will be split again may be larger: each part is what has to fit.
        size = min(max(1, fitting) * min(ways, 64), _GROUP_LARGEST)
    return programs[:0]


class _Program:
    """One program in a greenlet of its own."""

    def __init__(self, launch: Launch, number: int, body: Callable[[], object]) -> None:
        self.execution = Execution(launch, np.array([number], np.int64), wait=self.wait)
        self.awaited: object = None
        self.greenlet = greenlet(self._run)
        self._body = body

    def _run(self) -> None:
        with np.errstate(all="ignore"):
            self._body()

    def wait(self, change: object) -> None:
        """Let the others go on."""
        self.awaited = change
        parent = self.greenlet.parent
        assert parent is not None, "a program always has the greenlet that runs the launch above it"
        parent.switch()

    @property
    def certainly_waits(self) -> bool:
        """Whether it will do nothing but look again until memory changes."""
        return not isinstance(self.awaited, AwaitedChange) or self.awaited.is_certain

    def go_on(self) -> bool:
        """Run until the program waits or ends; whether it is still there."""
        ACTIVE.execution = self.execution
        self.greenlet.switch()
        return not self.greenlet.dead

    def where(self) -> str:
        """The line of the kernel at which it waits."""
        frame = self.greenlet.gr_frame
        while frame is not None and frame.f_code not in KERNEL_CODE:
            frame = frame.f_back
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _run_interleaved(launch: Launch, body: Callable[[], object], numbers: Array) -> None:
    live: deque[_Program] = deque()
    idle_rounds = 0
    others, told = OTHERS.get(), -1
    try:
        for number in numbers.tolist():
            live.append(_Program(launch, number, body))
            if not live[-1].go_on():
                live.pop()
        while live:
            changes, before = launch.memory.changes, len(live)
            for _turn in range(before):
                if live[0].go_on():
                    live.rotate(-1)
                else:
                    live.popleft()
            idle = (
                launch.memory.changes == changes
                and len(live) == before
                and all(program.certainly_waits for program in live)
            )
            idle_rounds = idle_rounds + 1 if idle else 0
            if others is not None and idle_rounds > _IDLE_ROUNDS_BEFORE_OTHERS:
                ACTIVE.execution = None
                # Needless wake-ups would ping-pong for ever.
                if told != launch.memory.changes:
                    told = launch.memory.changes
                    others.notify()
                others.wait(f'kernel "{launch.name}": memory to change: {_shown(live)}')
                idle_rounds = 0
            if idle_rounds > _IDLE_ROUNDS:
                raise _deadlock(launch, live)
    finally:
        for program in live:
            with contextlib.suppress(Exception):  # what a kernel's `finally` raises comes too late
                program.greenlet.throw()


def _deadlock(launch: Launch, live: Sequence[_Program]) -> Deadlock:
    waiting = _waiting(live)
    count = np.prod(launch.grid)
    return Deadlock(
        f'kernel "{launch.name}": {len(waiting)} of {count} programs wait for memory '
        f"to change, and no program is left that could change it: {_shown(live)}",
        waiting,
        hint="a lock is never released, or a flag is never set",
    )


def _waiting(live: Iterable[_Program]) -> tuple[Waiting, ...]:
    return tuple(
        Waiting(
            str(program.execution.name_of(0)),
            str(program.awaited),
            0,
            program.where(),
        )
        for program in live
    )


def _shown(live: Sequence[_Program]) -> str:
    shown = "; ".join(
        f"{program.execution.name_of(0)} at {program.where()}: {_change(program.awaited)}"
        for program in islice(live, 8)
    )
    return shown + (f"; and {len(live) - 8} more" if len(live) > 8 else "")


def _change(awaited: object) -> str:
    # That memory has to change is said once, before all programs.
    return awaited.change if isinstance(awaited, AwaitedChange) else str(awaited)
