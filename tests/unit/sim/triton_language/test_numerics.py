"""Formats, promotion and integer arithmetic, against numpy and torch."""

from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.sim.triton import formats

torch = pytest.importorskip("torch")
RANDOM = np.random.default_rng(3)


def spread(size: int, low: int, high: int) -> Any:
    scale = np.exp2(RANDOM.integers(low, high, size))
    return (RANDOM.standard_normal(size) * scale).astype(np.float32)


def test_every_half_is_read_and_written_as_numpy_does() -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)

    values = formats.HALF.decode(halves)

    np.testing.assert_array_equal(values, halves.astype(np.float32))
    finite = halves[np.isfinite(halves)]
    bits = formats.HALF.encode(finite.astype(np.float32)).view(np.uint16)
    np.testing.assert_array_equal(bits, finite.view(np.uint16))


def test_rounding_to_half_is_to_the_nearest_and_at_ties_to_even() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    ties = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    values = np.concatenate([spread(100_000, -30, 14), ties, -ties])

    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)

    np.testing.assert_array_equal(
        formats.HALF.rounded(values).view(np.uint32), expected.view(np.uint32)
    )


def test_what_a_half_cannot_hold_becomes_infinite() -> None:
    values = np.array([65519.0, 65520.0, -1e30, np.inf, np.nan, 1.0], np.float32)

    with np.errstate(over="ignore", invalid="ignore"):
        rounded = formats.HALF.rounded(values)

    np.testing.assert_array_equal(rounded, [65504.0, np.inf, -np.inf, np.inf, np.nan, 1.0])


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.concatenate([spread(100_000, -100, 100), [np.nan, np.inf, -np.inf, 0.0, -0.0]])
    values = values.astype(np.float32)

    expected = torch.tensor(values).bfloat16()

    np.testing.assert_array_equal(formats.BRAIN.rounded(values), expected.float().numpy())


@pytest.mark.parametrize(
    ("form", "name", "greatest"),
    [(formats.E5M2, "float8_e5m2", 57344), (formats.E4M3, "float8_e4m3fn", 448)],
)
def test_eight_bit_floats_round_as_torch_does_and_saturate(
    form: Any, name: str, greatest: float
) -> None:
    values = spread(50_000, -20, 16)
    values = values[np.abs(values) <= greatest]

    expected = torch.tensor(values).to(getattr(torch, name))

    np.testing.assert_array_equal(form.rounded(values), expected.float().numpy())
    np.testing.assert_array_equal(form.encode(values), expected.view(torch.uint8).numpy())
    assert form.rounded(np.array([1e9], np.float32))[0] == greatest


@triton.jit
def bfloat_kernel(x: Any, y: Any, o: Any, OP: tl.constexpr, B: tl.constexpr) -> None:
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    if OP == "add":
        r = a + b
    elif OP == "mul":
        r = a * b
    elif OP == "sub":
        r = a - b
    else:
        r = (a.to(tl.float32) * 3).to(tl.bfloat16)
    tl.static_assert(r.dtype == tl.bfloat16)
    tl.store(o + i, r)


@pytest.mark.parametrize("operation", ["add", "mul", "sub", "cast"])
def test_bfloat16_arithmetic_is_torchs_to_the_bit(operation: str) -> None:
    x, y = torch.randn(512).bfloat16(), torch.randn(512).bfloat16()
    out = torch.zeros(512, dtype=torch.bfloat16)

    bfloat_kernel[(4,)](x, y, out, OP=operation, B=128)

    expected = {"add": x + y, "mul": x * y, "sub": x - y, "cast": (x.float() * 3).bfloat16()}
    assert torch.equal(out, expected[operation])


def test_bfloat16_without_torch_lies_in_uint16() -> None:
    x = triton.typed([1.0, 2.5, 3.14159, -7.0], tl.bfloat16)
    out = triton.typed(np.zeros(4), tl.bfloat16)

    bfloat_kernel[(1,)](x, x, out, OP="add", B=4)

    assert x.array.dtype == np.uint16
    np.testing.assert_array_equal(out.numpy(), [2.0, 5.0, 6.28125, -14.0])


@triton.jit
def product_kernel(
    x: Any, y: Any, o: Any, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
) -> None:
    a = tl.load(x + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    b = tl.load(y + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(o + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tl.dot(a, b))


def test_products_of_narrow_floats_are_accumulated_in_fp32() -> None:
    x, y = torch.randn(16, 64).bfloat16(), torch.randn(64, 32).bfloat16()
    out = torch.zeros(16, 32)

    product_kernel[(1,)](x, y, out, M=16, N=32, K=64)

    assert torch.allclose(out, x.float() @ y.float(), rtol=1e-6, atol=1e-5)


def test_products_of_int8_are_exact() -> None:
    x = RANDOM.integers(-128, 127, (16, 64), np.int8)
    y = RANDOM.integers(-128, 127, (64, 16), np.int8)
    out = np.zeros((16, 16), np.int32)

    product_kernel[(1,)](x, y, out, M=16, N=16, K=64)

    np.testing.assert_array_equal(out, x.astype(np.int32) @ y.astype(np.int32))


@triton.jit
def integer_kernel(x: Any, o: Any, B: tl.constexpr) -> None:
    i = tl.arange(0, B)
    a = tl.load(x + i)
    tl.store(o + i, a // 3)
    tl.store(o + B + i, a % 3)
    tl.store(o + 2 * B + i, a * 2_000_000_000)
    tl.store(o + 3 * B + i, (a >> 1) ^ (a << 2))


def test_integers_divide_towards_zero_and_wrap_around() -> None:
    x = np.array([-7, -3, -1, 0, 1, 5, 7, 100], np.int32)
    out = np.zeros((4, 8), np.int32)

    integer_kernel[(1,)](x, out, B=8)

    np.testing.assert_array_equal(out[0], np.trunc(x / 3))
    np.testing.assert_array_equal(out[1], np.fmod(x, 3))
    np.testing.assert_array_equal(out[2], (x.astype(np.int64) * 2_000_000_000).astype(np.int32))
    np.testing.assert_array_equal(out[3], (x >> 1) ^ (x << 2))


@triton.jit
def index_kernel(o: Any, stride: Any, B: tl.constexpr) -> None:
    wide = (tl.program_id(0) + tl.arange(0, B)) * stride
    tl.store(o + tl.program_id(0) * B + tl.arange(0, B), wide.to(tl.int64))


def test_an_index_that_leaves_32_bits_wraps_even_while_it_is_symbolic() -> None:
    out = np.zeros((3, 4), np.int64)

    index_kernel[(3,)](out, 1_500_000_000, B=4)

    index = np.arange(3)[:, None] + np.arange(4)
    expected = (index.astype(np.int64) * 1_500_000_000).astype(np.int32).astype(np.int64)
    np.testing.assert_array_equal(out, expected)


@triton.jit
def add_pairs(first_a: Any, second_a: Any, first_b: Any, second_b: Any) -> Any:
    return first_a * first_b, first_b * second_a + second_b


@triton.jit
def recurrence_kernel(f: Any, x: Any, o: Any, B: tl.constexpr) -> None:
    i = tl.program_id(0) * B + tl.arange(0, B)
    _, h = tl.associative_scan((tl.load(f + i), tl.load(x + i)), 0, add_pairs)
    tl.store(o + i, h)


def test_a_scan_with_a_function_that_does_not_commute_keeps_the_order() -> None:
    f, x = RANDOM.random((3, 64), np.float32), RANDOM.random((3, 64), np.float32)
    out = np.zeros_like(x)

    recurrence_kernel[(3,)](f, x, out, B=64)

    state, expected = np.zeros(3), np.zeros((3, 64))
    for at in range(64):
        state = f[:, at] * state + x[:, at]
        expected[:, at] = state
    np.testing.assert_allclose(out, expected, rtol=1e-4)


@triton.jit
def larger(value_a: Any, index_a: Any, value_b: Any, index_b: Any) -> Any:
    take = value_a >= value_b
    return tl.where(take, value_a, value_b), tl.where(take, index_a, index_b)


@triton.jit
def reduce_kernel(x: Any, values: Any, places: Any, B: tl.constexpr) -> None:
    row = tl.program_id(0)
    i = tl.arange(0, B)
    best, where = tl.reduce((tl.load(x + row * B + i), i), 0, larger)
    tl.store(values + row, best)
    tl.store(places + row, where)


def test_a_reduction_with_a_users_function_over_two_blocks_is_an_argmax() -> None:
    x = RANDOM.standard_normal((9, 128)).astype(np.float32)
    values, places = np.zeros(9, np.float32), np.zeros(9, np.int32)

    reduce_kernel[(9,)](x, values, places, B=128)

    np.testing.assert_array_equal(values, x.max(1))
    np.testing.assert_array_equal(places, x.argmax(1))


@triton.jit
def histogram_kernel(x: Any, counts: Any, B: tl.constexpr) -> None:
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(counts + tl.load(x + i), 1)


@pytest.mark.parametrize("bins", [3, 500])
def test_atomic_sums_count_every_program_and_every_duplicate(bins: int) -> None:
    x = RANDOM.integers(0, bins, 4096, np.int32)
    counts = np.zeros(bins, np.int32)

    histogram_kernel[(16,)](x, counts, B=256)

    np.testing.assert_array_equal(counts, np.bincount(x, minlength=bins))


@triton.jit
def binned_kernel(x: Any, counts: Any, below: Any, B: tl.constexpr) -> None:
    i = tl.arange(0, B)
    tl.store(counts + tl.arange(0, 4), tl.histogram(tl.load(x + i), 4, mask=i < below))


def test_a_histogram_leaves_out_what_is_in_no_bin_as_triton_does() -> None:
    counts = np.zeros(4, np.int32)

    binned_kernel[(1,)](np.array([0, 3, 3, -1, 4, -9, 100, 2], np.int32), counts, 7, B=8)

    assert counts.tolist() == [1, 0, 0, 2]


@triton.jit
def eight_bit_kernel(x: Any, o: Any, B: tl.constexpr) -> None:
    i = tl.arange(0, B)
    tl.store(o + i, (tl.load(x + i).to(tl.float32) * 2).to(tl.float8e4nv))


def test_eight_bit_floats_are_loaded_and_stored() -> None:
    x = torch.randn(64).to(torch.float8_e4m3fn)
    out = torch.zeros(64).to(torch.float8_e4m3fn)

    eight_bit_kernel[(1,)](x, out, B=64)

    assert torch.equal(out.float(), (x.float() * 2).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ["exp", "log2", "sqrt", "rsqrt", "sin", "erf", "floor"])
def test_functions_of_narrow_floats_are_refused_as_by_the_compiler(name: str) -> None:
    function = getattr(tl, name)

    def kernel(x: Any) -> None:
        function(tl.load(x + tl.arange(0, 4)))

    with pytest.raises(triton.KernelTypeError, match=f"{name} is for fp32 and fp64, not fp16"):
        triton.jit(kernel)[(1,)](torch.ones(4, dtype=torch.float16))


@triton.jit
def cast_kernel(x: Any, o: Any, B: tl.constexpr) -> None:
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))


def doubles_next_to_ties(narrow: Any, bits: int) -> Any:
    """Values between two of the narrow type, and so little beside that float32 is the tie."""
    base = torch.tensor([1.0, 1.5, 1024.0, 0.001, 3.0, 0.33], dtype=narrow).double()
    half = torch.exp2(torch.floor(torch.log2(base)) - bits - 1)
    return torch.cat([
        sign * (base + half * (1 + nudge))
        for sign in (1, -1)
        for nudge in (2.0**-29, -(2.0**-29), 0.0)
    ])  # fmt: skip


@pytest.mark.parametrize(("narrow", "bits"), [(torch.float16, 10), (torch.bfloat16, 7)])
def test_a_cast_of_float64_is_rounded_once(narrow: Any, bits: int) -> None:
    x = torch.nn.functional.pad(doubles_next_to_ties(narrow, bits), (0, 28))
    out = torch.empty(64, dtype=narrow)

    cast_kernel[(1,)](x, out, B=64)

    step = torch.exp2(torch.floor(torch.log2(x[:36].abs())) - bits)
    exact = (out[:36].double() - x[:36]).abs()
    assert bool((exact <= step / 2).all())  # nearest; a tie rounded twice is beyond the half


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_cast_of_integers_is_rounded_once(kind: Any) -> None:
    # 2^25 + 2^17 is between two bf16, and one more is lost in float32.
    x = torch.tensor([2**25 + 2**17 + 1, -(2**25) - 2**17 - 1, 2**25 + 2**17 - 1, 7], dtype=kind)
    out = torch.empty(4, dtype=torch.bfloat16)

    cast_kernel[(1,)](x, out, B=4)

    assert out.tolist() == [2.0**25 + 2**18, -(2.0**25) - 2**18, 2.0**25, 7.0]


def test_the_greatest_integers_are_rounded_once() -> None:
    x = np.array([2**63 + 2**55 + 1, 2**63 + 2**55, 2**64 - 1, 0], np.uint64)
    out = triton.typed(np.zeros(4, np.uint16), tl.bfloat16)

    cast_kernel[(1,)](x, out, B=4)

    values = formats.BRAIN.decode(out.array)
    assert values.tolist() == [2.0**63 + 2**56, 2.0**63, 2.0**64, 0]


def test_a_fused_product_of_halves_is_rounded_once() -> None:
    @triton.jit
    def kernel(a: Any, b: Any, c: Any, o: Any) -> None:
        i = tl.arange(0, 2)
        tl.store(o + i, tl.fma(tl.load(a + i), tl.load(b + i), tl.load(c + i)))

    # 32816 is the middle between 32800 and 32832; float32 takes 32816 - 2**-16 for it.
    a, b = torch.tensor([4 + 2.0**-8] * 2).half(), torch.tensor([4 - 2.0**-8, 2.0**-8 - 4]).half()
    out = torch.empty(2, dtype=torch.float16)

    kernel[(1,)](a, b, torch.tensor([32800.0, -32800.0]).half(), out)

    assert out.tolist() == [32800.0, -32800.0]


def test_rounding_towards_zero_of_doubles_truncates() -> None:
    @triton.jit
    def kernel(x: Any, o: Any) -> None:
        i = tl.arange(0, 4)
        tl.store(o + i, tl.load(x + i).to(tl.float16, fp_downcast_rounding="rtz"))

    x = torch.tensor([1.9999999, -1.9999999, 1e9, 2.0**-24 * 1.5], dtype=torch.float64)
    out = torch.empty(4, dtype=torch.float16)

    kernel[(1,)](x, out)

    assert out.tolist() == [2 - 2.0**-10, -2 + 2.0**-10, 65504.0, 2.0**-24]


def test_shifting_a_signed_number_by_an_unsigned_one_keeps_its_sign() -> None:
    @triton.jit
    def kernel(x: Any, y: Any, o: Any) -> None:
        i = tl.arange(0, 4)
        tl.store(o + i, tl.load(x + i) >> tl.load(y + i))

    x, out = np.array([-5, -128, 7, 127], np.int8), np.zeros(4, np.int8)

    kernel[(1,)](x, np.array([1, 7, 1, 3], np.uint8), out)

    assert out.tolist() == [-3, -1, 3, 15]


def test_a_sum_in_one_bit_wraps_around() -> None:
    @triton.jit
    def kernel(o: Any) -> None:
        ones = tl.full((32,), 1, tl.int1)
        tl.store(o, tl.sum(ones, dtype=tl.int1).to(tl.int32))
        tl.store(o + 1, tl.sum(ones))

    out = np.full(2, -1, np.int32)

    kernel[(1,)](out)

    assert out.tolist() == [0, 32]


def test_one_element_becomes_a_number() -> None:
    @triton.jit
    def kernel(o: Any) -> None:
        if (tl.load(o + tl.arange(0, 1)) > 2).item():
            tl.store(o, 1)

    out = np.full(1, 3, np.int32)

    kernel[(1,)](out)

    assert out[0] == 1


@triton.jit
def masked_load(x: Any, o: Any, other: tl.constexpr) -> None:
    i = tl.arange(0, 4)
    tl.store(o + i, tl.load(x + i, mask=i < 2, other=other))


@pytest.mark.parametrize(
    ("kind", "other", "expected"),
    [
        (np.bool_, 0.5, False),
        (np.bool_, 256, False),
        (np.bool_, 3, True),
        (np.int8, 300, 44),
        (np.uint8, -1, 255),
        (np.float64, 0.1, float(np.float32(0.1))),
    ],
)
def test_what_a_masked_load_gives_instead_is_cast_as_tritons(
    kind: Any, other: Any, expected: Any
) -> None:
    x, out = np.ones(4, kind), np.zeros(4, kind)

    masked_load[(1,)](x, out, other)

    assert out.tolist() == [1, 1, expected, expected]
