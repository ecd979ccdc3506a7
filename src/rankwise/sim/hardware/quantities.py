"""Physical quantities, exactly: time in integer picoseconds, rates as fractions.

A rate is a fraction of two integers, so how long something takes is one integer division, rounded
up, and no float ever decides what happens first. Figures in topology files are decimal; `exactly`
takes them at their decimal value.
"""

from fractions import Fraction
from functools import lru_cache

PICOSECONDS_PER_NANOSECOND = 1_000
PICOSECONDS_PER_SECOND = 1_000_000_000_000
KIB = 1_024
MIB = 1_024 * KIB

WIDTH_BYTES: dict[str, int] = {
    "f64": 8, "i64": 8, "u64": 8,
    "f32": 4, "i32": 4, "u32": 4,
    "f16": 2, "bf16": 2, "i16": 2, "u16": 2,
    "i8": 1, "u8": 1, "f8e4": 1, "f8e5": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of every dtype that the machine knows."""


# A machine has 50,000 links, of a few rates and latencies.
@lru_cache(maxsize=1024)
def exactly(figure: float) -> Fraction:
    """The decimal value of a figure as a person wrote it: 0.1 is a tenth."""
    return Fraction(repr(figure))


@lru_cache(maxsize=1024)
def picoseconds(nanoseconds: float) -> int:
    """Convert a figure in nanoseconds, rounded to the picosecond."""
    return round(exactly(nanoseconds) * PICOSECONDS_PER_NANOSECOND)


def format_picoseconds(time: int, digits: int = 4) -> str:
    """Write simulated time for people: `12.3 us`."""
    for factor, unit in ((10**12, "s"), (10**9, "ms"), (10**6, "us"), (10**3, "ns")):
        if time >= factor:
            told = f"{time / factor:.{digits}g}"
            # No powers of ten: of an hour, all seconds.
            return f"{time / factor:,.0f} {unit}" if "e" in told else f"{told} {unit}"
    return f"{time} ps"


def exact_picoseconds(time: int) -> str:
    """Write simulated time in a unit for people, to the picosecond: `12.345678 us`."""
    return format_picoseconds(time, digits=15)


class Rate:
    """How much of something happens per picosecond, as an exact fraction."""

    __slots__ = ("denominator", "numerator")

    def __init__(self, per_picosecond: Fraction) -> None:
        assert per_picosecond > 0, "a rate of nothing would take for ever"
        self.numerator = per_picosecond.numerator
        self.denominator = per_picosecond.denominator

    @staticmethod
    def of_gigabytes_per_second(figure: float) -> "Rate":
        """A bandwidth; a gigabyte is 10**9 bytes."""
        return _rate_of(figure)

    def time_for(self, amount: int) -> int:
        """Picoseconds until `amount` is done, rounded up."""
        return -(-amount * self.denominator // self.numerator)

    def __float__(self) -> float:
        return self.numerator / self.denominator

    def __lt__(self, other: "Rate") -> bool:
        return self.numerator * other.denominator < other.numerator * self.denominator

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rate):
            return NotImplemented
        return (self.numerator, self.denominator) == (other.numerator, other.denominator)

    def __hash__(self) -> int:
        return self.numerator ^ self.denominator

    def __repr__(self) -> str:
        return f"Rate({self.numerator}/{self.denominator} per ps)"


@lru_cache(maxsize=1024)
def _rate_of(figure: float) -> Rate:
    """Thousands of devices have the same few rates."""
    return Rate(exactly(figure) / 1_000)
