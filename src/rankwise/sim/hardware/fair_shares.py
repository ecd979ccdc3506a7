"""Weighted max-min fair shares of many links, for all flows at once.

Each flow has a speed from 0 to 1, of which every link carries its `use`. The *level* of a flow is
its speed over its weight. Speeds are max-min fair if no level can rise without a fall of one that
is as low or lower. That is so if, and only if, each flow below speed 1 has a full link on which no
other flow has a higher level (Bertsekas and Gallager, Data Networks, 6.5.2). They are found by
filling: all levels rise together until a link is full; its flows stay, and the others go on.

Links that fill do so independently of each other where each is the first to fill for all of its
flows. All of these are settled in one pass, so that a thousand flows take some passes, not one for
each link.

Only additions in a fixed order, multiplications, divisions and comparisons of IEEE doubles are
used, so equal input gives equal output on every machine.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Figures = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Uses(NamedTuple):
    """Which flow uses which link, one entry each, in the order of the flows.

    Attributes:
        flow: the number of the flow; every flow has an entry at least.
        link: the number of the link.
        share: what the flow takes of the link at speed 1; the whole link is 1.
        link_count: how many links there are.
    """

    flow: Numbers
    link: Numbers
    share: Figures
    link_count: int


def fair_speeds(uses: Uses, weights: Figures) -> tuple[Figures, Figures]:
    """The max-min fair speed of each flow, and the level at which each link is full.

    The level of a link that does not fill is infinite.
    """
    flow, link, share, link_count = uses
    firsts = np.searchsorted(flow, np.arange(len(weights)))
    caps = 1 / weights
    speeds = np.zeros(len(weights))
    full_at = np.full(link_count, np.inf)
    left = np.ones(link_count)
    is_rising = np.ones(len(weights), np.bool_)
    rises = share * weights[flow]
    while is_rising.any():
        rising = np.where(is_rising[flow], rises, 0.0)
        total = np.bincount(link, rising, link_count)
        levels = np.divide(left, total, out=np.full(link_count, np.inf), where=total > 0)
        own = np.where(rising > 0, levels[link], np.inf)
        lowest = np.minimum(np.minimum.reduceat(own, firsts), caps)
        of_link = np.full(link_count, np.inf)
        np.minimum.at(of_link, link, np.where(rising > 0, lowest[flow], np.inf))
        is_full = (of_link == levels) & (total > 0)
        full_at = np.where(is_full, levels, full_at)
        stays = np.zeros(len(weights), np.bool_)
        stays[flow[is_full[link] & (rising > 0)]] = True
        stays |= lowest == caps
        stays &= is_rising
        assert stays.any(), "the lowest of all levels is a link's or a flow's"
        speeds = np.where(stays, np.where(lowest == caps, 1.0, lowest * weights), speeds)
        taken = np.bincount(link, np.where(stays[flow], share * speeds[flow], 0.0), link_count)
        left = np.maximum(_ROUNDING, left - taken)
        is_rising &= ~stays
    return np.minimum(speeds, 1.0), full_at


_ROUNDING = 1e-12
"""What is left of a link at least, so that a level is above 0 and a turn has an end."""
