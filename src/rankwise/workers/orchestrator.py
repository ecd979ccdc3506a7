"""What an orchestration function is given: it submits tasks, and asks for memory and domains.

Tasks are ordered by the memory that their tensors name (see `core.tree.hazards`):

    INPUT             reads: waits for the tasks that wrote it
    INOUT             reads and writes: waits for those that wrote or read it
    OUTPUT            writes: waits for those that wrote or read it; without address it gets memory
    OUTPUT_EXISTING   writes, in memory that there is
    NO_DEP            nothing waits

A task whose input was not written because its producer failed is skipped. Submitting never raises
because an earlier task has failed; `run` does, at the end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import LocalProtocolError, TreeValueError
from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.core.tasks.tensors import (
    ContinuousTensor,
    DataType,
    TensorArgType,
    data_type,
    get_element_size,
)
from rankwise.core.tree.vocabulary import HOST, Access, ChildPool
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.callable_table import check_callable
from rankwise.workers.errors import BadArguments, IndexOutOfRange
from rankwise.workers.numbers import checked_shape
from rankwise.workers.states import SubmitResult
from rankwise.workers.wire import pack_task

if TYPE_CHECKING:
    from rankwise.drivers.real.tree.engine import TreeEngine
    from rankwise.workers.recorded_graphs import Recorder
    from rankwise.workers.worker_tree import WorkerTree

_DEVICE_SHIFT = 48
"""Addresses of devices have the device's number, plus one, above this bit."""
_HOW: dict[TensorArgType, tuple[bool, bool]] = {
    TensorArgType.INPUT: (True, False),
    TensorArgType.OUTPUT: (False, True),
    TensorArgType.INOUT: (True, True),
    TensorArgType.OUTPUT_EXISTING: (False, True),
}


class Orchestrator:
    """Valid while the orchestration function runs."""

    def __init__(self, tree: "WorkerTree", recorder: "Recorder | None" = None) -> None:
        self._tree = tree
        self._engine: TreeEngine | Recorder = tree.engine if recorder is None else recorder
        self._table = tree.table
        self._enter = self._table.borrow if recorder is None else self._table.add
        """A recording needs its callables as long as it lives."""
        self._is_recorded = recorder is not None
        self._scope_depth = 0
        self._is_over = False
        self.held: list[object] = []
        """The arrays that recorded tasks were given."""

    # Submitting

    def submit_sub(self, callable_: Any, args: TaskArgs | None = None) -> SubmitResult:
        """Let a sub worker run `fn(args)`.

        Args:
            callable_: what `register` gave, or a function, which is registered by that.
            args: its arguments; tags say what it does with them.

        Raises:
            ConfigError: nothing is registered under this number, there are no sub workers, or a
                tensor lies in memory that children do not see.
            BadArguments: `args` are no `TaskArgs`.
            LocalProtocolError: the run is over.
        """
        number = self._number(callable_)
        name = self._table.names[number]
        accesses = () if args is None else self._accesses(args)
        frame = pack_task(args) if args else None  # the child makes empty ones
        return SubmitResult(
            self._engine.submit(ChildPool.SUB, number, frame, accesses=accesses, name=name)
        )

    def submit_sub_group(
        self,
        callable_: Any,
        args_list: Sequence[TaskArgs | None],
        *,
        workers: Sequence[int] | None = None,
    ) -> SubmitResult:
        """Let as many sub workers run `fn(args)` at the same time as there are arguments.

        Args:
            callable_: as in `submit_sub`.
            args_list: the arguments of each member.
            workers: for each member the number of its sub worker.
        """
        number = self._number(callable_)
        base = self._tree.first_sub
        children = self._members(args_list, workers, base, self._tree.sub_count, "sub worker")
        accesses = [access for args in args_list for access in self._accesses(args or TaskArgs())]
        frames = [None if args is None else pack_task(args) for args in args_list]
        return SubmitResult(
            self._engine.submit_group(
                ChildPool.SUB, number, frames, children=children, accesses=tuple(accesses),
                name=self._table.names[number],
            )
        )  # fmt: skip

    def submit_next_level(
        self,
        callable_: Any,
        args: TaskArgs | None = None,
        config: ChipCallConfig | None = None,
        *,
        worker: int = -1,
    ) -> SubmitResult:
        """Let a chip run a `ChipCallable`, or a next-level worker an orchestration function.

        Args:
            callable_: a `ChipCallable` at level 3; what `register` gave, or a function, above.
            args: its arguments.
            config: how to run it.
            worker: which chip or worker; -1 for any. Tensors in a chip's memory choose that chip.

        Raises:
            ConfigError: no such callable or worker, or tensors of several chips.
            LocalProtocolError: the run is over.
        """
        number = self._number(callable_)
        args = args if args is not None else TaskArgs()
        accesses = self._accesses(args)
        child = self._place(args, worker)
        return SubmitResult(
            self._engine.submit(
                ChildPool.NEXT_LEVEL, number, pack_task(args, config), accesses=accesses,
                child=child, name=self._table.names[number],
            )
        )  # fmt: skip

    def submit_next_level_group(
        self,
        callable_: Any,
        args_list: Sequence[TaskArgs | None],
        config: ChipCallConfig | None = None,
        *,
        workers: Sequence[int] | None = None,
    ) -> SubmitResult:
        """Let as many chips or next-level workers run the callable at the same time.

        Args:
            callable_: as in `submit_next_level`.
            args_list: the arguments of each member.
            config: how to run it.
            workers: for each member its chip or worker.
        """
        number = self._number(callable_)
        count = self._tree.next_level_count
        children = self._members(args_list, workers, 0, count, self._tree.next_level_kind)
        accesses: list[Access] = []
        for place, args in enumerate(args_list):
            accesses += self._accesses(args or TaskArgs())
            if workers is None and args is not None:
                children[place] = self._place(args, -1)
        return SubmitResult(
            self._engine.submit_group(
                ChildPool.NEXT_LEVEL,
                number,
                [pack_task(args, config) for args in args_list],
                children=children,
                accesses=tuple(accesses),
                name=self._table.names[number],
            )
        )

    # Memory

    def alloc(self, shape: Iterable[int] | int, dtype: Any = DataType.FLOAT32) -> ContinuousTensor:
        """A tensor that all children see, until the scope is closed and its tasks have ended.

        Waits while tasks that are still running hold the memory. Its contents are undefined.

        Args:
            shape: lengths of its dimensions, or one length.
            dtype: a `DataType`, a name of one (`float32`, `f4`), or a type of numpy.

        Raises:
            ConfigError: there is no such shape or type.
            TreeError: there will never be enough; says who holds the memory.
        """
        self._check_open()
        shape = checked_shape(shape)
        kind = data_type(dtype)
        size_bytes = get_element_size(kind)
        for length in shape:
            size_bytes *= length
        return ContinuousTensor.make(self._engine.allocate(size_bytes), shape, kind)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is allocated inside lives until the end, and until its tasks have ended."""
        self.scope_begin()
        try:
            yield
        finally:
            self.scope_end()

    def scope_begin(self) -> None:
        """Open a scope."""
        self._check_open()
        self._engine.open_scope()
        self._scope_depth += 1

    def scope_end(self) -> None:
        """Close the innermost scope; does not wait.

        Raises:
            LocalProtocolError: the function has not opened any.
        """
        self._check_open()
        if self._scope_depth == 0:
            raise LocalProtocolError(
                "scope_end() was called without scope_begin()", hint="with orch.scope(): …"
            )
        self._engine.close_scope()
        self._scope_depth -= 1

    def malloc(self, worker_id: int, size: int) -> int:
        """Memory of a chip; returns its address."""
        self._check_replayable("malloc")
        return self._tree.malloc(size, worker_id)

    def free(self, worker_id: int, pointer: int) -> None:
        """Give back what `malloc` gave."""
        self._check_replayable("free")
        self._tree.free(pointer, worker_id)

    def copy_to(self, worker_id: int, destination: int, source: int, size: int) -> None:
        """Copy from the host's memory to a chip's, after all tasks that were sent to it."""
        self._check_replayable("copy_to")
        self._tree.copy_to(destination, source, size, worker_id)

    def copy_from(self, worker_id: int, destination: int, source: int, size: int) -> None:
        """Copy from a chip's memory to the host's, after all tasks that were sent to it."""
        self._check_replayable("copy_from")
        self._tree.copy_from(destination, source, size, worker_id)

    # Domains

    def domain(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        buffers: Mapping[str, tuple[Any, Any]] | None = None,
        *,
        signals: Sequence[str] = (),
        timeout: float = 300.0,
        subs: bool = False,
    ) -> None:
        """Give some children windows that each of them maps, until the run ends.

        A task finds its own in `context()[name]`; see `rankwise.workers.Member`.

        Args:
            name: by which tasks find it.
            ranks: numbers of chips or next-level workers; all of them if not given.
            buffers: what lies in each window: shape and dtype by name.
            signals: names of the signals that each rank has.
            timeout: how long waits in it last, in seconds, when they are not told.
            subs: whether `ranks` are sub workers.

        Raises:
            ConfigError: a name, rank, shape or dtype is wrong.
            WorkerDied: one of the ranks has ended.
        """
        self._check_replayable("a domain")
        self._tree.open_domain(
            name, ranks, buffers or {}, signals=signals, timeout=timeout, subs=subs
        )

    def poll(self) -> None:
        """Give the task graph a turn, in the middle of a long computation."""
        self._engine.poll()

    def finish(self) -> None:
        """Close what the function has left open; nothing may be submitted any more."""
        for _ in range(self._scope_depth):
            self._engine.close_scope()
        self._scope_depth = 0
        self._is_over = True

    def abandon(self) -> None:
        """Nothing may be submitted any more; what was left open does not matter."""
        self._is_over = True

    # What goes on inside

    def _check_open(self) -> None:
        if self._is_over:
            raise LocalProtocolError(
                "an orchestrator was used after its run was over",
                hint="submit from within the function that run() calls",
            )

    def _check_replayable(self, what: str) -> None:
        """Refuse in a recording what is done at once, and would not be done by a replay."""
        self._check_open()
        if self._is_recorded:
            raise TreeValueError(
                f"{what} cannot be recorded: only submit_sub and alloc can",
                hint="do it before record(), in a run() or with the worker's own methods",
            )

    def _number(self, callable_: Any) -> int:
        if self._is_over:
            self._check_open()
        if isinstance(callable_, int):
            if callable_ not in self._table.names:
                raise TreeValueError(
                    f"callable {callable_} is not registered: there are {len(self._table)}",
                    hint="give what register() returned",
                )
            return callable_
        check_callable(callable_)
        return self._enter(callable_)

    def _accesses(self, args: TaskArgs) -> tuple[Access, ...]:
        if not isinstance(args, TaskArgs):
            raise BadArguments(
                f"a task was given {type(args).__name__} for its arguments",
                hint="make a TaskArgs, and add_tensor and add_scalar what the task needs",
            )
        if self._is_recorded:
            self.held += args.owners
        accesses = []
        for place, (address, size_bytes, tag, is_childs) in enumerate(args.accesses()):
            start = address
            if not address and tag is TensorArgType.OUTPUT:
                start = self._engine.allocate(size_bytes)
                args.set_address(place, start)
            if not start:
                continue
            space = (start >> _DEVICE_SHIFT) - 1 if is_childs else HOST
            if not is_childs:
                self._tree.check_shared(start, size_bytes, place)
            how = _HOW.get(tag)
            if how is not None:
                accesses.append(Access(space, start, start + size_bytes, *how))
        return tuple(accesses)

    def _place(self, args: TaskArgs, worker: int) -> int | None:
        """Which child a task must run at: the one that was asked for, or whose memory it names."""
        count = self._tree.next_level_count
        if worker != -1 and not 0 <= worker < count:
            raise IndexOutOfRange(
                f"there is no {self._tree.next_level_kind} {worker}: there are {count}",
                hint="worker=-1 takes any",
            )
        owners = {
            self._tree.chip_of_device((address >> _DEVICE_SHIFT) - 1)
            for address, _, _, is_childs in args.accesses()
            if is_childs and address >> _DEVICE_SHIFT
        }
        if worker != -1:
            owners.add(worker)
        if len(owners) > 1:
            raise TreeValueError(
                f"a task names memory of several chips, or runs at another: {sorted(owners)}",
                hint="copy to one chip first, or put what is shared into a window",
            )
        return next(iter(owners)) if owners else None

    def _members(
        self,
        args_list: Sequence[Any],
        workers: Sequence[int] | None,
        base: int,
        count: int,
        kind: str,
    ) -> list[int | None]:
        if workers is None:
            return [None] * len(args_list)
        if len(workers) != len(args_list):
            raise TreeValueError(f"{len(workers)} workers are named for {len(args_list)} members")
        for worker in workers:
            if not 0 <= worker < count:
                raise IndexOutOfRange(f"there is no {kind} {worker}: there are {count}")
        return [base + worker for worker in workers]
