"""Tasks that write to a tensor that they have as INPUT, on workers that check it."""

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import WorkerDied
from rankwise.workers import (
    ArgDirection,
    ChipCallable,
    InputWritten,
    Orchestrator,
    TaskArgs,
    TensorArgType,
    Worker,
    array_at,
)

pytestmark = pytest.mark.system

IN, OUT, INOUT = TensorArgType.INPUT, TensorArgType.OUTPUT, TensorArgType.INOUT
SMALL, LARGE = 4, 10_000
"""Numbers of float32: within a page of memory, and over several pages."""


def write_input(args: TaskArgs) -> None:
    array_at(args.tensor(0))[1] = 7


def write_input_in_place(args: TaskArgs) -> None:
    seen = array_at(args.tensor(0))
    np.add(seen, 1, out=seen)


def write_by_a_pointer(args: TaskArgs) -> None:
    tensor = args.tensor(0)
    ctypes.memset(tensor.data + tensor.nbytes() // 2, 1, 4)


def write_and_fail(args: TaskArgs) -> None:
    write_by_a_pointer(args)
    raise KeyError("lost")


def copy_input(args: TaskArgs) -> None:
    array_at(args.tensor(1))[:] = array_at(args.tensor(0))


def crash(_: TaskArgs) -> None:
    ctypes.string_at(8)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(level=3, num_sub_workers=1, platform="host", device_ids=[0], check_inputs=True)
    worker.init()
    yield worker
    worker.close()


def run(worker: Worker, function: Any, count: int, *tags: TensorArgType) -> Any:
    """Run a task on arrays of ones; returns the last of them."""
    arrays = [worker.share((count,), "f4") for _ in tags]
    for array in arrays:
        array[:] = 1

    def orchestrate(orch: Orchestrator, _args: TaskArgs | None, _config: Any) -> None:
        task = TaskArgs()
        for array, tag in zip(arrays, tags, strict=True):
            task.add_tensor(array, tag)
        if isinstance(function, ChipCallable):
            orch.submit_next_level(function, task)
        else:
            orch.submit_sub(function, task)

    worker.run(orchestrate)
    return arrays[-1].copy()


def line_of(function: Callable[..., Any], text: str) -> str:
    """How a line of a function is told."""
    from inspect import getsourcelines  # noqa: PLC0415  # only here

    lines, first = getsourcelines(function)
    place = next(place for place, line in enumerate(lines) if text in line)
    return f"{Path(__file__).name}:{first + place}, in {function.__name__}"


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("function", "line"), [(write_input, "= 7"), (write_input_in_place, "np.add")]
)
def test_array_of_an_input_refuses_writes_and_the_error_names_tensor_task_and_line(
    worker: Worker, function: Callable[..., Any], line: str, count: int
) -> None:
    with pytest.raises(InputWritten) as caught:
        run(worker, function, count, IN, OUT)

    told = f"tensor 0, which is INPUT, at {line_of(function, line)}"
    assert told in str(caught.value)
    assert f"({function.__name__})" in caught.value.__notes__[0]


def test_write_by_a_pointer_is_noticed_with_its_line(worker: Worker) -> None:
    with pytest.raises(InputWritten) as caught:
        run(worker, write_by_a_pointer, LARGE, IN, OUT)

    assert f"tensor 0, which is INPUT at {line_of(write_by_a_pointer, 'memset')}" in str(
        caught.value
    )


def test_write_by_a_pointer_within_a_page_is_noticed_without_its_line(worker: Worker) -> None:
    with pytest.raises(InputWritten, match=r"written to tensor 0, which is INPUT \(give it"):
        run(worker, write_by_a_pointer, SMALL, IN, OUT)


def test_what_the_task_raises_goes_first_and_has_the_write_as_a_note(worker: Worker) -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        run(worker, write_and_fail, LARGE, IN, OUT)

    assert any(
        re.search("written to tensor 0, which is INPUT at", note) for note in caught.value.__notes__
    )


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_tasks_that_write_only_their_outputs_pass(worker: Worker, count: int) -> None:
    assert run(worker, copy_input, count, IN, OUT).tolist() == [1.0] * count
    assert run(worker, write_input, count, INOUT)[1] == 7.0


def write_first(x: Any) -> None:
    x[0] = 3


def test_input_of_a_numpy_function_on_a_chip_is_checked(worker: Worker) -> None:
    kernel = ChipCallable.build([ArgDirection.IN], "write_first", write_first)

    with pytest.raises(InputWritten, match=line_of(write_first, "= 3")):
        run(worker, kernel, LARGE, IN)


def test_fault_elsewhere_ends_the_child_as_ever() -> None:
    # Its own worker: a shared one may fork the next child before the test ends.
    worker = Worker(level=3, num_sub_workers=1, platform="host", device_ids=[0], check_inputs=True)
    worker.init()
    try:
        with pytest.raises(WorkerDied, match="SIGSEGV"):
            run(worker, crash, LARGE, IN, OUT)
    finally:
        worker.close()


def test_replayed_tasks_are_checked() -> None:
    with Worker(level=3, num_sub_workers=1, check_inputs=True) as worker:
        worker.init()
        array = worker.share((SMALL,), "f4")

        def orchestrate(orch: Orchestrator, _args: TaskArgs | None, _config: Any) -> None:
            task = TaskArgs()
            task.add_tensor(array, IN)
            orch.submit_sub(write_input, task)

        recorded = worker.record(orchestrate)
        with pytest.raises(InputWritten):
            recorded.replay()


def test_without_the_check_a_task_may_write_what_it_likes() -> None:
    with Worker(level=3, num_sub_workers=1) as worker:
        worker.init()
        assert run(worker, write_input, SMALL, IN)[1] == 7.0
