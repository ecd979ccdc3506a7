"""Which bytes of memory an access touches, and which bursts that are.

Memory gives and takes whole bursts. A contiguous block costs what it has, but for its edges; a
column of a matrix costs a burst per element. A burst that several runs share is moved once.
"""

import numpy as np

from rankwise.sim.hardware.interleaving import Offsets


class Footprint:
    """Which bytes an access touches, from the lowest on: equally long runs.

    Attributes:
        run: bytes of each.
        offsets: where they begin, ascending; the first is 0.
    """

    __slots__ = ("offsets", "run")

    def __init__(self, run: int, offsets: Offsets) -> None:
        self.run = run
        self.offsets = offsets

    def bursts(self, address: int, burst: int) -> tuple[Offsets, Offsets]:
        """The bursts that it touches, each once: ranges of addresses, ascending.

        Args:
            address: its lowest byte.
            burst: bytes of a burst, whose addresses are multiples of it.
        """
        starts = address + self.offsets
        begins = starts // burst * burst
        ends = -((starts + self.run) // -burst) * burst
        if len(starts) > 1:
            # Both rise from run to run, so what a run shares it shares with the one before it.
            np.maximum(begins[1:], ends[:-1], out=begins[1:])
        return begins, ends
