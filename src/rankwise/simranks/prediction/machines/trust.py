"""How far a prediction can be trusted: an interval, and what lies outside of what was checked.

The interval is that of the runs that a machine was checked against: measured time divided by
predicted time, from the 10th to the 90th percentile. Where there is none, or the run has what no
checked run had, the interval is at least what the uncertainties of the machine's figures give, and
the reasons are named.

The reserve of torch's allocator is modelled. One published run has it (Llama 3.1 8B on 8 devices),
and its prediction is 2.6 % low. NCCL and cuBLAS take memory of their own, which is not. So the
interval is from the active bytes to 10 % above those that are reserved.
"""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rankwise.sim.reporting.breakdown import MESSAGES
from rankwise.simranks.prediction.costs import INDUCTOR
from rankwise.simranks.prediction.machines.catalogue import MachineTopology
from rankwise.simranks.prediction.machines.device import is_attention, operation_of

if TYPE_CHECKING:
    from rankwise.simranks.prediction.clocks import Prediction, PricedWork
    from rankwise.simranks.prediction.machines.description import RealMachine

_SHARE_THAT_COUNTS = 0.05
"""Operations of a type that was not checked matter from this share of all computing on."""


_RESERVED_MOST = 0.1
_RESERVED_RUNS, _RESERVED_DEVICES = 1, 8
_PRODUCTS_CHECKED = ("mm", "addmm", "bmm", "baddbmm", "linear")


class Interval(NamedTuple):
    """What a figure may be: a step in picoseconds, memory in bytes.

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
        against = f"10th to 90th percentile of {real.validated.runs} runs"
    elif real.residuals:
        worst = max(real.residuals.values())
        low, high = 1 / (1 + worst), 1 + worst
        against = "the largest residual of the calibration"
    if reasons or (low, high) == (1.0, 1.0):
        spread = _spread(real)
        low, high = min(low, 1 / (1 + spread)), max(high, 1 + spread)
    return Interval(round(time * low), round(time * high), tuple(reasons), against)


def memory_interval(prediction: "Prediction", active: int, reserved: int) -> Interval:
    """The interval of the bytes that torch's allocator reserves."""
    reasons = []
    if prediction.size > _RESERVED_DEVICES:
        reasons.append(f"{prediction.size} devices, checked up to {_RESERVED_DEVICES}")
    reasons += _of_other_layouts(prediction)
    against = f"{_RESERVED_RUNS} run on {_RESERVED_DEVICES} devices"
    return Interval(active, round(reserved * (1 + _RESERVED_MOST)), tuple(reasons), against)


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
        spent: Counter[str] = Counter()
        for each in products:
            if each.work.dtype not in checked.dtypes:
                spent[f"matrix products in {each.work.dtype or 'another type'}"] += _spent(each)
            elif not _is_checked(each.work.name):
                spent[operation_of(each.work.name)] += _spent(each)
        reasons += sorted(name for name in spent if spent[name] > _SHARE_THAT_COUNTS * whole)
        reasons += _of_other_layouts(prediction)
    if prediction.unknown:
        reasons.append("operations without a formula")
    return reasons


def _spent(priced: "PricedWork") -> int:
    return priced.count * priced.duration


def _is_checked(name: str) -> bool:
    return is_attention(name) or operation_of(name) in _PRODUCTS_CHECKED


def _of_other_layouts(prediction: "Prediction") -> list[str]:
    """What the ranks do together that no checked run does: those are of FSDP and DDP, eager."""
    reasons = []
    kinds = {kind for kind, _ in prediction.carried_out}
    if MESSAGES in kinds:
        reasons.append("messages between ranks")
    if "all_to_all" in kinds:
        reasons.append("all_to_all")
    if any(
        1 < count < prediction.size for kind, count in prediction.carried_out if kind != MESSAGES
    ):
        reasons.append("groups of some ranks")
    if any(each.work.name.startswith(INDUCTOR) for each in prediction.works):
        reasons.append("compiled graphs")
    return reasons
