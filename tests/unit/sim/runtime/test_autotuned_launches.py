"""Autotuned kernels on tensors of a simulated machine: hooks, arguments by name, trials."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError
from rankwise.sim import GraphEngine, RuntimeContext, triton
from rankwise.sim.triton.tools.tensor_descriptor import TensorDescriptor

N = 64


def add_ones(o: Any, x: Any, n: Any, block: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_add(o + i, tl.load(x + i, mask=i < n), mask=i < n)


def zero_output(given: dict[str, Any]) -> None:
    given["o"].zero_()


def tuned(*configs: Any, **options: Any) -> Any:
    return triton.autotune(list(configs), key=["n"], **options)(triton.jit(add_ones))


def config(block: int, pre_hook: Any = None) -> Any:
    return triton.Config({"block": block}, pre_hook=pre_hook)


def grid(given: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(given["n"], given["block"]),)


@pytest.fixture
def ctx() -> RuntimeContext:
    return RuntimeContext(GraphEngine("default"), ccl={})


def in_memory(ctx: RuntimeContext | None, values: Any) -> Any:
    """An array where kernels of one of the two worlds run: on a machine, or in the emulator."""
    if ctx is not None:
        return ctx.from_numpy(values)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(values)


@pytest.fixture(params=["machine", "emulator"])
def world(request: pytest.FixtureRequest) -> RuntimeContext | None:
    is_machine = request.param == "machine"
    return RuntimeContext(GraphEngine("default"), ccl={}) if is_machine else None


def test_a_configurations_hook_runs_before_each_launch(world: RuntimeContext | None) -> None:
    kernel = tuned(config(16, zero_output), config(32, zero_output))
    o, x = (in_memory(world, np.full(N, value, np.float32)) for value in (7, 1))

    for _launch in range(3):
        kernel[grid](o, x, N)

    np.testing.assert_array_equal(o.numpy(), np.ones(N, np.float32))


def test_reset_to_zero_belongs_to_the_choice_and_not_to_later_launches(
    world: RuntimeContext | None,
) -> None:
    kernel = tuned(config(16), config(32), reset_to_zero=["o"])
    o, x = (in_memory(world, np.full(N, value, np.float32)) for value in (7, 1))

    for _launch in range(3):
        kernel[grid](o, x, N)

    np.testing.assert_array_equal(o.numpy(), np.full(N, 3, np.float32))


def test_a_single_configuration_needs_no_choice_and_resets_nothing(
    world: RuntimeContext | None,
) -> None:
    kernel = tuned(config(16), reset_to_zero=["o"])
    o, x = (in_memory(world, np.full(N, value, np.float32)) for value in (7, 1))

    kernel[grid](o, x, N)

    np.testing.assert_array_equal(o.numpy(), np.full(N, 8, np.float32))


def test_trials_leave_the_users_values_alone(ctx: RuntimeContext) -> None:
    trial_blocks: list[int] = []

    def hook(given: dict[str, Any]) -> None:
        trial_blocks.append(given["block"])
        if given["block"] != 32:  # only a trial that is lost would clear it
            given["o"].zero_()

    kernel = tuned(config(1, hook), config(32, hook), restore_value=["o"])
    o, x = (in_memory(ctx, np.full(N, value, np.float32)) for value in (7, 1))

    kernel[grid](o, x, N)

    assert kernel.best_config.kwargs == {"block": 32}
    assert trial_blocks == [1, 32, 32], "two trials and a launch"
    np.testing.assert_array_equal(o.numpy(), np.full(N, 8, np.float32))


def test_the_hooks_of_trials_are_told_when_they_only_reset(world: RuntimeContext | None) -> None:
    told: list[bool] = []
    kernel = tuned(
        config(16), config(32), pre_hook=lambda _given, reset_only=False: told.append(reset_only)
    )
    o, x = (in_memory(world, np.zeros(N, np.float32)) for _ in range(2))

    kernel[grid](o, x, N)
    kernel[grid](o, x, N)

    assert told == [True]


@triton.autotune([config(16), config(32)], key=["n"])
@triton.heuristics({"factor": lambda given: given["n"] // 32})
@triton.jit
def scale(o: Any, x: Any, n: Any, block: tl.constexpr, factor: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(o + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


def test_arguments_may_all_be_given_by_name(ctx: RuntimeContext) -> None:
    x = ctx.from_numpy(np.arange(N, dtype=np.float32))
    o = ctx.zeros(N, dtype="f32")

    scale[grid](o=o, x=x, n=N)

    np.testing.assert_array_equal(o.numpy(), 2 * np.arange(N, dtype=np.float32))


@triton.autotune([triton.Config({"block": 1}), triton.Config({"block": 2})], key=[])
@triton.jit
def copy_first(tensors: Any, o: Any, block: tl.constexpr) -> None:
    i = tl.arange(0, block)
    tl.store(o + i, tl.load(tensors[0] + i))


def test_tensors_in_tuples_can_be_tried_too(ctx: RuntimeContext) -> None:
    x, o = ctx.ones(2), ctx.zeros(2)

    copy_first[1,]((x,), o=o)

    assert o.numpy()[0] == 1


def set_block(given: dict[str, Any]) -> None:
    given["x"].block_shape = [given["rows"], 16]


@triton.autotune([triton.Config({"rows": rows}, pre_hook=set_block) for rows in (1, 4)], key=[])
@triton.jit
def column_sums(x: Any, o: Any, rows: tl.constexpr) -> None:
    start = tl.program_id(0) * rows
    tl.atomic_add(o + tl.arange(0, 16), tl.sum(x.load([start, 0]), axis=0))


def test_a_hook_may_shape_a_descriptor_for_its_trial_and_for_its_launch(
    ctx: RuntimeContext,
) -> None:
    x, o = ctx.ones(8, 16), ctx.zeros(16)
    described = TensorDescriptor.from_tensor(x, [1, 1])

    column_sums[lambda given: (8 // given["rows"],)](described, o=o)

    np.testing.assert_array_equal(o.numpy(), np.full(16, 8, np.float32))
    assert column_sums.best_config is not None
    assert described.block_shape == [column_sums.best_config.kwargs["rows"], 16]


def test_grids_and_rules_see_the_tensors_themselves(ctx: RuntimeContext) -> None:
    @triton.heuristics({"block": lambda given: given["o"].shape[0] // 2})
    @triton.jit
    def fill(o: Any, block: tl.constexpr) -> None:
        tl.store(o + tl.program_id(0) * block + tl.arange(0, block), 5)

    o = ctx.zeros(32)

    fill[lambda given: (given["o"].numel() // given["block"],)](o)

    assert (o.numpy() == 5).all()


def test_a_parameter_that_is_tuned_and_given_is_refused(world: RuntimeContext | None) -> None:
    kernel = tuned(config(16), config(32))
    o, x = (in_memory(world, np.zeros(N, np.float32)) for _ in range(2))

    with pytest.raises(ConfigError, match="kernel add_ones is autotuned over block"):
        kernel[grid](o, x, N, block=16)


def test_ranks_choose_and_reset_each_for_itself(ctx: RuntimeContext) -> None:
    kernel = tuned(config(16, zero_output), config(32, zero_output))
    seen: dict[int, Any] = {}

    def worker(rank: int) -> None:
        o, x = ctx.full(N, fill_value=7.0), ctx.full(N, fill_value=float(rank))
        kernel[grid](o=o, x=x, n=N)
        kernel[grid](o=o, x=x, n=N)
        seen[rank] = o.numpy()

    ctx.multiprocessing.spawn(worker, nprocs=3)

    for rank in range(3):
        np.testing.assert_array_equal(seen[rank], np.full(N, rank, np.float32))


@triton.autotune(
    [config(16), config(32)], key=["n"], reset_to_zero=["counts", "o"], restore_value=["counts"]
)
@triton.jit
def count_or_not(o: Any, counts: Any, n: Any, block: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.atomic_add(o + i, 1, mask=i < n)
    if counts is not None:
        tl.atomic_add(counts + i, 1, mask=i < n)


def test_what_is_to_be_reset_may_be_left_out(world: RuntimeContext | None) -> None:
    o = in_memory(world, np.full(N, 7, np.float32))

    count_or_not[grid](o, None, N)

    np.testing.assert_array_equal(o.numpy(), np.ones(N, np.float32))
