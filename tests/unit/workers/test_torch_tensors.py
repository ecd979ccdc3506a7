from typing import Any

import pytest

from rankwise.base.errors import ConfigError
from rankwise.workers import (
    ContinuousTensor,
    DataType,
    TaskArgs,
    array_at,
    make_tensor_arg,
    torch_dtype_to_datatype,
)

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kind", DataType)
def test_every_data_type_is_one_of_torchs(kind: DataType) -> None:
    assert torch_dtype_to_datatype(getattr(torch, kind.name.lower())) is kind


@pytest.mark.parametrize("name", ["complex32", "float8_e5m2"])
def test_a_type_that_no_chip_has_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"tensors of torch.{name} .*float32"):
        torch_dtype_to_datatype(getattr(torch, name))


def test_what_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"int 3 is not a torch tensor"):
        make_tensor_arg(3)


def test_a_tensor_is_described_in_place() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)

    described = make_tensor_arg(tensor)
    array_at(described)[0, 0] = 9

    assert described == ContinuousTensor.make(tensor.data_ptr(), (2, 3), DataType.INT32)
    assert tensor[0, 0].item() == 9


def test_arguments_take_tensors_and_keep_them_alive() -> None:
    args = TaskArgs()
    args.add_tensor(torch.full((4,), 2.5).share_memory_())

    assert array_at(args.tensor(0)).tolist() == [2.5] * 4
    assert args.owner(0).tolist() == [2.5] * 4


def test_a_tensor_of_ones_own_class_is_one_too() -> None:
    mine = type("Mine", (torch.Tensor,), {})
    tensor = torch.arange(3, dtype=torch.int8).as_subclass(mine)
    args = TaskArgs()
    args.add_tensor(tensor)

    assert array_at(args.tensor(0)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(4, 4).t()[:, ::2], r"strides .*is not dense .*contiguous\(\)"),
        (lambda: torch.zeros(4, device="meta"), r"is on meta, expected the CPU .*\.cpu\(\)"),
    ],
)
def test_a_tensor_that_cannot_travel_is_refused_with_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tensor_arg(make())
