"""Multiply two matrices on four simulated chips that two workers share, in a tree of processes.

    python examples/chip_tree.py
    python examples/chip_tree.py --trace chip_tree.json     (the predicted timeline, for Perfetto)

    root, level 4
    ├── worker 0, level 3 ── chip 0, chip 1
    └── worker 1, level 3 ── chip 2, chip 3

The inner dimension is cut into four parts. Each chip finds its part of both matrices in its window,
where it was staged from the host when the chip was brought up, multiplies them with a kernel of the
`tl` language, and then all chips add their products up, through the windows that each of them has
mapped. The root compares the sum with numpy's, and asks when all that would have been done on the
modelled chips.

To see what failures look like:

    python examples/chip_tree.py --fail raise         a kernel's program raises
    python examples/chip_tree.py --fail kill          a chip's process is killed in its task
    python examples/chip_tree.py --fail bootstrap     a chip cannot be brought up
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rankwise.sim.triton.language as tl
from rankwise.base.errors import RankwiseError
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
    Orchestrator,
    Parameter,
    TaskArgs,
    TensorArgType,
    Worker,
    array_at,
    context,
)

ROWS, COLUMNS, INNER = 64, 64, 256
CHIPS_PER_WORKER, WORKER_COUNT = 2, 2
CHIP_COUNT = CHIPS_PER_WORKER * WORKER_COUNT
DEPTH = INNER // CHIP_COUNT
TILE = 16
IN, OUT = ArgDirection.IN, ArgDirection.OUT
Array = NDArray[np.float32]


@triton.jit
def matmul_kernel(  # noqa: PLR0917  # kernels are launched by position
    a: Any, b: Any, c: Any, n: Any, k: Any, tile: tl.constexpr
) -> None:
    """One tile of C = A B."""
    tiles = n // tile
    rows = tl.program_id(0) // tiles * tile + tl.arange(0, tile)
    columns = tl.program_id(0) % tiles * tile + tl.arange(0, tile)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, k, tile):
        depth = start + tl.arange(0, tile)
        left = tl.load(a + rows[:, None] * k + depth[None, :])
        right = tl.load(b + depth[:, None] * n + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


def multiply_and_add_up(chip: Any, a: Any, b: Any, c: Any, how_to_fail: int) -> None:
    """The program of a chip: its product, and then the sum of all products."""
    if how_to_fail and context().communicator.rank == CHIP_COUNT - 1:
        fail(how_to_fail)
    chip.launch(0, a, b, c, COLUMNS, DEPTH)
    product = array_at(
        ContinuousTensor.make(c.address, (ROWS, COLUMNS), DataType.FLOAT32, child_memory=False)
    )
    context().communicator.all_reduce(product, out=product)


def fail(how: int) -> None:
    """What `--fail` asks for."""
    if how == FAILURES.index("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise ArithmeticError("the last chip was told to fail")


FAILURES = ("none", "raise", "kill", "bootstrap")

PROGRAM = ChipCallable.build(
    [
        Parameter.of(IN, "a", "float32", (ROWS, DEPTH)),
        Parameter.of(IN, "b", "float32", (DEPTH, COLUMNS)),
        Parameter.of(OUT, "c", "float32", (ROWS, COLUMNS)),
        Parameter.of(ArgDirection.SCALAR, "how_to_fail", "int64"),
    ],
    "multiply_and_add_up",
    multiply_and_add_up,
    [
        (
            0,
            CoreCallable.build(
                [IN, IN, OUT, ArgDirection.SCALAR, ArgDirection.SCALAR],
                matmul_kernel,
                grid=(ROWS // TILE * (COLUMNS // TILE),),
                meta={"tile": TILE},
            ),
        )
    ],
)


def chip_worker_tree(a: Array, b: Array, *, spoil: bool) -> tuple[Worker, list[Worker]]:
    """The root and its two workers, with everything staged that the chips begin with."""
    root = Worker(level=4, start_timeout=60)
    workers = []
    for number in range(WORKER_COUNT):
        ranks = range(number * CHIPS_PER_WORKER, (number + 1) * CHIPS_PER_WORKER)
        worker = Worker(
            level=3,
            platform="sim",
            device_ids=ranks,
            chip_bootstrap_configs=[bring_up(rank, spoil=spoil) for rank in ranks],
        )
        for rank in ranks:
            part = slice(rank * DEPTH, (rank + 1) * DEPTH)
            worker.stage(f"a{rank}", a[:, part])
            worker.stage(f"b{rank}", b[part, :])
            worker.stage(f"c{rank}", np.zeros((ROWS, COLUMNS), np.float32))
        root.add_worker(worker)
        workers.append(worker)
    return root, workers


def bring_up(rank: int, *, spoil: bool) -> ChipBootstrapConfig:
    """How a chip comes up: its place among all chips, and what lies in its window."""
    a_bytes, b_bytes, c_bytes = 4 * ROWS * DEPTH, 4 * DEPTH * COLUMNS, 4 * ROWS * COLUMNS
    window_bytes = a_bytes + b_bytes + c_bytes
    is_spoiled = spoil and rank == CHIP_COUNT - 1
    return ChipBootstrapConfig(
        comm=ChipCommBootstrapConfig(rank, CHIP_COUNT, "all chips", window_bytes),
        buffers=[
            ChipBufferSpec("a", "float32", a_bytes // 4, "window", a_bytes, load_from_host=True),
            ChipBufferSpec("b", "float32", b_bytes // 4, "window", b_bytes, load_from_host=True),
            ChipBufferSpec("c", "float32", c_bytes // 4, "window", c_bytes, store_to_host=True),
        ],
        host_inputs=[
            HostBufferStaging("a", "nowhere" if is_spoiled else f"a{rank}", a_bytes),
            HostBufferStaging("b", f"b{rank}", b_bytes),
        ],
        host_outputs=[HostBufferStaging("c", f"c{rank}", c_bytes)],
    )


def window_tensor(address: int, shape: tuple[int, int]) -> ContinuousTensor:
    """A buffer in a chip's window."""
    return ContinuousTensor.make(address, shape, DataType.FLOAT32, child_memory=True)


def main() -> int:
    """Build the tree, run it, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="write the predicted timeline to this file")
    parser.add_argument("--fail", choices=FAILURES, default="none", help="let something go wrong")
    options = parser.parse_args()

    chance = np.random.default_rng(2026)
    a = chance.standard_normal((ROWS, INNER), dtype=np.float32)
    b = chance.standard_normal((INNER, COLUMNS), dtype=np.float32)
    root, workers = chip_worker_tree(a, b, spoil=options.fail == "bootstrap")

    def on_worker(orch: Orchestrator, args: TaskArgs, _config: object) -> None:
        """Runs in a level-3 worker: one task for each of its chips."""
        worker = workers[args.scalar(0)]
        for index, chip in enumerate(worker.chip_contexts):
            task = TaskArgs()
            task.add_tensor(window_tensor(chip.buffer_ptrs["a"], (ROWS, DEPTH)))
            task.add_tensor(window_tensor(chip.buffer_ptrs["b"], (DEPTH, COLUMNS)))
            task.add_tensor(
                window_tensor(chip.buffer_ptrs["c"], (ROWS, COLUMNS)),
                TensorArgType.OUTPUT_EXISTING,
            )
            task.add_scalar(args.scalar(1))
            orch.submit_next_level(PROGRAM, task, worker=index)

    def on_root(orch: Orchestrator, _args: TaskArgs | None, _config: object) -> None:
        """Runs here: one task for each worker."""
        for number in range(WORKER_COUNT):
            args = TaskArgs()
            args.add_scalar(number)
            args.add_scalar(FAILURES.index(options.fail))
            orch.submit_next_level(on_worker_number, args, worker=number)

    on_worker_number = root.register(on_worker)
    with root:
        try:
            root.init()
            print(f"{CHIP_COUNT} chips in {WORKER_COUNT} workers are up")
            root.run(on_root)
        except (RankwiseError, ArithmeticError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            for note in getattr(error, "__notes__", ()):
                if "\n" not in note:  # the others are tracebacks of children
                    print(f"  {note}", file=sys.stderr)
            return 1
    # Closing has stored every chip's sum to where it was staged.
    sums = [
        workers[rank // CHIPS_PER_WORKER].staged(f"c{rank}", "f4").reshape(ROWS, COLUMNS)
        for rank in range(CHIP_COUNT)
    ]
    worst = max(float(np.abs(each - a @ b).max()) for each in sums)
    print(f"largest difference from numpy's product on any chip: {worst:.1e}")
    for entry in root.timeline.entries:
        if entry.task >= 0:
            print(f"{entry.place}: {entry.name} until {entry.end_ps / 1e6:.2f} us")
    print(f"predicted: {root.timeline.end_ps / 1e6:.2f} us of simulated time")
    if options.trace:
        root.timeline.write_trace(options.trace)
        print(f"timeline written to {options.trace}")
    return 0 if worst < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
