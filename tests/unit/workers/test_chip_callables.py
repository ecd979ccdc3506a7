import ctypes
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError
from rankwise.sim import triton
from rankwise.workers import (
    ArgDirection,
    ChipCallable,
    ContinuousTensor,
    CoreCallable,
    DataType,
    Parameter,
    TaskArgs,
    arg_direction_name,
)
from rankwise.workers.callables import scalar_value
from rankwise.workers.errors import BadArguments

IN, OUT, INOUT, SCALAR = ArgDirection.IN, ArgDirection.OUT, ArgDirection.INOUT, ArgDirection.SCALAR


def copy_function(source: Any, target: Any) -> None:
    target[:] = source


@triton.jit
def copy_kernel(source: Any, target: Any, n: Any, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def task(*shapes: tuple[int, ...], scalars: int = 0, dtype: str = "float32") -> TaskArgs:
    args = TaskArgs()
    for shape in shapes:
        args.add_tensor(ContinuousTensor.make(64, shape, dtype))
    for value in range(scalars):
        args.add_scalar(value)
    return args


def test_directions_have_names() -> None:
    assert [arg_direction_name(number) for number in range(4)] == ["SCALAR", "IN", "OUT", "INOUT"]
    with pytest.raises(ConfigError, match=r"no argument direction 4 .*SCALAR \(0\)"):
        arg_direction_name(4)


def test_a_core_callable_knows_its_signature() -> None:
    core = CoreCallable.build([IN, Parameter.of(OUT, "y", "float16", (None, 4))], copy_function)

    assert (core.sig_count, core.sig(0), core.sig(1)) == (2, IN, OUT)
    assert core.parameter(1) == Parameter(OUT, "y", DataType.FLOAT16, (None, 4))
    assert not core.is_kernel
    with pytest.raises(IndexError, match="copy_function has no argument 2: its signature has 2"):
        core.sig(2)


def test_a_kernel_is_known_as_one() -> None:
    assert CoreCallable.build([IN, OUT, SCALAR], copy_kernel).is_kernel


def test_the_bytes_of_a_callable_and_its_children_lie_where_it_says() -> None:
    child = CoreCallable.build([IN, OUT], copy_function)
    parent = ChipCallable.build([IN], "program", copy_function, [(7, child), (9, child)], "quick")

    raw = ctypes.string_at(parent.buffer_ptr(), parent.buffer_size())

    assert (parent.func_name, parent.config_name, parent.child_count) == ("program", "quick", 2)
    assert (parent.child(1), parent.child_func_id(1)) == (child, 9)
    assert parent.child_offset(0) % 64 == parent.child_offset(1) % 64 == 0
    for index in (0, 1):
        offset = parent.child_offset(index)
        unpacked = pickle.loads(raw[offset : offset + child.binary_size])
        assert unpacked.__name__ == "copy_function"
    with pytest.raises(IndexError, match="program has 2 children, no child 2"):
        parent.child(2)
    with pytest.raises(IndexError, match="program has no child 8: there are 7, 9"):
        parent.child_of(8)


def test_more_than_32_children_are_no_problem() -> None:
    child = CoreCallable.build([IN], copy_function)

    parent = ChipCallable.build(
        [IN], "program", copy_function, [(number, child) for number in range(40)]
    )

    assert parent.child_func_id(39) == 39


@pytest.mark.parametrize(
    ("signature", "binary", "children", "message"),
    [
        ([9], copy_function, [], "no argument direction 9"),
        ([IN], b"\x7fELF", [], "expected a kernel of the tl language or a function"),
        ([IN], copy_kernel, [(0, CoreCallable.build([], copy_function))], "is a kernel and has 1"),
        ([IN], copy_function, [(0, copy_function)], "child 0 of f is .*expected a CoreCallable"),
        (
            [IN],
            copy_function,
            [(3, CoreCallable.build([], copy_function))] * 2,
            "two children with number 3",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_when_it_is_built(
    signature: Any, binary: Any, children: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ChipCallable.build(signature, "f", binary, children)


def test_a_callable_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="func_name is empty"):
        ChipCallable.build([], "", copy_function)


def test_arguments_come_in_the_order_of_the_signature() -> None:
    signature = [SCALAR, IN, Parameter.of(SCALAR, "scale", "float32"), OUT]
    callable_ = ChipCallable.build(signature, "mixed", copy_function)
    args = TaskArgs()
    args.add_tensor(ContinuousTensor.make(64, (1,), "int8"))
    args.add_tensor(ContinuousTensor.make(128, (2,), "int8"))
    args.add_scalar(5)
    args.add_scalar(0.5)

    values = [value for _parameter, value in callable_.values(args)]

    assert values == [5, args.tensor(0), 0.5, args.tensor(1)]


@pytest.mark.parametrize(
    ("dtype", "arrives"),
    [
        (None, 0.1),
        ("float64", 0.1),
        ("float32", float(np.float32(0.1))),
        ("float16", float(np.float16(0.1))),
        ("bfloat16", 0.10009765625),
    ],
)
def test_a_float_arrives_as_the_nearest_of_its_type(dtype: str | None, arrives: float) -> None:
    callable_ = ChipCallable.build([Parameter.of(SCALAR, "x", dtype)], "f", copy_function)
    args = TaskArgs()
    args.add_scalar(0.1)

    assert [value for _parameter, value in callable_.values(args)] == [arrives]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int32", r"argument 0 \('n'\) of f is 1\.5, expected INT32"),
        ("complex64", r"argument 0 \('n'\) of f is a scalar of COMPLEX64.*a tensor of one element"),
    ],
)
def test_a_scalar_that_its_type_cannot_be_is_refused(dtype: str, message: str) -> None:
    callable_ = ChipCallable.build([Parameter.of(SCALAR, "n", dtype)], "f", copy_function)
    args = TaskArgs()
    args.add_scalar(1.5)

    with pytest.raises(BadArguments, match=message):
        callable_.values(args)


def test_without_a_signature_any_arguments_will_do() -> None:
    callable_ = ChipCallable.build(None, "anything", copy_function)

    values = callable_.values(task((2,), (3,), scalars=1))

    assert [parameter.direction for parameter, _ in values] == [INOUT, INOUT, SCALAR]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (task((4, 2)), "copy was given 1 tensors and 0 scalars, expected 2 and 1"),
        (task((4, 2), (4, 2), scalars=2), "2 tensors and 2 scalars, expected 2 and 1"),
        (
            task((4, 2), (4, 2), scalars=1, dtype="int32"),
            r"argument 0 \('x'\) of copy has dtype INT32, expected FLOAT32",
        ),
        (
            task((4, 3), (4, 2), scalars=1),
            r"argument 0 \('x'\) of copy has shape \(4, 3\), expected \(any, 2\)",
        ),
        (task((2,), (4, 2), scalars=1), r"has shape \(2,\), expected \(any, 2\)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: TaskArgs, message: str) -> None:
    signature = [Parameter.of(IN, "x", "float32", (None, 2)), OUT, SCALAR]

    with pytest.raises(BadArguments, match=message):
        ChipCallable.build(signature, "copy", copy_function).values(args)


def test_an_argument_without_memory_is_refused_with_what_to_do() -> None:
    args = TaskArgs()
    args.add_tensor(ContinuousTensor.make(0, (2,), "int8"))

    with pytest.raises(BadArguments, match=r"argument 0 of f has no memory.*alloc or malloc"):
        ChipCallable.build([OUT], "f", copy_function).values(args)


@pytest.mark.parametrize(
    ("word", "kind", "value"),
    [
        (2**64 - 1, None, 2**64 - 1),
        (2**64 - 1, DataType.INT64, -1),
        (2**64 - 1, DataType.UINT64, 2**64 - 1),
        (2**64 - 1, DataType.INT32, -1),
        (0x1_0000_0005, DataType.UINT32, 5),
        (0xFF80, DataType.INT8, -128),
        (0xFF80, DataType.UINT8, 128),
        (0x3F80_0000, DataType.FLOAT32, 1.0),
        (0x3C00, DataType.FLOAT16, 1.0),
        (0x3F80, DataType.BFLOAT16, 1.0),
        (0x3FF8_0000_0000_0000, DataType.FLOAT64, 1.5),
        (2, DataType.BOOL, True),
    ],
)
def test_a_scalar_means_what_its_type_says(word: int, kind: DataType | None, value: float) -> None:
    assert scalar_value(word, kind) == value


def test_a_kernel_travels_to_who_has_never_seen_it() -> None:
    block = 32

    @triton.jit
    def double(x: Any, n: Any) -> None:
        at = tl.program_id(0) * block + tl.arange(0, 32)
        tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    callable_ = ChipCallable.build([INOUT, SCALAR], "double", double, grid=2)
    callable_.buffer_ptr()

    arrived = pickle.loads(cloudpickle.dumps(callable_))
    data = np.arange(40, dtype=np.int32)
    arrived.binary[(2,)](data, 40)

    assert arrived.parameters == callable_.parameters
    assert data.tolist() == list(range(0, 80, 2))
