"""The operations of the matrix engine, by the names that torch's operators have on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  # needs torch

from rankwise.sim import load_topology  # noqa: E402  # the same
from rankwise.simranks.prediction.clocks import Prediction  # noqa: E402  # the same
from rankwise.simranks.torch.flops import formula_of, is_of_matrices  # noqa: E402  # the same
from rankwise.simranks.torch.operations import ChargingMode  # noqa: E402  # the same
from rankwise.simranks.world.ranks import Rank  # noqa: E402  # the same

pytestmark = pytest.mark.torch


class Counter(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Adds the flops of all operations, and keeps the names of those without a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        formula = formula_of(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs or {}, out_val=result)
            self.names.append(str(func.overloadpacket))
        return result


def flops_of(compute: Callable[[], Any]) -> int:
    with Counter() as counter:
        compute()
    assert counter.names
    return counter.flops


def test_attention_on_the_cpu_has_the_flops_of_its_products() -> None:
    query = torch.randn(2, 4, 32, 16, requires_grad=True)
    key, value = torch.randn(2, 2, 24, 16), torch.randn(2, 2, 24, 16)
    outputs: list[Any] = []

    def attend() -> None:
        scaled = torch.nn.functional.scaled_dot_product_attention
        outputs.append(scaled(query, key, value, enable_gqa=True))

    product = 2 * (2 * 4) * 32 * 24 * 16
    assert flops_of(attend) == 2 * product
    assert flops_of(lambda: outputs[0].sum().backward()) == 5 * product


def test_recurrent_layers_have_the_flops_of_their_weights() -> None:
    layer, sequence = torch.nn.LSTM(16, 8), torch.randn(5, 3, 16)
    outputs: list[Any] = []

    forward = flops_of(lambda: outputs.append(layer(sequence)[0].sum()))

    assert forward == 2 * 5 * 3 * (4 * 8 * 16 + 4 * 8 * 8)
    assert flops_of(outputs[0].backward) == 2 * forward


def test_grouped_products_have_the_flops_of_their_groups() -> None:
    rows, weights = torch.randn(16, 32).bfloat16(), torch.randn(2, 32, 8).bfloat16()
    ends = torch.tensor([4, 16], dtype=torch.int32)

    assert (
        flops_of(lambda: torch._grouped_mm(rows, weights, offs=ends)) == 2 * 16 * 32 * 8
    )  # no other name


def test_products_with_vectors_and_whole_numbers_have_formulas() -> None:
    matrix, whole = torch.randn(4, 8), torch.ones(32, 64, dtype=torch.int8)

    assert flops_of(lambda: torch.mv(matrix, torch.randn(8))) == 2 * 4 * 8
    assert flops_of(lambda: torch.addmv(torch.randn(4), matrix, torch.randn(8))) == 2 * 4 * 8
    assert flops_of(lambda: torch._int_mm(whole, whole.t())) == 2 * 32 * 64 * 32  # the same


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fused_encoder_layer_has_the_flops_of_its_products() -> None:
    layer, tokens = (
        torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        torch.randn(2, 8, 32),
    )
    layer.eval()
    lengths = (8, 5)
    nested = torch.nested.nested_tensor([torch.randn(length, 32) for length in lengths])

    with torch.no_grad():
        whole = flops_of(lambda: layer(tokens))
        (priced,) = charged(lambda: layer(nested)).works

    weights = 4 * 32 * 32 + 2 * 32 * 64
    assert whole == 2 * 2 * 8 * weights + 2 * 4 * 8 * 8 * 32
    assert priced.work.flops == 2 * 13 * weights + 4 * (8 * 8 + 5 * 5) * 32


def test_quantized_products_have_the_flops_of_their_columns() -> None:
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.ones(32, 64, dtype=torch.int32), 2
    )
    rows, scales = torch.randn(8, 64).bfloat16(), torch.ones(2, 32, 2).bfloat16()

    flops = flops_of(lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, 32, scales))

    assert flops == 2 * 8 * 64 * 32


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("aten._linalg_svd", True),
        ("aten._cdist_forward", True),
        ("aten.mkldnn_linear_backward", True),
        ("quantized.conv2d", True),
        ("aten.linalg_matrix_exp", True),
        ("aten.hspmm", True),
        ("aten.smm", True),
        ("aten.sspaddmm", True),
        ("onednn.qlinear_prepack", False),
        ("aten.slice_inverse", False),
        ("aten.upsample_bilinear2d", False),
        ("aten._thnn_fused_lstm_cell", False),
        ("aten.native_layer_norm", False),
        ("aten._fused_adamw_", False),
        ("aten.leaky_relu_", False),
    ],
)
def test_names_tell_which_operators_multiply_matrices(
    name: str, is_one: bool
) -> None:  # a parameter
    assert is_of_matrices(name) == is_one


def charged(compute: Callable[[], Any]) -> Prediction:
    prediction = Prediction(load_topology("switch8"), 1)
    rank = Rank.__new__(Rank)
    rank.number, rank.own_state = 0, {}
    with ChargingMode(prediction.clock_of(rank)):
        compute()
    return prediction


def test_matrix_operator_without_a_formula_is_reported_and_not_guessed() -> None:
    matrix = torch.randn(8, 8)

    prediction = charged(lambda: torch.linalg.qr(matrix))

    assert [work.name for work in prediction.unknown] == ["aten.linalg_qr"]
    assert {work.flops for work in prediction.unknown} == {0}


def test_view_of_a_new_result_takes_no_time() -> None:
    left, right = torch.randn(2, 4, 8), torch.randn(8, 4)

    prediction = charged(lambda: left @ right)

    assert [priced.work.name for priced in prediction.works] == ["aten.mm"]


def test_fused_optimizer_reads_all_its_lists_and_writes_those_that_it_changes() -> None:
    values = [torch.randn(8), torch.randn(24)]
    gradients = [torch.randn(8), torch.randn(24)]
    moments = [torch.zeros(8), torch.zeros(24)]

    prediction = charged(
        lambda: torch._fused_sgd_(  # what the optimiser calls
            values,
            gradients,
            moments,
            weight_decay=0.0,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
    )

    (priced,) = prediction.works
    assert priced.work.flops == 32
    # By their schema the gradients are written, too: with a scaler they are.
    assert priced.work.size == 4 * 32 * (3 + 3)


_ROWS, _QUERY, _SEQUENCE = torch.randn(8, 64), torch.randn(2, 4, 32, 16), torch.randn(5, 3, 16)
_COMPUTATIONS: dict[str, Callable[[], Any]] = {
    "linear": partial(torch.nn.Linear(64, 32), _ROWS),
    "attention": partial(torch.nn.functional.scaled_dot_product_attention, *(_QUERY,) * 3),
    "lstm": partial(torch.nn.LSTM(16, 8), _SEQUENCE),
    "heads": partial(torch.nn.MultiheadAttention(16, 4), *(_SEQUENCE,) * 3),
    "loss": partial(torch.nn.functional.cross_entropy, _ROWS, torch.arange(8)),
}


@pytest.mark.parametrize("name", _COMPUTATIONS)
def test_computation_takes_the_same_time_in_inference_mode(name: str) -> None:
    def time_in(mode: Callable[[], Any]) -> int:
        with mode():
            return charged(_COMPUTATIONS[name]).now

    assert time_in(torch.inference_mode) == pytest.approx(time_in(torch.no_grad), rel=0.01)
