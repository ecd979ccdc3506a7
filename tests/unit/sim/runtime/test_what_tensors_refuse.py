"""Tensors in the wrong hands: freed, of another machine, without elements, with odd arguments."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.sim import GraphEngine, RuntimeContext, triton
from rankwise.sim.runtime.multiprocessing import SpawnException


def copy(source: Any, target: Any, n: Any, block: tl.constexpr) -> None:
    places = tl.arange(0, block)
    tl.store(target + places, tl.load(source + places, mask=places < n), mask=places < n)


@pytest.fixture
def ctx() -> Iterator[RuntimeContext]:
    with RuntimeContext(GraphEngine("default"), ccl={}) as context:
        yield context


@pytest.mark.parametrize(
    "use",
    [
        lambda mine, other, _: mine + other,
        lambda mine, other, _: mine.add_(other),
        lambda mine, other, _: mine.copy_(other),
        lambda mine, other, ctx: ctx.launch(copy, 1, other, mine, 3, block=4),
        lambda mine, other, ctx: ctx.launch(copy, 1, mine, target=other, n=3, block=4),
        lambda _, other, ctx: ctx.distributed.all_reduce(other),
    ],
)
def test_a_tensor_of_another_machine_is_refused_wherever_it_is_used(
    ctx: RuntimeContext, use: Callable[..., object]
) -> None:
    with RuntimeContext(GraphEngine("default"), ccl={}) as elsewhere:
        mine, other = ctx.full(3, 5.0), elsewhere.full(3, 7.0, name="theirs")

        with pytest.raises(LocalProtocolError, match="theirs is on the machine of another"):
            use(mine, other, ctx)

        assert mine.tolist() == [5.0, 5.0, 5.0]


def test_contexts_of_one_machine_use_each_others_tensors(ctx: RuntimeContext) -> None:
    with RuntimeContext(ctx.engine, ccl={}) as sibling:
        assert (ctx.full(3, 5.0) + sibling.full(3, 7.0)).tolist() == [12.0, 12.0, 12.0]


@pytest.mark.parametrize(
    "use",
    [
        lambda x, _: x.tolist(),
        lambda x, _: x.copy_(1),
        lambda x, ctx: ctx.launch(copy, 1, x, x, 3, block=4),
        lambda x, ctx: ctx.distributed.all_reduce(x),
    ],
)
def test_what_sees_freed_memory_is_refused_by_name(
    ctx: RuntimeContext, use: Callable[..., object]
) -> None:
    x = ctx.zeros(3, name="x")
    seen = x.reshape(3, 1)
    seen.free()

    for each in (x, seen):
        with pytest.raises(LocalProtocolError, match="x was used after it was freed"):
            use(each, ctx)


def test_sums_and_means_of_nothing_are_those_of_torch(ctx: RuntimeContext) -> None:
    assert (ctx.zeros(2, 0) @ ctx.zeros(0, 3)).tolist() == [[0.0] * 3] * 2
    assert math.isnan(ctx.zeros(0).mean().item())
    assert np.isnan(ctx.zeros(2, 0).mean(1).numpy()).all()
    assert ctx.zeros(0, 2).mean(1, keepdim=True).shape == (0, 1)


def test_no_type_is_the_default_where_tensors_are_made_and_none_elsewhere(
    ctx: RuntimeContext,
) -> None:
    assert ctx.zeros(2, dtype=None).dtype == ctx.rand(2, dtype=None).dtype == "f32"
    with pytest.raises(ConfigError, match="there is no dtype"):
        ctx.zeros(2).to(None)


@pytest.mark.parametrize("grid", ["x", None, 2.5, (1, "2")])
def test_a_grid_that_is_none_is_refused(ctx: RuntimeContext, grid: Any) -> None:
    x = ctx.zeros(3)

    with pytest.raises(ConfigError, match="the grid is"):
        ctx.launch(copy, grid, x, x, 3, block=4)


def test_an_array_of_the_host_is_refused_by_the_device(ctx: RuntimeContext) -> None:
    with pytest.raises(LocalProtocolError, match=r"array of shape \(3,\).*from_numpy"):
        ctx.launch(copy, 1, np.zeros(3), ctx.zeros(3), 3, block=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ctx: ctx.multiprocessing.spawn(print, nprocs="2"), "nprocs is '2'"),
        (lambda ctx: ctx.multiprocessing.spawn(print, wall_limit_s="2"), "a wall limit of '2' s"),
        (lambda _: RuntimeContext("default", ccl={}), "engine is 'default'"),
        (lambda _: RuntimeContext(GraphEngine("default"), ccl=5), "ccl is 5"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(
    ctx: RuntimeContext, call: Callable[[RuntimeContext], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        call(ctx)


def test_a_reduction_that_is_none_is_refused_where_it_is_asked_for(ctx: RuntimeContext) -> None:
    def reduce(_rank: int) -> None:
        ctx.distributed.all_reduce(ctx.zeros(3), op="sum")

    with pytest.raises(SpawnException, match="op is 'sum', expected a ReduceOp: SUM"):
        ctx.multiprocessing.spawn(reduce, nprocs=2)


@triton.jit
def fill(x: Any, n: Any, block: tl.constexpr) -> None:
    places = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + places, 1, mask=places < n)


def test_a_tensor_of_another_ranks_device_is_named_with_its_device(ctx: RuntimeContext) -> None:
    tensors: dict[int, Any] = {}

    def worker(rank: int) -> None:
        tensors[rank] = ctx.zeros(8, name=f"x{rank}")
        ctx.distributed.barrier()
        fill[1,](tensors[0], 8, block=8)

    with pytest.raises(SpawnException) as caught:
        ctx.multiprocessing.spawn(worker, nprocs=2)

    assert list(caught.value.errors) == [1]
    refusal = str(caught.value.errors[1])
    assert "x0 is on sip:0, and the kernel would run on sip:1" in refusal
    assert "copy_" in refusal


@pytest.mark.parametrize(
    ("arguments", "named", "complaint"),
    [
        ((8,), {}, "missing a required argument: 'block'"),
        ((8, 8, 8, 8), {}, "too many positional arguments"),
        ((8,), {"blok": 8}, "missing a required argument: 'block'"),
        ((8,), {"block": 8, "blok": 8}, "got an unexpected keyword argument 'blok'"),
    ],
)
def test_wrong_arguments_name_the_kernel_and_its_parameters(
    ctx: RuntimeContext, arguments: tuple[Any, ...], named: dict[str, Any], complaint: str
) -> None:
    for x in (ctx.zeros(8), np.zeros(8, np.float32)):
        with pytest.raises(LocalProtocolError) as caught:
            fill[1,](x, *arguments, **named)

        assert isinstance(caught.value, TypeError)
        assert str(caught.value) == (f"kernel fill: {complaint} (its parameters are x, n, block)")


@pytest.mark.parametrize("grid", [2.0, (1, 2.5), (1, 1, 1, 1), (), (-1,), "two"])
def test_a_grid_is_of_whole_numbers_on_the_machine_and_off_it(
    ctx: RuntimeContext, grid: Any
) -> None:
    for x in (ctx.zeros(8), np.zeros(8, np.float32)):
        for given in (grid, lambda _given: grid):
            with pytest.raises(ConfigError, match="the grid is"):
                fill[given](x, 8, block=8)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda ctx: ctx.relu,
            AttributeError,
            r"^the simulated torch has no 'relu' \(programs for .* rankwise run --on sim\)$",
        ),
        (lambda ctx: ctx.form_numpy, AttributeError, r"\(did you mean from_numpy\? programs"),
        (lambda ctx: ctx.from_numpy([1]), ConfigError, r"given \[1\], expected a numpy array"),
        (lambda ctx: ctx.multiprocessing.spawn(3), ConfigError, "fn is 3, expected a function"),
        (lambda ctx: ctx.zeros((-1,)), LocalProtocolError, "expected no negative length"),
    ],
)
def test_what_the_simulated_torch_cannot_do_is_refused_by_name(
    ctx: RuntimeContext, use: Callable[..., object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        use(ctx)
