"""How busy the kinds of a machine's parts were."""

import pytest

from rankwise.sim.benches.session import BenchSettings, simulate
from rankwise.sim.reporting.page import OTHERS, KindInUse, busiest_first, by_kind


def test_a_kind_has_the_mean_of_what_was_used_and_the_busiest() -> None:
    shares = {"sip0.cube0.pe0.gemm": 0.5, "sip0.cube0.pe1.gemm": 0.25, "sip0.cube0.pe2.gemm": 0.0}

    assert by_kind(shares) == [KindInUse("GEMM engines", 2, 0.375, "sip0.cube0.pe0.gemm", 0.5)]


def test_equals_are_in_the_order_of_their_numbers() -> None:
    shares = {"sip10.cube0.hbm0": 0.1, "sip2.cube0.hbm0": 0.1, "host->sip0": 0.2}

    names = [name for name, _ in busiest_first(shares)]

    assert names == ["host->sip0", "sip2.cube0.hbm0", "sip10.cube0.hbm0"]


@pytest.mark.parametrize("topology", ["default", "switch8"])
def test_every_part_of_a_machine_is_of_a_kind(topology: str) -> None:
    finished = simulate(BenchSettings(program="tp_mlp", topology=topology, fields={"tokens": "16"}))
    shares = finished.engine.machine.utilisation()

    kinds = by_kind(shares)

    assert sum(each.used for each in kinds) == len([each for each in shares.values() if each])
    assert OTHERS not in [each.kind for each in kinds]
    assert {"links between SIPs", "HBM channels", "GEMM engines"} <= {each.kind for each in kinds}
    assert all(0 < each.mean <= each.highest <= 1 for each in kinds)
