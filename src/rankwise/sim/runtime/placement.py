"""Where ranks live, and where in a rank's device the elements of a tensor lie.

A rank has a device: a SIP, or some of its cubes if there are more ranks than SIPs. A tensor is one
row-major range of virtual addresses whose pieces lie in the HBM channels next to the PEs that the
tensor's policy gives them to. Without a policy, all channels of the device take turns.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.sim.hardware.interleaving import dealt_in_turn

Cut: TypeAlias = Literal["replicate", "row", "column"]

PIECES_MAX = 1024
"""A tensor that a policy would cut into more pieces is cut into this many."""


class DPPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a tensor lies on a device: over its cubes, and inside a cube over its PEs.

    `row` and `column` cut the tensor, seen as a matrix whose columns are its last dimension;
    `replicate` keeps a copy in each place. Kernels and reads use the first copy; the others only
    take up memory.

    Attributes:
        cube: the cut over cubes.
        pe: the cut over the PEs of each cube.
        num_cubes: how many cubes take part; None for all of the device.
        num_pes: how many PEs of each of them; None for all.
    """

    cube: Cut = "row"
    pe: Cut = "row"
    num_cubes: int | None = None
    num_pes: int | None = None

    def __post_init__(self) -> None:
        for name in ("cube", "pe"):
            value = getattr(self, name)
            if value not in {"replicate", "row", "column"}:
                raise ConfigError(
                    f"DPPolicy: {name}={value!r}; expected 'replicate', 'row' or 'column'"
                )
        for name in ("num_cubes", "num_pes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"DPPolicy: {name}={value}; expected 1 or more")


class DeviceSelector:
    """Which SIPs a context uses: `"all"`, one number, or several.

    Args:
        which: `"all"`, a number, `"sip:2"`, `"0,2,3"`, or a sequence of numbers.
    """

    def __init__(self, which: str | int | Sequence[int] = "all") -> None:
        self.which = which

    def sips(self, count: int) -> tuple[int, ...]:
        """The chosen SIPs of a system that has `count` of them.

        Raises:
            ConfigError: it chooses one that there is not, or one twice.
        """
        if self.which == "all":
            return tuple(range(count))
        if isinstance(self.which, int):
            chosen: tuple[int, ...] = (self.which,)
        elif isinstance(self.which, str):
            try:
                chosen = tuple(int(part) for part in self.which.removeprefix("sip:").split(","))
            except ValueError:
                raise ConfigError(
                    f"DeviceSelector({self.which!r}); expected 'all', a number or 'sip:0,2'"
                ) from None
        else:
            chosen = tuple(self.which)
        if not chosen or len(set(chosen)) < len(chosen):
            raise ConfigError(f"DeviceSelector({self.which!r}) names no SIP, or one twice")
        for sip in chosen:
            if not 0 <= sip < count:
                raise ConfigError(
                    f"DeviceSelector({self.which!r}): there is no SIP {sip},"
                    f" they are 0 to {count - 1}"
                )
        return chosen

    def __repr__(self) -> str:
        return f"DeviceSelector({self.which!r})"


class Device(NamedTuple):
    """What one rank computes on.

    Attributes:
        sip: the number of the SIP.
        cubes: those of its cubes that are the rank's.
        pes_per_cube: how many PEs each cube has.
        index_on_sip: which of the ranks on this SIP it is.
    """

    sip: int
    cubes: tuple[int, ...]
    pes_per_cube: int
    index_on_sip: int = 0

    @property
    def pes(self) -> tuple[int, ...]:
        """The indexes of its PEs, counted over the whole SIP."""
        return tuple(
            cube * self.pes_per_cube + pe for cube in self.cubes for pe in range(self.pes_per_cube)
        )

    def __str__(self) -> str:
        return f"sip:{self.sip}" if not self.index_on_sip else f"sip:{self.sip}.{self.index_on_sip}"


def devices_for(
    world_size: int, sips: Sequence[int], cube_count: int, pes_per_cube: int
) -> list[Device]:
    """The device of every rank: a SIP each, or, if they are too few, equal shares of their cubes.

    Raises:
        ConfigError: there are more ranks than cubes.
    """
    if world_size <= len(sips):
        return [Device(sip, tuple(range(cube_count)), pes_per_cube) for sip in sips[:world_size]]
    per_sip = -(-world_size // len(sips))
    if per_sip > cube_count:
        raise ConfigError(
            f"{world_size} ranks do not fit on {len(sips)} SIPs with {cube_count} cubes each:"
            f" at most {len(sips) * cube_count}",
            hint="take a larger topology, or fewer ranks",
        )
    devices = []
    for rank in range(world_size):
        place, index_on_sip = divmod(rank, per_sip)
        first, last = (cube_count * each // per_sip for each in (index_on_sip, index_on_sip + 1))
        devices.append(Device(sips[place], tuple(range(first, last)), pes_per_cube, index_on_sip))
    return devices


class Piece(NamedTuple):
    """Consecutive bytes of a tensor, and the cube and PE whose HBM channel holds them."""

    size: int
    cube: int
    pe: int


class _Region(NamedTuple):
    """A part of the matrix, and its place."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    cube: int
    pe: int

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


class Layout(NamedTuple):
    """Where a tensor lies.

    Attributes:
        pieces: those that are used, one after the other.
        copies: those that only take up room.
        interleave: if not 0, the pieces take turns instead, so many bytes each.
    """

    pieces: tuple[Piece, ...]
    copies: tuple[Piece, ...] = ()
    interleave: int = 0


def layout_of(
    shape: tuple[int, ...],
    item_bytes: int,
    policy: DPPolicy | None,
    device: Device,
    interleave: int,
) -> Layout:
    """Lay a tensor out on a device.

    Args:
        shape: its lengths.
        item_bytes: bytes per element.
        policy: how it lies there; None to let all channels take turns.
        device: where.
        interleave: the bytes that channels take turns with; fewer, if they are not enough for all.
    """
    elements = prod(shape)
    if not elements:
        return Layout(())
    if policy is None:
        return _in_turn(elements * item_bytes, device, interleave)
    # A vector has rows of one element, so that both cuts cut it.
    columns = shape[-1] if len(shape) > 1 else 1
    rows = elements // columns
    kept, spare = _regions(rows, columns, policy, device)
    return Layout(
        _pieces(kept, rows, columns, item_bytes),
        tuple(Piece(region.elements * item_bytes, region.cube, region.pe) for region in spare),
    )


def _in_turn(size: int, device: Device, interleave: int) -> Layout:
    places = [(cube, pe) for pe in range(device.pes_per_cube) for cube in device.cubes]
    granule, sizes = dealt_in_turn(size, interleave, len(places))
    pieces = tuple(Piece(length, *place) for length, place in zip(sizes, places, strict=False))
    return Layout(pieces, interleave=granule)


def _regions(
    rows: int, columns: int, policy: DPPolicy, device: Device
) -> tuple[list[_Region], list[_Region]]:
    """The regions that are used, and those that are copies."""
    cubes = device.cubes[: _at_most(policy.num_cubes, len(device.cubes), "num_cubes", device)]
    pes = _at_most(policy.num_pes, device.pes_per_cube, "num_pes", device)
    kept: list[_Region] = []
    spare: list[_Region] = []
    for cube_index, cube in enumerate(cubes):
        on_cube = _cut((0, rows), (0, columns), policy.cube, cube_index, len(cubes))
        for pe in range(pes):
            region = _Region(*_cut(*on_cube, policy.pe, pe, pes), cube, pe)
            if not region.elements:
                continue
            is_copy = (policy.cube == "replicate" and cube_index > 0) or (
                policy.pe == "replicate" and pe > 0
            )
            (spare if is_copy else kept).append(region)
    return kept, spare


def _at_most(wanted: int | None, there: int, name: str, device: Device) -> int:
    if wanted is not None and wanted > there:
        raise ConfigError(f"DPPolicy: {name}={wanted}, but {device} has {there}")
    return there if wanted is None else wanted


def _cut(
    rows: tuple[int, int], columns: tuple[int, int], how: Cut, index: int, count: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    if columns == (0, 1) and how == "column":
        how = "row"
    if how == "row":
        return _share(rows, index, count), columns
    if how == "column":
        return rows, _share(columns, index, count)
    return rows, columns


def _share(span: tuple[int, int], index: int, count: int) -> tuple[int, int]:
    start, length = span[0], span[1] - span[0]
    return start + length * index // count, start + length * (index + 1) // count


def _pieces(regions: list[_Region], rows: int, columns: int, item_bytes: int) -> tuple[Piece, ...]:
    """Cut the row-major range where the place changes, but not into too many pieces."""
    runs: list[tuple[int, int, _Region]] = []
    for region in regions:
        width = region.columns[1] - region.columns[0]
        height = region.rows[1] - region.rows[0]
        if width == columns:
            runs.append((region.rows[0] * columns, height * columns, region))
        elif len(runs) + height > PIECES_MAX:
            return _coarsely(regions, rows, columns, item_bytes)
        else:
            runs += [
                (row * columns + region.columns[0], width, region) for row in range(*region.rows)
            ]
    runs.sort(key=lambda run: run[0])
    return tuple(Piece(length * item_bytes, r.cube, r.pe) for _start, length, r in runs)


def _coarsely(
    regions: list[_Region], rows: int, columns: int, item_bytes: int
) -> tuple[Piece, ...]:
    elements, pieces = rows * columns, []
    for index in range(PIECES_MAX):
        start, end = elements * index // PIECES_MAX, elements * (index + 1) // PIECES_MAX
        # Taken in turn, since a piece of several rows belongs to all regions of those rows.
        row, _column = divmod(start, columns)
        beside = [region for region in regions if region.rows[0] <= row < region.rows[1]]
        owner = beside[index % len(beside)]
        pieces.append(Piece((end - start) * item_bytes, owner.cube, owner.pe))
    return tuple(pieces)
