"""Faults and variability of chips, and what they do.

========== ============================ ==========================================================
fault      fields                       what happens
========== ============================ ==========================================================
`slow`     `link`, `times`              a link takes so many times as long for each byte
`slow`     `pe`, `times`                a PE does: its engines, DMA, scratch memory and ports
`jitter`   `percent`, `seed`            every PE and every wire is slower by a share of its own,
                                        from nothing to so many percent, which the seed decides
`kill`     `link`, `at`                 a link between SIPs dies, at the beginning or at an instant
========== ============================ ==========================================================

Parts are called what utilisation calls them: `sip0->sip1`, `host->sip0`, `sip0.cube0->cube1`,
`sip0.cube0.pe3`. `sip0-sip1` is the link in both directions.

Slowness and jitter are those of a part and hold from the beginning: rates are lower, latencies are
what they were. So every level of fidelity sees them where it sees the part at all.

**A link that has died** carries what was on it to its end, and nothing that begins later: that
takes the shortest way that is left. Where none is left, the run fails and says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base.errors import ConfigError, SimulationError
from rankwise.base.seeds import derived_seed
from rankwise.sim.faults.vocabulary import FaultOfChip, Jitter, KillLink, SlowPart
from rankwise.sim.hardware.cost_models import CostModel
from rankwise.sim.hardware.quantities import Rate, exactly
from rankwise.sim.hardware.routing import (
    Hop,
    detour,
    link_of_hop,
    node_name,
    sip_edges,
    sip_route,
    switch_named,
)

if TYPE_CHECKING:
    from rankwise.sim.hardware.specification import MachineSpec, SipsSpec
    from rankwise.sim.hardware.topology import Topology

_PARTS_PER_DRAW = 1 << 64
_SHARES = 1_000_000
"""Shares that are drawn are whole parts of so many, so that rates stay small fractions."""


SLOWNESS_MAX = 1_000_000
"""How many times as long a part takes at most, by all faults: picoseconds have 63 bits."""


class Damage(NamedTuple):
    """How the wires between devices are at an instant.

    Attributes:
        rates: of those that are slow.
        dead: those that nothing goes over any more.
    """

    rates: Mapping[Hop, Rate]
    dead: AbstractSet[Hop]


class ChipFaults:
    """The faults of one machine.

    Args:
        faults: as they were read.
        machine: what the topology describes.

    Raises:
        ConfigError: one names a part that there is not, or a part is too slow.
    """

    def __init__(self, faults: Sequence[FaultOfChip], machine: "MachineSpec") -> None:
        self._machine = machine
        self._jitters: list[Jitter] = []
        self._times: dict[str, Fraction] = {}
        self.deaths: list[tuple[int, list[Hop]]] = []
        """In picoseconds when which directions of a link die."""
        for each in faults:
            match each:
                case SlowPart():
                    for part in [each.pe] if each.pe else self._directions(each.link):
                        self._check(part, is_pe=bool(each.pe))
                        times = self._times.get(part, Fraction(1)) * exactly(each.times)
                        if times > SLOWNESS_MAX:
                            raise ConfigError(
                                f"{part} would take {float(times):,.0f} times as long, by all its"
                                f" faults together: expected at most {SLOWNESS_MAX:,}"
                            )
                        self._times[part] = times
                case Jitter():
                    self._jitters.append(each)
                case KillLink():
                    hops = [self._hop(part) for part in self._directions(each.link)]
                    self.deaths.append((each.at * 1_000, hops))

    @property
    def jitter_percent(self) -> float:
        """By how much jitter can make a part slower."""
        return sum(each.percent for each in self._jitters)

    def slowed(self, part: str, rate: Rate) -> Rate:
        """The rate of a link, or of a link that is a part of a PE."""
        times = self.times(_owner(part))
        return rate if times == 1 else Rate(Fraction(rate.numerator, rate.denominator) / times)

    def costs(self, pe: str, costs: CostModel) -> CostModel:
        """How long work takes on the engines of a PE."""
        times = self.times(pe)
        return costs if times == 1 else _SlowCosts(costs, times)

    def times(self, part: str) -> Fraction:
        """How many times as long a PE or a wire takes."""
        times = self._times.get(part, Fraction(1))
        if "->" in part or ".pe" in part:
            for each in self._jitters:
                drawn = derived_seed(each.seed, "jitter", part)
                share = Fraction(drawn * _SHARES // _PARTS_PER_DRAW, _SHARES)
                times *= 1 + share * exactly(each.percent) / 100
        return times

    def slowest_pe(self, sip: int) -> Fraction:
        """How many times as long the slowest PE of a SIP takes."""
        cubes, pes = self._machine.sip.cubes.count, self._machine.cube.pes.count
        return max(
            self.times(f"sip{sip}.cube{cube}.pe{pe}") for cube in range(cubes) for pe in range(pes)
        )

    def damage(self, instant: int) -> Damage:
        """How the wires between devices are at an instant, in picoseconds."""
        sips = self._machine.system.sips
        wires = [hop for one, other in sip_edges(sips) for hop in ((one, other), (other, one))]
        usual = {hop: link_of_hop(sips, hop).rate for hop in wires}
        rates = {hop: self.slowed(_wire_name(sips, hop), rate) for hop, rate in usual.items()}
        return Damage(
            {hop: rate for hop, rate in rates.items() if rate is not usual[hop]},
            {hop for at, hops in self.deaths if at <= instant for hop in hops},
        )

    def is_inside(self, sip: int) -> bool:
        """Whether something inside of a SIP is not as it is in others."""
        return bool(self._jitters) or sip in self._touched

    @cached_property
    def _touched(self) -> frozenset[int]:
        sips = (part.partition(".")[0] for part in self._times if "." in part)
        return frozenset(int(sip.removeprefix("sip")) for sip in sips)

    def _directions(self, link: str) -> list[str]:
        if "->" in link:
            return [link]
        one, dash, other = link.partition("-")
        if not dash:
            raise _no_part("link", link, self._example)
        device, dot, inside = one.rpartition(".")
        back = f"{device}{dot}{other}->{inside}"
        return [f"{one}->{other}", back]

    def _check(self, part: str, *, is_pe: bool) -> None:
        known = self._is_pe(part) if is_pe else self._is_wire(part)
        if not known:
            raise _no_part("PE" if is_pe else "link", part, self._example)

    def _is_pe(self, part: str) -> bool:
        sip, cube, pe = (*part.split("."), "", "")[:3]
        machine = self._machine
        counts = (machine.system.sips.count, machine.sip.cubes.count, machine.cube.pes.count)
        numbers = [
            _number(word, kind)
            for word, kind in zip((sip, cube, pe), ("sip", "cube", "pe"), strict=True)
        ]
        return part.count(".") == 2 and all(
            0 <= number < count for number, count in zip(numbers, counts, strict=True)
        )

    def _is_wire(self, part: str) -> bool:
        one, _, other = part.partition("->")
        count = self._machine.system.sips.count
        if "host" in {one, other}:
            return 0 <= _number(other if one == "host" else one, "sip") < count
        sip, dot, cube = one.partition(".")
        if not dot:
            return self._edge(part) is not None
        columns = self._machine.sip.cubes.shape[1]
        cubes = self._machine.sip.cubes.count
        here, there = _number(cube, "cube"), _number(other, "cube")
        are_there = 0 <= _number(sip, "sip") < count and 0 <= here < cubes and 0 <= there < cubes
        low, high = sorted((here, there))
        return are_there and (high - low == columns or (high - low == 1 and high % columns != 0))

    def _hop(self, part: str) -> Hop:
        hop = self._edge(part)
        if hop is None:
            raise _no_part("link between SIPs", part, self._example)
        return hop

    def _edge(self, part: str) -> Hop | None:
        sips = self._machine.system.sips
        one, _, other = part.partition("->")
        source, target = (
            _number(end, "sip") if end.startswith("sip") else switch_named(sips, end)
            for end in (one, other)
        )
        edge = (min(source, target), max(source, target))
        return (source, target) if edge in self._edges else None

    @cached_property
    def _edges(self) -> frozenset[Hop]:
        return frozenset(sip_edges(self._machine.system.sips))

    @property
    def _example(self) -> str:
        if not self._edges:
            return "sip0.cube0.pe0"
        return "-".join(node_name(self._machine.system.sips, node) for node in min(self._edges))


class _SlowCosts:
    """A cost model of engines that take so many times as long."""

    def __init__(self, costs: CostModel, times: Fraction) -> None:
        self._costs = costs
        self._times = times

    def gemm(self, m: int, n: int, k: int, dtype: str) -> int:
        """A product of m x k by k x n."""
        return self._longer(self._costs.gemm(m, n, k, dtype))

    def math(self, elements: int, operation: str, dtype: str) -> int:
        """An elementwise operation on so many elements."""
        return self._longer(self._costs.math(elements, operation, dtype))

    def _longer(self, time: int) -> int:
        return -(-time * self._times.numerator // self._times.denominator)


class Unreachable(SimulationError):
    """Links have died, and no way is left between two devices."""


def live_route(
    sips: "SipsSpec", source: int, destination: int, dead: AbstractSet[Hop]
) -> list[int]:
    """The nodes after SIP `source` on the way to SIP `destination`, around dead links.

    Raises:
        Unreachable: no way is left.
    """
    nodes = sip_route(sips, source, destination)
    if not dead.isdisjoint(zip([source, *nodes], nodes, strict=False)):
        around = detour(sips, source, destination, dead)
        if around is None:
            named = ", ".join(_wire_name(sips, hop) for hop in sorted(dead))
            raise Unreachable(
                f"there is no way from sip{source} to sip{destination}: dead are {named}",
                hint="leave a way between the SIPs of all ranks",
            )
        return around
    return nodes


def checked_faults(
    named: Iterable[tuple[str, FaultOfChip]], topology: "Topology"
) -> tuple[FaultOfChip, ...]:
    """The faults of a machine.

    Args:
        named: what errors call each, and the fault.
        topology: the machine.

    Raises:
        ConfigError: one names a part that there is not.
    """
    checked: list[FaultOfChip] = []
    for called, fault in named:
        checked.append(fault)
        try:
            ChipFaults(checked, topology.machine)
        except ConfigError as error:
            raise ConfigError(f"{called}: {error.message}", hint=error.hint) from None
    return tuple(checked)


def _wire_name(sips: "SipsSpec", hop: Hop) -> str:
    return "->".join(node_name(sips, node) for node in hop)


def _owner(part: str) -> str:
    """The part whose rate it is: of a link inside of a PE, that of the PE."""
    return part.rpartition(".")[0] if ".pe" in part else part


def _number(word: str, kind: str) -> int:
    """The number in a name such as `sip3`; -1 if it is none, or has other digits, as `sip03`."""
    digits = word.removeprefix(kind)
    number = int(digits) if digits.isdecimal() else -1
    return number if word == f"{kind}{number}" else -1


def _no_part(what: str, part: str, example: str) -> ConfigError:
    wanted = "sip0.cube0.pe0" if what == "PE" else example
    return ConfigError(f"the machine has no {what} {part!r}", hint=f"they are called {wanted}")
