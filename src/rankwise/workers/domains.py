"""Domains: which ranks map each other's windows, and what lies in them.

A domain is planned before any memory exists: `plan_domain` gives every buffer its offset, the same
in all windows, and says how much memory the region takes. The plan is a value; it travels to the
ranks, which join with it (`rankwise.workers.member`). A rank may be in many domains at once, and a
domain may have any of the ranks of a tree.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from mmap import mmap
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from rankwise.base.errors import TreeValueError
from rankwise.base.units import SECOND, Duration, format_bytes
from rankwise.collectives.communicator import patience_from_seconds
from rankwise.drivers.real.segments import DEFAULT_BUFFER_BYTES
from rankwise.drivers.real.windows import WindowRegion, region_bytes
from rankwise.drivers.real.windows.layout import SIGNALS_MAX, round_up

ALIGNMENT = 64
"""Buffers begin at cache lines, which suits every dtype and every vector instruction."""
DEFAULT_TIMEOUT_S = 300.0

Shape = int | Iterable[int]
Buffers = Mapping[str, tuple[Shape, DTypeLike]]


class WindowBuffer(msgspec.Struct, frozen=True):
    """An array of the same shape at the same offset in every rank's window."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    """As `numpy.dtype.str`, the byte order included."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"buffer {self.name!r} of {self.shape} {np.dtype(self.dtype).name}"


class DomainSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A planned domain.

    Attributes:
        name: what its ranks know it as.
        ranks: whom it consists of, as the surrounding tree numbers them; a rank of the domain is
            an index into these.
        buffers: what lies in each window.
        signals: names of the signals that every rank has.
        window_bytes: size of each window.
        timeout: how long its waits last when they are not told.
        chunk_bytes: how much of an array a collective moves at a time.
        offset: where its region lies in the memory that the ranks share.
    """

    name: str
    ranks: tuple[int, ...]
    buffers: tuple[WindowBuffer, ...] = ()
    signals: tuple[str, ...] = ()
    window_bytes: int = 0
    timeout: Duration = Duration(300 * SECOND)
    chunk_bytes: int = DEFAULT_BUFFER_BYTES
    offset: int = 0

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    @property
    def region_bytes(self) -> int:
        """How much memory it needs, a whole number of pages; most are never touched."""
        return region_bytes(self.size, self.window_bytes, len(self.signals), self.chunk_bytes)

    def at(self, offset: int) -> "DomainSpec":
        """The same domain, with its region at `offset`."""
        return msgspec.structs.replace(self, offset=offset)


def plan_domain(
    name: str,
    ranks: Iterable[int],
    buffers: Buffers | None = None,
    *,
    signals: Iterable[str] = (),
    window_bytes: int | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    chunk_bytes: int = DEFAULT_BUFFER_BYTES,
) -> DomainSpec:
    """Give every buffer its place.

    Args:
        name: what the ranks know the domain as.
        ranks: whom it consists of, each once.
        buffers: shape and dtype by name, the same in every window; `{"x": ((1024,), "f4")}`.
        signals: names of 64-bit values that ranks raise for each other; they begin at 0.
        window_bytes: size of a window, if it is to be larger than the buffers need.
        timeout: seconds that a wait lasts when it is not told.
        chunk_bytes: how much of an array a collective moves at a time.

    Raises:
        ConfigError: a name, shape, dtype or rank cannot be used, or a buffer does not fit.
    """
    members = _checked_ranks(name, ranks)
    placed: list[WindowBuffer] = []
    end = 0
    for buffer_name, described in (buffers or {}).items():
        buffer = _place_buffer(name, buffer_name, described, round_up(end, ALIGNMENT))
        end = buffer.offset + buffer.nbytes
        if window_bytes is not None and end > window_bytes:
            raise TreeValueError(
                f"domain {name!r}: {buffer} ends at byte {end} of its window, which has "
                f"{format_bytes(window_bytes)}",
                hint=f"give the window at least {end} bytes, or leave window_bytes out",
            )
        placed.append(buffer)
    spec = DomainSpec(
        name=name,
        ranks=members,
        buffers=tuple(placed),
        signals=_checked_signals(name, signals),
        window_bytes=end if window_bytes is None else window_bytes,
        timeout=patience_from_seconds(timeout, f"domain {name!r}: timeout"),
        chunk_bytes=chunk_bytes,
    )
    _ = spec.region_bytes  # refuses what has no room
    return spec


def create_domain(spec: DomainSpec) -> WindowRegion:
    """Make a domain's region in memory of its own; the caller closes it.

    Raises:
        WindowError: the system has no descriptor or no memory for it.
    """
    return WindowRegion.create(
        spec.name,
        spec.size,
        spec.window_bytes,
        signal_count=len(spec.signals),
        chunk_bytes=spec.chunk_bytes,
    )


def place_domain(memory: mmap, spec: DomainSpec) -> WindowRegion:
    """Make a domain's region at `spec.offset` of memory that all its ranks share.

    Raises:
        ConfigError: there is too little room.
    """
    return WindowRegion.place(
        memory,
        spec.offset,
        spec.name,
        spec.size,
        spec.window_bytes,
        signal_count=len(spec.signals),
        chunk_bytes=spec.chunk_bytes,
    )


def _checked_ranks(name: object, ranks: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(name, str) or not name:
        raise TreeValueError(f"a domain's name is {name!r}, expected a text")
    try:
        members = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        members = (-1,)
    if not members or min(members) < 0 or len(set(members)) < len(members):
        raise TreeValueError(
            f"domain {name!r}: ranks are {ranks!r}, expected at least one whole number, "
            f"none twice and none negative"
        )
    return members


def _checked_signals(name: str, signals: Iterable[Any]) -> tuple[str, ...]:
    names = tuple(signals)
    if isinstance(signals, str) or not all(isinstance(n, str) and n for n in names):
        raise TreeValueError(f"domain {name!r}: signals are {signals!r}, expected a list of names")
    if len(set(names)) < len(names) or len(names) > SIGNALS_MAX:
        raise TreeValueError(
            f"domain {name!r}: signals are {names!r}, expected each once, at most {SIGNALS_MAX}"
        )
    return names


def _place_buffer(name: str, buffer_name: object, described: Any, offset: int) -> WindowBuffer:
    what = f"domain {name!r}: buffer {buffer_name!r}"
    if not isinstance(buffer_name, str) or not buffer_name:
        raise TreeValueError(f"{what}: expected a text for a name")
    try:
        shape, dtype_like = described
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        sizes = tuple(operator.index(size) for size in sizes)
        dtype = np.dtype(dtype_like)
    except (TypeError, ValueError):
        raise TreeValueError(
            f"{what} is described by {described!r}, expected a shape and a dtype",
            hint='for example ((1024,), "f4")',
        ) from None
    if any(size < 0 for size in sizes):
        raise TreeValueError(f"{what} has shape {sizes}, expected no negative size")
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise TreeValueError(
            f"{what} has dtype {dtype}, expected numbers, booleans, dates or fixed texts",
            hint="Python objects cannot lie in shared memory; give each field its own buffer",
        )
    return WindowBuffer(buffer_name, offset, sizes, dtype.str)
