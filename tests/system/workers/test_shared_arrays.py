"""Arrays that a worker shares: when their memory goes."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankwise.workers import Orchestrator, TaskArgs, TensorArgType, Worker, array_at

pytestmark = pytest.mark.system

MIB = 1 << 20
PATIENCE_S = 60


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(level=3, num_sub_workers=1) as made:
        made.init()
        yield made


def shared_mib() -> int:
    """How much shared memory this process has touched."""
    for line in Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) >> 10
    raise AssertionError("the kernel does not tell")


def filled(worker: Worker, size_mib: int) -> Any:
    array = worker.share(size_mib * MIB, "u1")
    array[...] = 7
    return array


def args_of(array: Any) -> TaskArgs:
    args = TaskArgs()
    args.add_tensor(array, TensorArgType.INOUT)
    return args


def count_up(args: TaskArgs) -> None:
    array_at(args.tensor(0))[...] += 1


def test_memory_goes_when_the_last_view_of_an_array_does(worker: Worker) -> None:
    before = shared_mib()
    array = filled(worker, 50)
    view = array[10:20].view("i1")
    del array
    assert shared_mib() >= before + 49
    assert view.tolist() == [7] * 10

    del view

    assert shared_mib() <= before + 1


def test_an_array_that_ends_in_another_thread_or_in_a_cycle_gives_its_memory_back(
    worker: Worker,
) -> None:
    before = shared_mib()
    held = [filled(worker, 20)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(PATIENCE_S)
    cycle: list[Any] = [filled(worker, 20)]
    cycle.append(cycle)
    del cycle
    gc.collect()

    assert shared_mib() <= before + 1
    assert filled(worker, 1).sum() == 7 * MIB


def test_addresses_are_given_out_again_and_hold_zeros(worker: Worker) -> None:
    """All of them together are more than an arena has."""
    for _ in range(40):
        array = worker.share(10 << 30, "u1")
        assert not array[-5:].any()
        array[-5:] = 3


def test_a_task_under_way_keeps_the_memory_that_it_was_given(worker: Worker) -> None:
    result = worker.share(1, "i8")
    number_of_bytes = 4 * MIB
    before = shared_mib()

    def add_up(args: TaskArgs) -> None:
        array_at(args.tensor(1))[0] += array_at(args.tensor(0)).sum(dtype="i8")

    def orchestrate(orch: Orchestrator, _args: object, _config: object) -> None:
        for _ in range(8):
            args = args_of(filled(worker, 4))
            args.add_tensor(result, TensorArgType.INOUT)
            orch.submit_sub(add_up, args)
            orch.submit_sub(count_up, args_of(worker.share(MIB, "u1")))

    worker.run(orchestrate)

    assert result[0] == 8 * 7 * number_of_bytes
    assert shared_mib() <= before + 1


def test_a_recorded_graph_keeps_the_arrays_of_its_tasks(worker: Worker) -> None:
    counts = worker.share(3, "i8")
    address = counts.ctypes.data
    args = args_of(counts)
    graph = worker.record(lambda orch, args, _config: orch.submit_sub(count_up, args), args)
    del counts, args
    others = [worker.share(3, "i8") for _ in range(10)]

    graph.replay()
    graph.replay()

    assert all(other.tolist() == [0, 0, 0] for other in others)
    assert address not in {other.ctypes.data for other in others}


def test_a_function_keeps_the_arrays_that_it_has_captured(worker: Worker) -> None:
    seen = worker.share(1, "i8")

    def made() -> Any:
        captured = worker.share(4, "i8")
        captured[...] = 5

        def add_up(_: TaskArgs) -> None:
            seen[0] += captured.sum()

        return worker.register(add_up)

    number = made()
    gc.collect()
    for _ in range(3):
        worker.share(4, "i8")[...] = 9
        worker.run(lambda orch, _args, _config: orch.submit_sub(number))

    assert seen[0] == 3 * 20


def test_a_copy_of_the_process_that_drops_an_array_leaves_it_as_it_is(worker: Worker) -> None:
    array = filled(worker, 1)
    pid = os.fork()
    if pid == 0:
        del array
        os._exit(0)
    os.waitpid(pid, 0)

    assert array.sum() == 7 * MIB


def test_an_array_outlives_its_worker() -> None:
    with Worker(level=3, num_sub_workers=1) as worker:
        worker.init()
        array = filled(worker, 1)
        dropped = worker.share(4)
    del dropped

    assert array.sum() == 7 * MIB
    with worker:
        worker.init()
        worker.run(
            lambda orch, _args, _config: orch.submit_sub(count_up, args_of(worker.share(2, "i4")))
        )
    assert np.all(array == 7)
