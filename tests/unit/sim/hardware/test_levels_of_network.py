# ruff: noqa: E501 (a table of whole messages is read best with one case per line)
from itertools import pairwise

import pytest
import yaml

from rankwise.base.errors import ConfigError
from rankwise.sim.faults.vocabulary import KillLink
from rankwise.sim.hardware import parse_topology
from rankwise.sim.hardware.faults import live_route
from rankwise.sim.hardware.routing import (
    axes_of,
    link_of_hop,
    node_name,
    sip_edges,
    sip_route,
    switch_named,
)
from rankwise.sim.hardware.specification import SipsSpec
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.reporting.machine_drawing import as_svg, as_text

HEAD = """\
like: default
system:
  name: cluster
  sips:
    levels:
"""
NODES = """\
      - {name: nvlink, count: 8, graph: switch, link: {bandwidth_GBps: 450, latency_ns: 500}}
      - {name: rails, count: 4, graph: rails, link: {bandwidth_GBps: 50, latency_ns: 2000}}
"""
PODS = """\
      - {name: node, count: 4, graph: fully_connected, link: {bandwidth_GBps: 100, latency_ns: 50}}
      - {name: pod, count: 4, graph: torus_2d, shape: [2, 2], link: {bandwidth_GBps: 50, latency_ns: 300}}
      - {name: spine, count: 2, graph: fat_tree, spines: 2, oversubscription: 4, link: {bandwidth_GBps: 25, latency_ns: 1000}}
"""


def cluster(levels: str) -> Topology:
    return parse_topology(HEAD + levels, "cluster.yaml")


def names(sips: SipsSpec, source: int, target: int) -> list[str]:
    return [node_name(sips, node) for node in sip_route(sips, source, target)]


def test_a_machine_of_levels_has_as_many_devices_as_they_make() -> None:
    topology = cluster(NODES)

    assert topology.sip_count == topology.spec["system"]["sips"]["count"] == 32
    assert axes_of(topology.machine.system.sips) == (8, 32)
    assert topology.spec["pe"]["dma"]["bandwidth_GBps"] > 0  # of the preset that it is like
    assert topology.name == "cluster"


def test_what_is_told_of_a_machine_of_levels_can_be_read_again() -> None:
    spec = cluster(PODS).spec

    assert parse_topology(yaml.safe_dump(spec), "again").spec == spec


def test_a_message_goes_to_the_rail_of_its_target_and_over_it() -> None:
    sips = cluster(NODES).machine.system.sips

    assert names(sips, 0, 1) == ["nvlink0", "sip1"]
    assert names(sips, 3, 27) == ["rails3", "sip27"]
    assert names(sips, 3, 29) == ["nvlink0", "sip5", "rails5", "sip29"]


def test_a_message_between_pods_goes_over_leaves_and_a_spine() -> None:
    sips = cluster(PODS).machine.system.sips

    assert axes_of(sips) == (4, 8, 16, 32)
    assert names(sips, 0, 7) == ["sip3", "sip7"]
    assert names(sips, 1, 13) == ["sip5", "sip13"]  # around the torus, row first
    assert names(sips, 1, 18) == ["spine_leaf0", "spine_spine0", "spine_leaf1", "sip18"]
    assert names(sips, 1, 19) == ["spine_leaf0", "spine_spine1", "spine_leaf1", "sip19"]
    up = switch_named(sips, "spine_leaf0"), switch_named(sips, "spine_spine1")
    assert link_of_hop(sips, up).bandwidth == 25 * 16 / 4 / 2


@pytest.mark.parametrize("levels", [NODES, PODS])
def test_each_route_of_levels_follows_edges_and_ends_at_its_target(levels: str) -> None:
    sips = cluster(levels).machine.system.sips
    edges = set(sip_edges(sips))

    for source in range(sips.count):
        for target in range(sips.count):
            nodes = [source, *sip_route(sips, source, target)]
            assert nodes[-1] == target
            assert len(set(nodes)) == len(nodes)
            assert all((min(hop), max(hop)) in edges for hop in pairwise(nodes))


def test_traffic_of_a_dead_rail_takes_another_one() -> None:
    topology = cluster(NODES).with_faults([KillLink(link="sip3-rails3")])
    sips, faults = topology.machine.system.sips, topology.faults
    assert faults is not None

    nodes = live_route(sips, 3, 11, faults.damage(0).dead)

    assert [node_name(sips, node) for node in nodes] == [
        "nvlink0", "sip0", "rails0", "sip8", "nvlink1", "sip11",
    ]  # fmt: skip


def test_a_fault_of_a_link_that_no_level_has_names_one_that_there_is() -> None:
    with pytest.raises(ConfigError, match="no link between SIPs 'sip3->rails4'"):
        cluster(NODES).with_faults([KillLink(link="sip3-rails4")])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph: switch", "graph: swich", "cluster.yaml:6: system.sips.levels[0].graph: there is no 'swich'; did you mean switch?"),
        ("count: 8", "count: 0", "cluster.yaml:6: system.sips.levels[0].count: expected a whole number >= 1, found 0"),
        ("name: nvlink", "name: sip", "cluster.yaml:6: system.sips.levels[0]: name 'sip' is not a name of a level; expected letters, such as rails"),
        ("name: nvlink", "name: rails", "cluster.yaml:4: system.sips: levels have one name twice: rails, rails"),
        ("count: 8, graph: switch", "count: 8, graph: rails", "cluster.yaml:4: system.sips: levels[0] is rails of single SIPs: expected a level below with a count of 2 or more"),
        ("graph: rails", "graph: rails, oversubscription: 2", "cluster.yaml:7: system.sips.levels[1]: oversubscription is for graph fat_tree; the graph is rails"),
        ("graph: rails", "graph: torus_2d", "cluster.yaml:7: system.sips.levels[1]: graph torus_2d needs a shape: [rows, columns]"),
        ("graph: rails", "graph: fat_tree, seed: 3", "cluster.yaml:7: system.sips.levels[1]: seed is for routing hashed; the routing is static"),
        ("graph: rails", "graph: fat_tree, leaf: 5", "cluster.yaml:4: system.sips: levels[1].leaf: 5 SIPs at a leaf do not divide 32"),
        ("    levels:", "    count: 31\n    levels:", "cluster.yaml:4: system.sips: count is 31, but levels make 8 x 4 = 32"),
        ("    levels:", "    graph: switch\n    levels:", "cluster.yaml:4: system.sips: graph switch stands beside levels: each level has its graph"),
        ("like: default", "like: defualt", "cluster.yaml: like: there is no preset 'defualt'"),
    ],
)  # fmt: skip
def test_bad_levels_get_one_line(old: str, new: str, message: str) -> None:
    text = HEAD + NODES
    assert old in text

    with pytest.raises(ConfigError) as caught:
        parse_topology(text.replace(old, new, 1), "cluster.yaml")

    assert caught.value.message == message


def test_the_drawing_shows_each_level() -> None:
    text, picture = as_text(cluster(PODS)), as_svg(cluster(PODS))

    assert "spine: fat_tree of 2 spines, 4 to 1 oversubscribed: SIP 0 to 15 ── SIP 16 to 31" in text
    assert "└─ pod: torus_2d 2 x 2, 2 times: SIP 0 to 3 ── SIP 4 to 7" in text
    assert "   └─ node: fully_connected, 8 times: SIP 0 ── SIP 1 ── SIP 2 ── SIP 3" in text
    assert picture.count('class="level"') == 3
    assert "pod: 4 in torus_2d 2 x 2, 50 GB/s" in picture
