"""The same kernels under Triton's own interpreter and under ours give the same values.

Needs the `triton` package, which is not a dependency: skipped where it is missing. Its interpreter
truncates to bfloat16 and multiplies bfloat16 by its bits; ours is compared with torch there, in the
unit tests.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
with pytest.MonkeyPatch.context() as _patch:  # other tests want Triton's compiler
    _patch.setenv("TRITON_INTERPRET", "1")
    # `triton` alone may be a directory of our own tests.
    _language = pytest.importorskip("triton.language")
if type(_language.sum).__name__ == "JITFunction":
    pytest.skip(
        "Triton has been imported for compiling: run this file by itself", allow_module_level=True
    )

KERNELS = """
import {triton} as triton
import {triton}.language as tl

@triton.jit
def binary(x, y, o, OP: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add": r = a + b
    elif OP == "sub": r = a - b
    elif OP == "mul": r = a * b
    elif OP == "div": r = a / b
    elif OP == "floordiv": r = a // b
    elif OP == "mod": r = a % b
    elif OP == "and": r = a & b
    elif OP == "or": r = a | b
    elif OP == "xor": r = a ^ b
    elif OP == "lt": r = a < b
    elif OP == "ge": r = a >= b
    elif OP == "eq": r = a == b
    elif OP == "max": r = tl.maximum(a, b)
    elif OP == "min": r = tl.minimum(a, b)
    tl.store(o + i, r)

@triton.jit
def with_number(x, o, OP: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    if OP == "int": r = a * 3 + 1
    elif OP == "float": r = a * 2.5 - 1.25
    elif OP == "reflected": r = 7 - a
    elif OP == "division": r = 1 / a
    tl.store(o + i, r)

@triton.jit
def unary(x, o, OP: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    if OP == "exp": r = tl.exp(a)
    elif OP == "exp2": r = tl.exp2(a)
    elif OP == "log": r = tl.log(tl.abs(a))
    elif OP == "log2": r = tl.log2(tl.abs(a))
    elif OP == "sqrt": r = tl.sqrt(tl.abs(a))
    elif OP == "rsqrt": r = tl.rsqrt(tl.abs(a))
    elif OP == "sin": r = tl.sin(a)
    elif OP == "cos": r = tl.cos(a)
    elif OP == "floor": r = tl.floor(a)
    elif OP == "ceil": r = tl.ceil(a)
    elif OP == "sigmoid": r = tl.sigmoid(a)
    elif OP == "neg": r = -a
    elif OP == "abs": r = tl.abs(a)
    elif OP == "clamp": r = tl.clamp(a, -0.5, 0.5)
    tl.store(o + i, r)

@triton.jit
def cast(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))

@triton.jit
def minus(a, b):
    return a * 2 + b

@triton.jit
def along(x, o, OP: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    i = tl.arange(0, N if AXIS == 0 else M)
    if OP == "sum": tl.store(o + i, tl.sum(a, AXIS))
    elif OP == "max": tl.store(o + i, tl.max(a, AXIS))
    elif OP == "min": tl.store(o + i, tl.min(a, AXIS))
    elif OP == "argmax": tl.store(o + i, tl.argmax(a, AXIS))
    elif OP == "argmin": tl.store(o + i, tl.argmin(a, AXIS))

@triton.jit
def scan(x, o, OP: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + i)
    if OP == "cumsum": r = tl.cumsum(a, 1, reverse=REVERSE)
    elif OP == "cumprod": r = tl.cumprod(a, 1, reverse=REVERSE)
    tl.store(o + i, r)

@triton.jit
def shapes(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    j = tl.join(a, a + 100)
    p = tl.permute(j, (1, 0))
    q = tl.reshape(p, (2 * B,))
    low, high = tl.split(tl.reshape(q, (B, 2)))
    t = tl.trans(tl.reshape(tl.interleave(low, high), (2, B)))
    tl.store(o + tl.arange(0, 2 * B), tl.reshape(t, (2 * B,)))

@triton.jit
def product(x, y, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    a = tl.load(x + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    b = tl.load(y + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(o + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tl.dot(a, b))

@triton.jit
def randomness(o, seed, KIND: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if KIND == "rand": r = tl.rand(seed, i)
    elif KIND == "randn": r = tl.randn(seed, i)
    elif KIND == "randint": r = tl.randint(seed, i)
    tl.store(o + i, r)

@triton.jit
def atomics(x, where, o, OP: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i)
    at = o + tl.load(where + i)
    if OP == "add": tl.atomic_add(at, v)
    elif OP == "max": tl.atomic_max(at, v)
    elif OP == "min": tl.atomic_min(at, v)
"""


def _module(path: Path, name: str, triton: str) -> ModuleType:
    path.write_text(KERNELS.format(triton=triton))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, ModuleType]]:
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        theirs = _module(folder / "theirs.py", "kernels_theirs", "triton")
        yield theirs, _module(folder / "ours.py", "kernels_ours", "rankwise.sim.triton")
    del sys.modules["kernels_theirs"], sys.modules["kernels_ours"]


def compare(
    both: tuple[ModuleType, ModuleType],
    kernel: str,
    inputs: list[Any],
    output: Any,
    grid: tuple[int, ...] = (1,),
    rtol: float = 0.0,
    **meta: Any,
) -> None:
    results = []
    for module in both:
        out = output.clone()
        getattr(module, kernel)[grid](*inputs, out, **meta)
        results.append(out.to(torch.float64).numpy())
    np.testing.assert_allclose(results[1], results[0], rtol=rtol, atol=rtol)


def values(dtype: Any, size: int = 256, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(size, generator=generator) * 3).to(dtype)
    low = 1 if dtype is torch.uint8 else -100
    made = torch.randint(low, 100, (size,), generator=generator)
    return torch.where(made == 0, 1, made).to(dtype)


FLOATS = [torch.float16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div", "lt", "ge", "max", "min"])
@pytest.mark.parametrize("right", [*FLOATS, torch.int32])
@pytest.mark.parametrize("left", FLOATS)
def test_operations_of_floats_agree(both: Any, left: Any, right: Any, operation: str) -> None:
    output = torch.zeros(256, dtype=torch.float64)

    compare(
        both, "binary", [values(left), values(right, seed=1)], output, (2,), OP=operation, B=128
    )


@pytest.mark.parametrize(
    "operation", ["add", "sub", "mul", "div", "floordiv", "mod", "and", "or", "xor", "lt", "eq"]
)
@pytest.mark.parametrize("right", INTEGERS)
@pytest.mark.parametrize("left", INTEGERS)
def test_operations_of_integers_agree(both: Any, left: Any, right: Any, operation: str) -> None:
    divides = operation in ("div", "floordiv", "mod")
    if divides and torch.uint8 in (left, right) and left != right:
        pytest.skip("the language refuses to divide a signed by an unsigned number")
    output = torch.zeros(256, dtype=torch.float64)

    compare(
        both, "binary", [values(left), values(right, seed=1)], output, (2,), OP=operation, B=128
    )


@pytest.mark.parametrize("operation", ["int", "float", "reflected", "division"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int32])
def test_numbers_are_promoted_alike(both: Any, dtype: Any, operation: str) -> None:
    compare(
        both, "with_number", [values(dtype)], torch.zeros(256, dtype=torch.float64),
        OP=operation, B=256, rtol=1e-7,
    )  # fmt: skip


@pytest.mark.parametrize(
    "operation",
    [
        "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "sigmoid",
        "neg", "abs", "clamp",
    ],
)  # fmt: skip
def test_functions_agree(both: Any, operation: str) -> None:
    inputs = [values(torch.float32)]

    compare(both, "unary", inputs, torch.zeros(256), OP=operation, B=256, rtol=3e-7)


@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("source", [*FLOATS, torch.bfloat16, torch.int8, torch.int32, torch.int64])
def test_casts_agree(both: Any, source: Any, target: Any) -> None:
    if target is torch.uint8 and source.is_floating_point:
        pytest.skip("a negative float has no value as an unsigned integer")

    compare(both, "cast", [values(source)], torch.zeros(256, dtype=target), B=256)


@pytest.mark.parametrize("operation", ["sum", "max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int8])
def test_reductions_agree(both: Any, operation: str, axis: int, dtype: Any) -> None:
    output = torch.zeros(8 if axis else 32, dtype=torch.float64)

    compare(
        both, "along", [values(dtype)], output, OP=operation, AXIS=axis, M=8, N=32, rtol=1e-5
    )  # fmt: skip


@pytest.mark.parametrize("operation", ["cumsum", "cumprod"])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_agree(both: Any, operation: str, reverse: bool) -> None:
    inputs = [values(torch.float32) / 4]

    compare(
        both, "scan", inputs, torch.zeros(256), OP=operation, REVERSE=reverse, M=16, N=16, rtol=1e-4
    )


def test_elements_are_moved_alike(both: Any) -> None:
    compare(both, "shapes", [values(torch.float32, 16)], torch.zeros(32), B=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_products_agree(both: Any, dtype: Any) -> None:
    out = torch.zeros(256, dtype=torch.float32 if dtype.is_floating_point else torch.int32)
    inputs = [values(dtype, 512), values(dtype, 512, seed=1)]

    compare(both, "product", inputs, out, M=16, N=16, K=32, rtol=2e-5)


@pytest.mark.parametrize(("kind", "dtype"), [
    ("rand", torch.float32), ("randn", torch.float32), ("randint", torch.int64),
])  # fmt: skip
def test_random_numbers_are_the_same(both: Any, kind: str, dtype: Any) -> None:
    results = []
    for module in both:
        out = torch.zeros(512, dtype=dtype)
        module.randomness[(4,)](out, 123456789, KIND=kind, B=128)
        results.append(out.numpy())

    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operation", ["add", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_atomics_agree(both: Any, operation: str, dtype: Any) -> None:
    places = torch.randint(0, 7, (256,), generator=torch.Generator().manual_seed(2)).to(torch.int32)

    compare(
        both, "atomics", [values(dtype), places], torch.zeros(7, dtype=dtype), (4,),
        OP=operation, B=64, rtol=1e-5,
    )  # fmt: skip
