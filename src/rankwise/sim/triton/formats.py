"""Floating-point formats narrower than 32 bits, on float32 arrays.

Each format rounds float32 values to the nearest that it has, ties to even, and converts between
those and the bits in memory. Half precision is done on the bits of the float32 values, several
times faster than numpy's conversions, which handle one element at a time: scaled by 2^-112, every
finite half is a float32 whose upper bits are the half's. The cases that it cannot do (infinities,
NaN, overflow) are left to numpy.
"""

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


_SIGN = np.uint32(0x8000_0000)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_OVERFLOW = 0x477F_F000
"""65520 as float32: from here on, rounding to half precision gives infinity."""
_NORMAL = np.uint32(0x3880_0000)
"""2^-14: below are half precision's subnormal numbers."""


class _Half:
    """IEEE half precision."""

    def rounded(self, values: Array) -> Array:
        values = np.ascontiguousarray(values, dtype=np.float32)
        bits = values.view(np.uint32)
        magnitude = bits & _MAGNITUDE
        if magnitude.max(initial=0) >= _OVERFLOW:
            return values.astype(np.float16).astype(np.float32)
        result = bits >> np.uint32(13)
        result &= np.uint32(1)
        result += np.uint32(0x0FFF)
        result += bits
        result &= np.uint32(0xFFFF_E000)
        small = magnitude < _NORMAL
        small &= magnitude > 0
        nearest = result.view(np.float32)
        if small.any():
            # Between 0.5 and 1 float32 has the distances of half precision's subnormal numbers.
            few = values[small]
            shifted = (np.abs(few) + np.float32(0.5)) - np.float32(0.5)
            nearest[small] = np.copysign(shifted, few)
        return nearest

    def encode(self, values: Array) -> Array:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        if (bits & _MAGNITUDE).max(initial=0) >= _OVERFLOW:
            return values.astype(np.float16)
        scaled = (bits.view(np.float32) * np.float32(2.0**-112)).view(np.uint32)
        sign = scaled >> np.uint32(16)
        sign &= np.uint32(0x8000)
        scaled >>= np.uint32(13)
        scaled &= np.uint32(0x7FFF)
        scaled |= sign
        return scaled.astype(np.uint16).view(np.float16)

    def decode(self, stored: Array) -> Array:
        if not stored.flags.c_contiguous:
            stored = np.ascontiguousarray(stored)
        bits = stored.view(np.int16)
        if (bits & np.int16(0x7FFF)).max(initial=0) >= 0x7C00:
            return stored.astype(np.float32)
        wide = bits.astype(np.int32)
        wide <<= 13
        wide &= np.int32(-0x7000_2000)
        values = wide.view(np.float32)
        values *= np.float32(2.0**112)
        return values


class _Brain:
    """bfloat16: the upper half of a float32."""

    def rounded(self, values: Array) -> Array:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        result = bits >> np.uint32(16)
        result &= np.uint32(1)
        result += np.uint32(0x7FFF)
        result += bits
        result &= np.uint32(0xFFFF_0000)
        nearest = result.view(np.float32)
        missing = np.isnan(values)
        if missing.any():
            nearest[missing] = np.nan
        return nearest

    def encode(self, values: Array) -> Array:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return (bits >> np.uint32(16)).astype(np.uint16)

    def decode(self, stored: Array) -> Array:
        wide = stored.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)


def _byte_values(exponent_bits: int) -> Array:
    """What each of the 256 bytes means in the eight-bit float with that many exponent bits."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(256)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    normal = np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias)
    subnormal = np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias)
    values = np.where(exponent == 0, subnormal, normal)
    if exponent_bits == 5:
        values[exponent == 31] = np.nan
        values[(exponent == 31) & (mantissa == 0)] = np.inf
    else:
        values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


class _ByteFloat:
    """Rounding, reading and writing of an eight-bit float."""

    def __init__(self, exponent_bits: int) -> None:
        self.values = _byte_values(exponent_bits)
        finite = self.values[:128][np.isfinite(self.values[:128])]
        self.midpoints = (finite[:-1].astype(np.float64) + finite[1:]) / 2

    def encode(self, values: Array) -> Array:
        magnitude = np.abs(values).astype(np.float64)
        below = np.searchsorted(self.midpoints, magnitude, side="left")
        # A tie lies exactly on a midpoint, below the greater neighbour: the even code takes it.
        at_tie = np.take(self.midpoints, np.minimum(below, len(self.midpoints) - 1)) == magnitude
        codes = (below + (at_tie & (below % 2 == 1))).astype(np.uint8)
        codes[np.isnan(values)] = 0x7F
        signed: Array = codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))
        return signed

    def decode(self, stored: Array) -> Array:
        values: Array = self.values[stored]
        return values

    def rounded(self, values: Array) -> Array:
        return self.decode(self.encode(values))


HALF, BRAIN, E5M2, E4M3 = _Half(), _Brain(), _ByteFloat(5), _ByteFloat(4)
