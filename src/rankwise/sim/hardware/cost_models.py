"""How long work takes on the engines of a PE: the model that ships, and those of plug-ins.

The model that ships, `table`, takes its figures from the topology. GEMM of m x n x k: startup + 2 *
ceil(m) * ceil(n) * ceil(k) / (flops per cycle * clock), where the sizes are rounded up to the
engine's tile. Math: startup + elements * cost / (elements per cycle * clock), where cost is 1
unless the topology gives the operation another.

A dtype that the topology does not name takes the rate of the nearest one: of the same kind (float
or integer) if there is any, scaled by the widths. So an engine with a rate for f32 does f64 at half
of it, and a model need not list what it does not care about.

`pe.cost_model` of a topology names another one: an entry point of the group `rankwise.cost_models`,
a function that takes the `MachineSpec` and gives a `CostModel`. Its answers are checked, since a
fraction of a picosecond or a negative time would end determinism somewhere else.
"""

from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Any, Protocol

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.sim.hardware.plugins import load_plugin, plugin_failed, plugin_names
from rankwise.sim.hardware.quantities import WIDTH_BYTES, Rate, exactly, picoseconds
from rankwise.sim.hardware.specification import Dtype, MachineSpec

GROUP = "rankwise.cost_models"
"""The entry points of plug-ins."""
SHIPPED = "table"
"""What a topology gets that names none."""


class CostModel(Protocol):
    """How many picoseconds work takes on an idle engine. The same question has one answer."""

    def gemm(self, m: int, n: int, k: int, dtype: str) -> int:
        """A product of m x k by k x n."""
        ...

    def math(self, elements: int, operation: str, dtype: str) -> int:
        """An elementwise operation (`add`, `exp`, ...) on so many elements."""
        ...


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


class TableCosts:
    """The model that ships: figures of the topology."""

    def __init__(self, spec: MachineSpec) -> None:
        clock, gemm, math = spec.system.clock, spec.pe.gemm, spec.pe.math
        self._tile = gemm.tile
        self._gemm_startup = picoseconds(gemm.startup_ns)
        self._gemm_rates = RateTable(gemm.flops_per_cycle, clock, "the GEMM engine")
        self._math_startup = picoseconds(math.startup_ns)
        self._math_rates = RateTable(math.elements_per_cycle, clock, "the math engine")
        self._costs = {name: exactly(cost) for name, cost in math.cost.items()}

    def gemm(self, m: int, n: int, k: int, dtype: str) -> int:
        """A product of m x k by k x n."""
        sizes = (-(-size // tile) * tile for size, tile in zip((m, n, k), self._tile, strict=True))
        return self._gemm_startup + self._gemm_rates[dtype].time_for(2 * prod(sizes))

    def math(self, elements: int, operation: str, dtype: str) -> int:
        """An elementwise operation on so many elements."""
        cost = self._costs.get(operation)
        if cost is not None:
            elements = -(-elements * cost.numerator // cost.denominator)
        return self._math_startup + self._math_rates[dtype].time_for(elements)


class PluggedCosts:
    """A model of a plug-in, whose answers are checked."""

    def __init__(self, name: str, model: CostModel) -> None:
        self._name = name
        self._model = model

    def gemm(self, m: int, n: int, k: int, dtype: str) -> int:
        """A product of m x k by k x n."""
        time: int = self._asked("gemm", m, n, k, dtype)
        return time

    def math(self, elements: int, operation: str, dtype: str) -> int:
        """An elementwise operation on so many elements."""
        time: int = self._asked("math", elements, operation, dtype)
        return time

    def operation(self, name: str, flops: int, size: int, dtype: str) -> int | None:
        """An operation of a library on a whole device, if the model has an opinion."""
        if getattr(self._model, "operation", None) is None:
            return None
        time: int | None = self._asked("operation", name, flops, size, dtype, may_be_none=True)
        return time

    def _asked(self, method: str, *question: Any, may_be_none: bool = False) -> Any:
        try:
            answer = getattr(self._model, method)(*question)
        except Exception as error:
            raise plugin_failed(
                GROUP, self._name, f"failed in {method}{question}", error
            ) from error
        if answer is None and may_be_none:
            return None
        if type(answer) is not int or answer < 0:
            raise ConfigError(
                f"{self._name!r} of {GROUP}: {method}{question} is {answer!r},"
                " expected picoseconds: an int, 0 or more"
            )
        return answer


def plugged_costs(spec: MachineSpec) -> PluggedCosts | None:
    """The model of a plug-in that a topology names; None for the one that ships.

    Raises:
        ConfigError: there is none of that name, or its package fails.
    """
    model = cost_model(spec)
    return model if isinstance(model, PluggedCosts) else None


def cost_model(spec: MachineSpec) -> CostModel:
    """The model that a topology names.

    Raises:
        ConfigError: there is none of that name, or its package fails.
    """
    name = spec.pe.cost_model
    if name == SHIPPED:
        return TableCosts(spec)
    factory = load_plugin(GROUP, name)
    if factory is None:
        raise ConfigError(
            f"cost_model is {name!r}, and no installed package offers it in {GROUP}",
            hint=hint_on_name(name, (SHIPPED, *plugin_names(GROUP)), "there are"),
        )
    try:
        model = factory(spec)
    except Exception as error:
        raise plugin_failed(GROUP, name, "failed", error) from error
    if not all(callable(getattr(model, method, None)) for method in ("gemm", "math")):
        raise ConfigError(
            f"{name!r} of {GROUP} gives {model!r}, expected an object with gemm(m, n, k, dtype) and"
            " math(elements, operation, dtype)"
        )
    return PluggedCosts(name, model)
