"""A backend of joblib: `Parallel` runs its calls in a `rankwise.Pool`.

    import joblib
    import rankwise.compat.joblib

    with joblib.parallel_config("rankwise", n_jobs=4):
        cross_val_score(model, data, target)

The import registers it; scikit-learn and others that use joblib need not be changed. The workers
stay for the next `Parallel` with the same number of them.

joblib calls the interface of backends experimental: the tests run with 1.3.0 and with the newest.
"""

from threading import Lock
from typing import Any

from joblib._parallel_backends import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)
from joblib.parallel import register_parallel_backend

from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.this_process import mark
from rankwise.launch.pool import Pool

_lock = Lock()
_kept: tuple[object, Any, Pool] | None = None
"""The pool of the last `Parallel`, after the process and the settings that it was made for."""


class RankwiseBackend(AutoBatchingMixin, ParallelBackendBase):
    """Runs batches of calls on the workers of a pool."""

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    default_n_jobs = -1

    _pool: Pool | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many workers there will be; negative numbers count down from all CPUs."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, usable_cpu_count() + 1 + n_jobs)

    def configure(
        self, n_jobs: int = 1, parallel: Any = None, **_: Any
    ) -> int:  # joblib passes preferences that mean nothing here
        """Get a pool of so many workers."""
        count = self.effective_n_jobs(n_jobs)
        if count == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        self._pool = _pool_of(count, self._prepare_worker_env(n_jobs=count))
        return count

    def submit(self, func: Any, callback: Any = None) -> Any:
        """Have a worker call a batch."""
        assert self._pool is not None, "joblib configures a backend before it uses it"
        future = self._pool.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    apply_async = submit  # the name before joblib 1.5

    def retrieve_result_callback(self, out: Any) -> Any:
        """What a batch has returned, or raises what it has raised."""
        return out.result()

    def terminate(self) -> None:
        """Leave the workers to the next `Parallel`."""
        self._pool = None
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:  # joblib's
        """Interrupt what runs: its results are not wanted."""
        pool, self._pool = self._pool, None
        if pool is not None:
            _forget(pool)
            pool.stop()
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)


def _pool_of(count: int, environment: dict[str, str]) -> Pool:
    global _kept  # noqa: PLW0603  # one for all `Parallel`s of the process
    wanted = count, environment
    with _lock:
        if _kept is not None and _kept[0] is mark() and _kept[1] == wanted and _kept[2].is_open:
            return _kept[2]
        # The one before finishes what it has, and ends.
        pool = Pool(count, env=environment, writable=True)
        _kept = mark(), wanted, pool
        return pool


def _forget(pool: Pool) -> None:
    global _kept  # noqa: PLW0603  # the same
    with _lock:
        if _kept is not None and _kept[2] is pool:
            _kept = None


register_parallel_backend("rankwise", RankwiseBackend)
