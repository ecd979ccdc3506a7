"""`rankwise.Pool`: an executor whose workers are supervised processes.

It is a `concurrent.futures.Executor`. `Pool` lists what it has beyond that interface.
"""

import atexit
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from importlib import import_module
from itertools import count, islice
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeVar

from rankwise.base.errors import ConfigError
from rankwise.base.units import MICROSECOND, MILLISECOND
from rankwise.core.pool.vocabulary import PoolSpec
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.interrupts import gate_here, without_handlers
from rankwise.drivers.real.pool.array_memory import new_shared
from rankwise.drivers.real.pool.engine import PoolEngine, PoolOptions
from rankwise.drivers.real.pool.messages import CHUNK_CALLS_MAX, MessageKind
from rankwise.drivers.real.pool.progress import show_progress
from rankwise.drivers.real.pool.submitted_task import PoolFuture, rebuilt_error
from rankwise.drivers.real.proc import check_proc
from rankwise.launch.arguments import positive
from rankwise.launch.limits import check_working_directory
from rankwise.launch.pool_answers import answer_questions

T = TypeVar("T")
WORKERS_MAX = 4096
_CHUNK_NS = 10 * MILLISECOND
"""How long a chunk of `map` is to keep a worker busy: many times what it takes to send it."""
_CHUNKS_PER_WORKER = 3
"""Chunks in flight: one runs, one lies in the worker's socket, one is queued."""
_GROWTH = 8
"""A chunk is at most so many times as long as the one that was measured."""
_SHRINKAGE = 20
"""The last chunks of a `map` take at least this part of a long one's time: half a millisecond."""
_OVERHEAD_NS = 30 * MICROSECOND
"""What a worker needs for a chunk beside its calls."""


class Pool(Executor):
    """Runs functions on worker processes and returns their values.

        with rankwise.Pool(4) as pool:
            future = pool.submit(train_fold, data, seed=3)
            for score in pool.map(evaluate, rows): ...
            total = pool.submit(add, future, other_future)

    A future among a task's arguments stands for its value; if it fails or is cancelled, so does the
    task. Threads of the caller may all submit. Workers come from a clean process, never from a fork
    of the caller, and end with the caller, however that ends.

    numpy arrays and torch tensors on the CPU from 1 MiB on travel in memory of their own: the
    sender copies them once, the receiver does not. Arrays of `empty` are not copied at all.

    Args:
        max_workers: how many workers there are at most; by default the CPUs that may be used. They
            start when there are tasks for them.
        initializer: called by each worker first. If it raises, the pool is broken.
        initargs: its arguments.
        max_tasks_per_child: how many tasks a worker runs before another takes its place.
        retries: how often a task is run again whose worker died; for tasks that may run twice.
        writable: whether received arrays are writable: those that were copied privately, those of
            `empty` for all. Tensors are always, privately.
        preload: modules that are imported once, before workers are forked, such as `["torch"]`; by
            default numpy and scipy if they are imported here.
        env: variables to add to the workers' environment.
        start_timeout: seconds that these imports may take.
        progress: whether to show a line of progress, if stderr is a terminal.
        name: what `rankwise top` and `rankwise ps` call it; by default `pool-1` and so on.

    Raises:
        ConfigError: an argument cannot be used.
        SpawnFailed: the process that makes workers cannot be started.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
        retries: int = 0,
        writable: bool = False,
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 600.0,
        progress: bool = False,
        name: str | None = None,
    ) -> None:
        size = usable_cpu_count() if max_workers is None else max_workers
        _check_count("max_workers", size, 1, WORKERS_MAX)
        _check_count("retries", retries, 0)
        if max_tasks_per_child is not None:
            _check_count("max_tasks_per_child", max_tasks_per_child, 1)
        if initializer is not None and not callable(initializer):
            raise ConfigError(f"initializer is {initializer!r:.60}, expected a function")
        if isinstance(preload, str):
            raise ConfigError(f"preload is {preload!r:.60}, expected a list of modules' names")
        if name is not None and not (name and str(name).isprintable()):
            raise ConfigError(
                f"name is {name!r:.60}, expected a printable string that is not empty"
            )
        check_proc()
        check_working_directory()
        self._size = size
        # Weak: what was measured of a function must not keep it, and what it holds, alive.
        self._fitting = weakref.WeakKeyDictionary[Callable[..., Any], int]()
        self._attempts = retries + 1
        options = PoolOptions(
            spec=PoolSpec(size=size, tasks_max=max_tasks_per_child),
            initializer=None if initializer is None else (initializer, tuple(initargs)),
            preload=None if preload is None else tuple(preload),
            environment=dict(env or {}),
            is_writable=writable,
            start_timeout=positive(start_timeout, "start_timeout"),
        )
        engine: PoolEngine | None = None
        try:
            # Exceptions of signal handlers wait: half an engine could not be taken down.
            with gate_here().used():
                self._engine = engine = PoolEngine(options)
                _open.add(engine)
                answer_questions(engine, str(name or f"pool-{next(_numbers)}"), size)
                if progress:
                    show_progress(engine)
                # The tasks of a pool without a reference go on; its workers then end.
                self._forgotten = weakref.finalize(self, _close_forgotten, engine)
                self._forgotten.atexit = False  # `_close_all` waits for its tasks
        except BaseException:  # Ctrl-C came meanwhile: the caller does not get this pool
            if engine is not None:
                _stop(engine)
            raise

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Have a worker call `fn(*args, **kwargs)`; the future has what it returns or raises.

        Raises:
            BrokenPool: no worker can be had; it is a `concurrent.futures.BrokenExecutor`.
            LocalProtocolError: the pool was shut down, or this is a fork of its process. It is a
                RuntimeError.
        """
        return self._engine.submit(MessageKind.CALL, fn, args, kwargs, self._attempts)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
    ) -> Iterator[T]:
        """Call `fn` with the elements of the iterables; an iterator over its values, in order.

        Lists and other inputs with a length are worked on at once, whether or not the values are
        taken. Of other inputs, which may be endless, a little more is read than values were taken.

        Args:
            fn: what is called.
            iterables: its arguments; the shortest counts.
            timeout: seconds from now after which waiting for a value raises TimeoutError.
            chunksize: how many calls are sent to a worker at a time; by default as many as take 10
                milliseconds, as far as all workers have something to do.
        """
        if chunksize is not None:
            _check_count("chunksize", chunksize, 1)
        deadline = None if timeout is None else time.monotonic() + timeout
        feeder = _Chunks(self, fn, iterables, chunksize)
        feeder.feed()
        return feeder.values(deadline)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks, and end the workers when those that there are have ended.

        Ctrl-C while this waits interrupts the tasks, and kills workers five seconds later.

        Args:
            wait: return only when all processes have ended.
            cancel_futures: cancel the tasks that were not sent to a worker.
        """
        self._forgotten.detach()
        self._engine.close(cancels=cancel_futures)
        if wait:
            _wait(self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._forgotten.detach()
            _stop(self._engine)
            _wait(self._engine)
        else:
            self.shutdown()

    @staticmethod
    def empty(shape: int | tuple[int, ...], dtype: Any = float) -> Any:
        """A numpy array of zeros that travels between processes without a copy.

        Both see the same memory. A task may make one for what it returns. Receivers may write into
        it if their pool is `writable`.
        """
        np: Any = import_module(
            "numpy"
        )  # `import` would have all that imports rankwise wait for it
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ConfigError(f"dtype is {kind}, expected one without Python objects")
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        array = np.frombuffer(new_shared(_product(extents) * kind.itemsize), np.uint8)
        return array.view(kind).reshape(extents)

    def submit_chunk(
        self, fn: Callable[..., Any], items: list[Any], first: int = 0, *, starred: bool = False
    ) -> PoolFuture:
        """Have a worker call `fn` for each element; a future of the values and the first error.

        Args:
            fn: what is called.
            items: an argument for each call.
            first: the position of the chunk in the input.
            starred: whether the items are tuples of arguments.
        """
        kind = MessageKind.STARRED_CHUNK if starred else MessageKind.CHUNK
        places = range(first, first + len(items))
        return self._engine.submit(kind, fn, (items,), {}, self._attempts, items=places)

    def stop(self) -> None:
        """Interrupt the tasks that run, cancel the others, and take no more.

        It does not wait. Workers that do not end are killed five seconds later, or at once if it is
        called again.
        """
        self._forgotten.detach()
        self._engine.stop()

    @property
    def is_open(self) -> bool:
        """Whether tasks can be submitted."""
        return self._engine.is_open

    @property
    def size(self) -> int:
        """How many workers there are at most."""
        return self._size

    def fitting_size(self, fn: Callable[..., Any]) -> int:
        """How many calls of a function a chunk should have, by the last `map`; 1 if unknown."""
        with suppress(Exception):  # it has no hash, or no weak reference, or an odd `__eq__`
            return self._fitting.get(fn, 1)
        return 1

    def note_fitting_size(self, fn: Callable[..., Any], call_count: int) -> None:
        """Remember it for the next `map` with the function."""
        with suppress(Exception):  # the same
            self._fitting[fn] = call_count


class _Chunks:
    """Cuts the calls of a `map` into chunks, and keeps all workers busy with them."""

    def __init__(
        self,
        pool: Pool,
        fn: Callable[..., Any],
        iterables: tuple[Iterable[Any], ...],
        chunksize: int | None,
    ) -> None:
        self._pool = pool
        self._fn = fn
        self._left: int | None = None
        # A tuple around each single argument would take as long as all the rest.
        self._is_starred = len(iterables) != 1
        self._items: Iterator[Any] = (
            zip(*iterables, strict=False) if self._is_starred else iter(iterables[0])
        )
        if all(hasattr(each, "__len__") for each in iterables):
            items = list(self._items)
            self._left = len(items)
            self._items = iter(items)
        self._fixed_size = None if chunksize is None else min(chunksize, CHUNK_CALLS_MAX)
        self._fitting = pool.fitting_size(fn)
        """How many calls fit into a chunk, as was measured last."""
        self._measured = 0
        """By a chunk of how many calls."""
        # Calls with this input may take longer: the first chunks are short.
        self._size = chunksize or max(1, self._fitting // _GROWTH)
        self._futures: deque[PoolFuture] = deque()
        self._unfinished = 0
        self._begun = 0
        """How many calls were submitted."""
        self._window = _CHUNKS_PER_WORKER * pool.size
        self._is_over = False
        self._lock = Lock()
        self._is_feeding = self._is_asked = False

    def feed(self) -> None:
        """Submit chunks while fewer are unfinished, or of endless inputs unread, than wanted.

        One thread does at a time, and for others, too: chunks stay in order.
        """
        while True:
            with self._lock:
                self._is_asked = self._is_feeding
                if self._is_feeding:
                    return
                self._is_feeding = True
            try:
                while self._is_wanted() and (items := self._next_items()):
                    self._submit(items)
            finally:
                with self._lock:
                    self._is_feeding = False
                    is_asked = self._is_asked
            if not is_asked:
                return

    def _is_wanted(self) -> bool:
        ahead = len(self._futures) if self._left is None else self._unfinished
        return not self._is_over and ahead < self._window

    def _submit(self, items: list[Any]) -> None:
        if self._left is not None:
            self._left -= len(items)
        with self._lock:
            self._unfinished += 1
        future = self._pool.submit_chunk(self._fn, items, self._begun, starred=self._is_starred)
        self._begun += len(items)
        self._futures.append(future)
        future.add_done_callback(lambda done: self._on_done(done, len(items)))

    def _next_items(self) -> list[Any]:
        items = islice(self._items, self._next_size())
        if self._fixed_size is not None or self._left is not None:
            return [*items]
        # Inputs may come slowly, or be large: those that are there do not wait for more.
        began, found = time.monotonic_ns(), []
        for item in items:
            found.append(item)
            if time.monotonic_ns() - began > _CHUNK_NS:
                break
        return found

    def _next_size(self) -> int:
        if self._fixed_size is not None or self._left is None:
            return self._size
        if self._measured:
            # Ever smaller ones to the end, but not so small that to send them takes as long.
            fitting = max(self._left // (2 * self._pool.size), self._fitting // _SHRINKAGE)
        else:  # how long calls took with other inputs must not leave workers without any
            fitting = self._left // self._pool.size
        return max(1, min(self._size, fitting))

    def _on_done(self, future: "Future[Any]", call_count: int) -> None:
        assert isinstance(future, PoolFuture), "it is one of `submit_chunk`"
        with self._lock:
            self._unfinished -= 1
            if self._fixed_size is None and future.took_ns and _is_complete(future):
                self._measure(call_count, future.took_ns)
        if self._left is not None and not self._is_over:
            # The pool may be shut down meanwhile: the reader of the values gets an error.
            try:
                self.feed()
            except Exception as error:  # noqa: BLE001  # the same
                failed = PoolFuture()
                failed.set_exception(error)
                self._is_over = True
                self._futures.append(failed)

    def _measure(self, call_count: int, took_ns: int) -> None:
        # A short chunk at the end says little about calls: its time is mostly overhead.
        if 2 * call_count < self._measured and took_ns < _CHUNK_NS // _SHRINKAGE:
            return
        calls_ns = max(took_ns - _OVERHEAD_NS, took_ns // 8)
        self._fitting = max(1, call_count * _CHUNK_NS // calls_ns)
        self._measured = call_count
        self._size = min(self._fitting, call_count * _GROWTH)
        self._pool.note_fitting_size(self._fn, self._fitting)

    def values(self, deadline: float | None) -> Iterator[Any]:
        """The values in order; what was not begun is cancelled if they are not all taken."""
        try:
            while self._futures:
                future = self._futures[0]
                left = None if deadline is None else deadline - time.monotonic()
                values, error = future.result(left)
                self._futures.popleft()
                del future
                if self._left is None:
                    self.feed()
                values.reverse()
                while values:
                    yield values.pop()
                if error is not None:
                    raise error if isinstance(error, BaseException) else rebuilt_error(*error)
        finally:
            self._is_over = True
            for future in self._futures:
                future.cancel()


def _is_complete(future: PoolFuture) -> bool:
    """Whether all calls of a chunk were made: a failure ends it."""
    return not future.cancelled() and future.exception() is None and future.result()[1] is None


_numbers = count(1)
_open: "weakref.WeakSet[PoolEngine]" = weakref.WeakSet()


@without_handlers
def _close_forgotten(engine: PoolEngine) -> None:
    engine.close_later()


@atexit.register
def _close_all() -> None:
    """Let the pools of a program that ends finish what they were given, as other executors do.

    If Ctrl-C has ended it, they stop. Of an interactive interpreter, it has ended some line only.
    """
    is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    for engine in [*_open]:
        with suppress(KeyboardInterrupt):
            if is_interrupted and not hasattr(sys, "ps1"):
                _stop(engine)
            engine.close(cancels=False)
            _wait(engine)


def _wait(engine: PoolEngine) -> None:
    """Wait for the end of all processes; Ctrl-C stops them, a second one kills them."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            engine.wait_released()
            break
        except KeyboardInterrupt as error:
            interrupt = error
            _stop(engine)
    if interrupt is not None:
        raise interrupt


def _stop(engine: PoolEngine) -> None:
    """Stop a pool; Ctrl-C in the middle of that is the second one, which kills."""
    try:
        engine.stop()
    except KeyboardInterrupt:
        engine.stop()


def _check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or value < least or (most is not None and value > most):
        up_to = "" if most is None else f", at most {most}"
        raise ConfigError(f"{name} is {value!r:.60}, expected {least} or more{up_to}")


def _product(extents: tuple[int, ...]) -> int:
    product = 1
    for extent in extents:
        product *= int(extent)
    return product
