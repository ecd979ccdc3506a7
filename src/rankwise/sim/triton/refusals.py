"""Names of Triton that are not emulated: refused by name, with the reason."""

from collections.abc import Callable, Mapping
from typing import Any

from rankwise.sim.triton.execution import ACTIVE, Unsupported, place


class NameNotEmulated(Unsupported, AttributeError):
    """So that `hasattr(module, name)`, by which code adapts to versions of Triton, says no."""


COMPILER = "there is no compiler here"
GLUON = "gluon divides blocks among the threads of a GPU, and there are none here"
BINARIES = "there are no binaries to keep"
"""Reasons that several names share."""


def refusing(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`, which says of some names why they are missing."""

    def missing(name: str) -> Any:
        if name in reasons:
            where = f"{place()}: " if ACTIVE.execution is not None else ""
            raise NameNotEmulated(
                f"{where}{module}.{name} is not emulated: {reasons[name]}",
                hint="docs/development/kernels.md lists refused names",
            )
        raise AttributeError(f"the emulated {module} has no name {name!r}")

    return missing
