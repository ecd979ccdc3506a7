"""`Worker`: one chip (level 2), or a tree of processes (level 3 and more).

Life: construct, `register`, `add_worker`, `init()`, `run()` as often as you like, `close()`; then
`init()` again, if you like. One thread uses a worker, the one that called `init()`.

A worker whose chip or next-level worker has died cannot run any more: it is closed and initialised
again. A sub worker that dies is replaced.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from rankwise.base.errors import (
    BootstrapFailed,
    BootstrapRefused,
    LocalProtocolError,
    TreeValueError,
)
from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.core.tree.graph_layout import lay_out
from rankwise.drivers.real.interrupts import came_from_handler, gate_here, without_handlers
from rankwise.drivers.real.proc import check_proc
from rankwise.drivers.real.this_process import mark
from rankwise.drivers.real.tree.processor_placement import Home
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.bootstrap import ChipBootstrapConfig, ChipContext
from rankwise.workers.callable_table import CallableTable, check_call_runs, check_callable
from rankwise.workers.child_context import path_here
from rankwise.workers.chip_timeline import Timeline
from rankwise.workers.communicators import Communicators, inherited
from rankwise.workers.failures import TaskFailure
from rankwise.workers.numbers import checked_patience
from rankwise.workers.orchestrator import Orchestrator
from rankwise.workers.recorded_graphs import RecordedGraph, RecordedProgram, Recorder
from rankwise.workers.runs import Runs
from rankwise.workers.staging import array_staged, memory_with
from rankwise.workers.states import DEFAULT_HEAP_RING_SIZE
from rankwise.workers.worker_spec import WorkerSpec, spec_of
from rankwise.workers.worker_tree import WorkerTree

if TYPE_CHECKING:
    from rankwise.workers.chip_worker import ChipWorker
    from rankwise.workers.platforms.port import Leak, Platform
    from rankwise.workers.shared_arrays import SharedArrays


class Worker:
    """A worker of any level.

    Args:
        level: 2 is one chip; 3 has chips and sub workers; each level above has workers of the
            level below, given with `add_worker`, and sub workers.
        chip_bootstrap_configs: for each chip how it is brought up.
        platform: what chips are made of: "sim", "host", another that is installed, or a platform.
        device_id: the chip of a level-2 worker.
        device_ids: the chips of a level-3 worker.
        num_sub_workers: how many processes run plain functions.
        heap_ring_size: a quarter of the memory that tasks' `alloc` may hand out, in bytes.
        ring_depth: how many submitted tasks may be unfinished before `submit` waits.
        start_timeout: how many seconds `init()` may take.
        close_timeout: how many seconds children may take to end before they are killed.
        placement: "near" keeps the thread that calls `init()` on its processor until `close()`, and
            the first sub worker there, which is given tasks first; other children share a cache
            with it. Small tasks come back faster, as no process has to be woken elsewhere; that sub
            worker and the caller do not run at the same time, and threads that the caller starts
            meanwhile stay there too. By default the kernel places all processes.
        check_inputs: whether a task of a child of this worker that writes to a tensor which it has
            as INPUT fails with `InputWritten`. Each task takes longer then. A level-2 worker runs
            its tasks unchecked, and memory of chips is not checked.
        journal: a file to which this worker appends every fact that it is told and every order that
            follows, for `rankwise replay`. Small tasks take several times as long then.
        runtime, build: taken for programs that name a vendor's toolchain; without effect.

    Attributes:
        killed: children that had to be killed at the last `close()`, here or further below.
        leaks: chips' memory that was not freed at the last `close()`, by the chip's name.
    """

    _takes_tokens = False
    """Whether tensors may have addresses of no memory, which only order tasks."""

    def __init__(
        self,
        level: int,
        chip_bootstrap_configs: Sequence[ChipBootstrapConfig] | None = None,
        *,
        platform: "str | Platform" = "sim",
        device_id: int = 0,
        device_ids: Iterable[int] = (),
        num_sub_workers: int = 0,
        heap_ring_size: int = DEFAULT_HEAP_RING_SIZE,
        ring_depth: int = 4096,
        start_timeout: float = 120.0,
        close_timeout: float = 10.0,
        placement: Literal["near"] | None = None,
        check_inputs: bool = False,
        journal: str | None = None,
        runtime: str = "",
        build: bool = False,
    ) -> None:
        del runtime, build
        self._spec = spec_of(
            level,
            chip_bootstrap_configs,
            platform=platform,
            device_id=device_id,
            device_ids=device_ids,
            num_sub_workers=num_sub_workers,
            heap_ring_size=heap_ring_size,
            ring_depth=ring_depth,
            start_timeout=start_timeout,
            close_timeout=close_timeout,
            placement=placement,
            check_inputs=check_inputs,
            journal=journal,
            takes_tokens=self._takes_tokens,
        )
        self.level = level
        self._home: Home | None = None
        self._table = CallableTable()
        self._next_level: list[Worker] = []
        self._parent: Worker | None = None
        self._tree: WorkerTree | None = None
        self._runs = Runs(None, level)
        self._chip: ChipWorker | None = None
        self._communicators = Communicators()
        self._arrays: SharedArrays | None = None
        self._recordings: list[RecordedGraph] = []
        self._finalizer: Any = None
        self._owner: object = None
        """The process that has initialised it."""
        self.killed: tuple[str, ...] = ()
        self.leaks: dict[str, tuple[Leak, ...]] = {}

    @property
    def spec(self) -> WorkerSpec:
        """What it is made of at this moment."""
        return msgspec.structs.replace(
            self._spec, next_level=tuple(self._next_level), home=self._home
        )

    # Before init

    def register(self, function: Callable[..., Any]) -> int:
        """Give a function a number, by which it is submitted.

        A sub worker calls it as `fn(args)`, a next-level worker as `fn(orch, args, config)`. Before
        `init()` it keeps what it has captured; later, it travels by cloudpickle.

        Raises:
            LocalProtocolError: this is a level-2 worker.
            ConfigError: it cannot be called, or cannot be sent to children that run already.
        """
        self._spec.check_registers()
        check_callable(function)
        return self._table.add(function)

    def add_worker(self, worker: "Worker") -> int:
        """Make a worker of the level below a child of this one; returns its number.

        Raises:
            LocalProtocolError: this worker or that one is initialised already, or has a parent.
            ConfigError: the levels do not fit.
        """
        if not isinstance(worker, Worker):
            raise TreeValueError(f"{worker!r} is not a Worker, and cannot be added to one")
        self._spec.check_has_next_level()
        if self._tree is not None:
            raise LocalProtocolError(
                "add_worker() must be called before init()",
                hint="init() of the outermost worker initialises all that were added",
            )
        if worker.is_initialized:
            raise LocalProtocolError(
                "a worker that is added must not be initialized",
                hint="init() of the outermost worker initialises all that were added",
            )
        self._spec.check_next_level(worker.level)
        if worker._parent is not None:  # noqa: SLF001  # it is one of us
            raise LocalProtocolError("this worker was added to a worker before")
        worker._parent = self  # noqa: SLF001  # the same
        self._next_level.append(worker)
        return len(self._next_level) - 1

    def stage(self, name: str, array: Any) -> str:
        """Put an array where chips can load it from, before `init()`; returns its `shm_name`.

        Raises:
            LocalProtocolError: the worker is initialised already.
        """
        if self.is_initialized:
            raise LocalProtocolError(f"{name!r} was staged after init()", hint="stage it before")
        self._spec.staged[name] = memory_with(array)
        return name

    def staged(self, name: str, dtype: Any = "u1") -> Any:
        """What lies in staged memory now, as a flat numpy array; chips may have stored into it.

        Raises:
            UnknownName: nothing was staged under this name.
        """
        return array_staged(self._spec.staged, name, dtype)

    # Life

    @property
    def is_initialized(self) -> bool:
        """Whether `init()` has succeeded and `close()` was not called since."""
        return self._tree is not None or self._chip is not None

    def init(self) -> None:
        """Start everything, and wait until all of it is ready.

        Raises:
            LocalProtocolError: it was called before, this worker was added to another, or this
                process has other threads.
            BootstrapFailed: something did not come up; nothing of it is left. It is a
                `ValueError` too if it was about a value.
        """
        if self.is_initialized:
            raise LocalProtocolError("init() was called twice", hint="call close() in between")
        if self._parent is not None and not path_here():
            raise LocalProtocolError(
                f"this worker was added to one of level {self._parent.level}",
                hint="init() of the outermost worker initialises all that are below",
            )
        if self._spec.is_one_chip:
            self._init_chip()
            return
        if self._parent is None:
            self.spec.check_platforms()
            self.spec.check_bootstraps()
        check_proc()
        with gate_here().used():
            self._init_tree()

    def _init_tree(self) -> None:
        self._communicators.make(self.spec.communicators())
        try:
            self._home = Home() if self._spec.is_near else None
            tree = WorkerTree(self.spec, self._table)
            tree.open(inherited)
        except BaseException:
            self._communicators.drop()
            self._leave_home()
            raise
        self._tree = tree
        self._owner = mark()
        self._runs = Runs(tree, self.level)
        self._finalizer = weakref.finalize(self, _close_forgotten, tree, mark(), self._home)

    def _init_chip(self) -> None:
        from rankwise.workers.chip_worker import ChipWorker  # noqa: PLC0415  # takes numpy along

        chip = ChipWorker()
        try:
            with gate_here().handlers_replaced():
                chip.init(self._spec.platform)
                chip.set_device(self._spec.device_id)
        except Exception as error:
            if came_from_handler(error):
                raise
            kind = BootstrapRefused if isinstance(error, ValueError) else BootstrapFailed
            raise kind(
                f"chip {self._spec.device_id} bootstrap failed: {type(error).__name__}: {error}"
            ) from error
        self._chip = chip

    def close(self) -> None:
        """End everything, in order, within `close_timeout`; what does not end is killed.

        In a process that other code has forked from this one, it only lets go.

        Raises:
            LocalProtocolError: a run is going on.
            Exception: what a chip raised when it was to store its outputs. All is gone even so.
        """
        self._runs.check_idle("close()", "let it end first")
        with gate_here().used():
            self._close()

    def _close(self) -> None:
        if self._chip is not None:
            chip, self._chip = self._chip, None
            chip.finalize()
        tree, self._tree = self._tree, None
        if tree is None or mark() is not self._owner:
            return
        self._finalizer.detach()
        for recording in self._recordings:
            recording.forget()
        self._recordings = []
        if self._arrays is not None:
            self._arrays.close()
            self._arrays = None
        try:
            self.killed = tree.close()
        finally:
            self._communicators.drop()
            self._leave_home()
        self.leaks = tree.leaks
        tree.check_exit_reports()

    def _leave_home(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            home.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def chip_contexts(self) -> list[ChipContext]:
        """What is known of each chip that was brought up, in the order of `device_ids`.

        Raises:
            LocalProtocolError: before `init()`, and after `close()`.
        """
        if self._tree is None:
            raise LocalProtocolError(
                "chip_contexts are known after init(), and until close()", hint="call init() first"
            )
        return list(self._opened().chip_contexts)

    def _opened(self) -> WorkerTree:
        if self._tree is None:
            raise LocalProtocolError(
                "the worker was used before init(), or after close()", hint="call init() first"
            )
        if mark() is not self._owner:
            raise LocalProtocolError(
                "the worker was used in a process that was forked from its own",
                hint="make a Worker of its own there",
            )
        return self._tree

    @property
    def loss(self) -> str:
        """Describe the lost child that makes this worker unusable; follows the worker's name."""
        lost = None if self._tree is None else self._tree.engine.children.first_lost
        return "" if lost is None else "has lost {}, which {}".format(*lost)

    # Runs

    @property
    def failures(self) -> tuple[TaskFailure, ...]:
        """What went wrong in the last run, in the order of submission."""
        return self._runs.failures

    @property
    def timeline(self) -> Timeline:
        """What chips did in simulated time in the last run."""
        return self._runs.timeline

    def run(
        self,
        callable_: Any,
        args: TaskArgs | None = None,
        config: ChipCallConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Call an orchestration function, and wait until all that it has submitted has ended.

        At level 2, run one `ChipCallable` instead.

        Args:
            callable_: called as `fn(orch, args, config)`.
            args: handed to it.
            config: handed to it.
            timeout: how many seconds all of it may take; then what is left is cancelled or killed.

        Raises:
            WorkerDied: a child ended in a task, or had ended before.
            TimeoutError: it took too long.
            Exception: what the function raised; else what the first task that failed raised, with
                the child's traceback as its cause. `failures` has all.
        """
        if self._chip is not None:
            self._run_chip(self._chip, callable_, args, config)
            return
        self._opened()
        if not callable(callable_):
            raise TreeValueError(
                f"run() was given {callable_!r}, which cannot be called",
                hint="give a function of (orch, args, config), which submits tasks",
            )
        check_call_runs(callable_, "run")
        patience = None if timeout is None else checked_patience("timeout", timeout)
        self._run(callable_, args, config, patience=patience)

    def _run(self, callable_: Any, args: TaskArgs | None, config: Any, **options: Any) -> None:
        try:
            self._runs.run(callable_, args, config, **options)
        finally:
            if self._arrays is not None:
                self._arrays.take_back()

    def _run_chip(self, chip: "ChipWorker", *given: Any) -> None:
        chip.run(*given)

    def run_at(self, clock: int, callable_: Any, args: TaskArgs | None, config: Any) -> Timeline:
        """Like `run`, with tasks that begin at an instant of simulated time; what chips did."""
        self._opened()
        self._run(callable_, args, config, clock=clock)
        return self.timeline

    def record(
        self,
        callable_: Callable[[Orchestrator, TaskArgs | None, Any], object],
        args: TaskArgs | None = None,
        config: Any = None,
    ) -> RecordedGraph:
        """Note what an orchestration function submits, without running it, to replay it often.

        Only `submit_sub` and `alloc` can be recorded. Tasks that depend on each other run at one
        sub worker; tensors that it allocates live as long as the worker.

        Raises:
            ConfigError: it did something else.
        """
        tree = self._opened()
        self._runs.check_ready()
        check_call_runs(callable_, "run")
        recorder = Recorder(tree.engine)
        orch = Orchestrator(tree, recorder)
        callable_(orch, args, config)
        orch.finish()
        pools = [child.pool for child in tree.engine.spec.children]
        programs = {
            child: self._table.add(RecordedProgram([recorder.calls[place] for place in places]))
            for child, places in lay_out(recorder.tasks, pools).items()
        }
        recording = RecordedGraph(tree.engine, programs, len(recorder.tasks), orch.held)
        self._recordings.append(recording)
        return recording

    # Memory

    def malloc(self, size: int, worker_id: int = 0) -> int:
        """Memory of a chip; returns its address.

        Raises:
            IndexOutOfRange: there is no such chip.
            WorkerDied: the chip has ended.
            Exception: what the chip raised.
        """
        if self._chip is not None:
            return self._chip.malloc(size)
        return self._opened().malloc(size, worker_id)

    def free(self, pointer: int, worker_id: int = 0) -> None:
        """Give back what `malloc` gave."""
        if self._chip is not None:
            self._chip.free(pointer)
        else:
            self._opened().free(pointer, worker_id)

    def copy_to(self, destination: int, source: int, size: int, worker_id: int = 0) -> None:
        """Copy from this process's memory to a chip's."""
        if self._chip is not None:
            self._chip.copy_to(destination, source, size)
        else:
            self._opened().copy_to(destination, source, size, worker_id)

    def copy_from(self, destination: int, source: int, size: int, worker_id: int = 0) -> None:
        """Copy from a chip's memory to this process's."""
        if self._chip is not None:
            self._chip.copy_from(destination, source, size)
        else:
            self._opened().copy_from(destination, source, size, worker_id)

    def share(self, shape: Iterable[int] | int, dtype: Any = "f4") -> Any:
        """A numpy array with zeros that this process and all children see.

        Its memory is given back when nothing refers to it any more and no run is going on, and by
        `close()`. A task that keeps a view of it for later tasks needs you to keep the array, too.

        Args:
            shape: lengths of its dimensions, or one length.
            dtype: anything that numpy accepts as a dtype.

        Raises:
            LocalProtocolError: before `init()`, and after `close()`.
            ConfigError: there is no such shape or dtype.
            TreeError: no address is left for so much; it is a MemoryError too.
        """
        tree = self._opened()
        if self._arrays is None:
            from rankwise.workers.shared_arrays import SharedArrays  # noqa: PLC0415  # numpy

            self._arrays = SharedArrays(tree.engine.arena, self._runs)
        return self._arrays.make(shape, dtype)


@without_handlers
def _close_forgotten(tree: WorkerTree, owner: object, home: Home | None) -> None:
    """End a tree whose worker was forgotten, or left open at the end of the program."""
    if mark() is owner:
        try:
            with gate_here().used():
                tree.close()
        finally:
            if home is not None:
                home.leave()
