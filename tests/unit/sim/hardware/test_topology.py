# ruff: noqa: E501 (a table of whole messages is read best with one case per line)
from itertools import pairwise
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.launch.options import PRESETS as shown_presets  # noqa: N811  # one of two
from rankwise.sim.hardware import PRESETS, load_topology, parse_topology
from rankwise.sim.hardware.routing import mesh_route, sip_edges, sip_route
from rankwise.sim.hardware.specification import Graph, LinkSpec, SipsSpec

SMALL = """\
system:
  sips:
    count: 4
    graph: ring_1d
    link: {bandwidth_GBps: 50, latency_ns: 500}
  host:
    link: {bandwidth_GBps: 50, latency_ns: 700}
sip:
  cubes:
    shape: [2, 2]
    link: {bandwidth_GBps: 400, latency_ns: 15}
cube:
  pes:
    count: 8
    link: {bandwidth_GBps: 128, latency_ns: 5}
  hbm: {channels: 8, capacity_MiB: 64, bandwidth_GBps: 50, latency_ns: 100}
pe:
  tcm: {capacity_KiB: 64, bandwidth_GBps: 512, latency_ns: 2}
  dma: {bandwidth_GBps: 128, setup_ns: 20}
  gemm:
    flops_per_cycle: {f16: 2048}
  math:
    elements_per_cycle: {f16: 128}
"""


@pytest.mark.parametrize(
    ("preset", "sips", "graph"),
    [
        ("default", 4, "ring_1d"),
        ("torus16", 16, "torus_2d"),
        ("pod64", 64, "torus_2d"),
        ("switch8", 8, "switch"),
    ],
)
def test_a_preset_is_a_mapping_with_the_count_of_sips(preset: str, sips: int, graph: str) -> None:
    topology = load_topology(preset)

    assert topology.spec["system"]["sips"]["count"] == topology.sip_count == sips
    assert topology.spec["system"]["sips"]["graph"] == graph
    assert topology.spec["pe"]["ipcq"]["slots"] == 4
    assert topology.name == preset
    assert preset in PRESETS


def test_help_names_the_presets_that_there_are() -> None:
    assert sorted(shown_presets) == sorted(PRESETS)


def test_a_file_is_read_with_its_defaults_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL)

    topology = load_topology(path)

    assert topology.spec["system"]["clock_GHz"] == 1.0
    assert topology.spec["cube"]["hbm"]["capacity_MiB"] == 64
    assert topology.name == "mine"
    assert topology.pe_count == 32


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 4", "conut: 4", "x.yaml:3: system.sips.conut: there is no such field; did you mean count?"),
        ("pes:", "cores:", "x.yaml:13: cube.cores: there is no such field; expected one of pes, hbm"),
        ("GBps: 50,", "GBps: -50,", "x.yaml:5: system.sips.link.bandwidth_GBps: expected a number >= 1e-06, found -50"),
        ("GBps: 50,", "GBps: .nan,", "x.yaml:5: system.sips.link.bandwidth_GBps: expected a number >= 1e-06, found nan"),
        ("latency_ns: 500", "latency_ns: -1", "x.yaml:5: system.sips.link.latency_ns: expected a number >= 0.0, found -1"),
        ("latency_ns: 500", "latency_ns: soon", "x.yaml:5: system.sips.link.latency_ns: expected a number, found 'soon'"),
        ("ring_1d", "ring", "x.yaml:4: system.sips.graph: there is no 'ring'; did you mean ring_1d?"),
        ("ring_1d", "mesh_2d", "x.yaml:2: system.sips: graph mesh_2d needs a shape: [rows, columns]"),
        ("ring_1d", "mesh_2d\n    shape: [2, 3]", "x.yaml:2: system.sips: shape [2, 3] does not hold 4 SIPs"),
        ("ring_1d", "custom\n    edges: [[0, 1], [2, 3]]", "x.yaml:2: system.sips: edges leave no route from SIP 0 to SIP 2"),
        ("ring_1d", "custom\n    edges: [[0, 4]]", "x.yaml:2: system.sips: edge [0, 4] does not connect two of SIPs 0 to 3"),
        ("count: 4", "count: 0", "x.yaml:3: system.sips.count: expected a whole number >= 1, found 0"),
        ("count: 4", "count: 4\n    count: 5", "x.yaml:4: count is given twice, first in line 3"),
        ("{f16: 2048}", "{f17: 2048}", "x.yaml:21: pe.gemm.flops_per_cycle: there is no 'f17'; did you mean f16?"),
        ("{f16: 2048}", "{}", "x.yaml:20: pe.gemm: flops_per_cycle names no dtype"),
        ("count: 4", "count: [4", "x.yaml:4: not YAML"),
        (SMALL, "", "x.yaml:1: the file: expected fields with values, got nothing"),
        ("  host:\n    link: {bandwidth_GBps: 50, latency_ns: 700}\n", "", "x.yaml:1: system: object missing required field `host`"),
    ],
)  # fmt: skip
def test_an_error_names_the_file_the_line_and_the_field(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(SMALL.replace(old, new, 1), "x.yaml")

    assert str(caught.value).startswith(message)


def test_a_missing_file_is_told_with_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"no topology file 'defualt'.*did you mean default\?"):
        load_topology("defualt")


def graph_of(graph: Graph, count: int) -> SipsSpec:
    shapes = {"mesh_2d": (3, count // 3), "torus_2d": (3, count // 3)}
    edges = (
        (0, 1),
        (1, 2),
        (2, 3),
        (0, 4),
        (4, 5),
        (5, 6),
        (6, 7),
        (7, 8),
        (8, 9),
        (9, 10),
        (10, 11),
    )
    return SipsSpec(
        count=count,
        graph=graph,
        shape=shapes.get(graph),
        edges=edges if graph == "custom" else (),
        link=LinkSpec(bandwidth=1, latency_ns=1),
    )


@pytest.mark.parametrize(
    "graph", ["ring_1d", "mesh_2d", "torus_2d", "fully_connected", "switch", "custom"]
)
def test_routes_follow_the_links_and_are_shortest(graph: Graph) -> None:
    sips = graph_of(graph, 12)
    edges = sip_edges(sips)
    neighbours: dict[int, list[int]] = {}
    for one, other in edges:
        neighbours.setdefault(one, []).append(other)
        neighbours.setdefault(other, []).append(one)

    for source in range(12):
        distance = {source: 0}
        frontier = [source]
        for node in frontier:
            for other in neighbours[node]:
                if other not in distance:
                    distance[other] = distance[node] + 1
                    frontier.append(other)
        for destination in range(12):
            route = sip_route(sips, source, destination)
            hops = list(pairwise([source, *route]))
            assert all((min(hop), max(hop)) in edges for hop in hops)
            assert len(route) == distance[destination]
            assert [source, *route][-1] == destination


def test_a_mesh_is_crossed_along_the_row_first() -> None:
    assert mesh_route(0, 11, columns=4) == [1, 2, 3, 7, 11]
    assert mesh_route(11, 0, columns=4) == [10, 9, 8, 4, 0]


def test_of_two_equal_ways_round_a_ring_the_increasing_one_is_taken() -> None:
    assert sip_route(graph_of("ring_1d", 4), 0, 2) == [1, 2]
    assert sip_route(graph_of("ring_1d", 4), 3, 1) == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5_000, "x.yaml: not YAML: it is nested too deeply"),
        ("system: &again {system: *again}", "x.yaml: it is nested without end"),
    ],
)
def test_a_file_without_a_bottom_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_topology(text, "x.yaml")
