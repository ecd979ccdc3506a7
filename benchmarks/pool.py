"""Tasks that return values: `rankwise.Pool` beside the executors that Python users have.

`no-op`: the median time from `submit` to the result, one task at a time. `submit`: tasks per second
when thousands are submitted and then awaited. `map`: a list of small calls; rankwise chooses its
chunks itself, the others have the best of several chunk sizes. `arrays`: `a + 1` for 64 MiB, there
and back; `empty` is rankwise with arrays that travel without a copy. `ideal`: 10,000 tasks of one
millisecond on two workers, as a multiple of the five seconds that they need at least. `cpu`: 10,000
tasks that use the CPU for one millisecond; the CPU time of the caller and its workers as a multiple
of ten seconds. Unlike `ideal`, it can be measured on a busy machine. `deaths`: a worker is killed
every 50th task; what is lost and what is left.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import numpy as np
from measuring import Table, arguments, describe_machine, ratio, take_turns

import rankwise
from rankwise.base.units import SECOND
from rankwise.drivers.real.process_work import usage_of

PARTS = ("noop", "submit", "map", "arrays", "ideal", "cpu", "deaths")
WORKERS = 2
ARRAY_BYTES = 64 << 20
CHUNK_SIZES = (1, 16, 128, 1024)
REFERENCE = "ProcessPoolExecutor"


def noop() -> int:
    return 1


def small(number: int) -> int:
    return number + 1


def plus_one(array: Any) -> Any:
    return array + 1


def plus_one_shared(array: Any) -> Any:
    out = rankwise.Pool.empty(array.shape, array.dtype)
    np.add(array, 1, out=out)
    return out


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        """Use the CPU, as a task does."""


def use_cpu(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        """Use the CPU for so long, however many share it."""


def pid_after(seconds: float) -> int:
    spin(seconds)
    return os.getpid()


def die_or_return(number: int) -> int:
    if number % 50 == 49:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


Call = Callable[..., Any]


def map_all(function: Call, items: list[Any]) -> list[Any]:
    return list(map(function, items))


def _map_on_ray(remote: Any, function: Call, items: list[Any], chunk: int) -> list[Any]:
    import ray  # noqa: PLC0415  # where it is installed

    starts = range(0, len(items), chunk)
    parts = ray.get([remote.remote(map_all, function, items[at : at + chunk]) for at in starts])
    return [result for part in parts for result in part]


class Peer:
    """A pool of workers: how a call is submitted and awaited, and how a list is mapped."""

    def __init__(self, submit: Call, result: Call, map_: Call) -> None:
        """`submit(function, *args)`, `result(handle)`, `map_(function, items, chunk)`."""
        self.submit = submit
        self.result = result
        self.map = map_
        self.pids: set[int] = set()
        """Of the workers."""


@contextmanager
def peers(*, quick: bool) -> Iterator[dict[str, Peer]]:
    """All pools, with their workers started. Of Ray, `cpu` lacks its own two servers."""
    # The forks come first: the others have threads.
    with (
        ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as executor,
        get_context("fork").Pool(WORKERS) as multiprocessing_pool,
        rankwise.Pool(WORKERS) as pool,
    ):
        found = {
            "rankwise.Pool": Peer(
                pool.submit, lambda future: future.result(), lambda f, items, _: pool.map(f, items)
            ),
            REFERENCE: Peer(
                executor.submit,
                lambda future: future.result(),
                lambda f, items, chunk: executor.map(f, items, chunksize=chunk),
            ),
            "multiprocessing.Pool": Peer(
                lambda f, *args: multiprocessing_pool.apply_async(f, args),
                lambda handle: handle.get(),
                multiprocessing_pool.map,
            ),
        }
        if find_spec("joblib"):
            from joblib.externals.loky import get_reusable_executor  # noqa: PLC0415  # if there

            loky = get_reusable_executor(WORKERS)
            found["joblib (loky)"] = Peer(
                loky.submit,
                lambda future: future.result(),
                lambda f, items, chunk: loky.map(f, items, chunksize=chunk),
            )
        if find_spec("ray") and not quick:
            import ray  # noqa: PLC0415  # the same

            ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
            remote = ray.remote(lambda f, *args: f(*args))
            found["Ray"] = Peer(remote.remote, ray.get, partial(_map_on_ray, remote))
        for peer in found.values():
            handles = [peer.submit(pid_after, 0.1) for _ in range(2 * WORKERS)]
            peer.pids = {peer.result(handle) for handle in handles}
        yield found
        if "joblib (loky)" in found:
            loky.shutdown(wait=True)
        if "Ray" in found:
            ray.shutdown()


def main() -> None:
    """Measure all parts that are asked for."""
    options = arguments(__doc__, repetitions=5, parts=PARTS)
    describe_machine()
    quick = options.quick
    with peers(quick=quick) as found:
        for part in options.only:
            if part == "deaths":
                continue
            measure, title, unit = MEASURES[part]
            samples: dict[str, Callable[[], float]] = {
                name: partial(measure, peer, quick=quick) for name, peer in found.items()
            }
            if part == "arrays":
                shared = rankwise.Pool.empty(ARRAY_BYTES // 8)
                mine = found["rankwise.Pool"]
                samples["rankwise.Pool, empty"] = partial(
                    _seconds_of, mine, plus_one_shared, shared
                )
            medians = take_turns(samples, options.repetitions)
            table = Table(title, ("pool", unit, f"of {REFERENCE}"), options.json)
            for name, value in medians.items():
                scale = (
                    1.0 if part in ("ideal", "cpu") else 1e6 if part in ("noop", "submit") else 1e3
                )
                table.row(name, f"{value * scale:.2f}", ratio(value, medians[REFERENCE]))
    if "deaths" in options.only:
        _show_deaths(200 if quick else 2000, options)


def measure_noop(peer: Peer, *, quick: bool) -> float:
    samples = []
    for _ in range(50 if quick else 1000):
        begun = time.perf_counter()
        peer.result(peer.submit(noop))
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples)


def measure_submit(peer: Peer, *, quick: bool) -> float:
    count = 200 if quick else 5000
    begun = time.perf_counter()
    for handle in [peer.submit(noop) for _ in range(count)]:
        peer.result(handle)
    return (time.perf_counter() - begun) / count


def measure_map(peer: Peer, *, quick: bool) -> float:
    items = list(range(1000 if quick else 50_000))
    chunks = (128,) if quick else CHUNK_SIZES[1:]
    best = float("inf")
    for chunk in chunks:
        begun = time.perf_counter()
        assert sum(peer.map(small, items, chunk)) == sum(items) + len(items)
        best = min(best, time.perf_counter() - begun)
    return best


def _seconds_of(peer: Peer, function: Call, array: Any) -> float:
    begun = time.perf_counter()
    result = peer.result(peer.submit(function, array))
    assert result[-1] == array[-1] + 1
    return time.perf_counter() - begun


def measure_arrays(peer: Peer, *, quick: bool) -> float:
    return _seconds_of(peer, plus_one, np.ones(ARRAY_BYTES // 8 // (8 if quick else 1)))


def measure_ideal(peer: Peer, *, quick: bool) -> float:
    count = 200 if quick else 10_000
    begun = time.perf_counter()
    for handle in [peer.submit(spin, 0.001) for _ in range(count)]:
        peer.result(handle)
    return (time.perf_counter() - begun) / (count * 0.001 / WORKERS)


def measure_cpu(peer: Peer, *, quick: bool) -> float:
    count = 200 if quick else 10_000
    begun = _cpu_seconds(peer)
    for handle in [peer.submit(use_cpu, 0.001) for _ in range(count)]:
        peer.result(handle)
    return (_cpu_seconds(peer) - begun) / (count * 0.001)


def _cpu_seconds(peer: Peer) -> float:
    of_workers = (usage_of(pid) for pid in peer.pids)
    return time.process_time() + sum(usage[0] / SECOND for usage in of_workers if usage)


def _show_deaths(count: int, options: Any) -> None:
    with rankwise.Pool(WORKERS) as pool:
        futures = [pool.submit(die_or_return, number) for number in range(count)]
        ends = [future.exception() or future.result() for future in futures]
    died = [number for number, end in enumerate(ends) if isinstance(end, rankwise.WorkerDied)]
    lost = [n for n, end in enumerate(ends) if end != n and n not in died]
    table = Table("A worker is killed every 50th task", ("tasks", "died", "lost"), options.json)
    table.row(str(count), str(len(died)), str(len(lost)))
    assert died == list(range(49, count, 50))


MEASURES = {
    "noop": (measure_noop, "A call that does nothing, until its result is there", "us"),
    "submit": (measure_submit, "Many calls, submitted and then awaited", "us a call"),
    "map": (measure_map, "`map` of small calls", "ms"),
    "arrays": (measure_arrays, "`a + 1` for 64 MiB, there and back", "ms"),
    "ideal": (measure_ideal, "Tasks of 1 ms, as a multiple of the ideal", "times"),
    "cpu": (measure_cpu, "Tasks of 1 ms of CPU: CPU time, as a multiple of theirs", "times"),
}

if __name__ == "__main__":
    main()
