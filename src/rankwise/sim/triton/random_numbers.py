"""Counter-based random numbers: Philox, so that (seed, offset) decides a number.

The same numbers as the language's own, bit for bit: Philox 4x32-10 for 32-bit offsets, with the
seed as key and the offset as counter (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3").
"""

from typing import Any

import numpy as np

from rankwise.sim.triton import dtypes as t
from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.casting import cast
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array
from rankwise.sim.triton.execution import KernelTypeError, active, note_math, place
from rankwise.sim.triton.functions import cos, log, maximum, sin, sqrt, upper_of_64
from rankwise.sim.triton.tensor import broadcast_shape, padded, tensor, to_tensor

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BITS_OF_LOW = 32
_KEY_STEP = (0x9E3779B9, 0xBB67AE85)
_ROUND = (0xD2511F53, 0xCD9E8D57)
_WIDE_KEY_STEP = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_WIDE_ROUND = (0xD2E7470EE14C6C93, 0xCA5A826395121157)


def _rounds_of_32(counters: list[Array], keys: list[Array], rounds: int) -> list[Array]:
    c0, c1, c2, c3 = (each.astype(np.uint64) for each in counters)
    k0, k1 = (each.astype(np.uint64) for each in keys)
    first, second = np.uint64(_ROUND[0]), np.uint64(_ROUND[1])
    for _ in range(rounds):
        from_0, from_2 = c0 * first, c2 * second
        c0, c1 = (from_2 >> _HALF) ^ c1 ^ k0, from_2 & _LOW
        c2, c3 = (from_0 >> _HALF) ^ c3 ^ k1, from_0 & _LOW
        k0 = (k0 + np.uint64(_KEY_STEP[0])) & _LOW
        k1 = (k1 + np.uint64(_KEY_STEP[1])) & _LOW
    return [each.astype(np.uint32) for each in (c0, c1, c2, c3)]


def _rounds_of_64(counters: list[Array], keys: list[Array], rounds: int) -> list[Array]:
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    first, second = np.uint64(_WIDE_ROUND[0]), np.uint64(_WIDE_ROUND[1])
    for _ in range(rounds):
        high_0, high_2 = upper_of_64(c0, first), upper_of_64(c2, second)
        low_0, low_2 = c0 * first, c2 * second
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + np.uint64(_WIDE_KEY_STEP[0]), k1 + np.uint64(_WIDE_KEY_STEP[1])
    return [c0, c1, c2, c3]


def philox(
    seed: Any, c0: Any, c1: Any, c2: Any, c3: Any, n_rounds: Any = 10
) -> tuple[tensor, tensor, tensor, tensor]:
    """Four blocks of random bits for a seed and four counters."""
    key = in_type(to_tensor(seed), t.uint64)
    if to_tensor(c0).dtype.primitive_bitwidth == _BITS_OF_LOW:
        halves = (key.data & _LOW, key.data >> _HALF)
        low, high = (tensor(half, t.uint64, key.shape) for half in halves)
        return philox_impl(c0, c1, c2, c3, low, high, n_rounds)
    return philox_impl(c0, c1, c2, c3, key, 0, n_rounds)


def philox_impl(
    c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any = 10
) -> tuple[tensor, tensor, tensor, tensor]:
    """Four blocks of random bits for four counters and two halves of a key."""
    counters = [to_tensor(each) for each in (c0, c1, c2, c3)]
    bits = counters[0].dtype.primitive_bitwidth
    if not counters[0].dtype.is_int() or bits not in (_BITS_OF_LOW, 64):
        raise KernelTypeError(f"{place()}: philox counts in 32 or 64 bits, not {counters[0].dtype}")
    type_ = t.uint32 if bits == _BITS_OF_LOW else t.uint64
    counters = [
        cast(each, type_, bitcast=each.dtype.primitive_bitwidth == bits) for each in counters
    ]
    shape = counters[0].shape
    for each in counters[1:]:
        shape = broadcast_shape(shape, each.shape)
    rank = len(shape)
    keys = [padded(in_type(to_tensor(each), type_).data, rank) for each in (k0, k1)]
    data = [padded(each.data, rank) for each in counters]
    rounds = int(plain(n_rounds))
    rounds_of = _rounds_of_32 if bits == _BITS_OF_LOW else _rounds_of_64
    out = rounds_of(data, keys, rounds)
    results = [tensor(np.broadcast_to(each, (len(each), *shape)), type_, shape) for each in out]
    if active().observer is not None:
        for each in results:
            note_math("philox", each, counters)
    return results[0], results[1], results[2], results[3]


def randint4x(seed: Any, offset: Any, n_rounds: Any = 10) -> tuple[tensor, tensor, tensor, tensor]:
    """Four blocks of random 32-bit integers."""
    offset = to_tensor(offset)
    low = in_type(offset, t.uint32)
    nothing = tensor(np.zeros_like(low.data), t.uint32, low.shape)
    high = nothing
    if offset.dtype.primitive_bitwidth > 32:
        high = in_type(offset >> 32, t.uint32)
    return philox(seed, low, high, nothing, nothing, n_rounds)


def randint(seed: Any, offset: Any, n_rounds: Any = 10) -> tensor:
    """A block of random 32-bit integers."""
    return randint4x(seed, offset, n_rounds)[0]


def uint_to_uniform_float(x: tensor) -> tensor:
    """Random bits as numbers that are uniform in [0, 1)."""
    if x.dtype.primitive_bitwidth == 32:
        signed, scale = cast(x, t.int32, bitcast=True), 4.6566127342e-10
    else:
        signed, scale = cast(x, t.int64, bitcast=True), 1.0842020432385337e-19
    flipped = tensor(
        np.where(signed.data < 0, -signed.data - 1, signed.data), signed.dtype, signed.shape
    )
    flipped.token = x.token
    return in_type(flipped, t.float32) * scale


def rand(seed: Any, offset: Any, n_rounds: Any = 10) -> tensor:
    """A block of random fp32 numbers, uniform in [0, 1)."""
    return uint_to_uniform_float(randint(seed, offset, n_rounds))


def rand4x(seed: Any, offsets: Any, n_rounds: Any = 10) -> tuple[tensor, ...]:
    """Four blocks of random fp32 numbers, uniform in [0, 1)."""
    return tuple(map(uint_to_uniform_float, randint4x(seed, offsets, n_rounds)))


def pair_uniform_to_normal(u1: tensor, u2: tensor) -> tuple[tensor, tensor]:
    """Two normally distributed blocks from two uniform ones (Box and Muller)."""
    radius = sqrt(-2.0 * log(maximum(1.0e-7, u1)))
    angle = 6.283185307179586 * u2
    return radius * cos(angle), radius * sin(angle)


def randn(seed: Any, offset: Any, n_rounds: Any = 10) -> tensor:
    """A block of random fp32 numbers, normally distributed."""
    first, second, _third, _fourth = randint4x(seed, offset, n_rounds)
    return pair_uniform_to_normal(uint_to_uniform_float(first), uint_to_uniform_float(second))[0]


def randn4x(seed: Any, offset: Any, n_rounds: Any = 10) -> tuple[tensor, ...]:
    """Four blocks of random fp32 numbers, normally distributed."""
    uniform = rand4x(seed, offset, n_rounds)
    return (
        *pair_uniform_to_normal(uniform[0], uniform[1]),
        *pair_uniform_to_normal(uniform[2], uniform[3]),
    )


__all__ = [
    "pair_uniform_to_normal", "philox", "philox_impl", "rand", "rand4x", "randint", "randint4x",
    "randn", "randn4x", "uint_to_uniform_float",
]  # fmt: skip
