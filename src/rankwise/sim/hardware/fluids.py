"""Fluids: transfers that take a share of their links, instead of sending chunks over them.

A collective of a thousand ranks is two million messages. Where all of its links are its own, when
it ends is arithmetic (`ccl.message_execution`). Where it meets others, what they take from each
other is a matter of shares, and that needs no message either.

A fluid has so many bytes to move over each of its links in a time that it would take alone, so it
*demands* a share of each link, its work there over that time. It has *progress*, from 0 to that
time: a picosecond for each picosecond, while every link gives it what it demands.

**With other fluids.** A link whose demands exceed it is shared evenly: each gets the same, those
that want less excepted (max-min fairness). A fluid moves on as fast as its scarcest link lets it.
Shares are worked out anew when a fluid comes or goes, and at no other time.

**With chunks.** A chunk that is carried while k flows want the link shares it evenly, too: the k
flows and the fluids. It takes longer by the fluids' part, and the fluids that get less than they
would go on later by what they have lost. Of what a fluid has lost on several links, the most
counts: its ranks wait for each other, so that one wait serves for all.

All is counted in whole picoseconds, shares in parts of `WHOLE`; no float decides anything.
"""

from collections.abc import Iterable, Mapping, Sequence

from rankwise.sim.hardware.links import Link
from rankwise.sim.kernel import Future, Simulator

WHOLE = 1 << 20
"""All of a link."""


class Fluid:
    """A transfer over many links at once.

    Args:
        simulator: whose time counts.
        name: what deadlock reports call it.
        loads: how many bytes it moves over each link.
        duration: picoseconds that it takes alone.
        marks: how much progress somebody waits for (`reached`).

    Attributes:
        duration, loads: as they were given.
        demands: the share of each link that it would take alone.
    """

    def __init__(
        self,
        simulator: Simulator,
        name: str,
        loads: Mapping[Link, int],
        duration: int,
        marks: Iterable[int],
    ) -> None:
        self._simulator = simulator
        self.duration = duration
        self.loads = dict(loads)
        self.demands = {
            link: min(WHOLE, link.rate.time_for(size) * WHOLE // duration) if duration else 0
            for link, size in loads.items()
        }
        self._lost: dict[Link, int] = {}
        self._speed = WHOLE
        self._since = simulator.now
        self._done = self._lost_before = 0
        self._marks = {mark: simulator.future(name) for mark in sorted({*marks, duration})}
        self._waiting = list(self._marks)
        self._waiting.reverse()  # the next one is the last
        self._alarm = 0
        """Counts the times that it was set; an earlier one means nothing."""
        self._begin()

    def reached(self, mark: int) -> Future:
        """Happens when it has got so far; the mark is one of those that it was given."""
        return self._marks[mark]

    def demand(self, link: Link) -> int:
        """The share of a link that it would take alone, at the speed that it has."""
        return self.demands[link] * self._speed // WHOLE

    def progress(self) -> int:
        """How far it is: picoseconds of the time that it takes alone."""
        return max(0, min(self.duration, self._progress()))

    def part_of(self, amount: int) -> int:
        """Of an amount that it moves from its beginning to its end, what it has moved so far."""
        return amount * self.progress() // self.duration if self.duration else amount

    def lose(self, link: Link, amount: int) -> None:
        """Go on later: chunks have taken so much time from it on a link."""
        self._lost[link] = self._lost.get(link, 0) + amount

    def rush(self) -> None:
        """Go on as fast as its links allow from now on."""
        speed = min(
            (_speed(link, demand) for link, demand in self.demands.items() if demand),
            default=WHOLE,
        )
        if speed != self._speed:
            self._done = self._progress()
            self._since, self._lost_before = self._simulator.now, self._lost_most
            self._speed = speed
            self._set_alarm()

    @property
    def _lost_most(self) -> int:
        return max(self._lost.values(), default=0)

    def _progress(self) -> int:
        """How far it is; less than nothing if it has lost more than it has had so far."""
        passed = (self._simulator.now - self._since) * self._speed // WHOLE
        return self._done + passed - (self._lost_most - self._lost_before)

    def _begin(self) -> None:
        for link in self.loads:
            link.make_way()
            if link.sharing is None:
                link.sharing = Sharing()
            link.sharing.fluids.append(self)
        self._set_alarm()
        _rush_all(self.loads)

    def stop(self) -> dict[int, Future]:
        """End it before its time, with what it has moved so far; the marks that are left."""
        left = {mark: self._marks[mark] for mark in self._waiting}
        self._alarm += 1
        self._end()
        return left

    def _end(self) -> None:
        for link, size in self.loads.items():
            assert link.sharing is not None, "it has a share until it ends"
            moved = self.part_of(size)
            link.sharing.fluids.remove(self)
            link.account(moved, link.rate.time_for(moved))
        _rush_all(self.loads)
        for link in self.loads:
            if link.sharing is not None and not link.sharing.fluids:
                link.sharing = None

    def _set_alarm(self) -> None:
        self._alarm += 1
        left = max(0, self._waiting[-1] - self._progress()) * WHOLE
        instant = self._simulator.now - (-left // self._speed)
        self._simulator.call_at(instant, self._look, self._alarm)

    def _look(self, alarm: int) -> None:
        """See how far it is. It may have been held up since the alarm was set."""
        if alarm != self._alarm:
            return
        progress = self._progress()
        while self._waiting and self._waiting[-1] <= progress:
            self._marks[self._waiting.pop()].succeed()
        if self._waiting:
            self._set_alarm()
        else:
            self._end()


class Sharing:
    """The fluids that have a share of one link."""

    __slots__ = ("fluids",)

    def __init__(self) -> None:
        self.fluids: list[Fluid] = []

    def stretched(self, link: Link, duration: int, flows: int) -> int:
        """How long a chunk takes beside the fluids, which hear what it takes from them.

        Args:
            link: which carries it.
            duration: what the chunk takes on the link alone.
            flows: how many flows want the link, the chunk's own included.
        """
        demands = [fluid.demand(link) for fluid in self.fluids]
        share = fair_share(demands, flows)
        left = WHOLE - sum(min(demand, share) for demand in demands)
        longer = -(-duration * WHOLE // left)
        for fluid, demand in zip(self.fluids, demands, strict=True):
            if demand > share:
                fluid.lose(link, longer * (demand - share) // fluid.demands[link])
        return longer

    def work_so_far(self, link: Link) -> int:
        """How long the link would have been busy with what fluids have moved, alone."""
        return link.rate.time_for(self.bytes_so_far(link))

    def bytes_so_far(self, link: Link) -> int:
        """What fluids that are still there have moved over the link."""
        return sum(fluid.part_of(fluid.loads[link]) for fluid in self.fluids)


def fair_share(demands: Sequence[int], flows: int) -> int:
    """What each gets of a link who wants more than that; flows want all that they can get."""
    left, count = WHOLE, len(demands) + flows
    for demand in sorted(demands):
        if demand * count >= left:
            break
        left -= demand
        count -= 1
    return left // count if count else WHOLE


def _speed(link: Link, demand: int) -> int:
    """How fast a link lets a fluid go that demands so much of it."""
    assert link.sharing is not None, "the fluid has a share of it"
    fluids = link.sharing.fluids
    if len(fluids) == 1:
        return WHOLE
    share = fair_share([each.demands[link] for each in fluids], 0)
    return min(WHOLE, max(1, share) * WHOLE // demand)


def _rush_all(links: Iterable[Link]) -> None:
    """Work out the shares of all fluids anew that meet on some links."""
    there = [link.sharing.fluids for link in links if link.sharing is not None]
    for fluid in dict.fromkeys(each for fluids in there for each in fluids):
        fluid.rush()
