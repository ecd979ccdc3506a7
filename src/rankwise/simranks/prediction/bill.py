"""What one rank spent its time with, by what it did: the entries behind its account.

The account (`clocks.Account`) has five sums. This has the kind of each operation and collective as
well, and the phase of the training, so that two runs can be compared.
"""

from typing import TYPE_CHECKING

from rankwise.sim.reporting.breakdown import COMPUTE, HOST
from rankwise.simranks.prediction.machines.device import is_attention

if TYPE_CHECKING:
    from rankwise.simranks.prediction.clocks import PricedWork
    from rankwise.simranks.prediction.costs import DeviceCosts
    from rankwise.simranks.prediction.machines.device import DevicePrices

LAUNCHES = "launches of kernels"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
Key = tuple[str, str, str]
"""Cause, kind and phase."""

_CLASSES = (
    # The first that fits counts.
    ("kernels of Triton", ("triton.",)),
    ("updates of parameters", ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad")),
    ("convolutions", ("conv",)),
    ("normalization", ("_norm",)),
    ("softmax and losses", ("softmax", "nll_loss", "cross_entropy", "mse_loss")),
    ("lookups", ("embedding", "gather", "index", "scatter")),
    ("copies and fills", ("copy", "clone", "aten.cat", "fill", "zero")),
)


class Bill:
    """The entries of one rank until now.

    Attributes:
        works: by phase, how often each operation was carried out on the main stream.
        others: picoseconds of what is no operation.
    """

    __slots__ = ("others", "works")

    def __init__(self) -> None:
        self.works: dict[str, dict[PricedWork, int]] = {}
        self.others: dict[Key, int] = {}

    def add_work(self, priced: "PricedWork", phase: str) -> None:
        """Count an operation."""
        of_phase = self.works.get(phase)
        if of_phase is None:
            of_phase = self.works[phase] = {}
        of_phase[priced] = of_phase.get(priced, 0) + 1

    def add(self, cause: str, kind: str, phase: str, duration: int) -> None:
        """Add time."""
        if duration:
            key = (cause, kind, phase)
            self.others[key] = self.others.get(key, 0) + duration

    def copy(self) -> "Bill":
        """The same, which stays as it is."""
        copied = Bill()
        copied.works = {phase: dict(of_phase) for phase, of_phase in self.works.items()}
        copied.others = dict(self.others)
        return copied

    def spent(self, costs: "DeviceCosts | DevicePrices") -> dict[Key, int]:
        """Picoseconds by cause, kind and phase."""
        found = dict(self.others)
        for phase, of_phase in self.works.items():
            for priced, count in of_phase.items():
                launch = costs.launch(priced.work, priced.duration)
                for key, time in (
                    ((COMPUTE, class_of(priced.work.name, priced.work.engine), phase),
                     priced.duration - launch),
                    ((HOST, LAUNCHES, phase), launch),
                ):  # fmt: skip
                    if time:
                        found[key] = found.get(key, 0) + count * time
        return found


def class_of(name: str, engine: str) -> str:
    """The class of an operation, such as `matrix products`, by its name and engine."""
    if is_attention(name) and not name.startswith("triton."):
        return "attention"
    for known, words in _CLASSES:
        if any(word in name for word in words):
            return known
    return "matrix products" if engine == "gemm" else "elementwise and others"


def difference(now: dict[Key, int], then: dict[Key, int]) -> dict[Key, int]:
    """What has come between two moments."""
    return {key: more for key, time in now.items() if (more := time - then.get(key, 0))}
