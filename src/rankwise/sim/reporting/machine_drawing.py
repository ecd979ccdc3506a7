"""A machine as a picture: its SIPs and what connects them, one SIP's cubes, one cube's parts."""

import math
from html import escape
from textwrap import wrap

from rankwise.base.units import format_bytes
from rankwise.sim.hardware.routing import levels_of_network, sip_edges
from rankwise.sim.hardware.specification import SipsSpec
from rankwise.sim.hardware.topology import Topology
from rankwise.sim.reporting.results import format_rate

Point = tuple[float, float]


def facts(topology: Topology) -> list[tuple[str, str]]:
    """What there is to know about each level, in words: a name and a sentence."""
    spec = topology.machine
    sips, cubes, pes, hbm = spec.system.sips, spec.sip.cubes, spec.cube.pes, spec.cube.hbm
    clock, pe = spec.system.clock, spec.pe
    gemm = ", ".join(
        f"{dtype} {format_rate(rate * clock * 1e9, 'FLOP/s')}"
        for dtype, rate in pe.gemm.flops_per_cycle.items()
    )
    fastest = max(pe.gemm.flops_per_cycle.items(), key=lambda item: item[1])
    whole_pes = sips.count * topology.pe_count
    memory = sips.count * cubes.count * hbm.channels * hbm.bandwidth * 1e9
    host = f"to the host {_link(spec.system.host.link)}"
    links = "" if sips.levels else f", {sips.words}; links of {_link(sips.link)}"
    return [
        ("system", f"{sips.count} SIPs{links}; {host}"),
        *((_level_name(sips, number), _level_facts(sips, number)) for number in _levels(sips)),
        ("SIP", f"{cubes.shape[0]} x {cubes.shape[1]} cubes; links of {_link(cubes.link)}"),
        (
            "cube",
            (
                f"{pes.count} PEs, each with a port of {_link(pes.link)}; {hbm.channels} HBM "
                f"channels of {hbm.bandwidth:g} GB/s, {format_bytes(hbm.capacity)}"
            ),
        ),
        (
            "PE",
            (
                f"{format_bytes(pe.tcm.capacity)} TCM at {pe.tcm.bandwidth:g} GB/s; DMA at "
                f"{pe.dma.bandwidth:g} GB/s; GEMM {gemm}; queues of {pe.ipcq.slots} slots of "
                f"{format_bytes(pe.ipcq.slot_bytes)}"
            ),
        ),
        (
            "in all",
            (
                f"{whole_pes} PEs, {format_rate(whole_pes * fastest[1] * clock * 1e9, 'FLOP/s')} "
                f"in {fastest[0]}; HBM of {format_rate(memory, 'B/s')}"
            ),
        ),
    ]


def _levels(sips: SipsSpec) -> range:
    return range(len(sips.levels))


def _level_name(sips: SipsSpec, number: int) -> str:
    return levels_of_network(sips).levels[number].name


def _level_facts(sips: SipsSpec, number: int) -> str:
    spec = sips.levels[number]
    units = "SIPs" if not number else f"units of {_level_name(sips, number - 1)}"
    uplinks = ""
    if spec.graph == "fat_tree":
        uplink = levels_of_network(sips).levels[number].uplink
        uplinks = f", from a leaf to a spine of {_link(uplink)}; routing {spec.routing}"
    return f"{spec.count} {units} in {spec.words}; links of {_link(spec.link)}{uplinks}"


def _text_levels(sips: SipsSpec) -> list[str]:
    """Each level with an example: a unit, what connects it, and what is in it."""
    lines: list[str] = []
    network = levels_of_network(sips)
    for number in reversed(_levels(sips)):
        level = network.levels[number]
        units, below = sips.count // level.size, level.below
        parts = [
            f"SIP {place}" if below == 1 else f"SIP {place} to {place + below - 1}"
            for place in range(0, level.size, below)
        ]
        indent = "   " * (len(lines) - 1) + "└─ " if lines else ""
        times = f", {units} times" if units > 1 else ""
        lines.append(
            f"{indent}{level.name}: {level.spec.words}{times}: {' ── '.join(_ends(parts))}"
        )
    return lines


def _link(link: object) -> str:
    return f"{getattr(link, 'bandwidth', 0):g} GB/s and {getattr(link, 'latency_ns', 0):g} ns"


def as_text(topology: Topology, columns: int | None = None) -> str:
    """The machine for a terminal, its sentences folded to so many columns."""
    sips, cubes = topology.machine.system.sips, topology.machine.sip.cubes
    lines = [topology.name, ""]
    if sips.levels:
        lines += _text_levels(sips)
    elif sips.shape and sips.graph in {"mesh_2d", "torus_2d"}:
        lines += _text_grid(*sips.shape, "SIP")
        if sips.graph == "torus_2d":
            lines.append("(and around, in rows and columns)")
    elif sips.graph == "ring_1d":
        lines += [" ── ".join(_ends([f"SIP {sip}" for sip in range(sips.count)])) + " ── SIP 0"]
    else:
        neighbours: dict[int, list[int]] = {}
        for one, other in sip_edges(sips):
            neighbours.setdefault(one, []).append(other)
        for sip, others in neighbours.items():
            shown = ["switch" if other == sips.count else f"SIP {other}" for other in others]
            lines.append(f"SIP {sip} ── {', '.join(_ends(shown))}")
    lines += ["", *_text_grid(*cubes.shape, "cube"), ""]
    width = max(len(name) for name, _ in facts(topology))
    indent = " " * (width + 2)
    for name, sentence in facts(topology):
        line = f"{name:<{width}}  {sentence}"
        lines += (
            [line]
            if columns is None
            else wrap(line, max(columns, 40), subsequent_indent=indent, drop_whitespace=True)
        )
    return "\n".join(lines)


def _ends(names: list[str]) -> list[str]:
    return names if len(names) <= 12 else [*names[:6], "…", *names[-3:]]


def _text_grid(rows: int, columns: int, word: str) -> list[str]:
    width = len(f"{word} {rows * columns - 1}")
    lines = []
    for row in range(rows):
        names = [f"{word} {row * columns + column}".ljust(width) for column in range(columns)]
        lines.append(" ── ".join(names).rstrip())
        if row + 1 < rows:
            lines.append((" " * 4).join("│".center(width) for _ in range(columns)).rstrip())
    return lines


WIDTH, HEIGHT = 760, 372
STUB = 13
"""How far a link that goes round a torus is seen beyond its SIP."""
NAME_SHOWN = 24
EDGES_DRAWN, PES_DRAWN = 2_000, 10_000
"""Where there are more, a picture shows nothing but ink, and takes megabytes."""


def as_svg(topology: Topology) -> str:
    """The machine as a picture that stands by itself: the system and one SIP."""
    sips, cubes = topology.machine.system.sips, topology.machine.sip.cubes
    name, is_torus = topology.name, sips.graph == "torus_2d"
    if len(name) > NAME_SHOWN:
        name = f"{name[: NAME_SHOWN - 1]}…"
    drawn = _system_of_levels(sips) if sips.levels else _system(topology)
    network = f"{len(sips.levels)} levels" if sips.levels else sips.graph
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(topology.name)}" font-family="system-ui, sans-serif" '
            'font-size="11">'
        ),
        (
            f'<text x="10" y="18" fill="#7a8699">{escape(name)}: {sips.count} SIPs, '
            f"{network}{' (dashed: round to the other side)' * is_torus}</text>"
        ),
        *drawn,
        (
            f'<text x="400" y="18" fill="#7a8699">each SIP: {cubes.shape[0]} x {cubes.shape[1]} '
            f"cubes of {topology.machine.cube.pes.count} PEs</text>"
        ),
        *_sip(topology),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


UNITS_DRAWN = 8
"""Of each level; the others are told."""
_SHADES = ("#2f6fb5", "#c77d2e", "#4c8f6b", "#8a5fa8", "#7a8699")


def _system_of_levels(sips: SipsSpec) -> list[str]:
    """Levels as bars over what they connect, the outermost on top, and SIPs as a row of circles."""
    network = levels_of_network(sips)
    height = min(64.0, 270 / (len(sips.levels) + 1))
    left, width, top = 14.0, 350.0, 40.0
    lines = []
    x, span = left, width  # of the unit that is drawn; those beside it are hints
    for row, number in enumerate(reversed(_levels(sips))):
        level, y = network.levels[number], top + row * height
        colour = _SHADES[(number + 1) % len(_SHADES)]
        lines.append(
            f'<text x="{left}" y="{y - 4:.1f}" fill="#7a8699" font-size="10">'
            f"{escape(_level_words(sips, number))}</text>"
        )
        drawn = min(UNITS_DRAWN, level.spec.count)
        part = span / drawn
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{span:.1f}" height="10" rx="3" class="level" '
            f'fill="{colour}"/>'
        )
        lines += [
            f'<line x1="{x + part * (unit + 0.5):.1f}" y1="{y + 10:.1f}" '
            f'x2="{x + part * (unit + 0.5):.1f}" y2="{y + height - 16:.1f}" '
            'stroke="#8fa3bf" stroke-width="1.5"/>'
            for unit in range(drawn)
        ]
        if number:  # what one of them is made of, wide enough to be seen
            lines += [
                f'<rect x="{x + part * unit + 2:.1f}" y="{y + height - 16:.1f}" '
                f'width="{part - 4:.1f}" height="6" rx="2" fill="#c9d4e3"/>'
                for unit in range(1, drawn)
            ]
            span = max(part, 150.0)
        else:
            radius = min(9.0, part / 2.4)
            for unit in range(drawn):
                lines.append(
                    f'<circle cx="{x + part * (unit + 0.5):.1f}" cy="{y + height - 6:.1f}" '
                    f'r="{radius:.1f}" class="sip" fill="#2f6fb5"/>'
                )
    return lines


def _level_words(sips: SipsSpec, number: int) -> str:
    spec = sips.levels[number]
    more = f", {UNITS_DRAWN} drawn" if spec.count > UNITS_DRAWN else ""
    link = f"{spec.link.bandwidth:g} GB/s"
    return f"{_level_name(sips, number)}: {spec.count} in {spec.words}, {link}{more}"


def _system(topology: Topology) -> list[str]:
    sips = topology.machine.system.sips
    points = _positions(topology)
    radius = max(4.0, min(20.0, 420 / max(8, len(points) * (1 if sips.shape is None else 0.45))))
    lines = []
    edges = sip_edges(sips)
    if len(edges) > EDGES_DRAWN:
        lines.append(
            f'<text x="10" y="{HEIGHT - 6}" fill="#7a8699">{len(edges):,} links, not drawn</text>'
        )
        edges = []
    for one, other in edges:
        (x1, y1), (x2, y2) = points[one], points[other]
        distance = math.dist(points[one], points[other])
        if sips.graph == "torus_2d" and distance > 1.5 * _step(topology):
            # Two ends that point outwards: a line between them would lie on everything between.
            dx, dy = (x1 - x2) / distance, (y1 - y2) / distance
            reach = radius + STUB
            lines += [
                _dashed(x1, y1, x1 + dx * reach, y1 + dy * reach),
                _dashed(x2, y2, x2 - dx * reach, y2 - dy * reach),
            ]
        else:
            lines.append(
                f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                'stroke="#8fa3bf" stroke-width="1.5"/>'
            )
    for number, (x, y) in enumerate(points):
        is_switch = number == sips.count
        colour = "#c77d2e" if is_switch else "#2f6fb5"
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"/>')
        if radius >= 8:
            lines.append(
                f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="#fff">'
                f"{'sw' if is_switch else number}</text>"
            )
    return lines


def _step(topology: Topology) -> float:
    shape = topology.machine.system.sips.shape or (1, 1)
    return 276 / max(1, *(length - 1 for length in shape))


def _dashed(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#8fa3bf" '
        'stroke-width="1.5" stroke-dasharray="3 2"/>'
    )


def _positions(topology: Topology) -> list[Point]:
    """Where each node is drawn; a switch in the middle."""
    sips = topology.machine.system.sips
    if sips.shape is not None:
        step = _step(topology)
        return [
            (46 + step * (sip % sips.shape[1]), 66 + step * (sip // sips.shape[1]) * 0.94)
            for sip in range(sips.count)
        ]
    middle, radius = (185.0, 192.0), 140.0
    if sips.count == 1:
        return [middle]
    around = [
        (
            middle[0] + radius * math.sin(2 * math.pi * sip / sips.count),
            middle[1] - radius * math.cos(2 * math.pi * sip / sips.count),
        )
        for sip in range(sips.count)
    ]
    return [*around, middle] if sips.graph == "switch" else around


def _sip(topology: Topology) -> list[str]:
    rows, columns = topology.machine.sip.cubes.shape
    count = topology.machine.cube.pes.count
    size = min(290 / max(rows, columns), 120.0)
    gap = size * 0.18
    lines = []
    for cube in range(rows * columns):
        row, column = divmod(cube, columns)
        x, y = 400 + column * (size + gap), 34 + row * (0.8 * size + gap)
        width, height = size, size * 0.8
        if column + 1 < columns:
            lines.append(_bar(x + width, y + height / 2, gap, 0))
        if row + 1 < rows:
            lines.append(_bar(x + width / 2, y + height, 0, gap))
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
            'class="cube" fill="#dfe8f3" stroke="#8fa3bf"/>'
        )
        across = math.ceil(math.sqrt(count * width / height))
        down = math.ceil(count / across)
        cell = min(width * 0.9 / across, height * 0.66 / down)
        for pe in range(count if rows * columns * count <= PES_DRAWN else 0):
            px = x + width * 0.05 + cell * (pe % across)
            py = y + height * 0.06 + cell * (pe // across)
            lines.append(
                f'<rect x="{px:.1f}" y="{py:.1f}" width="{cell * 0.82:.1f}" '
                f'height="{cell * 0.82:.1f}" rx="1" fill="#2f6fb5"/>'
            )
        if size >= 55:
            lines.append(
                f'<text x="{x + width * 0.05:.1f}" y="{y + height * 0.92:.1f}" class="on-cube" '
                f'fill="#40516b" font-size="{min(11.0, size / 9):.1f}">cube {cube} + HBM</text>'
            )
    return lines


def _bar(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x + width:.1f}" y2="{y + height:.1f}" '
        'stroke="#8fa3bf" stroke-width="4"/>'
    )
