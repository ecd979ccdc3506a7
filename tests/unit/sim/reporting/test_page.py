"""The page: one file, nothing fetched, everything of the run in it."""

import re
import xml.etree.ElementTree as ET
from copy import deepcopy
from html.parser import HTMLParser
from itertools import combinations

import msgspec
import pytest
import yaml

from rankwise.sim.benches.session import BenchSettings, Finished, simulate
from rankwise.sim.hardware.quantities import format_picoseconds
from rankwise.sim.hardware.topology import PRESETS, load_topology, parse_topology
from rankwise.sim.reporting.charts import roofline_chart, timeline_chart
from rankwise.sim.reporting.machine_drawing import as_svg, as_text
from rankwise.sim.reporting.page import page

VOID = {"meta", "br", "rect", "line", "circle", "path"}


class Nesting(HTMLParser):
    """Sees to it that what is opened is closed, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def finished() -> Finished:
    return simulate(BenchSettings(program="gemm", fields={"m": "64", "n": "64", "k": "64"}))


def test_a_page_has_every_section_and_is_well_formed(finished: Finished) -> None:
    html = page("gemm <1>", finished.engine, finished.results)

    nesting = Nesting()
    nesting.feed(html)
    assert nesting.open == []
    sections = re.findall(r"<h2>(.*?)</h2>", html)
    assert sections == ["Results", "Timeline", "Utilisation", "Roofline", "Machine"]
    assert "gemm &lt;1&gt;" in html


def test_a_page_says_why_the_whole_run_took_longer_than_its_results(finished: Finished) -> None:
    whole = format_picoseconds(finished.engine.now)
    assert finished.engine.now > sum(result.time_ps for result in finished.results)

    html = page("gemm", finished.engine, finished.results)

    assert f"the {whole} at the top include everything before" in html


def test_a_page_fetches_nothing(finished: Finished) -> None:
    html = page("gemm", finished.engine, finished.results).replace("http://www.w3.org/2000/svg", "")

    assert "http" not in html
    assert "src=" not in html
    assert "<script" not in html


def test_a_page_shows_only_shares_that_are_possible(finished: Finished) -> None:
    html = page("gemm", finished.engine, finished.results)

    widths = [float(width) for width in re.findall(r"width:([\d.]+)%\"", html)]
    assert widths
    assert all(0 < width <= 100 for width in widths)


def test_a_page_without_results_has_no_roofline(finished: Finished) -> None:
    assert "Roofline" not in page("mine", finished.engine, [])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_drawn_with_all_its_sips(preset: str) -> None:
    topology = load_topology(preset)

    picture = ET.fromstring(as_svg(topology))  # it is ours

    nodes = [each for each in picture.iter() if each.tag.endswith("circle")]
    is_switched = topology.machine.system.sips.graph == "switch"
    assert len(nodes) == topology.sip_count + is_switched
    assert topology.name in as_text(topology)


def test_a_long_name_does_not_run_into_the_other_half_of_the_picture() -> None:
    spec = deepcopy(load_topology("torus16").spec)
    spec["system"]["name"] = "the machine that we might buy next year, if it is cheap"

    picture = as_svg(parse_topology(yaml.safe_dump(spec), "file"))

    assert "the machine that we mig…: 16 SIPs" in picture


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_drawn_of_a_machine_is_in_view(preset: str) -> None:
    picture = as_svg(load_topology(preset))

    assert in_view(picture) == []
    lines = [each for each in ET.fromstring(picture).iter() if each.tag.endswith("line")]
    ends = [
        (float(each.attrib[f"x{n}"]), float(each.attrib[f"y{n}"])) for each in lines for n in "12"
    ]
    assert all(0 <= x <= 760 and 20 < y <= 372 for x, y in ends)


def in_view(picture: str) -> list[str]:
    """What lies outside of a picture's view."""
    root = ET.fromstring(picture)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    outside = []
    for each in root.iter():
        x, y = (float(each.get(name, each.get(f"c{name}", "0"))) for name in "xy")
        right, bottom = (float(each.get(name, "0")) for name in ("width", "height"))
        if not (x >= 0 and x + right <= width and y >= 0 and y + bottom <= height):
            outside.append(f"{each.tag} {each.attrib} {each.text}")
    return outside


def test_many_results_are_numbered_and_listed_inside_the_picture(finished: Finished) -> None:
    results = [
        msgspec.structs.replace(finished.results[0], case=f"case {number}", time_ps=1_000 + number)
        for number in range(40)
    ]

    picture = roofline_chart(finished.engine.topology, results)

    assert in_view(picture) == []
    assert all(f"{number + 1}. gemm: case {number}, " in picture for number in range(40))
    assert ">1-40<" in picture  # they lie on each other, and share a label


def test_texts_of_the_roofline_do_not_lie_on_each_other(finished: Finished) -> None:
    spec = deepcopy(load_topology("default").spec)
    spec["pe"]["math"]["elements_per_cycle"] = spec["pe"]["gemm"]["flops_per_cycle"]
    topology = parse_topology(yaml.safe_dump(spec), "file")  # both peaks at one height
    results = [
        msgspec.structs.replace(
            finished.results[0], flops=10 ** (power % 9), time_ps=10**4 * 2 ** (power % 7)
        )
        for power in range(30)
    ]

    boxes = []
    for each in ET.fromstring(roofline_chart(topology, results)).iter():
        if anchor := each.get("text-anchor"):
            x, y, text = float(each.attrib["x"]), float(each.attrib["y"]), each.text or ""
            left = x - 6 * len(text) * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            boxes.append((left, y - 9, left + 6 * len(text), y + 2))
    assert len(boxes) > 20
    assert not [
        (one, other)
        for one, other in combinations(boxes, 2)
        if one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
    ]


def test_a_machine_of_thousands_is_drawn_in_less_than_a_megabyte() -> None:
    spec = deepcopy(load_topology("default").spec)
    spec["system"]["sips"] |= {"count": 1_000, "graph": "fully_connected"}
    spec["sip"]["cubes"]["shape"] = [16, 16]
    spec["cube"]["pes"]["count"] = 1_000

    picture = as_svg(parse_topology(yaml.safe_dump(spec), "large"))

    assert "499,500 links, not drawn" in picture
    assert len(picture) < 1_000_000
    assert in_view(picture) == []


def test_sips_are_only_called_hidden_if_they_did_something(finished: Finished) -> None:
    fields = {"m": "64", "n": "64", "k": "64"}
    alone = simulate(
        BenchSettings(program="gemm", topology="torus16", fields=fields, has_data=False)
    )
    together = simulate(BenchSettings(program="ccl_allreduce", topology="torus16", has_data=False))

    assert "are not shown" not in timeline_chart(alone.engine)
    assert "SIPs from 8 on are not shown" in timeline_chart(together.engine)
