"""Arithmetic of simulated tensors gives what torch gives: values, types and shapes."""

import operator
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from rankwise.sim import GraphEngine, RuntimeContext

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

KINDS = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
NAMES = {kind: name for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def ctx() -> Iterator[RuntimeContext]:
    with RuntimeContext(GraphEngine("default"), ccl={}) as context:
        yield context


def values(shape: tuple[int, ...], kind: str, seed: int = 0) -> Any:
    """A tensor of torch with small numbers, half of them whole, none of them zero."""
    random = np.random.default_rng((seed, *shape))
    numbers = random.integers(1, 9, shape) / (2 if kind.startswith(("f", "bf")) else 1)
    return torch.tensor(numbers).to(KINDS[kind])


def on_device(ctx: RuntimeContext, tensor: Any) -> Any:
    plain = tensor.double() if tensor.dtype.is_floating_point else tensor
    return ctx.tensor(plain.numpy(), dtype=NAMES[tensor.dtype])


def check(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert actual.shape == tuple(expected.shape)
    assert actual.dtype == NAMES[expected.dtype]
    wide = expected.double().numpy() if expected.dtype.is_floating_point else expected.numpy()
    np.testing.assert_allclose(actual.numpy().astype(wide.dtype), wide, rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_two_tensors_are_combined_in_the_type_that_torch_takes(
    ctx: RuntimeContext, kind: str
) -> None:
    for other, operate in product(KINDS, [operator.mul, operator.truediv, operator.lt]):
        one, two = values((3, 5), kind), values((3, 5), other, seed=1)

        check(operate(on_device(ctx, one), on_device(ctx, two)), operate(one, two), 1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [2, 2.5, True])
def test_a_number_takes_part_as_it_does_in_torch(
    ctx: RuntimeContext, kind: str, number: float
) -> None:
    one = values((7,), kind)
    device = on_device(ctx, one)
    for operate in [*OPERATORS, *COMPARISONS]:
        if operate is operator.sub and (kind == "bool" or number is True):
            continue  # torch refuses it too, but tells it by its own exception

        check(operate(device, number), operate(one, number), 1e-15)
        # torch rounds the reciprocal before it multiplies; here a quotient is rounded once.
        twice = operate is operator.truediv and KINDS[kind].itemsize < 4
        check(operate(number, device), operate(number, one), 1e-2 if twice else 1e-15)


SHAPES = [
    ((4, 6), (6,)), ((4, 6), (4, 1)), ((4, 1), (1, 6)), ((2, 3, 4), (3, 1)),
    ((3, 1, 2, 1), (5, 1, 7)), ((1,), (130, 70)), ((), (5,)), ((5,), ()), ((), ()),
    ((0, 4), (4,)), ((2, 1, 3, 1, 2), (2, 3, 3, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_shapes_are_broadcast_as_in_torch(
    ctx: RuntimeContext, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    one, two = values(left, "f32"), values(right, "f32", seed=1)

    check(on_device(ctx, one) - on_device(ctx, two), one - two)


@pytest.mark.parametrize("kinds", [("f16", "f32"), ("i32", "f16"), ("i8", "i64")])
def test_a_tensor_without_dimensions_has_less_to_say(
    ctx: RuntimeContext, kinds: tuple[str, str]
) -> None:
    for single, many in (kinds, kinds[::-1]):
        one, two = values((), single), values((4,), many)

        check(on_device(ctx, one) + on_device(ctx, two), one + two)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("name", ["sum", "amax", "amin", "mean"])
def test_reductions_are_those_of_torch(
    ctx: RuntimeContext, kind: str, dim: int | None, name: str
) -> None:
    if name == "mean" and not KINDS[kind].is_floating_point:
        return
    one = values((5, 9, 3), kind)
    options = {} if dim is None else {"dim": dim, "keepdim": True}

    check(getattr(on_device(ctx, one), name)(**options), getattr(one, name)(**options), 1e-2)


def test_a_long_vector_is_reduced_in_parts(ctx: RuntimeContext) -> None:
    one = values((50_001,), "f64")

    check(on_device(ctx, one).sum(), one.sum())
    check(on_device(ctx, one).max(), one.max())


PRODUCTS = [
    ((70, 40), (40, 33)), ((40,), (40, 5)), ((5, 40), (40,)), ((6,), (6,)), ((3, 4, 5), (3, 5, 6)),
    ((3, 4, 5), (5, 6)), ((1, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("left", "right"), PRODUCTS)
def test_products_are_those_of_torch(
    ctx: RuntimeContext, kind: str, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    one, two = values(left, kind), values(right, kind, seed=1)

    check(on_device(ctx, one) @ on_device(ctx, two), one @ two, 1e-2)


@pytest.mark.parametrize(
    "operate",
    [
        operator.neg, abs, lambda x: x.exp(), lambda x: x.sqrt(), lambda x: x.log(),
        lambda x: x.relu(), lambda x: x.sigmoid(), lambda x: x.T, lambda x: x.float(),
        lambda x: x.transpose(0, 1), lambda x: x**2, lambda x: 2.0**x, lambda x: x.maximum(x * 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_functions_of_elements_are_those_of_torch(
    ctx: RuntimeContext, operate: Callable[[Any], Any], kind: str
) -> None:
    one = values((6, 70), kind)

    check(operate(on_device(ctx, one)), operate(one), 1e-3)


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x.max(), lambda x: x.min(), lambda x: x.amax(0), lambda x: x.amin(1),
        lambda x: x.relu(), lambda x: x.maximum(x * 0), lambda x: x.minimum(x * 0), lambda x: x + 1,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bf16", "f32", "f64"])
def test_what_is_no_number_stays_so(
    ctx: RuntimeContext, operate: Callable[[Any], Any], kind: str
) -> None:
    one = values((70, 90), kind)
    one[3, 5] = float("nan")

    check(operate(on_device(ctx, one)), operate(one), 1e-2)


def test_a_product_over_nothing_is_zero(ctx: RuntimeContext) -> None:
    check(ctx.ones(2, 0) @ ctx.ones(0, 3), torch.ones(2, 0) @ torch.ones(0, 3))


def test_a_vector_has_no_rows_to_exchange(ctx: RuntimeContext) -> None:
    one = values((5,), "f32")

    check(on_device(ctx, one).t(), one.t())


def test_in_place_operators_keep_the_memory_and_the_type(ctx: RuntimeContext) -> None:
    one = values((6,), "f16")
    device = on_device(ctx, one)
    address = device.address

    device += 1
    device *= on_device(ctx, values((6,), "f32"))
    device **= 2
    one += 1
    one *= values((6,), "f32")
    one **= 2

    assert device.address == address
    check(device, one)
