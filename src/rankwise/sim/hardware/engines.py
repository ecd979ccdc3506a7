"""The GEMM and the math engine of a PE: work of known duration, one piece after the other.

GEMM of m x n x k: startup + 2 * ceil(m) * ceil(n) * ceil(k) / (flops per cycle * clock), where the
sizes are rounded up to the engine's tile. Math: startup + elements * cost / (elements per cycle *
clock), where cost is 1 unless the topology gives the operation another.

A dtype that the topology does not name takes the rate of the nearest one: of the same kind (float
or integer) if there is any, scaled by the widths. So an engine with a rate for f32 does f64 at half
of it, and a model need not list what it does not care about.
"""

from collections.abc import Mapping
from fractions import Fraction

from rankwise.base.errors import ConfigError
from rankwise.sim.hardware.quantities import WIDTH_BYTES, Rate, exactly, picoseconds
from rankwise.sim.hardware.specification import Dtype, GemmSpec, MathSpec
from rankwise.sim.kernel import Server, Simulator, Steps


class RateTable:
    """The rates of an engine for every dtype."""

    def __init__(self, per_cycle: Mapping[Dtype, float], clock_ghz: float, what: str) -> None:
        self._per_cycle: dict[str, float] = {str(name): rate for name, rate in per_cycle.items()}
        self._clock_ghz = clock_ghz
        self._what = what
        self._rates: dict[str, Rate] = {}

    def __getitem__(self, dtype: str) -> Rate:
        rate = self._rates.get(dtype)
        if rate is None:
            rate = self._rates[dtype] = self._derive(dtype)
        return rate

    def _derive(self, dtype: str) -> Rate:
        clock = exactly(self._clock_ghz) / 1_000
        if dtype in self._per_cycle:
            return Rate(exactly(self._per_cycle[dtype]) * clock)
        if dtype not in WIDTH_BYTES:
            raise ConfigError(
                f"{self._what} knows no dtype {dtype!r}",
                hint=f"dtypes are {', '.join(WIDTH_BYTES)}",
            )
        nearest = min(
            sorted(self._per_cycle),
            key=lambda other: (
                (other[0] in "bf") != (dtype[0] in "bf"),
                abs(WIDTH_BYTES[other] - WIDTH_BYTES[dtype]),
            ),
        )
        scale = Fraction(WIDTH_BYTES[nearest], WIDTH_BYTES[dtype])
        return Rate(exactly(self._per_cycle[nearest]) * clock * scale)


class GemmEngine(Server):
    """The matrix engine of one PE."""

    __slots__ = ("_rates", "_startup", "_tile", "flops")

    def __init__(self, simulator: Simulator, name: str, spec: GemmSpec, rates: RateTable) -> None:
        super().__init__(simulator, name)
        self._tile = spec.tile
        self._startup = picoseconds(spec.startup_ns)
        self._rates = rates
        self.flops = 0
        """Floating-point operations that were asked for, without the rounding up to tiles."""

    def duration(self, m: int, n: int, k: int, dtype: str) -> int:
        """Picoseconds that a product takes on the idle engine."""
        sizes = (-(-size // tile) * tile for size, tile in zip((m, n, k), self._tile, strict=True))
        flops = 2
        for size in sizes:
            flops *= size
        return self._startup + self._rates[dtype].time_for(flops)

    def multiply(self, m: int, n: int, k: int, dtype: str) -> Steps:
        """Occupy the engine with a product of m x k by k x n."""
        self.flops += 2 * m * n * k
        yield self.occupy(self.duration(m, n, k, dtype))


class MathEngine(Server):
    """The vector engine of one PE."""

    __slots__ = ("_costs", "_rates", "_startup", "flops")

    def __init__(
        self,
        simulator: Simulator,
        name: str,
        spec: MathSpec,
        rates: RateTable,
        costs: Mapping[str, Fraction],
    ) -> None:
        super().__init__(simulator, name)
        self._startup = picoseconds(spec.startup_ns)
        self._rates = rates
        self._costs = costs
        self.flops = 0
        """Elements that were worked on."""

    def duration(self, elements: int, operation: str, dtype: str) -> int:
        """Picoseconds that an elementwise operation takes on the idle engine."""
        cost = self._costs.get(operation)
        if cost is not None:
            elements = -(-elements * cost.numerator // cost.denominator)
        return self._startup + self._rates[dtype].time_for(elements)

    def apply(self, elements: int, operation: str, dtype: str) -> Steps:
        """Occupy the engine with an operation on so many elements."""
        self.flops += elements
        yield self.occupy(self.duration(elements, operation, dtype))
