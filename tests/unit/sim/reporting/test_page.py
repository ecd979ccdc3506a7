"""The page: one file, nothing fetched, everything of the run in it."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from rankwise.sim.benches.session import Finished, Settings, simulate
from rankwise.sim.hardware.topology import PRESETS, load_topology
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
    return simulate(Settings(program="gemm", fields={"m": "64", "n": "64", "k": "64"}))


def test_a_page_has_every_section_and_is_well_formed(finished: Finished) -> None:
    html = page("gemm <1>", finished.engine, finished.results)

    nesting = Nesting()
    nesting.feed(html)
    assert nesting.open == []
    sections = re.findall(r"<h2>(.*?)</h2>", html)
    assert sections == ["Results", "Timeline", "Utilisation", "Roofline", "Machine"]
    assert "gemm &lt;1&gt;" in html


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
