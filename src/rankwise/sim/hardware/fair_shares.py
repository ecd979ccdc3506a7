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


def fair_speeds(uses: Uses, weights: Figures) -> Figures:
    """The max-min fair speed of each flow."""
    flow, link, share, link_count = uses
    caps = 1 / weights
    speeds = np.zeros(len(weights))
    left = np.ones(link_count)
    while len(flow):
        # The entries that are left are of flows whose levels rise.
        firsts = np.flatnonzero(np.diff(flow, prepend=-1))
        total = np.bincount(link, share * weights[flow], link_count)
        levels = np.divide(left, total, out=np.full(link_count, np.inf), where=total > 0)
        numbers = flow[firsts]
        lowest = np.minimum(np.minimum.reduceat(levels[link], firsts), caps[numbers])
        counts = np.diff(firsts, append=len(flow))
        own = np.repeat(lowest, counts)
        # A link is full if it is the first for all of its flows: none of them goes less far.
        goes_less = np.bincount(link, own < levels[link], link_count)
        is_full = (goes_less == 0) & (total > 0)
        is_capped = lowest == caps[numbers]
        stays = is_capped | np.logical_or.reduceat(is_full[link], firsts)
        assert stays.any(), "the lowest of all levels is a link's or a flow's"
        speeds[numbers] = np.where(stays, np.where(is_capped, 1.0, lowest * weights[numbers]), 0.0)
        entry_stays = np.repeat(stays, counts)
        taken = np.bincount(link[entry_stays], (share * speeds[flow])[entry_stays], link_count)
        left = np.maximum(_ROUNDING, left - taken)
        flow, link, share = flow[~entry_stays], link[~entry_stays], share[~entry_stays]
    return np.minimum(speeds, 1.0)


_ROUNDING = 1e-12
"""What is left of a link at least, so that a level is above 0."""
