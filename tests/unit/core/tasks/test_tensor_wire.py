import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError, MailboxCorrupt
from rankwise.core.tasks.tensors import (
    CONTINUOUS_TENSOR_MAX_DIMS,
    TENSOR_BYTES,
    ContinuousTensor,
    DataType,
    decode_arguments,
    encode_arguments,
    encoded_arguments_bytes,
    get_dtype_name,
    get_element_size,
)

WORDS = st.integers(0, 2**64 - 1)
TENSORS = st.builds(
    ContinuousTensor.make,
    WORDS,
    st.lists(st.integers(0, 2**32 - 1), max_size=CONTINUOUS_TENSOR_MAX_DIMS),
    st.sampled_from(DataType),
    st.booleans(),
)


def test_data_types_have_the_numbers_that_programs_know() -> None:
    assert [(kind.name, kind.value, get_element_size(kind)) for kind in DataType] == [
        ("FLOAT32", 0, 4), ("FLOAT16", 1, 2), ("INT32", 2, 4), ("INT16", 3, 2), ("INT8", 4, 1),
        ("UINT8", 5, 1), ("BFLOAT16", 6, 2), ("INT64", 7, 8), ("UINT64", 8, 8), ("UINT16", 9, 2),
        ("UINT32", 10, 4), ("BOOL", 11, 1), ("FLOAT64", 64, 8), ("COMPLEX64", 65, 8),
        ("COMPLEX128", 66, 16),
    ]  # fmt: skip
    assert get_dtype_name(6) == "BFLOAT16"


def test_an_unknown_data_type_is_refused_with_the_list_of_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no data type 'float8'.*FLOAT32.*UINT32"):
        ContinuousTensor.make(0, (1,), "float8")


def test_a_tensor_has_the_layout_of_forty_bytes() -> None:
    tensor = ContinuousTensor.make(0x1122334455667788, (2, 3), DataType.BFLOAT16, child_memory=True)

    packed = tensor.pack()

    assert len(packed) == TENSOR_BYTES
    assert struct.unpack("=Q5IIBB6s", packed) == (
        0x1122334455667788, 2, 3, 0, 0, 0, 2, 6, 1, b"\0" * 6,
    )  # fmt: skip


@given(TENSORS)
def test_a_tensor_survives_the_wire_with_all_its_fields(tensor: ContinuousTensor) -> None:
    assert ContinuousTensor.unpack(tensor.pack()) == tensor


@given(st.lists(TENSORS, max_size=120), st.lists(WORDS, max_size=50))
def test_arguments_survive_the_wire_however_many(
    tensors: list[ContinuousTensor], scalars: list[int]
) -> None:
    blob = encode_arguments(tensors, scalars)

    assert len(blob) == encoded_arguments_bytes(len(tensors), len(scalars))
    assert decode_arguments(blob) == (tensors, scalars)


@given(st.lists(TENSORS, max_size=4), st.lists(WORDS, max_size=4), st.data())
def test_cut_or_prolonged_arguments_are_corrupt(
    tensors: list[ContinuousTensor], scalars: list[int], data: st.DataObject
) -> None:
    blob = encode_arguments(tensors, scalars)
    length = data.draw(st.integers(0, len(blob) - 1))

    with pytest.raises(MailboxCorrupt):
        decode_arguments(blob[:length])
    with pytest.raises(MailboxCorrupt, match="expected"):
        decode_arguments(blob + b"\0")


@given(st.binary(max_size=200))
def test_any_bytes_are_arguments_or_corrupt(blob: bytes) -> None:
    try:
        tensors, scalars = decode_arguments(blob)
    except MailboxCorrupt:
        return
    assert decode_arguments(encode_arguments(tensors, scalars)) == (tensors, scalars)


@pytest.mark.parametrize(
    ("offset", "byte", "field"), [(28, 6, "dimensions"), (32, 12, "data type"), (33, 2, "child")]
)
def test_a_wrong_field_of_a_tensor_is_named(offset: int, byte: int, field: str) -> None:
    packed = bytearray(ContinuousTensor.make(16, (1,), DataType.INT8).pack())
    packed[offset] = byte

    with pytest.raises(MailboxCorrupt, match=field):
        ContinuousTensor.unpack(packed)


def test_six_dimensions_are_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1, 1, 1, 1, 1\) has 6 dimensions.*at most 5"):
        ContinuousTensor.make(0, (1,) * 6, DataType.INT8)


@pytest.mark.parametrize("shape", [(-1,), (2**32,)])
def test_a_length_that_no_tensor_has_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="length"):
        ContinuousTensor.make(0, shape, DataType.INT8)


@pytest.mark.parametrize("address", [-1, 2**64])
def test_an_address_that_is_none_is_refused(address: int) -> None:
    with pytest.raises(ConfigError, match="address"):
        ContinuousTensor.make(address, (1,), DataType.INT8)


def test_fields_can_be_set_and_are_checked_then_too() -> None:
    tensor = ContinuousTensor.make(0, (4, 5), DataType.FLOAT16)

    tensor.shapes = [7]
    tensor.data = 64
    tensor.dtype = DataType.INT64
    tensor.ndims = 2

    assert tensor == ContinuousTensor.make(64, (7, 0), "int64")
    with pytest.raises(ConfigError, match="6 dimensions"):
        tensor.ndims = 6


def test_bytes_are_counted_by_shape_and_type() -> None:
    assert ContinuousTensor.make(0, (3, 4), DataType.FLOAT16).nbytes() == 24
    assert ContinuousTensor.make(0, (), DataType.INT64).nbytes() == 8
    assert ContinuousTensor.make(0, (3, 0), DataType.INT64).nbytes() == 0


def test_only_memory_of_a_chip_is_mentioned_when_a_tensor_is_shown() -> None:
    assert "child_memory" not in repr(ContinuousTensor.make(0, (1,), DataType.INT8))
    assert "child_memory=True" in repr(
        ContinuousTensor.make(0, (1,), DataType.INT8, child_memory=True)
    )
