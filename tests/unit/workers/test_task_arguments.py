import ctypes
import gc
import mmap
import struct
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError, MailboxCorrupt, TreeValueError
from rankwise.workers import (
    ChipCallConfig,
    ChipStorageTaskArgs,
    ContinuousTensor,
    DataType,
    TaskArgs,
    TensorArgType,
    Worker,
    array_at,
    read_args_from_blob,
    scalar_to_uint64,
)
from rankwise.workers.arrays import data_type_of, host_bytes
from rankwise.workers.errors import BadPointer
from rankwise.workers.wire import pack_task, unpack_task


def some_tensor(child_memory: bool = False) -> ContinuousTensor:
    return ContinuousTensor.make(4096, (2, 3), DataType.FLOAT16, child_memory)


def test_arguments_are_kept_in_their_order_with_their_tags() -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor())
    args.add_tensor(some_tensor(), TensorArgType.OUTPUT)
    args.add_scalar(7)

    args.set_tag(0, TensorArgType.NO_DEP)

    assert (args.tensor_count(), args.scalar_count(), len(args)) == (2, 1, 3)
    assert args.tags == (TensorArgType.NO_DEP, TensorArgType.OUTPUT)
    assert args.tag(1) is TensorArgType.OUTPUT
    assert args.scalar(0) == 7
    assert "NO_DEP ContinuousTensor" in repr(args)


def test_a_tensor_after_a_scalar_is_a_runtime_error() -> None:
    args = TaskArgs()
    args.add_scalar(1)

    with pytest.raises(RuntimeError, match=r"after 1 scalars .*before the first scalar"):
        args.add_tensor(some_tensor())


@pytest.mark.parametrize("index", [-1, 1])
def test_an_index_without_argument_is_an_index_error_that_says_how_many_there_are(
    index: int,
) -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor())
    args.add_scalar(1)

    for ask in (args.tensor, args.scalar, args.tag, args.owner):
        with pytest.raises(IndexError, match=rf"no \w+ {index}: the arguments have 1"):
            ask(index)
    with pytest.raises(IndexError):
        args.set_tag(index, TensorArgType.INPUT)


def test_cleared_arguments_take_tensors_again() -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor())
    args.add_scalar(1)

    args.clear()
    args.add_tensor(some_tensor())

    assert len(args) == 1


def test_there_is_no_limit_on_the_number_of_tensors() -> None:
    args = TaskArgs()
    for place in range(1000):
        args.add_tensor(ContinuousTensor.make(place, (1,), DataType.INT8))

    arrived, _config = unpack_task(pack_task(args))

    assert arrived.tensor_count() == 1000
    assert arrived.tensor(999).data == 999


@pytest.mark.parametrize("scalars", [(), (3,), (1, -2), (0.5, 7, 9)])
@pytest.mark.parametrize("tags", [(), (0, 0), (0, 2), (4, 3, 1)])
def test_tags_arrive_whatever_scalars_stand_beside_them(
    tags: tuple[int, ...], scalars: tuple[int | float, ...]
) -> None:
    args = TaskArgs()
    for tag in tags:
        args.add_tensor(some_tensor(), TensorArgType(tag))
    for scalar in scalars:
        args.add_scalar(scalar)

    arrived, _ = unpack_task(memoryview(pack_task(args)))

    assert arrived.tags == tags
    assert arrived.scalars == scalars
    assert arrived.tensors == args.tensors


def test_unknown_tag_in_a_message_is_told() -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor(), TensorArgType.NO_DEP)
    frame = bytearray(pack_task(args))
    frame[-1] = 5

    with pytest.raises(MailboxCorrupt, match="expected a byte from 0 to 4"):
        unpack_task(frame)


def test_every_option_and_child_memory_survive_the_wire() -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor(child_memory=True), TensorArgType.OUTPUT)
    config = ChipCallConfig(7, 2, enable_profiling=True, enable_dump_tensor=True)

    arrived, arrived_config = unpack_task(memoryview(pack_task(args, config)))

    assert arrived.tensor(0) == some_tensor(child_memory=True)
    assert arrived.tags == (TensorArgType.OUTPUT,)
    assert arrived_config == config


@pytest.mark.parametrize("args", [None, TaskArgs()])
def test_a_task_without_arguments_is_one(args: TaskArgs | None) -> None:
    arrived, config = unpack_task(pack_task(args))

    assert len(arrived) == 0
    assert config == ChipCallConfig()
    assert unpack_task(pack_task(args, ChipCallConfig(block_dim=2)))[1].block_dim == 2


def test_arguments_are_rebuilt_from_an_address_as_from_bytes() -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor(child_memory=True))
    args.add_scalar(-1)
    blob = args.to_blob()
    memory = ctypes.create_string_buffer(blob + b"what lies behind", len(blob) + 16)

    from_address = read_args_from_blob(ctypes.addressof(memory))

    assert from_address.tensors == read_args_from_blob(blob).tensors == args.tensors
    assert from_address.scalars == (2**64 - 1,)


def test_a_cut_blob_is_corrupt() -> None:
    with pytest.raises(MailboxCorrupt):
        read_args_from_blob(b"\1\0\0\0\0\0\0\0abc")


def test_what_a_task_touches_is_told_at_once() -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor(), TensorArgType.INOUT)
    args.add_tensor(ContinuousTensor.make(0, (5,), DataType.INT64, child_memory=True))

    args.set_address(1, 512)

    assert args.accesses() == [(4096, 12, 2, False), (512, 40, 0, True)]


def test_an_array_is_described_and_kept_alive() -> None:
    args = TaskArgs()
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    watcher = weakref.ref(array)
    args.add_tensor(array)
    del array
    gc.collect()

    tensor = args.tensor(0)

    assert watcher() is args.owner(0)
    assert (tensor.shapes, tensor.dtype) == ((2, 3), DataType.INT16)
    assert array_at(tensor).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_array_in_shared_memory_is_seen_in_place() -> None:
    memory = mmap.mmap(-1, 4096)
    array = np.frombuffer(memory, np.float32, 8, 64)
    args = TaskArgs()
    args.add_tensor(array)

    array_at(args.tensor(0))[:] = 2.5

    assert memory[64:68] == struct.pack("=f", 2.5)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4), np.int8)[:, ::2], r"strides \(4, 2\), and is not dense.*ascontiguous"),
        (np.zeros(3, "V3"), r"arrays of void24 .*astype.*float32"),
        (np.zeros(3, "M8[s]"), r"arrays of datetime64\[s\]"),
        (np.zeros(3, ">i4"), "native byte order"),
        ([1, 2, 3], "given as list, expected a ContinuousTensor, a numpy array"),
    ],
)
def test_an_array_that_cannot_travel_is_refused_with_what_to_do(
    array: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskArgs().add_tensor(array)


def test_a_read_only_array_is_only_an_input() -> None:
    args = TaskArgs()
    array = np.zeros(4, np.int8)
    array.flags.writeable = False
    args.add_tensor(array)

    with pytest.raises(ConfigError, match=r"read-only array of shape \(4,\) is INOUT"):
        args.add_tensor(array, TensorArgType.INOUT)
    with pytest.raises(ConfigError, match="is OUTPUT_EXISTING: the task would write it"):
        args.set_tag(0, TensorArgType.OUTPUT_EXISTING)

    assert args.tags == (TensorArgType.INPUT,)


def test_every_data_type_but_bfloat16_is_one_of_numpys() -> None:
    kinds = {data_type_of(name) for name in (
        "f4", "f2", "i4", "i2", "i1", "u1", "i8", "u8", "u2", "u4", "?", "f8", "c8", "c16",
    )}  # fmt: skip

    assert kinds == set(DataType) - {DataType.BFLOAT16}


@pytest.mark.parametrize("address", [0, 4096, 2**63, 2**64 - 8])
def test_an_address_that_is_not_mapped_is_an_error_and_no_crash(address: int) -> None:
    with pytest.raises(BadPointer, match=f"the input has 8 bytes at {address:#x}"):
        host_bytes(address, 8, "the input")


def test_a_range_that_is_mapped_in_part_is_an_error() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = libc.mmap(None, 3 * mmap.PAGESIZE, mmap.PROT_READ, flags, -1, 0)
    libc.munmap(pages + mmap.PAGESIZE, mmap.PAGESIZE)
    try:
        assert host_bytes(pages, mmap.PAGESIZE).sum() == 0
        with pytest.raises(BadPointer, match="is not mapped here"):
            host_bytes(pages, mmap.PAGESIZE + 1)
        with pytest.raises(BadPointer, match="is not mapped here"):
            host_bytes(pages, 3 * mmap.PAGESIZE)
    finally:
        libc.munmap(pages, 3 * mmap.PAGESIZE)


def test_memory_of_a_chip_cannot_be_looked_at_from_the_host() -> None:
    with pytest.raises(BadPointer, match=r"a chip's memory at 0x1000.*copy_from"):
        array_at(some_tensor(child_memory=True))


def test_a_tensor_without_elements_needs_no_memory() -> None:
    assert array_at(ContinuousTensor.make(0, (0, 3), DataType.INT32)).shape == (0, 3)


def test_bfloat16_is_seen_as_its_bits() -> None:
    bits = np.array([0x3F80], np.uint16)
    tensor = ContinuousTensor.make(bits.ctypes.data, (1,), DataType.BFLOAT16)

    assert array_at(tensor).tolist() == [0x3F80]


@pytest.mark.parametrize("dtype", ["float64", "bool", "complex64", "complex128"])
def test_arrays_of_numpys_usual_types_are_given_as_they_are(dtype: str) -> None:
    array = np.array([1, 0, 1], dtype)
    args = TaskArgs()
    args.add_tensor(array)

    arrived, _config = unpack_task(pack_task(args))

    assert array_at(arrived.tensor(0)).dtype == array.dtype
    assert array_at(arrived.tensor(0)).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        (np.float32, DataType.FLOAT32),
        (np.dtype("i8"), DataType.INT64),
        (float, DataType.FLOAT64),
        (bool, DataType.BOOL),
        ("f8", DataType.FLOAT64),
        (3, DataType.INT16),
    ],
)
def test_a_data_type_is_found_by_what_a_program_calls_it(named: object, kind: DataType) -> None:
    assert ContinuousTensor.make(0, (1,), named).dtype is kind  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [99, "float8", None, object(), str, [1]])
def test_what_names_no_data_type_is_refused(named: object) -> None:
    with pytest.raises(ConfigError, match="there is no data type"):
        ContinuousTensor.make(0, (1,), named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "arrives"),
    [
        (1.5, 1.5),
        (0.1, 0.1),
        (1e300, 1e300),
        (-1, -1),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
        (True, 1),
        (ctypes.c_float(1.5), 1.5),
        (ctypes.c_double(0.1), 0.1),
        (ctypes.c_int32(-3), -3),
        (np.float32(1.5), 1.5),
        (np.float64(0.1), 0.1),
        (np.int8(-2), -2),
        (np.uint64(2**63), 2**63),
        (np.True_, 1),
    ],
)
def test_a_scalar_arrives_as_the_number_that_was_given(given: object, arrives: float) -> None:
    args = TaskArgs()
    args.add_scalar(7)
    args.add_scalar(given)

    arrived, _config = unpack_task(pack_task(args))

    assert arrived.scalars == args.scalars == (7, arrives)
    assert type(arrived.scalar(1)) is type(arrives)


@pytest.mark.parametrize("number", [2**64, 2**70, -(2**63) - 1])
def test_an_integer_without_place_in_64_bits_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=r"a scalar is -?\d+, expected -2\*\*63 to 2\*\*64 - 1"):
        TaskArgs().add_scalar(number)
    with pytest.raises(ConfigError, match="a scalar is"):
        ChipStorageTaskArgs().add_scalar(number)


@given(st.lists(st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False))))
def test_any_numbers_survive_the_wire(numbers: list[float]) -> None:
    args = TaskArgs()
    for number in numbers:
        args.add_scalar(number)

    arrived, _config = unpack_task(pack_task(args))

    assert arrived.scalars == tuple(numbers)
    assert [type(number) for number in arrived.scalars] == [type(number) for number in numbers]


def test_a_blob_for_others_holds_the_words_that_they_know() -> None:
    args = TaskArgs()
    for value in (1.5, ctypes.c_double(1.5), np.float16(1.0), -1):
        args.add_scalar(value)

    words = (0x3FC00000, 0x3FF8000000000000, 0x3C00, 2**64 - 1)
    assert read_args_from_blob(args.to_blob()).scalars == words
    storage = ChipStorageTaskArgs.from_args(args)
    assert tuple(storage.scalar(place) for place in range(4)) == words


@given(st.integers())
def test_an_integer_keeps_its_lowest_64_bits(number: int) -> None:
    assert scalar_to_uint64(number) == number % 2**64


@given(st.floats(width=32))
def test_a_float_becomes_the_bits_of_a_float32(number: float) -> None:
    assert struct.pack("=I", scalar_to_uint64(number)) == struct.pack("=f", number)


@given(st.floats())
def test_ctypes_double_keeps_all_its_bits(number: float) -> None:
    assert struct.pack("=Q", scalar_to_uint64(ctypes.c_double(number))) == struct.pack("=d", number)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (True, 1),
        (ctypes.c_float(1.0), 0x3F800000),
        (ctypes.c_int32(-1), 2**64 - 1),
        (ctypes.c_uint8(255), 255),
        (np.float32(1.0), 0x3F800000),
        (np.float16(1.0), 0x3C00),
        (np.float64(1.0), 0x3F800000),
        (np.int8(-2), 2**64 - 2),
        (np.uint64(2**63), 2**63),
    ],
)
def test_numbers_of_others_keep_the_bits_that_they_have(value: object, bits: int) -> None:
    assert scalar_to_uint64(value) == bits


@pytest.mark.parametrize("value", ["1", None, [1], np.zeros(2), 1j])
def test_what_is_no_number_is_no_scalar(value: object) -> None:
    with pytest.raises(ConfigError, match="expected a number"):
        scalar_to_uint64(value)


def test_a_float_that_no_float32_holds_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"1e\+300 does not fit .*c_double"):
        scalar_to_uint64(1e300)


def test_arguments_for_a_pointer_lie_where_it_says() -> None:
    args = TaskArgs()
    args.add_tensor(some_tensor())
    args.add_scalar(3)

    storage = ChipStorageTaskArgs.from_args(args)
    raw = ctypes.string_at(storage.__ptr__(), storage.sizeof())

    assert ContinuousTensor.unpack(raw) == some_tensor() == storage.tensor(0)
    assert struct.unpack_from("=Q", raw, 128 * 40) == (3,)
    assert struct.unpack_from("=ii", raw, len(raw) - 8) == (1, 1)
    assert storage.sizeof() == 128 * 40 + 128 * 8 + 8
    assert (len(storage), storage.scalar(0)) == (2, 3)


def test_arguments_at_a_fixed_place_have_an_end_and_say_so() -> None:
    storage = ChipStorageTaskArgs()
    for _ in range(128):
        storage.add_tensor(some_tensor())
    with pytest.raises(ConfigError, match="holds 128 tensors at most"):
        storage.add_tensor(some_tensor())
    for _ in range(128):
        storage.add_scalar(1)
    with pytest.raises(ConfigError, match="holds 128 scalars at most"):
        storage.add_scalar(1)
    with pytest.raises(IndexError):
        storage.tensor(128)

    storage.clear()

    assert (storage.tensor_count(), storage.scalar_count()) == (0, 0)


def test_an_unknown_tag_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(TreeValueError, match=r"tag is 99, expected .*INPUT \(0\), OUTPUT \(1\)"):
        TaskArgs().add_tensor(np.ones(3), 99)  # type: ignore[arg-type]


def test_an_unknown_staged_name_is_refused_with_those_that_there_are() -> None:
    worker = Worker(level=3, num_sub_workers=1)
    worker.stage("x", np.ones(3))

    with pytest.raises(KeyError, match=r"nothing was staged as 'y' \(staged are: x\)"):
        worker.staged("y")
