"""The windows through which chips of one tree reach each other: made once, by the outermost worker.

Processes below inherit them when they are forked, and find them by the path of their communicator.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rankwise.base.errors import TreeValueError
from rankwise.workers.bootstrap import ChipCommBootstrapConfig

if TYPE_CHECKING:
    from rankwise.drivers.real.windows import WindowRegion

inherited: "dict[str, WindowRegion]" = {}
"""Communicators that this worker, or one above, has made before this process was forked."""


class Communicators:
    """Those that one worker has made."""

    def __init__(self) -> None:
        self._owned: dict[str, WindowRegion] = {}

    def make(self, places: Iterable[ChipCommBootstrapConfig]) -> None:
        """Make the windows of all communicators that no worker above has made.

        Raises:
            ConfigError: chips disagree about their communicator, or are not all there.
        """
        from rankwise.drivers.real.windows import WindowRegion  # noqa: PLC0415  # few need it

        by_path: dict[str, list[ChipCommBootstrapConfig]] = {}
        for place in places:
            if place.rootinfo_path not in inherited:
                by_path.setdefault(place.rootinfo_path, []).append(place)
        made: dict[str, WindowRegion] = {}
        for path, together in by_path.items():
            _check_communicator(path, together)
            first = together[0]
            made[path] = WindowRegion.create(path, first.nranks, first.window_size)
        inherited.update(made)
        self._owned = made

    def drop(self) -> None:
        """Let go of them. Twice is once."""
        for path, region in self._owned.items():
            inherited.pop(path, None)
            region.close()
        self._owned = {}


def _check_communicator(path: str, places: Sequence[ChipCommBootstrapConfig]) -> None:
    """Refuse chips that disagree about their communicator, or are not all there."""
    first = places[0]
    for place in places:
        if (place.nranks, place.window_size) != (first.nranks, first.window_size):
            raise TreeValueError(
                f"chips of communicator {path!r} disagree: nranks {first.nranks} and window_size "
                f"{first.window_size}, or {place.nranks} and {place.window_size}"
            )
    ranks = sorted(place.rank for place in places)
    if ranks != list(range(first.nranks)):
        raise TreeValueError(
            f"communicator {path!r} has {first.nranks} ranks, but the chips are {ranks}",
            hint="each rank is one chip of this tree",
        )
