"""Collective times against those that ASTRA-sim gave for the same systems."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from rankwise.sim.ccl.message_timing import (
    Algorithm,
    Dimension,
    MessageCosts,
    collective_time,
)
from rankwise.sim.hardware.specification import Graph

GRAPHS: dict[str, Graph] = {
    "Ring": "ring_1d",
    "FullyConnected": "fully_connected",
    "Switch": "switch",
}
ALGORITHMS: dict[str, Algorithm] = {
    "ring": "ring",
    "direct": "direct",
    "halvingDoubling": "halving_doubling",
    "doubleBinaryTree": "double_binary_tree",
}
ITS_GIGABYTE = 2**30 / 10**9
RUNS = json.loads(Path(__file__).with_name("astra_sim_times.json").read_text())["runs"]


def name_of(run: dict[str, Any]) -> str:
    shape = "x".join(
        f"{graph}{count}" for graph, count in zip(run["topology"], run["counts"], strict=True)
    )
    model = run["model"].split()[0].removeprefix("Congestion_")
    size = f"{run['megabytes']}MB"
    return f"{run['collective']}-{size}-{shape}-{run['algorithm'][0]}-{run['chunks']}-{model}"


def our_picoseconds(run: dict[str, Any], reductions: Literal["received", "astra_sim"]) -> int:
    fields = zip(
        run["counts"],
        run["topology"],
        run["algorithm"],
        run["bandwidth_GBps"],
        run["latency_ns"],
        strict=True,
    )
    dimensions = [
        Dimension(
            count=count,
            graph=GRAPHS[graph],
            algorithm=ALGORITHMS[algorithm],
            bandwidth_gbps=bandwidth * ITS_GIGABYTE,
            latency_ns=latency,
        )
        for count, graph, algorithm, bandwidth, latency in fields
    ]
    costs = MessageCosts(
        endpoint_ns=10,
        memory_gbps=1600,
        contention=run["model"].startswith("Congestion_Aware"),
        reductions=reductions,
        active_chunks=1,
    )
    size = run["megabytes"] << 20
    time = collective_time(run["collective"], size, dimensions, chunks=run["chunks"], costs=costs)
    return time.picoseconds


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_a_collective_takes_as_long_as_in_astra_sim(run: dict[str, Any]) -> None:
    picoseconds = our_picoseconds(run, "astra_sim")

    assert picoseconds / 1_000 == pytest.approx(run["time_ns"], rel=0.005)


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_the_two_ways_to_charge_reductions_differ_as_the_docs_say(run: dict[str, Any]) -> None:
    received, as_there = (our_picoseconds(run, way) for way in ("received", "astra_sim"))

    reduces = run["collective"] in {"all_reduce", "reduce_scatter"}
    if "doubleBinaryTree" in run["algorithm"]:
        assert 0.96 * as_there < received < as_there
    elif "halvingDoubling" not in run["algorithm"] or not reduces:
        assert received == as_there
    elif len(run["counts"]) == 1:
        half = 3 * (run["megabytes"] << 20) // 2  # two reads and a write per byte
        assert received - as_there == pytest.approx(half / 1.6, rel=1e-4)
    else:  # nothing, where another dimension is what takes long
        assert as_there <= received < 1.06 * as_there
