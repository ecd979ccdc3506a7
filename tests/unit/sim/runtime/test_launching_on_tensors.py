"""`kernel[grid](…)` with tensors of a simulated machine: launched there, as with `launch`."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import LocalProtocolError
from rankwise.sim import GraphEngine, RuntimeContext, triton
from rankwise.sim.triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def count(x: Any, n: Any, block: tl.constexpr) -> None:
    places = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + places, places, mask=places < n)


@triton.autotune([triton.Config({"block": 16}), triton.Config({"block": 256})], key=["n"])
@triton.heuristics({"factor": lambda given: given["n"] // 50})
@triton.jit
def count_by(x: Any, n: Any, block: tl.constexpr, factor: tl.constexpr) -> None:
    places = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + places, places * factor, mask=places < n)


@triton.jit
def double(source: Any, target: Any, rows: tl.constexpr) -> None:
    row = tl.program_id(0) * rows
    target.store([row, 0], source.load([row, 0]) * 2)


@triton.jit
def copy_first(tensors: Any, block: tl.constexpr) -> None:
    places = tl.arange(0, block)
    tl.store(tensors[1] + places, tl.load(tensors[0] + places))


@pytest.fixture
def ctx() -> RuntimeContext:
    return RuntimeContext(GraphEngine("default"), ccl={})


def kernels_run(ctx: RuntimeContext) -> list[str]:
    return [each.name for each in ctx.engine.op_log if each.kind == "KernelLaunch"]


def test_a_kernel_on_a_grid_runs_where_its_tensor_lies(ctx: RuntimeContext) -> None:
    x = ctx.zeros(100, dtype="i32")

    count[2,](x, 100, block=64, num_warps=4)

    assert kernels_run(ctx) == ["count"]
    np.testing.assert_array_equal(x.numpy(), np.arange(100))


def test_ranks_launch_on_grids_by_name_each_on_its_own_device(ctx: RuntimeContext) -> None:
    seen: dict[int, Any] = {}

    def worker(rank: int) -> None:
        x = ctx.zeros(10 + rank, dtype="i32")
        count[lambda given: (triton.cdiv(given["n"], given["block"]),)](x=x, n=10 + rank, block=8)
        seen[rank] = x.tolist()

    ctx.multiprocessing.spawn(worker, nprocs=3)

    assert seen == {rank: list(range(10 + rank)) for rank in range(3)}


def test_decorated_kernels_choose_on_the_machine(ctx: RuntimeContext) -> None:
    x = ctx.zeros(100, dtype="i32")

    count_by[lambda given: (triton.cdiv(100, given["block"]),)](x, 100)

    assert kernels_run(ctx) == ["count_by"]
    np.testing.assert_array_equal(x.numpy(), 2 * np.arange(100))


def test_tensors_in_descriptors_and_tuples_count_too(ctx: RuntimeContext) -> None:
    x, y, z = ctx.ones(32, 16), ctx.zeros(32, 16), ctx.zeros(16)

    double[2,](
        TensorDescriptor.from_tensor(x, [16, 16]),
        TensorDescriptor(y, [32, 16], [16, 1], [16, 16]),
        rows=16,
    )
    copy_first[1,]((y, z), block=16)

    assert kernels_run(ctx) == ["double", "copy_first"]
    assert (y.numpy() == 2).all()
    assert (z.numpy() == 2).all()


def test_without_data_it_takes_the_same_time() -> None:
    instants = []
    for has_data in (True, False):
        machine = RuntimeContext(GraphEngine("default", enable_data=has_data), ccl={})
        x, y = machine.ones(32, 16), machine.zeros(32, 16)
        descriptors = [TensorDescriptor.from_tensor(each, [16, 16]) for each in (x, y)]
        for _launch in range(2):
            double[2,](*descriptors, rows=16)
        instants.append(machine.now)

    assert instants[0] == instants[1]


def test_what_the_kernel_stores_is_never_lost_in_a_copy(ctx: RuntimeContext) -> None:
    x = ctx.zeros(100, dtype="i32")

    with pytest.raises(LocalProtocolError, match="'x' is on a simulated machine"):
        count.run(x, 100, grid=(2,), warmup=False, block=64)
