"""Time a ring on the machine by messages: the rounds of all ranks at once, in numpy.

A collective without the rounds of a ring is timed by its programs (`message_graph`).

Every rank sends one message in each round, spread over its lanes. A message has two times: when its
*head*, the first slot of each lane, can be forwarded, and when its *tail*, the last slot, can. A
message that a rank sends on follows the one that it receives from head to tail, so the ring
is a pipeline here as it is queue by queue (`execution`):

    start   = max(head is there, way is free)
    end     = max(start + message / bandwidth, tail is there + slot / bandwidth); the way is free
    at the next rank, head = start + slots of all lanes / bandwidth + latency + combining
                      tail = end + latency + combining

The latency is that of the whole way between two PEs. The bandwidth is that of the scarcest thing
on it: links by how many lanes and ranks use them in a round, the DMA engine, HBM channel, scratch
memory and math engine of a lane by what each byte asks of them, and the slots of a queue by how
long one is under way. Combining takes the math engine, and the operand that must have been loaded.
A part that is too large to stay in scratch memory is stored and loaded before it is sent on.

**Lanes on one wire.** The lanes begin together, and their chunks take turns on the wire: the first
slots of all are there at once, after as long as all of them take. From round to round the lanes get
apart, since a lane that is ahead finds the wire free. Three lanes and more do so the faster the
more they are, until each slot has the wire for itself; two stay a few chunks apart. How fast is
measured, not derived: it is the one figure here that was fitted to the level of queues.

**Images.** Devices are alike: what is inside of them is looked at in one pair, and holds for all.
If the wires between them and the parts are alike, too, all ranks do the same at the same instants,
and one stands for all.

Nothing of that knows of others on the links: it is how long the collective takes alone. As a *flow
transfer* (`hardware.flow_model`) it then shares the wires between the devices, and those between
cubes, with whatever else goes over them. Inside of a cube it meets no other.

The ranks begin together, when the last one has come; a rank that has come before would have sent
its first messages ahead, which no other rank could have answered with more than a few.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rankwise.core.collectives.ring import RingRound
from rankwise.sim.ccl.configuration import QueueLayout
from rankwise.sim.ccl.execution import pass_on
from rankwise.sim.ccl.message_graph import MessageGraph
from rankwise.sim.ccl.message_model import Picoseconds
from rankwise.sim.ccl.message_pes import Elements, Lanes, PeTimes
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.ccl.wire_classes import WireClass, WireClasses, wire_classes
from rankwise.sim.hardware.flow_model import FlowTransfer
from rankwise.sim.hardware.hardware_machine import HardwareMachine
from rankwise.sim.hardware.links import Link
from rankwise.sim.hardware.quantities import MIB, picoseconds
from rankwise.sim.kernel import Future, Steps


class MessageExecution:
    """One collective on its way, by messages.

    Args:
        machine: where it runs.
        plan: what its ranks do; rings by their rounds, others by their programs.
        lanes: those of every rank; equally many for all.
        layout: of the queues between them, with everything that suits the machine.
        work: what is done with the elements.
        name: what deadlock reports call it.
    """

    def __init__(
        self,
        machine: HardwareMachine,
        plan: Plan,
        lanes: Sequence[Lanes],
        layout: QueueLayout,
        work: Elements,
        *,
        name: str = "collective",
    ) -> None:
        self._machine = machine
        self._plan = plan
        self._lanes = [lanes[rank] for rank in plan.ring] if plan.rounds else list(lanes)
        self._layout = layout
        self._work = work
        self._name = name
        self._began = machine.simulator.future(f"all ranks of {name}")
        self._missing = len(lanes)
        self._reached: list[Future] | None = None
        self._transfer: FlowTransfer | None = None
        self._is_kept, self._alone = True, 0
        """Whether parts stay in the TCM, and how long it takes alone; known with the ends."""
        self._still = 0
        """Of the time alone: that in which no bytes move, since latencies count."""
        self._share = Fraction(1)
        """Of the collective, what the transfer moves."""

    def rank_steps(self, rank: int) -> Steps:
        """The program of one rank; the generator ends when the rank has its result."""
        self._missing -= 1
        if self._missing:
            yield self._began
        else:
            self._begin()
            self._began.succeed()
        if self._reached is not None:
            yield self._reached[rank]

    def time_alone(self) -> int:
        """Picoseconds until the last rank has its result, if all begin at 0."""
        return max(self._ends()) if self._plan.moves_anything else 0

    def _begin(self) -> None:
        if not self._plan.moves_anything:
            return
        ends = self._ends()
        self._transfer = self._started(self._loads(), max(ends), ends)
        self._reached = [self._transfer.reached(end) for end in ends]
        if self._machine.topology.faults is not None:
            self._machine.rerouted.add_callback(self._go_on)

    def _go_on(self, _death: Future) -> None:
        """Links have died: what is left takes other ways, and as long as it takes there."""
        before, ends = self._transfer, self._ends()
        assert before is not None, "it has begun"
        left = before.duration - before.progress()
        if not left:
            return
        self._share *= Fraction(left, before.duration)
        alone = round(max(ends) * self._share)
        # By future, not by mark: of what is left much sooner, two marks may have become one.
        marks = {
            future: alone - (before.duration - mark) * alone // left
            for mark, future in before.stop().items()
        }
        loads = {link: round(size * self._share) for link, size in self._loads().items()}
        transfer = self._transfer = self._started(loads, alone, marks.values())
        for future, mark in marks.items():
            transfer.reached(mark).add_callback(partial(pass_on, future))
        self._machine.rerouted.add_callback(self._go_on)

    def _ends(self) -> list[int]:
        """By rank: how long after all have begun it has its result, without other traffic."""
        rounds = self._plan.rounds
        if rounds is None:
            times = MessageGraph(
                self._machine, self._plan, self._lanes, self._layout, self._work
            ).times()
            self._alone = max(times.ends)
            self._still = max(0, self._alone - times.moving)
            return times.ends
        timing = RingTiming(self._machine, self._plan, self._lanes, self._layout, self._work)
        ends = timing.ends(rounds)
        self._is_kept, self._alone = timing.is_kept, max(ends)
        self._still = max(0, max(ends) - timing.moving)
        by_rank = [0] * len(ends)
        for rank, end in zip(self._plan.ring, ends, strict=True):
            by_rank[rank] = end
        return by_rank

    def _started(self, loads: dict[Link, int], duration: int, marks: Iterable[int]) -> FlowTransfer:
        """Start a transfer for all messages, or for what is left of them."""
        layout, lanes = self._layout, self._lanes
        assert layout.vc_chunk_size is not None, "it is known by now"
        longest = self._plan.longest_message
        own = longest * self._work.item_bytes // len(lanes[0].pes)
        turn = min(layout.vc_chunk_size, max(1, own))
        lanes_over = self._lanes_over()
        return FlowTransfer(
            self._machine.simulator,
            self._name,
            loads,
            duration,
            marks,
            # The parts of a PE have no weights of their own: lanes wait on the wires.
            weights={link: max(1, lanes_over[link] * turn or size) for link, size in loads.items()},
            latency=round(self._still * self._share),
        )

    def _lanes_over(self) -> Counter[Link]:
        """How many lanes send over each link, those to all next ranks counted."""
        if self._plan.rounds is None:
            classes = self._classes()
            if classes is not None:
                lanes = len(self._lanes[0].pes)
                return self._over_classes(
                    classes, dict.fromkeys(self._plan.elements_sent_by(classes.first), lanes)
                )
            pairs = {pair: len(self._lanes[pair[0]].pes) for pair in self._plan.ways()}
            return self._over_ways(pairs)
        return self._over_links([len(each.pes) for each in self._lanes])

    def _loads(self) -> dict[Link, int]:
        """The bytes over each wire between devices and cubes, and through busy parts of PEs."""
        if self._plan.rounds is None:
            item = self._work.item_bytes
            classes = self._classes()
            if classes is not None:
                sent_by_one = self._plan.elements_sent_by(classes.first)
                loads = self._over_classes(
                    classes, {peer: count * item for peer, count in sent_by_one.items()}
                )
            else:
                loads = self._over_ways(
                    {pair: count * item for pair, count in self._plan.elements_sent().items()}
                )
            if self._machine.combines_in_switches:
                self._save_by_switches(loads, item)
            return loads
        sent = [
            sum(self._plan.elements_sent_by(rank).values()) * self._work.item_bytes
            for rank in self._plan.ring
        ]
        return self._over_links(sent) + self._inside_pes(sent)

    def _save_by_switches(self, loads: Counter[Link], item: int) -> None:
        """Take from the wires what a switch copies or combines: it crosses them once."""
        unit = self._machine.topology.machine.system.sips.multicast_unit
        for rank, own in enumerate(self._lanes):
            copied, combined = self._plan.saved_by_switches(rank)
            near = (each.sip for each in self._lanes if each.sip // unit == own.sip // unit)
            other = next((sip for sip in near if sip != own.sip), None)
            if other is None:
                continue
            loads[self._machine.sip_links(own.sip, other)[0]] -= copied * item
            loads[self._machine.sip_links(other, own.sip)[-1]] -= combined * item

    def _inside_pes(self, sent: Sequence[int]) -> Counter[Link]:
        """The bytes through parts of PEs that few collectives at once would fill."""
        rounds, lanes = self._plan.rounds, self._lanes
        assert rounds, "only rings have a message level"
        # For each round: what comes in is stored, an operand loaded, and what is sent, unless it is
        # still in scratch memory.
        through_memory = len(rounds) + sum(each.combines for each in rounds)
        through_memory += 1 if self._is_kept else len(rounds)
        loads: Counter[Link] = Counter()
        for own, size in zip(lanes, sent, strict=True):
            of_lane = size // len(own.pes)
            moved = of_lane * through_memory // len(rounds)
            # Lanes are alike: if the first one's parts have room, there is nothing to look for.
            for lane, number in enumerate(own.pes):
                pe = self._machine.sip(own.sip).pe(number)
                assert pe.tcm.port is not None, "memories of a PE have ports"
                assert pe.hbm.port is not None, "memories of a PE have ports"
                own_loads = (
                    (pe.hbm.port, moved),
                    (pe.dma_engine, moved),
                    (pe.tcm.port, moved + 2 * of_lane),
                )
                if not lane and not any(self._fills(*each) for each in own_loads):
                    break
                for link, amount in own_loads:
                    loads[link] += amount
        return loads

    def _fills(self, link: Link, size: int) -> bool:
        """Whether as many collectives as meet on a PE could fill a part of it together."""
        return link.rate.time_for(size) * _MEET_ON_PE > self._alone

    def _over_links(self, sent: Sequence[int]) -> Counter[Link]:
        """What goes over each wire, if each rank sends so much to the next one."""
        count = len(self._lanes)
        return self._over_ways({(here, (here + 1) % count): size for here, size in enumerate(sent)})

    def _classes(self) -> WireClasses | None:
        """The wires that carry the same, if all ranks do the same."""
        if any(each.pes != self._lanes[0].pes for each in self._lanes):
            return None
        homes = [each.sip for each in self._lanes]
        return wire_classes(self._machine.topology, homes, self._plan.symmetry)

    def _over_classes(self, classes: WireClasses, sent: Mapping[int, int]) -> Counter[Link]:
        """What goes over each wire, if each rank sends to others what the first one does."""
        machine, first = self._machine, classes.first
        carried: Counter[WireClass] = Counter()
        for peer, size in sent.items():
            for _, each in classes.on_way(first, peer):
                carried[each] += size
        loads: Counter[Link] = Counter()
        for (one, other), each in classes.all_hops():
            if each in carried:
                loads[machine.wire("sip", -1, one, other)] += (
                    carried[each] * classes.count // each.size
                )
        pes = self._lanes[0].pes
        cubes = Counter(pe // machine.topology.machine.cube.pes.count for pe in pes)
        everything = sum(sent.values())
        for own in self._lanes:
            for cube, count in cubes.items():
                for way in ((cube, 0), (0, cube)):
                    for link in machine.cube_links(own.sip, *way):
                        loads[link] += everything * count // len(pes)
        return loads

    def _over_ways(self, sent: Mapping[tuple[int, int], int]) -> Counter[Link]:
        """What goes over each wire, if so much goes from one place in the lanes to another."""
        machine, lanes = self._machine, self._lanes
        loads: Counter[Link] = Counter()
        of_cubes = machine.topology.machine.cube.pes.count
        cubes = [Counter(pe // of_cubes for pe in each.pes) for each in lanes]
        for (here, there), size in sent.items():
            source, target = lanes[here].sip, lanes[there].sip
            if source == target:
                continue
            for link in machine.sip_links(source, target):
                loads[link] += size
            for cube, count in cubes[here].items():
                for link in machine.cube_links(source, cube, 0):
                    loads[link] += size * count // len(lanes[here].pes)
            for cube, count in cubes[there].items():
                for link in machine.cube_links(target, 0, cube):
                    loads[link] += size * count // len(lanes[there].pes)
        return loads


class _Ways:
    """The ways from each position of the ring to the next.

    Attributes:
        latency: from the first byte's leaving to its arrival, in the lane that it takes longest.
        mebibyte: how long one of all lanes together takes where it is narrowest.
    """

    def __init__(self, machine: HardwareMachine, lanes: Sequence[Lanes]) -> None:
        inside: dict[Hashable, tuple[int, int]] = {}
        pairs = list(zip(lanes, [*lanes[1:], lanes[0]], strict=True))
        wires = [
            [] if one.sip == other.sip else machine.sip_links(one.sip, other.sip)
            for one, other in pairs
        ]
        users = Counter(link for way in wires for link in way)
        latency, mebibyte = [], []
        for (one, other), way in zip(pairs, wires, strict=True):
            alike = _alike(machine, one.sip), _alike(machine, other.sip)
            key = (one.sip == other.sip, one.pes, other.pes, *alike)
            if key not in inside:
                inside[key] = _inside(machine, one, other, way)
            latency.append(inside[key][0] + sum(link.latency for link in way))
            narrowest = max((link.rate.time_for(MIB * users[link]) for link in way), default=0)
            mebibyte.append(max(inside[key][1], narrowest))
        self.latency: Picoseconds = np.array(latency, np.int64)
        self.mebibyte: Picoseconds = np.array(mebibyte, np.int64)


def _alike(machine: HardwareMachine, sip: int) -> int:
    """Equal for devices that are alike inside: their numbers where they have faults of theirs."""
    faults = machine.topology.faults
    return sip if faults is not None and faults.is_inside(sip) else -1


def _inside(
    machine: HardwareMachine, one: Lanes, other: Lanes, wires: Sequence[Link]
) -> tuple[int, int]:
    """Of a way inside of its devices: the latency, and how long a mebibyte of all lanes takes."""
    paths = [
        machine.path(machine.sip(one.sip).pe(here).tcm, machine.sip(other.sip).pe(there).tcm)
        for here, there in zip(one.pes, other.pes, strict=True)
    ]
    outside = sum(link.latency for link in wires)
    users = Counter(link for path in paths for link in path if link not in wires)
    slowest = max(link.rate.time_for(MIB * count) for link, count in users.items())
    return max(path.latency for path in paths) - outside, slowest // len(paths)


class RingInstants(NamedTuple):
    """What is known between two rounds, by position; of one position if all are alike.

    Attributes:
        head: the first slot of each lane can be sent on.
        tail: the last slot can.
        free: the way to the next position is free.
        came: the last message has arrived.
    """

    head: Picoseconds
    tail: Picoseconds
    free: Picoseconds
    came: Picoseconds

    def later(self, by: int) -> "RingInstants":
        """All instants so much later."""
        return RingInstants(*(each + by for each in self))

    def uniform_step_from(self, before: "RingInstants") -> int | None:
        """By how much all instants are later than those before; None if they differ in that."""
        step = int(self.head[0] - before.head[0])
        if all((mine - other == step).all() for mine, other in zip(self, before, strict=True)):
            return step
        return None


class RingTiming:
    """The recurrence of the module's text; arrays by position on the ring, or of one for all.

    Values that depend on the size of a part are in arrays by its length: parts have two lengths at
    most. Values that depend on the PEs are by device besides, where devices have faults of their
    own, and there the slowest lane counts; else lane 0 of the first one stands for all.

    Equal rounds are replayed: as soon as some delay all instants equally, so do those that follow.
    """

    def __init__(
        self,
        machine: HardwareMachine,
        plan: Plan,
        lanes: Sequence[Lanes],
        layout: QueueLayout,
        work: Elements,
    ) -> None:
        ways = _Ways(machine, lanes)
        self._count = len(lanes)
        self._latency, self._mebibyte = ways.latency, ways.mebibyte
        self.moving = 0
        kinds = {_alike(machine, each.sip): each for each in reversed(lanes)}
        numbers = {kind: number for number, kind in enumerate(kinds)}
        self._kind = np.array([numbers[_alike(machine, each.sip)] for each in lanes])
        self._pes = [
            [
                PeTimes(machine, each, lane, work)
                for lane in range(len(each.pes) if kind >= 0 else 1)
            ]
            for kind, each in kinds.items()
        ]
        lengths, self._length_of = np.unique(plan.part_elements, return_inverse=True)
        if len(lengths) == 1 and all(map(_is_one, (self._latency, self._mebibyte, self._kind))):
            # All do the same at the same instants.
            self._latency, self._mebibyte = self._latency[:1], self._mebibyte[:1]
            self._length_of, self._kind = self._length_of[:1], self._kind[:1]
        lane_count = len(lanes[0].pes)
        own = -(-lengths // lane_count) * work.item_bytes
        self._size = lengths * work.item_bytes
        self._slots = np.maximum(1, -(-own // layout.slot_size))
        self._first = np.minimum(own, layout.slot_size)
        self._last = own - (self._slots - 1) * layout.slot_size
        self._others = np.minimum(self._first * lane_count, self._size) - self._first
        """Bytes of the other lanes' first slots."""
        assert layout.vc_chunk_size is not None, "it is known by now"
        self._get_apart = (lane_count - 1) ** 2 * layout.vc_chunk_size // 3
        """By so many of them the lanes get apart in a round. The third is fitted, to rings of 16 Ki
        to 1 Mi f16: with it they are within 2.4 % of queues. Without it, some are 13 to 56 %
        longer; with three times as much, up to 14 % shorter."""
        if lane_count == _PAIR:
            # Fitted: 16 Ki f16 on 4 ranks are 1.6 % off with it, and 2.6 % longer without.
            self._others = np.maximum(0, self._others - 9 * layout.vc_chunk_size // 2)
            self._get_apart = 0
        self.is_kept = bool(own.max() <= self._pes[0][0].keeps_bytes)
        assert layout.n_slots is not None, "it is known by now"
        wake = picoseconds(machine.topology.machine.pe.ipcq.wake_ns)
        slot = _time_over(self._first.max(), self._mebibyte)
        self._slot_pace = (2 * self._latency + slot + wake) // layout.n_slots
        """A slot of a lane after the other can be sent so fast, as credits come back."""
        self._load = self._by_slot(PeTimes.load)
        self._store = self._by_slot(PeTimes.store)
        self._combine = self._by_slot(PeTimes.combine)
        self._busy = {
            combines: self._slots
            * self._by_slot(
                partial(PeTimes.pass_on, combines=combines, loads_first=not self.is_kept)
            )[0]
            for combines in (False, True)
        }

    def ends(self, rounds: Sequence[RingRound]) -> list[int]:
        """By position: when a rank has its result, if all begin at 0."""
        now, moving = self.at_begin(rounds), np.zeros_like(self._latency)
        following = self._equal_rounds(rounds)
        passed = 0
        latest: deque[RingInstants] = deque(maxlen=_PERIOD_MOST)
        while passed < len(rounds):
            latest.appendleft(now)
            now, duration = self.after_round(now, passed, rounds)
            moving = moving + duration
            passed += 1
            equal = following[passed - 1]
            for period, before in enumerate(latest, start=1):
                if equal < period or following[passed - period] != equal + period - 1:
                    break
                step = now.uniform_step_from(before)
                if step is not None:
                    # A round knows differences of instants alone: what some have done, equal ones
                    # do again. Rounding and operands alternate, so it may take several.
                    times = equal // period
                    now = now.later(times * step)
                    moving = moving + times * period * duration
                    passed += times * period
                    latest.clear()
                    break
        self.moving = int(moving.max())
        return self.at_end(now, rounds)

    def at_begin(self, rounds: Sequence[RingRound]) -> RingInstants:
        """The instants before the first round."""
        zero = np.zeros_like(self._latency)
        sends = np.roll(self._length_of, -rounds[0].offset)
        load_first, load_last = (each[self._kind, sends] for each in self._load)
        return RingInstants(load_first, load_last, zero, zero)

    def at_end(self, now: RingInstants, rounds: Sequence[RingRound]) -> list[int]:
        """By position: when a rank has its result, from the instants after the last round."""
        _, store_last = self._store
        got = np.roll(self._length_of, 1 - rounds[-1].offset)
        ends = np.maximum(now.free, now.tail + store_last[self._kind, got])
        return [int(end) for end in np.broadcast_to(ends, self._count)]

    def _equal_rounds(self, rounds: Sequence[RingRound]) -> list[int]:
        """By round: how many of those after it take what it takes."""
        following = [0] * len(rounds)
        if len(self._size) > 1:
            return following
        # In the last round, nothing is loaded again to be sent on.
        last = len(rounds) - 1 if self.is_kept else len(rounds) - 2
        for number in reversed(range(last)):
            is_apart = not (self._get_apart and (self._together(number) > 0).any())
            if is_apart and rounds[number].combines == rounds[number + 1].combines:
                following[number] = following[number + 1] + 1
        return following

    def _together(self, number: int) -> Picoseconds:
        """Bytes of the other lanes' first slots that still come together in a round."""
        together: Picoseconds = np.maximum(0, self._others - number * self._get_apart)
        return together

    def after_round(
        self, now: RingInstants, number: int, rounds: Sequence[RingRound]
    ) -> tuple[RingInstants, Picoseconds]:
        """The instants at the next positions after a round, and how long its messages took."""
        here, (head, tail, free, came) = self._kind, now
        offset, combines = rounds[number]
        sends = np.roll(self._length_of, -offset)
        slots = self._slots[sends]
        duration = _time_over(self._size[sends], self._mebibyte)
        duration = np.maximum(duration, self._busy[combines][here, sends])
        duration = np.maximum(duration, np.where(slots > 1, slots * self._slot_pace, 0))
        begin = np.maximum(head, free)
        last_slots = _time_over(self._last[sends], self._mebibyte)
        free = np.maximum(begin + duration, tail + last_slots)
        together = self._together(number)
        ahead = self._first + together
        head = begin + self._latency + _time_over(ahead[sends], self._mebibyte)
        tail = free + self._latency
        # From here on at the next position.
        head, tail, before, got = (
            np.roll(array, 1) for array in (head, tail, np.where(slots > 1, last_slots, -1), sends)
        )
        arrived = tail
        if combines:
            (load_first, load_last), (combine_first, combine_last) = self._load, self._combine
            # A lane loads an operand as it has got its slot before, not the last one of all:
            # lanes that are apart are served one after the other.
            between = _time_over((self._others - together)[got], self._mebibyte)
            loaded = came - between + load_first[here, got]
            # Waiting for operands draws slots apart, until each has time to load its own.
            apart = (tail - head) // np.maximum(1, self._slots[got] - 1)
            head = np.maximum(head, loaded) + combine_first[here, got]
            previous = np.where(before >= 0, tail - np.maximum(before + between, apart), came)
            tail = np.maximum(tail, previous + load_last[here, got]) + combine_last[here, got]
        if not self.is_kept and number + 1 < len(rounds):
            (load_first, load_last), (store_first, store_last) = self._load, self._store
            head = head + (store_first + load_first)[here, got]
            tail = tail + (store_last + load_last)[here, got]
        return RingInstants(head, tail, free, arrived), duration

    def _by_slot(self, time_of: Callable[[PeTimes, int], int]) -> tuple[Picoseconds, Picoseconds]:
        """How long the first and the last slot of a part take, by kind of device and length."""
        first, last = (
            np.array(
                [[max(time_of(pe, int(size)) for pe in pes) for size in sizes] for pes in self._pes]
            )
            for sizes in (self._first, self._last)
        )
        return first, last


def _time_over(size: Any, mebibyte: Picoseconds) -> Picoseconds:
    """How long so many bytes take where a mebibyte takes so long; their product has no 63 bits."""
    whole, rest = np.divmod(size, MIB)
    high, low = np.divmod(mebibyte, MIB)
    time: Picoseconds = whole * mebibyte + rest * high + rest * low // MIB
    return time


_PERIOD_MOST = 4
"""The longest period, in rounds, that is looked for."""
_PAIR = 2
_MEET_ON_PE = 8
"""A part of which a collective takes less than an eighth is not looked at: wires fill before. Up to
eight that meet have been compared; where PEs fill, `auto` keeps to queues (`fidelity`)."""


def _is_one(array: Picoseconds) -> bool:
    return bool((array == array[0]).all())
