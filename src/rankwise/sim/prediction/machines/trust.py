"""How far a prediction can be trusted: an interval, and what lies outside of what was checked.

The interval is that of the runs that a machine was checked against: measured time divided by
predicted time, from the 10th to the 90th percentile. Where there is none, or the run has what no
checked run had, the interval is at least what the uncertainties of the machine's figures give, and
the reasons are named.
"""

from typing import TYPE_CHECKING, NamedTuple

from rankwise.sim.prediction.machines.catalogue import MachineTopology

if TYPE_CHECKING:
    from rankwise.sim.prediction.clocks import Prediction
    from rankwise.sim.prediction.machines.description import RealMachine

_SHARE_THAT_COUNTS = 0.05
"""Operations of a type that was not checked matter from this share of all computing on."""


class Interval(NamedTuple):
    """What a step may take, in picoseconds.

    Attributes:
        low, high: its ends.
        extrapolated: why it is outside of what was validated; empty if it is inside.
        against: what was checked, in a few words.
    """

    low: int
    high: int
    extrapolated: tuple[str, ...]
    against: str


def interval_of(prediction: "Prediction", time: int) -> Interval | None:
    """The interval of a time; None on a topology, which is checked against nothing."""
    topology = prediction.topology
    if not isinstance(topology, MachineTopology):
        return None
    real = topology.real
    reasons = _reasons(prediction, real)
    low, high = 1.0, 1.0
    against = "the uncertainties of the machine's figures"
    if real.validated is not None:
        low, high = real.validated.low, real.validated.high
        against = f"10th to 90th percentile of {real.validated.runs} published runs"
    elif real.residuals:
        worst = max(real.residuals.values())
        low, high = 1 / (1 + worst), 1 + worst
        against = "the largest residual of the calibration"
    if reasons or (low, high) == (1.0, 1.0):
        spread = _spread(real)
        low, high = min(low, 1 / (1 + spread)), max(high, 1 + spread)
    return Interval(round(time * low), round(time * high), tuple(reasons), against)


def interval_in_words(interval: Interval) -> str:
    """What to add to an interval."""
    if interval.extrapolated:
        return f"extrapolated: {'; '.join(interval.extrapolated)}"
    return interval.against


def _spread(real: "RealMachine") -> float:
    """What the figures that decide most are uncertain by, together."""
    device = real.device
    peak = device.peak_tflops.get("bf16", device.peak_tflops["f32"])
    fitted, rails = device.fitted, real.levels[-1]
    parts = (peak, fitted.matrix, fitted.memory, device.bandwidth, rails.bandwidth, rails.reached)
    return sum(each.within for each in parts)


def _reasons(prediction: "Prediction", real: "RealMachine") -> list[str]:
    checked = real.validated
    reasons = []
    if real.status == "sheet only":
        reasons.append(f"{real.name} is not validated")
    if checked is not None and not checked.own:
        reasons.append(f"no published run on {real.name} itself was checked")
    if checked is not None and prediction.size > checked.devices:
        reasons.append(f"{prediction.size} devices, checked up to {checked.devices}")
    if checked is not None:
        whole = sum(each.count * each.duration for each in prediction.works) or 1
        products = [each for each in prediction.works if each.work.engine == "gemm"]
        for dtype in sorted({each.work.dtype for each in products} - set(checked.dtypes)):
            spent = sum(each.count * each.duration for each in products if each.work.dtype == dtype)
            if spent > _SHARE_THAT_COUNTS * whole:
                reasons.append(f"matrix products in {dtype or 'another type'}")
    if prediction.unknown:
        reasons.append("operations without a formula")
    return reasons
