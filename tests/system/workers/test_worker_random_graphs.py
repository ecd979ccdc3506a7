"""Random graphs on real processes that raise and are killed, compared with a sequential run.

Which tasks die with their child depends on time, so the sequential run is told; all else follows.
`RANKWISE_SEEDS=500` runs more of them.
"""

import os
import signal
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import WorkerDied
from rankwise.core.tree.vocabulary import EndCause
from rankwise.drivers.virtual.random_streams import stream
from rankwise.workers import Orchestrator, TaskArgs, TensorArgType, Worker, array_at

pytestmark = pytest.mark.system

SEEDS = range(int(os.environ.get("RANKWISE_SEEDS", "12")))
CELL_COUNT, TASK_COUNT, MODULUS = 40, 300, 1_000_003
WELL, RAISES, DIES = range(3)


class Misfortune(Exception):
    pass


def step(args: TaskArgs) -> None:
    cells, counts = array_at(args.tensor(0)), array_at(args.tensor(1))
    number, fate = args.scalar(0), args.scalar(1)
    counts[number] += 1
    if fate == RAISES:
        raise Misfortune
    if fate == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    cells[...] = (cells * 31 + number) % MODULUS


def random_task(chance: Random, raising: float, dying: float) -> tuple[int, int, int]:
    """First cell, cell after the last, and what becomes of it."""
    first = chance.randrange(CELL_COUNT)
    end = min(CELL_COUNT, first + chance.choice((1, 1, 2, 8)))
    draw = chance.random()
    return first, end, RAISES if draw < raising else DIES if draw < raising + dying else WELL


def test_random_graphs_give_the_values_of_a_sequential_run() -> None:
    with Worker(level=3, num_sub_workers=3) as worker:
        number = worker.register(step)
        worker.init()
        cells, counts = worker.share((CELL_COUNT,), "i8"), worker.share((TASK_COUNT,), "i4")
        for seed in SEEDS:
            chance = stream(seed, "real graph")
            odds = chance.choice((0, 0.01, 0.05)), chance.choice((0, 0.005))
            tasks = [random_task(chance, *odds) for _ in range(TASK_COUNT)]
            cells[...] = counts[...] = 0

            def orchestrate(orch: Orchestrator, tasks: Any = tasks) -> None:
                for place, (first, end, fate) in enumerate(tasks):
                    args = TaskArgs()
                    args.add_tensor(cells[first:end], TensorArgType.INOUT)
                    args.add_tensor(counts, TensorArgType.NO_DEP)
                    args.add_scalar(place)
                    args.add_scalar(fate)
                    orch.submit_sub(number, args)

            with suppress(Misfortune, WorkerDied):
                worker.run(lambda orch, _args, _config: orchestrate(orch))
            judge(seed, tasks, worker, cells, counts)


def judge(seed: int, tasks: Any, worker: Worker, cells: Any, counts: Any) -> None:
    causes = {failure.number: failure.cause for failure in worker.failures}
    expected, tainted = np.zeros(CELL_COUNT, "i8"), np.zeros(CELL_COUNT, bool)
    for place, (first, end, fate) in enumerate(tasks):
        touched = slice(first, end)
        told = causes.get(place)
        wanted: EndCause | None
        if told is EndCause.DIED:
            wanted, runs = EndCause.DIED, counts[place]
            assert runs <= 1, (seed, place)
        elif tainted[touched].any():
            wanted, runs = EndCause.SKIPPED, 0
        else:
            wanted, runs = (EndCause.RAISED if fate == RAISES else None), 1
        assert (told, counts[place]) == (wanted, runs), (seed, place)
        if wanted is None:
            expected[touched] = (expected[touched] * 31 + place) % MODULUS
        else:
            tainted[touched] = True
    assert (expected[~tainted] == cells[~tainted]).all(), seed
