"""Recorded graphs: what an orchestration function submitted once, done again without asking.

Everything is decided when the graph is recorded: which child runs which call, in which order (see
`core.tree.recording`). A replay is one word per child, and one word back.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.errors import LocalProtocolError, TreeValueError
from rankwise.base.units import Instant
from rankwise.core.tree.graph_layout import RecordedTask
from rankwise.core.tree.vocabulary import Access, ChildPool
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.numbers import checked_patience
from rankwise.workers.wire import unpack_arguments

if TYPE_CHECKING:
    from rankwise.drivers.real.tree.engine import TreeEngine
    from rankwise.workers.callable_table import CallableTable


class BoundCallable(msgspec.Struct, frozen=True):
    """A callable and the frame of its arguments; without one, it has none."""

    callable_: int
    frame: bytes | None


class RecordedProgram:
    """What one child does in a replay."""

    def __init__(self, calls: list[BoundCallable]) -> None:
        self.calls = calls
        self._prepared: list[tuple[Callable[[TaskArgs], Any], TaskArgs]] | None = None

    def run(
        self,
        table: "CallableTable",
        checked: Callable[[TaskArgs], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Do everything, in order; arguments are unpacked the first time and kept.

        Args:
            table: has the functions.
            checked: what each call is made within.
        """
        if self._prepared is None:
            self._prepared = [
                (table.find(call.callable_), _arguments(call.frame)) for call in self.calls
            ]
        for function, args in self._prepared:
            if checked is None:
                function(args)
            else:
                with checked(args):
                    function(args)


def _arguments(frame: bytes | None) -> TaskArgs:
    return TaskArgs() if frame is None else unpack_arguments(frame)


class Recorder:
    """Takes submissions down instead of running them.

    Attributes:
        tasks: what was submitted.
        calls: for each task what its child has to do.
        allocated: offsets in the arena of what was allocated; it lives as long as the recording.
    """

    def __init__(self, engine: "TreeEngine") -> None:
        self._engine = engine
        self.tasks: list[RecordedTask] = []
        self.calls: list[BoundCallable] = []
        self.allocated: list[int] = []

    def submit(
        self,
        pool: ChildPool,
        callable_: int,
        frame: bytes | None,
        *,
        accesses: tuple[Access, ...] = (),
        child: int | None = None,
        name: str = "",
    ) -> int:
        """Note a task."""
        if pool is not ChildPool.SUB:
            raise TreeValueError(
                f"{name} is for a chip or a next-level worker, and only submit_sub is recorded",
                hint="submit it with run()",
            )
        self.tasks.append(RecordedTask(pool, child, accesses, name))
        self.calls.append(BoundCallable(callable_, frame))
        return len(self.tasks) - 1

    def submit_group(
        self,
        pool: ChildPool,
        callable_: int,
        frames: Sequence[bytes | None],
        *,
        children: Sequence[int | None],
        accesses: tuple[Access, ...] = (),
        name: str = "",
    ) -> int:
        """Refuse: members of a group wait for each other, and a replay does not watch for that."""
        del pool, callable_, frames, children, accesses
        raise TreeValueError(f"the group {name} cannot be recorded", hint="submit it with run()")

    def allocate(self, size_bytes: int) -> int:
        """Memory that lives as long as the recording."""
        offset = self._engine.arena.allocate(size_bytes)
        self.allocated.append(offset)
        return self._engine.arena.address + offset

    def open_scope(self) -> None:
        """Memory of a recording has no scope."""

    def close_scope(self) -> None:
        """Memory of a recording has no scope."""

    def poll(self) -> None:
        """Nothing is running."""


class RecordedGraph:
    """What `Worker.record` gives.

    Attributes:
        task_count: how many tasks a replay runs.
    """

    def __init__(
        self,
        engine: "TreeEngine",
        programs: dict[int, int],
        task_count: int,
        held: Sequence[object],
    ) -> None:
        self._engine: TreeEngine | None = engine
        self._held = held
        """The arrays that its tasks were given."""
        self._programs = programs
        self.task_count = task_count

    def replay(self, *, timeout: float | None = None) -> None:
        """Run all tasks once more, and wait for them.

        A task that raises ends its child's part; the parts of other children go on.

        Args:
            timeout: how many seconds it may take; children that take longer are killed.

        Raises:
            WorkerDied: a child has ended.
            TimeoutError: it took too long.
            Exception: what a task has raised.
        """
        if self._engine is None:
            raise LocalProtocolError(
                "a recorded graph was replayed after its worker was closed",
                hint="record it again after init()",
            )
        deadline = None
        if timeout is not None:
            deadline = Instant(time.monotonic_ns() + checked_patience("timeout", timeout))
        self._engine.run_programs(self._programs, deadline)

    def forget(self) -> None:
        """Called when the worker is closed."""
        self._engine = None
