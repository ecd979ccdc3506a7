"""Windows: memory of one rank that other ranks read and write, with signals between them."""

from rankwise.drivers.real.windows.layout import RANKS_MAX, WindowLayout, region_bytes
from rankwise.drivers.real.windows.region import WindowRegion
from rankwise.drivers.real.windows.shared_signals import SignalBoard
from rankwise.drivers.real.windows.watch import PeerWatch

__all__ = [
    "RANKS_MAX",
    "PeerWatch",
    "SignalBoard",
    "WindowLayout",
    "WindowRegion",
    "region_bytes",
]
