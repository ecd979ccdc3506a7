"""Flow transfers: they take a share of their links, instead of sending chunks over them.

A collective of a thousand ranks is two million messages. Where all of its links are its own, when
it ends is arithmetic (`ccl.message_execution`). Where it meets others, what they take from each
other is a matter of shares, and that needs no message either.

A transfer has so many bytes to move over each of its links in a time that it would take alone, so
it *demands* a share of each link, its work there over that time. It has *progress*, from 0 to that
time: a picosecond for each picosecond, while every link gives it what it demands.

**With other transfers.** A link whose demands exceed it is shared by weight, max-min fairly over
all links of all transfers that meet (`fair_shares`). A busy link serves in turn, a chunk each, so
the weight of a transfer is the bytes that it has on a link in one turn: a chunk for each lane.
Where a transfer has fewer bytes for each of them than on another link, they wait there only part of
the time, and its weight is less by as much. A transfer that waits for one link does not hold
another one (back-pressure, `links`), so lanes get max-min fair shares, and no weight depends on
what is under way. Speeds are worked out anew when a transfer comes or goes, for those that it
meets, directly or through others; once for all that come and go at one instant.

**Latency.** Collectives that meet begin together and wait together: what one leaves of a link while
it waits for latencies, another one does not take. So the part of a transfer's time in which it
moves nothing stays as it is, and the rest takes longer.

**With chunks.** A chunk that is carried while k flows want the link shares it by weight, too: each
of the k flows has a chunk in a turn. It takes longer by the transfers' part, and the transfers that
get less than they would go on later by what they have lost. Of what a transfer has lost on several
links, the most counts: its ranks wait for each other, so that one wait serves for all.

Time is counted in whole picoseconds, shares in parts of `WHOLE`. A speed is worked out in floats
whose operations and order are fixed, and rounded to such a part before it decides anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import numpy as np

from rankwise.sim.hardware.fair_shares import Uses, fair_speeds
from rankwise.sim.hardware.links import Link
from rankwise.sim.kernel import Future, Simulator

WHOLE = 1 << 20
"""All of a link."""
USUAL_CHUNK = 4_096
"""Bytes that a transfer without weights has on each link in a turn: a usual chunk of a flow."""


class FlowTransfer:
    """A transfer over many links at once.

    Args:
        simulator: whose time counts.
        name: what deadlock reports call it.
        loads: how many bytes it moves over each link.
        duration: picoseconds that it takes alone.
        marks: how much progress is waited for (`reached`).
        weights: the bytes that it has on each link in a turn.
        latency: the part of the duration in which it moves nothing.

    Attributes:
        duration, loads, weights, latency: as they were given.
        shares: of each link, while it moves; 1 is all of it.
        numbers: of the sharings of its links, in their order.
        weight: speed for each turn per picosecond, on the link where its lanes wait.
        demands: the share of each link that it would take alone.
    """

    def __init__(
        self,
        simulator: Simulator,
        name: str,
        loads: Mapping[Link, int],
        duration: int,
        marks: Iterable[int],
        *,
        weights: Mapping[Link, int] | None = None,
        latency: int = 0,
    ) -> None:
        self._simulator = simulator
        self.duration = duration
        self.loads = dict(loads)
        self.weights = dict.fromkeys(loads, USUAL_CHUNK) if weights is None else dict(weights)
        self.demands = {
            link: min(WHOLE, link.rate.time_for(size) * WHOLE // duration) if duration else 0
            for link, size in loads.items()
        }
        assert 0 <= latency <= duration, "it is a part of the duration"
        self.latency = latency
        turns = max((size / self.weights[link] for link, size in loads.items()), default=0.0)
        self.weight = max(1, duration - latency) / turns if turns else 1.0
        moving = max(1, duration - latency)
        self.shares = np.array(
            [min(1.0, max(1, link.rate.time_for(size)) / moving) for link, size in loads.items()]
        )
        self.numbers = np.zeros(0, np.int64)
        self.is_stale = False
        """Whether others have come or gone since its speed was worked out."""
        self.has_ended = False
        self._lost: dict[Link, int] = {}
        self._speed = WHOLE
        self._since = simulator.now
        self._done = self._lost_before = 0
        self._marks = {mark: simulator.future(name) for mark in sorted({*marks, duration})}
        self._waiting = list(self._marks)
        self._waiting.reverse()  # the next one is the last
        self._looks_at: int | None = None
        """The instant of the alarm that counts; others mean nothing."""
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

    def go_on_at(self, speed: int) -> None:
        """Go on at that speed, in parts of `WHOLE`, from now on."""
        self.is_stale = False
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
                link.sharing = Sharing(next(_numbers))
            link.sharing.transfers.append(self)
        self.numbers = np.array([_sharing_of(link).number for link in self.loads], np.int64)
        self._set_alarm()
        self._disturb()

    def _disturb(self) -> None:
        """Have the speeds worked out anew of those that it meets: it has come, or goes."""
        met = [link.sharing.transfers for link in self.loads if link.sharing is not None]
        found = dict.fromkeys(each for transfers in met if len(transfers) > 1 for each in transfers)
        for transfer in found:
            transfer.is_stale = True
        if found:
            self._simulator.call_at(self._simulator.now, _work_out, list(found))

    def stop(self) -> dict[int, Future]:
        """End it before its time, with what it has moved so far; the marks that are left."""
        left = {mark: self._marks[mark] for mark in self._waiting}
        self._looks_at = None
        self._end()
        return left

    def _end(self) -> None:
        self._disturb()
        self.has_ended = True
        for link, size in self.loads.items():
            assert link.sharing is not None, "it has a share until it ends"
            moved = self.part_of(size)
            link.sharing.transfers.remove(self)
            link.account(moved, link.rate.time_for(moved))
            if not link.sharing.transfers:
                link.sharing = None

    def _set_alarm(self) -> None:
        """Look when the next mark is due, unless a look is due before: it will see to the rest."""
        left = max(0, self._waiting[-1] - self._progress()) * WHOLE
        instant = self._simulator.now - (-left // self._speed)
        if self._looks_at is None or instant < self._looks_at:
            self._looks_at = instant
            self._simulator.call_at(instant, self._look, instant)

    def _look(self, instant: int) -> None:
        """See how far it is. It may have been held up since the alarm was set."""
        if instant != self._looks_at:
            return
        self._looks_at = None
        progress = self._progress()
        while self._waiting and self._waiting[-1] <= progress:
            self._marks[self._waiting.pop()].succeed()
        if self._waiting:
            self._set_alarm()
        else:
            self._end()


class Sharing:
    """The transfers that have a share of one link, and its number among all."""

    __slots__ = ("number", "transfers")

    def __init__(self, number: int) -> None:
        self.number = number
        self.transfers: list[FlowTransfer] = []

    def stretched(self, link: Link, duration: int, flows: int, chunk: int = USUAL_CHUNK) -> int:
        """How long a chunk takes beside the transfers, which learn what it takes from them.

        Args:
            link: which carries it.
            duration: what the chunk takes on the link alone.
            flows: how many flows want the link, the chunk's own included.
            chunk: its bytes, and those of the other flows in a turn.
        """
        demands = [transfer.demand(link) for transfer in self.transfers]
        weights = [transfer.weights[link] for transfer in self.transfers]
        # Only the cost of simulating makes the chunks of a long flow larger than usual.
        shares = shares_of(demands, weights, flows * min(chunk, USUAL_CHUNK))
        longer = -(-duration * WHOLE // (WHOLE - sum(shares)))
        for transfer, demand, share in zip(self.transfers, demands, shares, strict=True):
            if demand > share:
                transfer.lose(link, longer * (demand - share) // transfer.demands[link])
        return longer

    def work_so_far(self, link: Link) -> int:
        """How long the link would have been busy with what transfers have moved, alone."""
        return link.rate.time_for(self.bytes_so_far(link))

    def bytes_so_far(self, link: Link) -> int:
        """What transfers that are still there have moved over the link."""
        return sum(transfer.part_of(transfer.loads[link]) for transfer in self.transfers)


_numbers = count()
"""Tell links apart, and decide nothing else."""


def _sharing_of(link: Link) -> Sharing:
    assert link.sharing is not None, "a transfer has a share of it"
    return link.sharing


def shares_of(demands: Sequence[int], weights: Sequence[int], flows: int) -> list[int]:
    """What each transfer gets of a link beside flows of some weight, which want all they get."""
    shares = list(demands)
    left, total = WHOLE, sum(weights) + flows
    order = sorted(range(len(demands)), key=lambda index: demands[index] / weights[index])
    for place, index in enumerate(order):
        if demands[index] * total >= left * weights[index]:
            for other in order[place:]:
                shares[other] = left * weights[other] // total
            break
        left -= demands[index]
        total -= weights[index]
    return shares


def _work_out(stale: Iterable[FlowTransfer]) -> None:
    """Work out the speeds of stale transfers, and of all that they meet."""
    for transfer in stale:
        if transfer.is_stale and not transfer.has_ended:
            met = _all_that_meet(transfer)
            for each, speed in zip(met, _speeds(met), strict=True):
                each.go_on_at(speed)


def _all_that_meet(transfer: FlowTransfer) -> list[FlowTransfer]:
    """A transfer and those that it meets, directly or through others."""
    found, seen = {transfer: None}, set[Link]()
    waiting = [transfer]
    while waiting:
        for link in waiting.pop().loads:
            assert link.sharing is not None, "the transfer has a share of it"
            if len(link.sharing.transfers) > 1 and link not in seen:
                seen.add(link)
                new = [each for each in link.sharing.transfers if each not in found]
                found.update(dict.fromkeys(new))
                waiting += new
    return list(found)


def _speeds(transfers: Sequence[FlowTransfer]) -> list[int]:
    """How fast transfers go that share links with each other alone; in parts of `WHOLE`."""
    if len(transfers) == 1:
        return [WHOLE]
    numbers = np.concatenate([transfer.numbers for transfer in transfers])
    flow = np.repeat(np.arange(len(transfers)), [len(transfer.numbers) for transfer in transfers])
    present, link = np.unique(numbers, return_inverse=True)
    share = np.concatenate([transfer.shares for transfer in transfers])
    uses = Uses(flow, link, share, len(present))
    weights = np.array([transfer.weight for transfer in transfers])
    speeds = fair_speeds(uses, weights)
    # In its latency a transfer moves nothing.
    duration = np.array([max(1, transfer.duration) for transfer in transfers], np.float64)
    latency = np.array([transfer.latency for transfer in transfers], np.float64)
    overall = duration / (latency + (duration - latency) / speeds)
    return [max(1, speed) for speed in np.rint(WHOLE * overall).astype(np.int64).tolist()]
