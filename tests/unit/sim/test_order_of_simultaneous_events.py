"""What is calculated does not depend on the order in which simultaneous events are taken."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

import rankwise.sim.triton.language as tl
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.ccl.configuration import SHIPPED
from rankwise.sim.kernel import Simulator


class Shuffling(Simulator):
    """Takes what is asked for at the same instant in a random order."""

    random = random.Random()
    shuffled = 0

    def _begin_stretch(self, ahead: Iterator[int], horizon: int) -> bool:
        is_more = super()._begin_stretch(ahead, horizon)
        for wave in self._soon:
            if isinstance(wave, list):  # else it happens alone
                self.shuffled += len(wave) > 1
                self.random.shuffle(wave)
        return is_more


def add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + places, mask=places < n), tl.load(y_ptr + places, mask=places < n)
    tl.store(y_ptr + places, x * y + x, mask=places < n)


def values_of(
    algorithm: str, *, order: int | None = None, schedule: int | None = None
) -> list[bytes]:
    """Kernels, a collective by some algorithm, and messages, among four ranks."""
    engine = GraphEngine("default")
    if order is not None:
        engine.simulator.__class__ = Shuffling
        engine.simulator.random = random.Random(order)
    values: dict[int, bytes] = {}

    def worker(rank: int, torch: Any) -> None:
        x, y = torch.rand(97, dtype="f16"), torch.rand(97, dtype="f16")
        torch.launch(add_kernel, 7, x, y, 97, BLOCK=16)
        torch.distributed.all_reduce(y, algorithm=algorithm)
        if rank % 2:
            torch.distributed.send(y, dst=rank - 1)
        else:
            torch.distributed.recv(x, src=rank + 1)
        values[rank] = x.numpy().tobytes() + y.numpy().tobytes()

    with RuntimeContext(engine, ccl={}, seed=3) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=4, schedule_seed=schedule)
    assert order is None or engine.simulator.shuffled > 10
    return [values[rank] for rank in range(4)]


# The machine has no switch that copies and combines.
ALL_REDUCES = [name for name in SHIPPED if name.endswith("_allreduce") and name != "nvls_allreduce"]


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_values_are_the_same_whatever_comes_first_of_one_instant(algorithm: str) -> None:
    expected = values_of(algorithm)

    assert len(set(expected)) > 1
    for order in range(3):
        assert values_of(algorithm, order=order) == expected


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_values_are_the_same_whichever_rank_runs_first(algorithm: str) -> None:
    assert values_of(algorithm, schedule=1) == values_of(algorithm)


def test_all_instants_of_a_run_are_whole_picoseconds() -> None:
    engine = GraphEngine("default")
    with RuntimeContext(engine, ccl={}) as torch:
        x = torch.ones(1_001)
        torch.launch(add_kernel, 3, x, x, 1_001, BLOCK=512)

    instants = [instant for each in engine.op_log for instant in (each.start, each.end)]
    assert len(instants) > 10
    assert {type(instant) for instant in instants} == {int}
