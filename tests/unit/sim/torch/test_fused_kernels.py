"""Functions that take the time of one kernel, and compute what their parts do."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rankwise.sim import load_topology  # noqa: E402  # needs torch
from rankwise.simranks.prediction.clocks import Prediction  # noqa: E402  # the same
from rankwise.simranks.torch.fused_kernels import (  # noqa: E402  # the same
    rms_norm,
    scaled_dot_product_attention,
)
from rankwise.simranks.torch.operations import ChargingMode, charge_thread  # noqa: E402  # the same
from rankwise.simranks.world.ranks import Rank  # noqa: E402  # the same

pytestmark = pytest.mark.torch
SHAPE = (4, 64)


def leaves(dtype: Any) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in ((8, *SHAPE), SHAPE)]


def charged(compute: Any) -> tuple[Any, Prediction]:
    """What it gives in a thread that is charged, as those of ranks are."""
    prediction = Prediction(load_topology("switch8"), 1)
    rank = Rank.__new__(Rank)
    rank.number, rank.own_state = 0, {}

    def live() -> Any:
        with charge_thread(ChargingMode(prediction.clock_of(rank))):
            return compute()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(live).result(), prediction


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_one_kernel_forward_and_one_backward_with_the_same_bits(dtype: Any) -> None:
    def train(norm: Any) -> list[Any]:
        x, weight = leaves(dtype)
        normed = norm(x, SHAPE, weight, 1e-5)
        return [normed, *torch.autograd.grad(normed, (x, weight), torch.ones_like(x))]

    found, prediction = charged(lambda: train(rms_norm))

    assert all(map(torch.equal, found, train(torch.rms_norm)))
    names = [each.work.name for each in prediction.works]
    assert names[-1] == "aten._fused_rms_norm_backward"
    assert names.count("aten._fused_rms_norm") == 1
    assert not {"aten.pow", "aten.rsqrt", "aten.mean"} & set(names)


def test_rms_norm_takes_the_same_time_in_inference_mode() -> None:
    x, weight = leaves(torch.float32)

    def infer() -> None:
        with torch.inference_mode():
            rms_norm(x, SHAPE, weight)

    _, inferred = charged(infer)
    _, trained = charged(lambda: rms_norm(x, SHAPE, weight))

    assert inferred.now == trained.now > 0


def test_gradient_of_the_gradient_of_rms_norm_is_that_of_its_parts() -> None:
    def second(norm: Any) -> Any:
        x, weight = leaves(torch.float32)
        (first,) = torch.autograd.grad(norm(x, SHAPE, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    found, _ = charged(lambda: second(rms_norm))

    for one, other in zip(found, second(torch.rms_norm), strict=True):
        torch.testing.assert_close(one, other)


def test_attention_with_dropout_takes_the_time_of_one_without() -> None:
    def train(attend: Any, dropout: float) -> list[Any]:
        torch.manual_seed(0)
        tensors = [torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3)]
        attended = attend(*tensors, dropout_p=dropout, is_causal=True)
        return [attended, *torch.autograd.grad(attended, tensors, torch.ones(2, 4, 32, 16))]

    found, dropping = charged(lambda: train(scaled_dot_product_attention, 0.5))
    _, plain = charged(lambda: train(scaled_dot_product_attention, 0.0))

    parts = train(torch.nn.functional.scaled_dot_product_attention, 0.5)
    assert all(map(torch.equal, found, parts))
    names = [[each.work.name for each in told.works] for told in (dropping, plain)]
    assert names[0] == names[1]
    assert dropping.now == pytest.approx(plain.now, rel=0.01)
    assert dropping.clocks[0].memory.peak_of_run < 1.1 * plain.clocks[0].memory.peak_of_run
