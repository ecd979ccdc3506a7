"""Intervals of predictions, and what is outside of what was validated."""

from rankwise.sim import load_topology
from rankwise.simranks.prediction.clocks import Prediction, PricedWork
from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.prediction.machines import open_machine
from rankwise.simranks.prediction.machines.catalogue import named_machine
from rankwise.simranks.prediction.machines.trust import interval_of


def predicted(name: str, nodes: int = 1, dtype: str = "bf16") -> Prediction:
    prediction = Prediction(open_machine(name, nodes, 8), nodes * 8)
    priced = PricedWork(DeviceOperation("aten.mm", "gemm", 1, 1, dtype), 1_000)
    priced.count = 1
    prediction.note(priced)
    return prediction


def test_a_validated_machine_has_the_interval_of_its_runs() -> None:
    checked = named_machine("h100-sxm").validated
    assert checked is not None

    interval = interval_of(predicted("h100-sxm"), 1_000_000)

    assert interval is not None
    assert interval[:3] == (round(1e6 * checked.low), round(1e6 * checked.high), ())
    assert interval.low < 1_000_000 < interval.high


def test_more_devices_than_any_run_had_are_extrapolated() -> None:
    interval = interval_of(predicted("h100-sxm", nodes=128), 1_000_000)
    inside = interval_of(predicted("h100-sxm"), 1_000_000)

    assert interval is not None
    assert inside is not None
    assert "1024 devices" in interval.extrapolated[0]
    assert interval.low <= inside.low < inside.high <= interval.high


def test_a_type_that_no_run_had_is_extrapolated() -> None:
    interval = interval_of(predicted("h100-sxm", dtype="f8e4"), 1_000_000)

    assert interval is not None
    assert interval.extrapolated == ("matrix products in f8e4",)


def test_a_machine_that_has_only_a_sheet_says_so() -> None:
    interval = interval_of(predicted("b200"), 1_000_000)

    assert interval is not None
    assert interval.extrapolated == ("b200 is not validated",)
    assert interval.low < 900_000
    assert interval.high > 1_100_000


def test_a_topology_has_no_interval() -> None:
    assert interval_of(Prediction(load_topology("switch8"), 1), 1_000_000) is None


def test_a_machine_without_a_run_of_its_own_says_so() -> None:
    interval = interval_of(predicted("h200"), 1_000_000)

    assert interval is not None
    assert interval.extrapolated == ("no published run on h200 itself was checked",)
