"""The GEMM and the math engine of a PE: work of known duration, one piece after the other.

How long a piece takes is the cost model's business (`cost_models`).
"""

from rankwise.sim.hardware.cost_models import CostModel
from rankwise.sim.kernel.resources import Server
from rankwise.sim.kernel.simulator import Simulator


class _Engine(Server):
    """What both have in common.

    Attributes:
        flops: what was asked for: of the matrix engine, floating-point operations, without the
            rounding up to tiles; of the vector engine, elements.
    """

    __slots__ = ("_costs", "flops")

    def __init__(self, simulator: Simulator, name: str, costs: CostModel) -> None:
        super().__init__(simulator, name)
        self._costs = costs
        self.flops = 0

    @property
    def amount(self) -> int:
        """What it has done, as `account` takes it."""
        return self.flops

    def is_idle(self, at: int) -> bool:
        """Whether work that was asked for at that instant would begin at once."""
        return self.free_at <= at

    def account(self, size: int, work: int) -> None:
        """Add what a replica has worked on, and how long."""
        self.flops += size
        self._work += work


class GemmEngine(_Engine):
    """The matrix engine of one PE."""

    __slots__ = ()

    def duration(self, m: int, n: int, k: int, dtype: str) -> int:
        """Picoseconds that a product takes on the idle engine."""
        return self._costs.gemm(m, n, k, dtype)

    def request(self, m: int, n: int, k: int, dtype: str) -> int:
        """Ask for a product of m x k by k x n; the delay from now until it is done."""
        self.flops += 2 * m * n * k
        return self.occupy(self._costs.gemm(m, n, k, dtype))


class MathEngine(_Engine):
    """The vector engine of one PE."""

    __slots__ = ()

    def duration(self, elements: int, operation: str, dtype: str) -> int:
        """Picoseconds that an elementwise operation takes on the idle engine."""
        return self._costs.math(elements, operation, dtype)

    def request(self, elements: int, operation: str, dtype: str) -> int:
        """Ask for an operation on so many elements; the delay from now until it is done."""
        self.flops += elements
        return self.occupy(self._costs.math(elements, operation, dtype))
