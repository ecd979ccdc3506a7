"""A tree of chip workers: two chips with a process each, and tasks that are ordered by their data.

`chip_tree.py` has two levels, and a kernel on simulated chips.
"""

import itertools

import numpy as np

from rankwise.workers import (
    ArgDirection,
    ChipCallable,
    Orchestrator,
    TaskArgs,
    TensorArgType,
    Worker,
)

IN, OUT = TensorArgType.INPUT, TensorArgType.OUTPUT


def double(x: np.ndarray, y: np.ndarray) -> None:
    """What a chip does; on the platform `host` that is a numpy function."""
    y[...] = 2 * x


DOUBLE = ChipCallable.build([ArgDirection.IN, ArgDirection.OUT], "double", double)


def task(x: np.ndarray, y: np.ndarray) -> TaskArgs:
    """A task that reads x and writes y."""
    args = TaskArgs()
    args.add_tensor(x, IN)
    args.add_tensor(y, OUT)
    return args


def main() -> None:
    """Double numbers three times, each time on the other chip."""
    with Worker(level=3, platform="host", device_ids=[0, 1]) as worker:
        worker.init()
        arrays = [worker.share((4,), "f4") for _ in range(4)]
        arrays[0][:] = [1, 2, 3, 4]

        def orchestrate(orch: Orchestrator, _args: object, _config: object) -> None:
            # Each waits for the one before: it reads what that one writes.
            for step, (x, y) in enumerate(itertools.pairwise(arrays)):
                orch.submit_next_level(DOUBLE, task(x, y), worker=step % 2)

        worker.run(orchestrate)
        print("after three chips' work:", arrays[3].tolist())


if __name__ == "__main__":
    main()
