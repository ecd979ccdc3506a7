"""Ways over links, with what follows from all of their links."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.sim.hardware.links import Link


class Path(list["Link"]):
    """A way over links, and what follows from all of them, worked out once.

    Attributes:
        latency: of all links together.
        slowest: the lowest rate among them; None of a path without links.
        is_broken: whether one of them has died: what begins now must take another way.
        sips: the devices inside of which it has links; empty if that is not known.
    """

    __slots__ = ("is_broken", "latency", "sips", "slowest")

    def __init__(self, links: Iterable["Link"], sips: tuple[int, ...] = ()) -> None:
        super().__init__(links)
        self.is_broken = False
        self.sips = sips
        self.latency = sum(link.latency for link in self)
        self.slowest = min((link.rate for link in self), default=None)
