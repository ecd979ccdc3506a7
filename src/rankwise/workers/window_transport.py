"""Collectives over windows: what lies in a window is reduced there, by all ranks at once.

The transport between the workers of a node (`rankwise.collectives.shared_memory`) moves arrays
through slots, since other ranks cannot read the caller's memory. An array in a window needs none of
that: every rank folds its own part of all windows and stores the result in all of them. That takes
two barriers, one before which all have written and one after which all may read; each element is
loaded once and stored once per window, and nothing is copied.

Ranks must agree on it, though they may have given different arrays: one lies in a window, another
does not, a third at another offset. So each writes into its ledger where its array lies, and after
the first barrier all read the same places and come to the same decision. Small arrays take one
barrier through the slots, which no window could undercut.
"""

from typing import Any

import numpy as np

from rankwise.collectives.ordered_reductions import Reduction, fold
from rankwise.collectives.shared_memory import SharedMemoryTransport
from rankwise.collectives.transport import Flat
from rankwise.drivers.real.segments import LEDGER_PLACE, LEDGER_WORDS, Segment
from rankwise.drivers.real.windows import WindowRegion

_PIECE_BYTES = 1 << 17
"""How much of each window is folded at a time: the result is copied from a cache; measured."""


class WindowTransport(SharedMemoryTransport):
    """The transport of a region's ranks. The region stays the caller's."""

    def __init__(self, region: WindowRegion, rank: int, pid: int) -> None:
        """Take the place of `rank`."""
        # Its own view of the segment, which it closes.
        segment = Segment.within(region.memory, region.layout.segment)
        super().__init__(segment, rank, pid, region.fate_of)
        self._region = region
        self._places = segment.ledgers
        self._window_address = region.window_address(rank)

    def all_reduce(self, source: Flat, result: Flat, reduction: Reduction) -> None:
        """Fold all sources in the order of the ranks; every rank gets the whole."""
        if source.nbytes <= self._small_bytes:
            super().all_reduce(source, result, reduction)
            return
        self._places[LEDGER_WORDS * self.rank + LEDGER_PLACE] = place = self._place_of(
            source, result
        )
        self._barrier.arrive_and_wait()
        if place and set(self._places[LEDGER_PLACE::LEDGER_WORDS].tolist()) == {place}:
            self._fold_in_windows(place - 1, source.dtype, source.size, reduction)
            self._barrier.arrive_and_wait()
        else:
            super().all_reduce(source, result, reduction)

    def _fold_in_windows(
        self, offset: int, dtype: np.dtype[Any], count: int, reduction: Reduction
    ) -> None:
        """Fold this rank's part of what lies at `offset` of all windows, into all of them."""
        windows = [
            np.frombuffer(
                self._region.memory, dtype, count, self._region.window_offset(rank) + offset
            )
            for rank in range(self.size)
        ]
        low, high = count * self.rank // self.size, count * (self.rank + 1) // self.size
        step = max(1, _PIECE_BYTES // dtype.itemsize)
        for start in range(low, high, step):
            end = min(start + step, high)
            pieces = [window[start:end] for window in windows]
            fold(reduction, pieces, pieces[0])
            for piece in pieces[1:]:
                np.copyto(piece, pieces[0])

    def _place_of(self, source: Flat, result: Flat) -> int:
        """Where in this rank's window both lie, plus one; 0 when they do not."""
        address: int = source.__array_interface__["data"][0]
        offset = address - self._window_address
        if (
            result.__array_interface__["data"][0] != address
            or offset < 0
            or offset + source.nbytes > self._region.window_bytes
        ):
            return 0
        return offset + 1

    def close(self) -> None:
        """Give the rank back."""
        self._places.release()
        del self._region
        super().close()
