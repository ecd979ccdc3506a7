"""`rankwise.Pool` in this process: values, failures, deaths, arrays, ends."""

import asyncio
import concurrent.futures
import itertools
import json
import operator
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pool_tasks
import pytest
from running import run

import rankwise
from rankwise.launch.control.client import list_pools
from rankwise.launch.pool import _Chunks

pytestmark = pytest.mark.system
PATIENCE_S = 120
offset = 1


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rankwise.Pool]:
    folder = str(tmp_path_factory.mktemp("met"))
    with rankwise.Pool(2) as pool:
        met = [pool.submit(pool_tasks.meet, folder, 2) for _ in range(2)]  # both workers are there
        assert [each.result(PATIENCE_S) for each in met] == [None, None]
        yield pool


@pytest.fixture
def pool(shared_pool: rankwise.Pool) -> rankwise.Pool:
    """A pool of two workers, which were there before the test."""
    return shared_pool


@pytest.fixture
def mortal_pool() -> Iterator[rankwise.Pool]:
    """A pool of the test's own, whose workers may die."""
    with rankwise.Pool(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _leftovers_are_those_of_a_test(shared_pool: rankwise.Pool, no_leftovers: None) -> None:
    """The module's own pool is no leftover."""


def test_future_has_what_the_function_returns(pool: rankwise.Pool) -> None:
    assert pool.submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1)
    assert pool.submit(int, "ff", base=16).result(PATIENCE_S) == 255


def test_futures_among_the_arguments_stand_for_their_values(pool: rankwise.Pool) -> None:
    first, second = pool.submit(abs, -20), pool.submit(abs, -22)

    assert pool.submit(operator.add, first, second).result(PATIENCE_S) == 42


def test_future_of_another_executor_can_be_an_argument(pool: rankwise.Pool) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert pool.submit(abs, threads.submit(abs, -3)).result(PATIENCE_S) == 3


def test_failed_future_fails_what_needs_it(pool: rankwise.Pool) -> None:
    dependent = pool.submit(operator.add, pool.submit(pool_tasks.fail, "early"), 1)

    with pytest.raises(pool_tasks.TwoArguments, match="failed early"):
        pool.submit(abs, dependent).result(PATIENCE_S)


def test_exception_has_its_remote_traceback_notes_and_attributes(pool: rankwise.Pool) -> None:
    error = pool.submit(pool_tasks.fail, "badly").exception(PATIENCE_S)

    assert isinstance(error, pool_tasks.TwoArguments)
    assert error.how == "badly"
    assert error.__notes__ == ["it was told to"]
    told = str(error.__cause__)
    assert "in fail" in told
    assert "pool/worker.py" not in told


def test_what_cannot_be_pickled_is_named_in_a_line(pool: rankwise.Pool) -> None:
    with pytest.raises(rankwise.ConfigError, match=r"argument 0 of abs \(a generator\) cannot"):
        pool.submit(abs, (x for x in "")).result(PATIENCE_S)
    with pytest.raises(TypeError, match=r"the result, a _thread.lock, cannot be sent"):
        pool.submit(pool_tasks.lock).result(PATIENCE_S)


def test_function_by_value_sees_the_names_of_its_submission(pool: rankwise.Pool) -> None:
    global offset  # noqa: PLW0603  # that is the point
    amounts = [1]
    plus_offset = lambda x: x + offset  # noqa: E731
    plus_amount = lambda x: x + amounts[0]  # noqa: E731

    assert pool.submit(plus_amount, 1).result(PATIENCE_S) == 2
    amounts[0] = 5
    assert pool.submit(plus_amount, 1).result(PATIENCE_S) == 6
    assert pool.submit(plus_offset, 1).result(PATIENCE_S) == 2
    offset = 10
    try:
        assert pool.submit(plus_offset, 1).result(PATIENCE_S) == 11
    finally:
        offset = 1


def test_more_functions_than_workers_remember(pool: rankwise.Pool) -> None:
    functions = [lambda x, n=n: x + n for n in range(100)]

    for _ in range(2):
        results = [pool.submit(function, 1) for function in functions]
        assert [each.result(PATIENCE_S) for each in results] == list(range(1, 101))


@pytest.mark.parametrize("chunksize", [None, 1, 7])
def test_map_keeps_the_order(pool: rankwise.Pool, chunksize: int | None) -> None:
    values = pool.map(operator.mul, range(500), itertools.repeat(2), chunksize=chunksize)

    assert list(values) == list(range(0, 1000, 2))


def test_map_begins_with_chunks_that_fit_the_calls_of_the_last_one(pool: rankwise.Pool) -> None:
    def quick(value: int) -> int:
        return value

    first = _Chunks(pool, quick, (range(1000),), None)
    first._measure(100, 1_030_000)  # 10 us a call, and 30 us for the chunk
    first._measure(2, 60_000)  # too short to say more
    second = _Chunks(pool, quick, (range(1000),), None)
    begun_with = second._size
    second._measure(125, 1_250_000_030)
    third = _Chunks(pool, quick, (range(1000),), None)
    unknown = _Chunks(pool, len, (range(1000),), None)

    assert (first._fitting, begun_with) == (1000, 125)
    assert (third._size, unknown._size) == (1, 1)


def test_first_chunks_of_a_map_leave_calls_for_all_workers(pool: rankwise.Pool) -> None:
    def quick(value: int) -> int:
        return value

    pool.note_fitting_size(quick, 1_000_000)
    chunks = _Chunks(pool, quick, (range(100),), None)
    first = chunks._next_items()

    assert len(first) == 100 // pool.size


def test_slow_input_of_a_map_is_not_collected_for_long_chunks(pool: rankwise.Pool) -> None:
    read = []

    def slow() -> Iterator[int]:
        for number in itertools.count():
            time.sleep(0.011)  # more than a chunk is to take
            read.append(number)
            yield number

    pool.note_fitting_size(abs, 1_000_000)
    values = pool.map(abs, slow())

    assert next(values) == 0
    assert len(read) <= 3 * pool.size + 1


def test_chunk_that_fails_says_nothing_about_the_time_of_calls(pool: rankwise.Pool) -> None:
    def refuse(value: int) -> int:
        raise ValueError(value)

    with pytest.raises(ValueError, match="0"):
        next(pool.map(refuse, range(1000)))

    assert pool.fitting_size(refuse) == 1


class Unequal:
    """A function that cannot be compared."""

    __hash__ = object.__hash__

    def __init__(self, result: int) -> None:
        self.result = result

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    def __call__(self, value: int) -> int:
        return value + self.result


class Unhashable(Unequal):
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("function", [Unequal(1), Unhashable(1), np.negative, [1].count])
def test_map_takes_functions_that_cannot_be_remembered(pool: rankwise.Pool, function: Any) -> None:
    for _ in range(2):
        assert len([*pool.map(function, range(300))]) == 300


def test_map_of_a_list_is_in_order_while_other_threads_feed_it(pool: rankwise.Pool) -> None:
    for _ in range(20):
        assert list(pool.map(abs, range(30))) == list(range(30))


def test_map_reads_an_endless_input_little_further_than_values_are_taken(
    pool: rankwise.Pool,
) -> None:
    read = itertools.count()

    values = pool.map(abs, read, chunksize=1)
    taken = [next(values) for _ in range(20)]
    values.close()  # type: ignore[attr-defined]

    assert taken == list(range(20))
    assert next(read) < 40


def test_map_gives_the_values_before_the_one_that_fails(pool: rankwise.Pool) -> None:
    values = pool.map(operator.truediv, [4, 2, 1], [2, 1, 0], chunksize=3)

    assert [next(values), next(values)] == [2, 2]
    with pytest.raises(ZeroDivisionError):
        next(values)


def test_map_has_a_timeout(pool: rankwise.Pool) -> None:
    with pytest.raises(TimeoutError):
        next(pool.map(pool_tasks.sleep, [0.2, 0.2], timeout=0.01))


def test_death_names_the_signal_and_other_tasks_go_on(mortal_pool: rankwise.Pool) -> None:
    others = [mortal_pool.submit(abs, -number) for number in range(40)]
    death = mortal_pool.submit(pool_tasks.die)
    others += [mortal_pool.submit(abs, -number) for number in range(40)]

    error = death.exception(PATIENCE_S)

    assert isinstance(error, rankwise.WorkerDied)
    assert error.exit_code == -signal.SIGKILL
    assert "was killed by SIGKILL" in str(error)
    assert str(error).endswith(("while it ran die", ")"))
    assert [each.result(PATIENCE_S) for each in others] == [*range(40), *range(40)]


def test_death_of_a_fatal_signal_shows_the_stack(mortal_pool: rankwise.Pool) -> None:
    error = mortal_pool.submit(pool_tasks.die, signal.SIGSEGV).exception(PATIENCE_S)

    assert isinstance(error, rankwise.WorkerDied)
    assert "in die" in error.stack
    assert "in serve" not in error.stack


def test_worker_that_exits_is_told_with_its_code(mortal_pool: rankwise.Pool) -> None:
    with pytest.raises(rankwise.WorkerDied, match="ended with exit code 3 while it ran _exit on 3"):
        mortal_pool.submit(os._exit, 3).result(PATIENCE_S)


def test_worker_that_dies_in_a_map_is_told_with_the_items_of_its_chunk(
    mortal_pool: rankwise.Pool,
) -> None:
    values = mortal_pool.map(os._exit, [3] * 5, chunksize=2)

    with pytest.raises(rankwise.WorkerDied, match="_exit on items 0 to 1 of a map"):
        list(values)


def test_long_argument_of_a_task_whose_worker_dies_is_cut(mortal_pool: rankwise.Pool) -> None:
    error = mortal_pool.submit(pool_tasks.die_of, "x" * 100).exception(PATIENCE_S)

    assert f"while it ran die_of on '{'x' * 39}… " in str(error)


def test_worker_killed_every_fiftieth_task_loses_nothing(mortal_pool: rankwise.Pool) -> None:
    futures = [mortal_pool.submit(pool_tasks.die_or_return, number) for number in range(200)]

    results = [future.exception(PATIENCE_S) or future.result() for future in futures]

    died = [n for n, each in enumerate(results) if isinstance(each, rankwise.WorkerDied)]
    assert died == [49, 99, 149, 199]
    assert [each for each in results if isinstance(each, int)] == [
        n for n in range(200) if n % 50 != 49
    ]


def test_task_with_retries_runs_again_after_a_death(tmp_path: Path) -> None:
    with rankwise.Pool(1, retries=1) as pool:
        assert pool.submit(pool_tasks.die_once, str(tmp_path / "x")).result(PATIENCE_S) == "second"
        with pytest.raises(rankwise.WorkerDied):
            pool.submit(pool_tasks.die).result(PATIENCE_S)


def taken(values: Iterator[Any]) -> tuple[list[Any], BaseException | None]:
    """The values of a `map`, and the exception that ended them."""
    found: list[Any] = []
    try:
        found.extend(values)
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return found, error
    return found, None


@pytest.mark.parametrize("value", [None, "x" * 1000, b"y" * 100_000])
def test_death_in_a_chunk_loses_no_result_of_the_calls_before(
    mortal_pool: rankwise.Pool, value: Any
) -> None:
    calls = range(64), itertools.repeat(62), itertools.repeat(value)

    found, error = taken(mortal_pool.map(pool_tasks.die_at, *calls, chunksize=64))

    assert found == (list(range(62)) if value is None else [value] * 62)
    assert isinstance(error, rankwise.WorkerDied)
    assert "on items 62 to 63 of a map" in str(error)


def test_death_in_a_long_chunk_of_short_calls_loses_few_results(
    mortal_pool: rankwise.Pool,
) -> None:
    calls = range(20_000), itertools.repeat(15_000)

    found, error = taken(mortal_pool.map(pool_tasks.die_at, *calls, chunksize=20_000))

    assert found == list(range(len(found)))
    assert 15_000 - 64 <= len(found) <= 15_000
    assert isinstance(error, rankwise.WorkerDied)


def test_death_in_a_chunk_of_arrays_loses_no_array(mortal_pool: rankwise.Pool) -> None:
    found, error = taken(mortal_pool.map(pool_tasks.array_or_die, range(5), chunksize=5))

    assert [(int(array[0]), array.size) for array in found] == [(n, 1 << 18) for n in range(3)]
    assert isinstance(error, rankwise.WorkerDied)


def test_retries_repeat_only_the_calls_of_a_chunk_that_are_left(tmp_path: Path) -> None:
    with rankwise.Pool(1, retries=1) as pool:
        calls = range(64), itertools.repeat(str(tmp_path))
        values = list(pool.map(pool_tasks.die_once_at, *calls, chunksize=64))

    assert values == list(range(64))
    runs = {int(path.name): path.stat().st_size for path in tmp_path.iterdir()}
    assert runs == {number: 2 if number in (5, 20, 62) else 1 for number in range(64)}


def test_result_of_a_chunk_that_cannot_be_pickled_is_the_only_one_lost(
    pool: rankwise.Pool,
) -> None:
    found, error = taken(pool.map(pool_tasks.lock_at, range(5), chunksize=5))

    assert found == [0, 1, 2]
    assert "the result, a _thread.lock, cannot be sent to the caller" in str(error)


def test_stop_iteration_ends_no_chunk_silently(pool: rankwise.Pool) -> None:
    found, error = taken(pool.map(pool_tasks.stop_at, range(1000), chunksize=1000))

    assert found == list(range(300))
    assert error is not None


def test_idle_worker_takes_over_what_was_sent_to_a_busy_one(
    pool: rankwise.Pool, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "end")
    futures = [pool.submit(abs, number) for number in range(200)]  # short: many are sent ahead
    blocked = pool.submit(pool_tasks.wait_for, str(tmp_path / "end"))
    futures += [pool.submit(abs, number) for number in range(200)]

    assert len([future.result(PATIENCE_S) for future in futures]) == 400
    (tmp_path / "end").write_text("done")
    assert blocked.result(PATIENCE_S) == "done"


def test_other_terminal_sees_what_a_pool_does(tmp_path: Path) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    for fifo in (begun, end):
        os.mkfifo(fifo)
    name = f"folds of {os.getpid()}"
    with rankwise.Pool(1, name=name) as pool:
        pid = pool.submit(os.getpid).result(PATIENCE_S)
        blocked = pool.submit(pool_tasks.begin_and_wait, str(begun), str(end))
        assert begun.read_text() == "begun"
        queued = [pool.submit(abs, -1) for _ in range(100)]
        shown = run("top", "--json", name)
        page = run("top", "--once", name)
        listed = run("ps")
        stopped = run("stop", name)
        end.write_text("")
        concurrent.futures.wait([blocked, *queued], PATIENCE_S)

    told = json.loads(shown.stdout)
    (worker,) = told["workers"]
    assert (told["run_id"], told["pid"], told["pool"]["queued"]) == (name, os.getpid(), 100)
    assert (worker["pid"], worker["task"], worker["steps"]) == (pid, "begin_and_wait", 1)
    assert worker["task_s"] > 0
    assert "pool of 1 worker  100 queued  1 done" in page.stdout
    assert "1 of 1 workers" in next(line for line in listed.lines if line.startswith(name))
    assert stopped.code == 2  # a pool is no run
    assert name not in [each.run_id for each in list_pools()]


def test_pools_of_one_name_are_told_apart() -> None:
    name = f"twin of {os.getpid()}"
    with rankwise.Pool(1, name=name), rankwise.Pool(1, name=name):
        named = [each.run_id for each in list_pools() if each.run_id.startswith(name)]

    assert named == [name, f"{name}-2"]


def test_queued_task_can_be_cancelled_and_its_dependent_is(
    pool: rankwise.Pool, tmp_path: Path
) -> None:
    fifos = [tmp_path / "one", tmp_path / "other"]
    for fifo in fifos:
        os.mkfifo(fifo)
        pool.submit(pool_tasks.wait_for, str(fifo))
    ahead = [pool.submit(abs, -1) for _ in range(100)]
    queued = pool.submit(abs, -2)
    dependent = pool.submit(abs, queued)

    assert queued.cancel()
    concurrent.futures.wait([queued, dependent], PATIENCE_S)
    assert dependent.cancelled()
    for fifo in fifos:
        fifo.write_text("")
    assert [each.result(PATIENCE_S) for each in ahead] == [1] * 100


def test_interrupt_in_a_callback_keeps_no_future_from_its_end(
    mortal_pool: rankwise.Pool, tmp_path: Path
) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    for fifo in (begun, end):
        os.mkfifo(fifo)
    waiting = [
        mortal_pool.submit(pool_tasks.begin_and_wait, str(begun), str(end)) for _ in range(2)
    ]
    assert begun.read_text()
    queued = [mortal_pool.submit(abs, -1) for _ in range(100)]

    def interrupt(_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)

    for future in queued:
        future.add_done_callback(interrupt)

    for future in (queued[50], queued[60]):
        with pytest.raises(KeyboardInterrupt):
            future.cancel()
    with pytest.raises(KeyboardInterrupt):
        mortal_pool.stop()

    done, left = concurrent.futures.wait([*queued, *waiting], PATIENCE_S)
    assert (len(done), left) == (102, set())


def test_futures_work_with_as_completed_and_asyncio(pool: rankwise.Pool) -> None:
    futures = {pool.submit(abs, -number) for number in range(10)}
    assert set(concurrent.futures.as_completed(futures, PATIENCE_S)) == futures

    async def total() -> int:
        loop = asyncio.get_running_loop()
        one = asyncio.wrap_future(pool.submit(abs, -1))
        return await one + await loop.run_in_executor(pool, abs, -2)

    assert asyncio.run(total()) == 3


def test_many_threads_submit(pool: rankwise.Pool) -> None:
    results: list[int] = []

    def submit() -> None:
        futures = [pool.submit(abs, -number) for number in range(100)]
        results.extend(future.result(PATIENCE_S) for future in futures)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(results) == sorted([*range(100)] * 4)


def test_large_array_is_read_only_and_right(pool: rankwise.Pool) -> None:
    array = np.arange(1 << 18, dtype=float)

    result = pool.submit(pool_tasks.plus_one, array).result(PATIENCE_S)

    assert np.array_equal(result, array + 1)
    assert not result.flags.writeable
    assert not pool.submit(pool_tasks.is_writable, array).result(PATIENCE_S)
    assert pool.submit(pool_tasks.is_writable, array[:4]).result(PATIENCE_S)


def test_thousands_of_large_arrays_need_no_open_files(pool: rankwise.Pool) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])

    kept = [pool.submit(np.zeros, 1 << 17).result(PATIENCE_S) for _ in range(20)]

    assert len([*Path("/proc/self/fd").iterdir()]) <= before
    assert len(kept) == 20


def test_array_of_empty_is_seen_by_all_and_written_if_asked_for(pool: rankwise.Pool) -> None:
    array = pool.empty((3, 4), int)
    assert pool.submit(pool_tasks.plus_one_shared, array).result(PATIENCE_S).sum() == 12
    with pytest.raises(ValueError, match="read-only"):
        pool.submit(pool_tasks.add_in_place, array).result(PATIENCE_S)

    with rankwise.Pool(1, writable=True) as writing:
        assert writing.submit(pool_tasks.add_in_place, array).result(PATIENCE_S) == 12
        assert writing.submit(pool_tasks.add_in_place, array[:1]).result(PATIENCE_S) == 8

    assert array.tolist() == [[2] * 4, [1] * 4, [1] * 4]


def test_memory_of_an_array_goes_with_its_last_view(pool: rankwise.Pool) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("rankwise-pool")

    before = mapped()
    array = pool.empty(1 << 20, np.uint8)
    part = array[5:]
    result = pool.submit(pool_tasks.plus_one, array).result(PATIENCE_S)
    assert mapped() == before + 2

    del array, part, result

    assert mapped() == before


@pytest.mark.torch
def test_large_tensor_travels_as_memory(pool: rankwise.Pool) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512).requires_grad_()

    result = pool.submit(pool_tasks.plus_one, tensor).result(PATIENCE_S)

    assert torch.equal(result, tensor + 1)
    bits = torch.ones(1 << 20, dtype=torch.bool)
    back = pool.submit(operator.itemgetter(slice(None)), bits).result(PATIENCE_S)
    back[0] = False  # its own copy
    assert back.sum() == len(bits) - 1


def test_worker_is_replaced_after_so_many_tasks() -> None:
    with rankwise.Pool(1, max_tasks_per_child=2) as pool:
        pids = list(pool.map(pool_tasks.pid_of_worker, range(6), chunksize=1))

    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def test_initializer_runs_in_each_worker_and_its_failure_breaks_the_pool() -> None:
    with rankwise.Pool(1, initializer=pool_tasks.set_value, initargs=(7,)) as pool:
        assert pool.submit(pool_tasks.value).result(PATIENCE_S) == [7]

    with rankwise.Pool(1, initializer=pool_tasks.fail, initargs=("at once",)) as pool:
        future = pool.submit(abs, -1)
        with pytest.raises(concurrent.futures.BrokenExecutor, match="initializer raised"):
            future.result(PATIENCE_S)
        with pytest.raises(rankwise.BrokenPool):
            pool.submit(abs, -1)


def test_death_in_the_initializer_names_it() -> None:
    told = "exit code 3 in _exit, the initializer"
    with (
        rankwise.Pool(1, initializer=os._exit, initargs=(3,)) as pool,
        pytest.raises(rankwise.BrokenPool, match=told),
    ):
        pool.submit(abs, -1).result(PATIENCE_S)


def test_pool_in_a_task(pool: rankwise.Pool) -> None:
    assert pool.submit(pool_tasks.squares_in_a_pool, 3).result(PATIENCE_S) == [3, 2, 1]


def test_shutdown_finishes_what_was_submitted_and_refuses_more() -> None:
    pool = rankwise.Pool(1)
    futures = [pool.submit(abs, -number) for number in range(20)]
    pool.shutdown()

    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(abs, -1)


def test_shutdown_can_cancel_what_was_not_sent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "end")
    pool = rankwise.Pool(1)
    fifos = str(tmp_path / "begun"), str(tmp_path / "end")
    running = pool.submit(pool_tasks.begin_and_wait, *fifos)
    assert (tmp_path / "begun").read_text() == "begun"
    futures = [pool.submit(abs, -number) for number in range(20)]
    pool.shutdown(wait=False, cancel_futures=True)
    concurrent.futures.wait(futures[2:], PATIENCE_S)
    assert all(future.cancelled() for future in futures[2:])

    (tmp_path / "end").write_text("done")

    assert running.result(PATIENCE_S) == "done"
    pool.shutdown()


def test_pool_that_nobody_holds_finishes_its_tasks_and_ends() -> None:
    pool = rankwise.Pool(1)
    future = pool.submit(abs, -3)
    engine = pool._engine
    del pool

    assert future.result(PATIENCE_S) == 3
    assert engine.wait_released(PATIENCE_S)


class NameAtSignal(str):  # noqa: SLOT000  # it has a number
    """A name that is read a second time when Ctrl-C comes: the pool's thread runs by then."""

    reads = 0

    def __str__(self) -> str:
        self.reads += 1
        if self.reads == 2:
            signal.raise_signal(signal.SIGINT)
        return super().__str__()


def test_interrupt_while_a_pool_is_made_leaves_nothing_of_it() -> None:
    before = {*threading.enumerate()}

    with pytest.raises(KeyboardInterrupt):
        rankwise.Pool(1, name=NameAtSignal("late"))

    for thread in {*threading.enumerate()} - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_fork_of_the_caller_is_told_to_make_its_own_pool(pool: rankwise.Pool) -> None:
    with os.fdopen(os.memfd_create("answer"), "r+") as answer:
        child = os.fork()
        if child == 0:
            try:
                pool.submit(abs, -1)
            except RuntimeError as error:
                answer.write(str(error))
                answer.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        answer.seek(0)
        assert answer.read() == (
            f"this pool belongs to process {os.getpid()}, of which this process is a fork"
            " (make a rankwise.Pool here)"
        )
    assert pool.submit(abs, -1).result(PATIENCE_S) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_workers": 0}, "max_workers is 0, expected 1 or more, at most 4096"),
        ({"max_workers": "4"}, "max_workers is '4', expected 1 or more"),
        ({"retries": -1}, "retries is -1, expected 0 or more"),
        ({"max_tasks_per_child": 0}, "max_tasks_per_child is 0, expected 1 or more"),
        ({"initializer": 3}, "initializer is 3, expected a function"),
    ],
)
def test_wrong_argument_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(rankwise.ConfigError, match=message):
        rankwise.Pool(**arguments)  # type: ignore[arg-type]
