"""Tiles for a matrix product: which there are, how fast each could be, and which to take.

Every tile of C is a program of its own, with its sums in f32 in the scratch memory of a PE, and
what is loaded for the next steps along k beside them: `stages` steps in all. Tiles are dealt to the
PEs in waves. Small tiles keep all PEs busy, large ones load less: each element of A is loaded once
for every column of tiles, each of B once for every row. So a tiling has a floor, the longest of

    waves       waves * time of a tile on the GEMM engine
    tile loads  bytes of all tiles / bandwidth of the memory
    DMA         waves * bytes of a tile / bandwidth of a PE's DMA engine
    die links   bytes over the busiest link between dies / its bandwidth

and no product in tiles of one size is faster than the lowest floor of them all. (Bytes over links
are those of tensors that lie evenly over all dies, as they do unless a policy says otherwise.)
"""

from collections.abc import Iterator
from itertools import pairwise, product
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankwise.base.errors import ConfigError
from rankwise.base.units import format_bytes
from rankwise.sim.benches.bounds import Bound, Roofline
from rankwise.sim.hardware.cost_models import CostModel
from rankwise.sim.hardware.quantities import PICOSECONDS_PER_SECOND
from rankwise.sim.hardware.routing import mesh_route
from rankwise.sim.hardware.specification import MachineSpec, MeshSpec

STAGES_MAX = 4
_SIDES = (16, 32, 64, 128, 256, 512)
_DEPTHS = (128, 64, 32, 16)
_SUM_BYTES = 4
_SHARPNESS = 4


class Product(NamedTuple):
    """What is to be multiplied: m x k by k x n, of a dtype of so many bytes."""

    m: int
    n: int
    k: int
    dtype: str
    item_bytes: int


class Tiling(NamedTuple):
    """Tiles of C of `m` x `n`, summed up in steps of `k`, so many steps in memory at a time."""

    m: int
    n: int
    k: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


def _crossings(cubes: MeshSpec) -> npt.NDArray[np.int64]:
    """From how many cubes the way to a cube leads over a link, by link and by that cube."""
    found: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
    for source, target in product(range(cubes.count), repeat=2):
        for link in pairwise([source, *mesh_route(source, target, cubes.shape[1])]):
            found.setdefault(link, np.zeros(cubes.count, np.int64))[target] += 1
    return np.array(list(found.values())).reshape(-1, cubes.count)


class Tilings:
    """The tilings of one product on some PEs of a machine.

    Args:
        wanted: what is to be multiplied.
        spec: the machine.
        costs: how long work takes on its engines.
        roofline: what the PEs can do per second, with their memory.
        pe_count: how many PEs share the work.
    """

    def __init__(
        self,
        wanted: Product,
        spec: MachineSpec,
        costs: CostModel,
        roofline: Roofline,
        pe_count: int,
    ) -> None:
        self._product = wanted
        self._costs = costs
        self._roofline = roofline
        self._pe_count = pe_count
        self._room = spec.pe.tcm.capacity
        self._burst = spec.cube.hbm.burst_bytes
        port = min(spec.pe.dma.bandwidth, spec.pe.tcm.bandwidth) * 1e9
        self._port_rate = port / PICOSECONDS_PER_SECOND
        self._cubes = spec.sip.cubes
        self._crossings = _crossings(self._cubes)
        self._floors: dict[tuple[int, int], Bound] = {}
        self._link_rate = self._cubes.link.bandwidth * 1e9 / PICOSECONDS_PER_SECOND
        self._memory_rate = roofline.bytes_per_second / PICOSECONDS_PER_SECOND
        hbm, dma, tcm = spec.cube.hbm, spec.pe.dma, spec.pe.tcm
        self._latency = 1_000 * (dma.setup_ns + hbm.latency_ns + tcm.latency_ns)

    def square(self, side: int) -> Tiling:
        """Tiles of `side` x `side`.

        Raises:
            ConfigError: they do not fit into a PE's scratch memory.
        """
        for depth in _DEPTHS:
            stages = self._stages(side, side, depth)
            if depth <= max(side, 16) and stages:
                return Tiling(side, side, depth, stages)
        raise ConfigError(
            f"gemm: tiles of {side} x {side} do not fit into the {format_bytes(self._room)} of"
            " scratch memory that a PE has",
            hint="take smaller ones, or leave `tile` to be chosen",
        )

    def best(self) -> Tiling:
        """The one that should be fastest; of equal ones the largest.

        Raises:
            ConfigError: none fits into a PE's scratch memory.
        """
        found = list(self._all())
        if not found:
            return self.square(min(_SIDES))  # which says why
        return min(found, key=lambda each: (self._estimate(each), -each.m * each.n, -each.k))

    def bound(self) -> Bound:
        """The roofline, or where no tiling comes up to it, the lowest floor and its name."""
        m, n, k, _dtype, item_bytes = self._product
        roof = self._roofline.bound(2 * m * n * k, (m * k + k * n + m * n) * item_bytes)
        floor = min((self._floor(each) for each in self._all()), key=itemgetter(1), default=roof)
        return roof if floor.picoseconds <= roof.picoseconds else floor

    def _all(self) -> Iterator[Tiling]:
        for m in _SIDES:
            for n in _SIDES:
                for depth in _DEPTHS:
                    stages = self._stages(m, n, depth)
                    if stages:
                        yield Tiling(m, n, depth, stages)

    def _stages(self, m: int, n: int, depth: int) -> int:
        """How many steps have room beside the sums; 0 if a step cannot be loaded during another."""
        if depth * self._product.item_bytes < self._burst and depth < max(_DEPTHS):
            return 0  # a row of A would be less than memory gives at once
        left = self._room - m * n * _SUM_BYTES
        stages = left // ((m + n) * depth * self._product.item_bytes)
        return min(stages, STAGES_MAX) if stages > 1 else 0

    def _floor(self, tiling: Tiling) -> Bound:
        sides = tiling.m, tiling.n
        if sides not in self._floors:
            self._floors[sides] = self._found_floor(tiling)
        return self._floors[sides]

    def _found_floor(self, tiling: Tiling) -> Bound:
        m, n, k, _dtype, item_bytes = self._product
        tiles = -(-m // tiling.m) * -(-n // tiling.n)
        waves = -(-tiles // self._pe_count)
        height, width = min(tiling.m, m), min(tiling.n, n)
        peak = self._roofline.flops_per_second / self._pe_count / PICOSECONDS_PER_SECOND
        loaded = self._loaded(tiling)
        floors = {
            "waves": waves * 2 * height * width * k / peak,
            "tile loads": (loaded + m * n * item_bytes) / self._memory_rate,
            "DMA": waves * (height + width) * k * item_bytes / self._port_rate,
            "die links": loaded * self._busiest_link(tiles) / self._link_rate,
        }
        return max((Bound(name, round(time)) for name, time in floors.items()), key=itemgetter(1))

    def _busiest_link(self, tiles: int) -> float:
        """The share of all loads that passes the busiest link between dies."""
        per_cube = self._pe_count // self._cubes.count
        rounds, rest = divmod(tiles, self._pe_count)
        there = np.arange(self._cubes.count) * per_cube
        there = rounds * per_cube + np.clip(rest - there, 0, per_cube)
        return float((self._crossings @ there).max(initial=0)) / tiles / self._cubes.count

    def _loaded(self, tiling: Tiling) -> int:
        """Bytes of A and B that all tiles load; what lies beyond the edges is not loaded."""
        m, n, k, _dtype, item_bytes = self._product
        return (m * -(-n // tiling.n) + n * -(-m // tiling.m)) * k * item_bytes

    def _estimate(self, tiling: Tiling) -> float:
        """The floor, with what a step costs besides, and what cannot overlap."""
        m, n, k, dtype, item_bytes = self._product
        tiles = -(-m // tiling.m) * -(-n // tiling.n)
        waves, steps = -(-tiles // self._pe_count), -(-k // tiling.k)
        step = self._costs.gemm(tiling.m, tiling.n, tiling.k, dtype)
        share = min(self._port_rate, self._memory_rate / min(tiles, self._pe_count))
        first = (tiling.m + tiling.n) * tiling.k * item_bytes / share
        last = tiling.m * tiling.n * item_bytes / share
        # A part that is nearly as slow as the slowest stands in its way now and then.
        parts = (waves * steps * step, self._floor(tiling).picoseconds)
        working: float = sum(each**_SHARPNESS for each in parts) ** (1 / _SHARPNESS)
        return 2 * self._latency + first + working + last
