"""Multiply two matrices on four simulated chips. Chips and workers are processes.

root, level 4
├── worker 0, level 3 ── chip 0, chip 1
└── worker 1, level 3 ── chip 2, chip 3

Each chip multiplies a quarter of A's rows by B, with a kernel. All processes see the same arrays.
"""

from typing import Any

import numpy as np

import rankwise.sim.triton.language as tl
from rankwise.sim import triton
from rankwise.workers import ArgDirection, ChipCallable, Orchestrator, TaskArgs, Worker
from rankwise.workers import TensorArgType as Tag

WORKERS, CHIPS_PER_WORKER = 2, 2
ROWS, SIZE, TILE = 128, 64, 16
ROWS_PER_CHIP = ROWS // (WORKERS * CHIPS_PER_WORKER)
IN, OUT, SCALAR = ArgDirection.IN, ArgDirection.OUT, ArgDirection.SCALAR


@triton.jit
def matmul_kernel(a: Any, b: Any, c: Any, size: Any, tile: tl.constexpr) -> None:
    """One tile of C = A B, where B is square."""
    tiles = size // tile
    row = tl.program_id(0) // tiles * tile + tl.arange(0, tile)
    column = tl.program_id(0) % tiles * tile + tl.arange(0, tile)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, size, tile):
        depth = start + tl.arange(0, tile)
        left = tl.load(a + row[:, None] * size + depth[None, :])
        right = tl.load(b + depth[:, None] * size + column[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * size + column[None, :], total)


SIGNATURE = [IN, IN, OUT, SCALAR]
GRID = ROWS_PER_CHIP // TILE * (SIZE // TILE)  # one program for each tile
MATMUL = ChipCallable.build(SIGNATURE, "matmul", matmul_kernel, grid=GRID, meta={"tile": TILE})


def main() -> None:
    """Build the tree, run one task on each chip, and compare with numpy."""
    with Worker(level=4) as root:
        for _ in range(WORKERS):
            root.add_worker(Worker(level=3, platform="sim", device_ids=range(CHIPS_PER_WORKER)))
        root.init()
        a, b, c = (root.share((rows, SIZE), "f4") for rows in (ROWS, SIZE, ROWS))
        a[:], b[:] = (np.random.default_rng(2026).standard_normal(x.shape) for x in (a, b))

        def on_worker(orch: Orchestrator, args: TaskArgs, _config: object) -> None:
            for index in range(CHIPS_PER_WORKER):
                first = (args.scalar(0) * CHIPS_PER_WORKER + index) * ROWS_PER_CHIP
                rows = slice(first, first + ROWS_PER_CHIP)
                task = TaskArgs()
                task.add_tensor(a[rows])
                task.add_tensor(b)
                task.add_tensor(c[rows], Tag.OUTPUT)
                task.add_scalar(SIZE)
                orch.submit_next_level(MATMUL, task, worker=index)

        def on_root(orch: Orchestrator, _args: object, _config: object) -> None:
            for worker in range(WORKERS):
                args = TaskArgs()
                args.add_scalar(worker)
                orch.submit_next_level(on_worker, args, worker=worker)

        root.run(on_root)
        for entry in root.timeline.entries:
            if entry.task >= 0:
                print(f"{entry.place}: {entry.name} until {entry.end_ps / 1e6:.2f} us")
        print(f"largest difference from numpy's product: {np.abs(c - a @ b).max():.3f}")


if __name__ == "__main__":
    main()
