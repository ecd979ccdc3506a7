"""Arithmetic of simulated tensors: it takes simulated time, and refuses what it does not do."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import LocalProtocolError
from rankwise.sim import GraphEngine, RuntimeContext


@pytest.fixture
def ctx() -> Iterator[RuntimeContext]:
    with RuntimeContext(GraphEngine("default"), ccl={}) as context:
        yield context


def test_an_operation_is_a_kernel_on_the_device_and_reads_nothing(ctx: RuntimeContext) -> None:
    x = ctx.ones(1 << 16)
    before, so_far = ctx.now, len(ctx.engine.op_log)

    y = x * 2 + x

    kinds = [ctx.engine.op_log[at].kind for at in range(so_far, len(ctx.engine.op_log))]
    assert kinds.count("KernelLaunch") == 2
    assert "MemoryRead" not in kinds
    assert ctx.now > before
    assert (y.numpy() == 3).all()


def test_comparing_gives_a_tensor_and_only_one_element_has_a_truth(ctx: RuntimeContext) -> None:
    x = ctx.tensor([0.0, 1.0])

    assert (x == 0).tolist() == [True, False]
    assert (x[0:1] == 0).all()
    assert bool((x == 0).amax())
    with pytest.raises(LocalProtocolError, match="one element"):
        bool(x == 0)


def test_tensors_are_still_keys_by_identity(ctx: RuntimeContext) -> None:
    x, y = ctx.ones(2), ctx.ones(2)

    assert {x: "x", y: "y"}[x] == "x"


def test_time_is_the_same_without_data() -> None:
    times = []
    for enable_data in (True, False):
        with RuntimeContext(GraphEngine("default", enable_data), ccl={}) as torch:
            x = torch.ones(100, 80, dtype="f16")
            (x @ x.T).sum(1)
            times.append(torch.now)

    assert times[0] == times[1]


def test_ranks_calculate_on_their_own_devices() -> None:
    sums = []

    def worker(rank: int, torch: Any) -> None:
        x = torch.full((64,), rank)
        torch.distributed.all_reduce(x)
        sums.append((x * (rank + 1)).sum().item())

    with RuntimeContext(GraphEngine("default"), ccl={}) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=4)

    assert sums == [64 * 6 * (rank + 1) for rank in range(4)]


REFUSED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (
        lambda x, _i: x + np.ones(4),
        "add of a simulated tensor and a ndarray is not defined: make a",
    ),
    (lambda x, _i: np.ones(4) + x, "make a tensor of it first"),
    (lambda x, _i: x + "a", "add of a simulated tensor and a str"),
    (lambda x, _i: np.ones(4) @ x, "@ takes two tensors, not a ndarray"),
    (lambda x, _i: x @ 2, "numbers are multiplied with"),
    (lambda x, i: x @ i, "of one floating-point type, not f32 and i32"),
    (lambda x, _i: x // 2, "a simulated tensor has no //: launch a kernel, or take numpy"),
    (lambda x, _i: x % 2, "a simulated tensor has no %"),
    (lambda x, _i: x & 1, "and is for whole numbers and truth values, not fp32"),
    (lambda _x, i: i**2, "is for fractions: convert the tensor first"),
    (lambda _x, i: i.mean(), "the mean of i32"),
    (lambda x, _i: -(x == 0), "take ~ for the opposite"),
    (lambda x, _i: (x == 0) - (x == 1), "take . for where they differ"),
    (lambda x, _i: x.max(0), r"take amax\(dim\)"),
    (lambda x, _i: x.reshape(2, 2, 1).T, r"has shape \(2, 2, 1\): use transpose"),
    (lambda x, _i: x.reshape(2, 2, 1).t(), r"t\(\) and T are for matrices"),
    (lambda x, _i: x.reshape(2, 2).sum((0, 1)), "dim is a tuple, expected one number"),
    (lambda x, _i: x.__setitem__(0, 1.0), "no assignment to elements: use copy_, or launch"),
    (lambda x, i: i.__iadd__(x), "float32 values cannot be put into|fp32 values cannot be put"),
    (lambda x, _i: x.to("f8e4") + x.to("f16"), "have no common type: convert one of them first"),
]


@pytest.mark.parametrize(("operate", "message"), REFUSED)
def test_what_is_not_offered_says_what_to_use_instead(
    ctx: RuntimeContext, operate: Callable[[Any, Any], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        operate(ctx.ones(4), ctx.ones(4, dtype="i32"))


@pytest.mark.parametrize(
    ("operate", "message"),
    [
        (lambda x: x + x.reshape(2, 2), r"shapes \(4,\) and \(2, 2\) cannot be broadcast"),
        (lambda x: x @ x.reshape(2, 2), r"matrices of shapes \(4,\) and \(2, 2\)"),
        (lambda x: x.__iadd__(x.reshape(4, 1)), r"has shape \(4,\), its new values \(4, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_are_told(
    ctx: RuntimeContext, operate: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        operate(ctx.ones(4))


def test_nothing_has_no_largest_element_and_the_sum_zero(ctx: RuntimeContext) -> None:
    nothing = ctx.ones(0)

    assert nothing.sum().item() == 0
    with pytest.raises(LocalProtocolError, match="no elements to take max of"):
        nothing.max()


def test_a_freed_tensor_calculates_nothing(ctx: RuntimeContext) -> None:
    x = ctx.ones(4)
    x.free()

    with pytest.raises(LocalProtocolError, match="used after it was freed"):
        x + 1
