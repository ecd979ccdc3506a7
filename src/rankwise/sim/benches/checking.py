"""Is what the simulated machine has computed right? Compared with numpy, element by element."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.base.errors import SimulationError


class CheckFailed(SimulationError):
    """A program's numbers differ from numpy's."""


def check_close(
    what: str, actual: npt.NDArray[Any], expected: npt.NDArray[Any], *, tolerance: float
) -> None:
    """Refuse an element that is off by more than `tolerance`, relative to 1 or to its size.

    Raises:
        CheckFailed: names the worst element, its place, and what was expected there.
    """
    if actual.shape != expected.shape:
        raise CheckFailed(f"{what}: the shape is {actual.shape}, expected {expected.shape}")
    wide, right = actual.astype(np.float64), expected.astype(np.float64)
    off = np.abs(wide - right) / np.maximum(1.0, np.abs(right))
    # A NaN is never smaller than the tolerance, so it counts as wrong.
    wrong = ~(off <= tolerance)
    if not wrong.any():
        return
    worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
    place = tuple(int(index) for index in np.unravel_index(worst, off.shape))
    raise CheckFailed(
        f"{what}: {int(wrong.sum())} of {off.size} elements differ from numpy's by more than "
        f"{tolerance:g}; the worst, at {place}, is {wide[place]:g}, expected {right[place]:g}"
    )


TOLERANCES = {"f16": 2e-2, "bf16": 1e-1, "f32": 1e-4, "i32": 0.0, "i8": 0.0}
"""How far sums in another order may be off."""
