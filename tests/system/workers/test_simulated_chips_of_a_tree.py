"""Simulated chips of two workers: kernels, staged windows, and a sum over all of them."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import triton
from rankwise.workers import (
    ArgDirection,
    ChipBootstrapConfig,
    ChipBufferSpec,
    ChipCallable,
    ChipCommBootstrapConfig,
    ContinuousTensor,
    CoreCallable,
    DataType,
    HostBufferStaging,
    TaskArgs,
    TensorArgType,
    Worker,
    array_at,
    context,
)

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("no_leftovers")]

IN, OUT = ArgDirection.IN, ArgDirection.OUT
COUNT, BYTES, CHIPS = 64, 256, 4


@triton.jit
def square(x: Any, y: Any, count: tl.constexpr) -> None:
    at = tl.arange(0, count)
    value = tl.load(x + at)
    tl.store(y + at, value * value)


def square_and_add_up(chip: Any, x: Any, y: Any) -> None:
    """The program of a chip: a kernel, and then the sum of all chips' results."""
    if context().communicator.rank == CHIPS - 1 and array_at(host_view(x.address))[0] < 0:
        raise ArithmeticError("the last chip got a negative number")
    chip.launch(0, x, y)
    squares = array_at(host_view(y.address))
    context().communicator.all_reduce(squares, out=squares)


def host_view(address: int) -> ContinuousTensor:
    return ContinuousTensor.make(address, (COUNT,), DataType.FLOAT32, child_memory=False)


PROGRAM = ChipCallable.build(
    [IN, OUT],
    "square_and_add_up",
    square_and_add_up,
    [(0, CoreCallable.build([IN, OUT], square, grid=1, meta={"count": COUNT}))],
)


def bring_up(rank: int) -> ChipBootstrapConfig:
    return ChipBootstrapConfig(
        comm=ChipCommBootstrapConfig(rank, CHIPS, "all chips", 2 * BYTES),
        buffers=[
            ChipBufferSpec("x", "float32", COUNT, "window", BYTES, load_from_host=True),
            ChipBufferSpec("y", "float32", COUNT, "window", BYTES, store_to_host=True),
        ],
        host_inputs=[HostBufferStaging("x", f"x{rank}", BYTES)],
        host_outputs=[HostBufferStaging("y", f"y{rank}", BYTES)],
    )


def tree(values: list[float]) -> tuple[Worker, list[Worker]]:
    """A root over two workers with two chips each; a chip starts with one of the values."""
    root, workers = Worker(level=4), []
    for ranks in (range(2), range(2, 4)):
        worker = Worker(
            level=3,
            platform="sim",
            device_ids=ranks,
            chip_bootstrap_configs=[bring_up(rank) for rank in ranks],
        )
        for rank in ranks:
            worker.stage(f"x{rank}", np.full(COUNT, values[rank], np.float32))
            worker.stage(f"y{rank}", np.zeros(COUNT, np.float32))
        root.add_worker(worker)
        workers.append(worker)
    return root, workers


def on_all_chips(root: Worker, workers: list[Worker]) -> Any:
    def on_worker(orch: Any, args: TaskArgs, _config: Any) -> None:
        for index, chip in enumerate(workers[args.scalar(0)].chip_contexts):
            task = TaskArgs()
            for name, tag in (("x", TensorArgType.INPUT), ("y", TensorArgType.OUTPUT_EXISTING)):
                place = chip.buffer_ptrs[name]
                tensor = ContinuousTensor.make(place, (COUNT,), DataType.FLOAT32, child_memory=True)
                task.add_tensor(tensor, tag)
            orch.submit_next_level(PROGRAM, task, worker=index)

    number_of_on_worker = root.register(on_worker)

    def on_root(orch: Any, _args: Any, _config: Any) -> None:
        for number in range(len(workers)):
            args = TaskArgs()
            args.add_scalar(number)
            orch.submit_next_level(number_of_on_worker, args, worker=number)

    return on_root


def test_chips_of_two_workers_add_up_what_their_kernels_gave() -> None:
    root, workers = tree([1, 2, 3, 4])
    on_root = on_all_chips(root, workers)

    with root:
        root.init()
        root.run(on_root)

    sums = [workers[rank // 2].staged(f"y{rank}", "f4") for rank in range(CHIPS)]
    assert [each.tolist() for each in sums] == [[30] * COUNT] * CHIPS
    tasks = [entry for entry in root.timeline.entries if entry.task >= 0]
    assert sorted(entry.place for entry in tasks) == [
        f"chip {chip} of worker {worker}" for chip in range(2) for worker in range(2)
    ]
    assert {entry.name for entry in tasks} == {"square_and_add_up"}
    assert all(entry.end_ps > 0 for entry in tasks)


def test_the_error_of_a_chip_comes_before_those_of_its_peers_in_the_sum() -> None:
    root, workers = tree([1, 2, 3, -4])
    on_root = on_all_chips(root, workers)

    with root:
        root.init()
        with pytest.raises(ArithmeticError, match="the last chip got a negative number") as caught:
            root.run(on_root)

    notes = caught.value.__notes__
    assert "in task 1 (square_and_add_up) at chip 1 of worker 1" in notes[0]
    others = [note for note in notes if note.startswith("besides")]
    assert len(others) == 2
    assert all("PeerDied: all_reduce" in note for note in others)
    assert all("the last chip got a negative number" in note for note in others)
