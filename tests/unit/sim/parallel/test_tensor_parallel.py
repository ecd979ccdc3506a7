"""Tensor parallelism: what is cut over ranks gives, element by element, what the whole gives."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.sim import GraphEngine, RuntimeContext, SpawnException
from rankwise.sim import parallel as mpu
from rankwise.sim.runtime.context import active_context


@pytest.fixture
def ctx() -> Iterator[RuntimeContext]:
    with RuntimeContext(engine=GraphEngine("default"), ccl={}) as context:
        yield context


def run_ranks(ctx: RuntimeContext, size: int, worker: Callable[[int], object]) -> list[Any]:
    """What the worker returns on every rank, whose groups are made."""
    returned: dict[int, Any] = {}

    def noting(rank: int) -> None:
        mpu.initialize_model_parallel(tensor_model_parallel_size=size)
        returned[rank] = worker(rank)
        mpu.destroy_model_parallel()

    ctx.multiprocessing.spawn(noting, nprocs=size)
    return [returned[rank] for rank in range(size)]


def halves(random: np.random.Generator, *shape: int) -> Any:
    """Values whose products and sums are exact in f16 with f32 accumulation."""
    return (random.integers(-4, 5, shape) / 2).astype(np.float16)


def relu_kernel(x: Any, count: int, block: tl.constexpr) -> None:
    place = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(x + place, mask=place < count)
    tl.store(x + place, tl.maximum(values, 0.0), mask=place < count)


def test_ranks_that_are_neighbours_share_a_model(ctx: RuntimeContext) -> None:
    seen: list[Any] = []

    def worker(_rank: int) -> None:
        mpu.initialize_model_parallel(tensor_model_parallel_size=2)
        seen.append(
            (
                mpu.get_tensor_model_parallel_group().ranks,
                mpu.get_tensor_model_parallel_rank(),
                mpu.get_tensor_model_parallel_world_size(),
                mpu.get_data_parallel_group().ranks,
                mpu.get_data_parallel_rank(),
                mpu.get_data_parallel_world_size(),
            )
        )

    ctx.multiprocessing.spawn(worker, nprocs=4)

    assert seen == [
        ((0, 1), 0, 2, (0, 2), 0, 2),
        ((0, 1), 1, 2, (1, 3), 0, 2),
        ((2, 3), 0, 2, (0, 2), 1, 2),
        ((2, 3), 1, 2, (1, 3), 1, 2),
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_two_layer_mlp_equals_the_unsharded_one_on_every_rank(
    ctx: RuntimeContext, size: int
) -> None:
    random = np.random.default_rng(1)
    x, first, second = (
        halves(random, 5, 12), halves(random, 16, 12), halves(random, 7, 16),
    )  # fmt: skip
    bias, other_bias = halves(random, 16), halves(random, 7)

    def worker(_rank: int) -> Any:
        up = mpu.ColumnParallelLinear(12, 16, weight=first, bias_values=bias, gather_output=False)
        down = mpu.RowParallelLinear(
            16, 7, weight=second, bias_values=other_bias, input_is_parallel=True
        )
        hidden = up(ctx.tensor(x))
        ctx.launch(relu_kernel, -(-hidden.numel() // 64), hidden, hidden.numel(), block=64)
        return down(hidden).numpy()

    hidden = np.maximum(x.astype(np.float32) @ first.T.astype(np.float32) + bias, 0)
    expected = (hidden @ second.T.astype(np.float32) + other_bias).astype(np.float16)
    for result in run_ranks(ctx, size, worker):
        np.testing.assert_array_equal(result, expected)


def test_a_sharded_mlp_of_real_numbers_differs_by_rounding_alone(ctx: RuntimeContext) -> None:
    random = np.random.default_rng(2)
    x = random.standard_normal((3, 64)).astype(np.float16)

    def worker(_rank: int) -> Any:
        up = mpu.ColumnParallelLinear(64, 32, gather_output=False, seed=1)
        down = mpu.RowParallelLinear(32, 8, input_is_parallel=True, seed=2)
        return down(up(ctx.tensor(x))).numpy()

    (whole,) = run_ranks(ctx, 1, worker)
    results = run_ranks(ctx, 4, worker)

    for result in results:
        np.testing.assert_array_equal(result, results[0])
        np.testing.assert_allclose(result, whole, rtol=2e-3, atol=1e-6)


def test_a_row_parallel_layer_cuts_its_input_itself(ctx: RuntimeContext) -> None:
    random = np.random.default_rng(3)
    x, weight = halves(random, 2, 3, 8), halves(random, 5, 8)

    def worker(_rank: int) -> Any:
        return mpu.RowParallelLinear(8, 5, weight=weight, bias=False)(ctx.tensor(x)).numpy()

    for result in run_ranks(ctx, 4, worker):
        np.testing.assert_array_equal(result, x @ weight.T)


def test_a_column_parallel_layer_gathers_its_output(ctx: RuntimeContext) -> None:
    random = np.random.default_rng(4)
    x, weight = halves(random, 3, 6), halves(random, 8, 6)

    def worker(_rank: int) -> Any:
        return mpu.ColumnParallelLinear(6, 8, weight=weight, bias=False)(ctx.tensor(x)).numpy()

    for result in run_ranks(ctx, 2, worker):
        np.testing.assert_array_equal(result, x @ weight.T)


def test_an_embedding_cut_over_ranks_finds_every_word(ctx: RuntimeContext) -> None:
    random = np.random.default_rng(5)
    table = random.standard_normal((12, 5)).astype(np.float16)
    ids = np.array([[0, 11, 5], [6, 3, 3]], np.int32)

    def worker(_rank: int) -> Any:
        return mpu.VocabParallelEmbedding(12, 5, weight=table)(ctx.tensor(ids)).numpy()

    for result in run_ranks(ctx, 4, worker):
        np.testing.assert_array_equal(result, table[ids])


def test_scattering_and_gathering_are_inverse(ctx: RuntimeContext) -> None:
    values = np.arange(24, dtype=np.float32).reshape(3, 8)

    def worker(rank: int) -> Any:
        whole = mpu.copy_to_tensor_model_parallel_region(ctx.tensor(values))
        part = mpu.scatter_to_tensor_model_parallel_region(whole)
        np.testing.assert_array_equal(part.numpy(), values[:, 4 * rank : 4 * rank + 4])
        return mpu.gather_from_tensor_model_parallel_region(part).numpy()

    for result in run_ranks(ctx, 2, worker):
        np.testing.assert_array_equal(result, values)


def test_sizes_that_cannot_be_cut_are_refused(ctx: RuntimeContext) -> None:
    with pytest.raises(SpawnException, match="output_size of 7 cannot be cut into 2") as caught:
        run_ranks(ctx, 2, lambda _rank: mpu.ColumnParallelLinear(4, 7))

    assert isinstance(caught.value.errors[0], ConfigError)
    with pytest.raises(SpawnException, match=r"3 ranks cannot be cut into .* groups of 2"):
        ctx.multiprocessing.spawn(lambda _rank: mpu.initialize_model_parallel(2), nprocs=3)


def test_groups_have_to_be_made_once_and_before_they_are_used(ctx: RuntimeContext) -> None:
    with pytest.raises(LocalProtocolError, match="not initialized on this rank"):
        mpu.get_tensor_model_parallel_rank()

    mpu.initialize_model_parallel()
    with pytest.raises(LocalProtocolError, match="called twice"):
        mpu.initialize_model_parallel()
    mpu.destroy_model_parallel()

    assert not mpu.model_parallel_is_initialized()


def test_groups_of_ranks_that_have_ended_are_not_those_of_the_next(ctx: RuntimeContext) -> None:
    ctx.multiprocessing.spawn(lambda _rank: mpu.initialize_model_parallel(2), nprocs=2)
    seen: list[bool] = []

    def worker(_rank: int) -> None:
        seen.append(mpu.model_parallel_is_initialized())
        mpu.initialize_model_parallel(4)

    ctx.multiprocessing.spawn(worker, nprocs=4)

    assert seen == [False] * 4


def test_a_closed_context_is_not_kept_alive() -> None:
    with RuntimeContext(engine=GraphEngine("default"), ccl={}) as context:
        mpu.initialize_model_parallel()
        assert active_context() is context
        gone = weakref.ref(context)
    gc.disable()  # it goes at once, not with the next collection
    try:
        del context
    finally:
        gc.enable()

    assert gone() is None
    with pytest.raises(LocalProtocolError, match="no runtime context is open"):
        active_context()


def test_the_innermost_open_context_is_the_active_one(ctx: RuntimeContext) -> None:
    with RuntimeContext(engine=GraphEngine("default"), ccl={}) as inner:
        assert active_context() is inner
    assert active_context() is ctx
