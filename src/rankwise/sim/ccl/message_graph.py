"""Time any collective on the machine by messages: those that its programs say, as flows.

Each instruction of each rank is a *step*. A send is a flow over the links of its way and through
the memories of both PEs; flows that are under way at an instant have max-min fair rates
(`hardware.fair_shares`), by lanes. Equal flows begin and end at equal instants, so that all of them
are one event: a thousand ranks that do the same cost what a few do.

A step has two times, as round a ring (`message_execution`): its *head*, when the first slot of each
lane may be used, and its *tail*, when the last one may. A step that is about the same span
as the one that it waits for follows it slot by slot, from head to tail; any other one waits for the
end. So trees and recursive doubling are pipelines, and halving is not.

    start of a send   = head of what it waits for, and the first slot is loaded
    end of a send     = when its flow has moved all bytes, and its last slot after the tail of that
    head of a receive = start + latency + first slots of the lanes + combining
    tail of a receive = end + latency + combining; stored, it is done

A local step begins when what it reads is there on its first lane, and its last lane ends as much
later as it has begun later.

If all ranks do the same on a network that is alike for all (`wire_classes`), one rank is looked at.
What it sends to the rank some places ahead is what it receives from the one as far behind.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from rankwise.core.collectives.program import Copy, Fold, Instruction, Receive, Send
from rankwise.sim.ccl.configuration import QueueLayout
from rankwise.sim.ccl.execution import LOADS_AHEAD, dependencies
from rankwise.sim.ccl.message_pes import Elements, Lanes, PeRates, PeTimes
from rankwise.sim.ccl.plan import Plan
from rankwise.sim.ccl.switched_messages import leaders
from rankwise.sim.ccl.wire_classes import wire_classes
from rankwise.sim.hardware.fair_shares import Figures, Numbers, Uses, fair_speeds
from rankwise.sim.hardware.hardware_machine import HardwareMachine
from rankwise.sim.hardware.links import CHUNKS_PER_FLOW_MAX, Link
from rankwise.sim.hardware.quantities import picoseconds


class GraphTimes(NamedTuple):
    """How long a collective takes alone.

    Attributes:
        ends: by rank, when it has its result.
        moving: the time in which bytes move at the busiest rank.
    """

    ends: list[int]
    moving: int


_Used = Sequence[tuple[int, float]]
"""What is used, and for how long per byte."""


class _Stage(NamedTuple):
    """What a message uses from one instant on: a wire, or what the sender or the receiver has."""

    latency: int
    """How long after its beginning the first byte is there."""
    begin: int
    end: int
    """From where to where in the table its uses stand: by whom, and for how long per byte."""


class _Way(NamedTuple):
    """From the lanes of one rank to those of another."""

    latency: int
    stages: tuple[_Stage, ...]
    """Those of the sender, of the wires, and of the receiver; the first begins at once."""
    cap: float
    """The least time per byte that one message takes."""
    ahead: float
    """The same before its first byte is there: slots are loaded ahead of what the receiver does."""
    pace: float = 0.0
    """The least time per byte in which a sender fills slots, as long as there are free ones."""
    window: float = float("inf")
    """So many bytes the slots hold."""
    round_trip: float = 0.0
    """How long after a slot is sent its credit is back."""
    uneven: float = 0.0
    """The part of its time that the first lane ends before the last, if the wires are full."""
    wire: int | None = None
    """What it uses first outside of the device."""

    @property
    def second(self) -> float:
        """How long after its beginning the second stage is reached; infinite if there is none."""
        return self.stages[1].latency if len(self.stages) > 1 else float("inf")

    def moved_when_sent(self, size: float) -> float:
        """How many bytes of a message have moved when its last slot gets a credit."""
        if size <= self.window:
            return 0.0
        return min(size, size - self.window + self.round_trip / self.cap)

    def least(self, size: float, cap: float) -> float:
        """The least time per byte of a message: each time all slots are full, it waits for credits.

        Args:
            size: its bytes.
            cap: the least time per byte if there are slots enough.
        """
        full = (size - 1) // self.window if size > self.window else 0
        waiting = full * self.round_trip + (size - full * self.window) * cap
        return max(cap, waiting / size)


class _Step:
    """An instruction of a rank, and what is known of its head and its tail so far."""

    __slots__ = (
        "began", "combines", "depth", "done", "early", "flowed_at", "followers", "follows", "frees",
        "head", "head_missing", "is_in_tcm", "is_sent", "kind", "left", "local",
        "peers", "rank", "reached", "size", "sources", "tail", "tail_missing", "target", "way",
        "weight",
    )  # fmt: skip

    def __init__(self, rank: int, kind: str, size: int) -> None:
        self.rank, self.kind, self.size = rank, kind, size
        self.head = self.tail = self.done = 0.0
        self.head_missing = self.tail_missing = 0
        self.followers: list[tuple[_Step, bool, bool]] = []
        """What waits for it: whether slot by slot, and whether from scratch memory."""
        self.peers: list[_Step] = []
        """What receives it; several if a switch copies it. Of a load or a store, whose it is."""
        self.target = -1
        self.way: _Way | None = None
        self.combines = self.is_in_tcm = self.follows = False
        self.local = self.flowed_at = 0.0
        self.depth = 0
        """How many messages it follows, one after the other."""
        self.sources = 0
        """Of a local step: how many spans it loads. Of a receive: how many messages it is of."""
        self.frees: list[_Step] = []
        """Local steps that write what it reads: they wait until its last slot is loaded."""
        self.is_sent = False
        """Whether that is so: slots that have a credit wait before a wire that is not free."""
        self.began = 0.0
        """Of a local step: when its first lane begins; its lanes end as far apart as they begin."""
        self.reached: list[float] = []
        """By stage of its way at which the first byte has been: how much had moved by then."""
        self.left = 0
        """How many of the stages the last byte has left."""
        self.early = 0.0
        """Bytes of a send that are missing when its first lane is done; 0 if no step waits."""
        self.weight = float(LOADS_AHEAD)
        """How many slots it has in the queue of a memory, which serves chunks in turn."""


class _Flows:
    """The messages that are under way, in the order in which they have begun; arrays by message.

    A message passes its stages like a train. It is at a stage from the instant at which its first
    byte is there, and until as many bytes as it has have moved since then. Bytes move at one rate
    over all stages at which it is.
    """

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.moved: Figures = np.zeros(0)
        """Bytes that have moved, at whatever stage."""
        self.leaves: Figures = np.zeros(0)
        """With so many it leaves the first stage at which it is."""
        self.rates: Figures = np.zeros(0)
        """Zero while all of it is between two stages."""
        self.arrives: Figures = np.zeros(0)
        """When the first byte reaches the next stage; infinite if there is none."""
        self.early: Figures = np.zeros(0)
        """With so many its first lane is sent; infinite if that is over, or told to none."""
        self.least: Figures = np.zeros(0)
        """The least time per byte."""
        self.uses: Numbers = np.zeros((0, 2), np.int64)
        """Where in the table of uses its own ones begin and end, by now."""
        self.weights: Figures = np.zeros(0)

    def __len__(self) -> int:
        return len(self.steps)

    def next_instant(self, now: float) -> float:
        """When the next one reaches or leaves a stage."""
        if not self.steps:
            return float("inf")
        moves = self.rates > 0
        left = np.full(len(self.steps), np.inf)
        until = np.minimum(self.leaves, self.early)
        np.divide(until - self.moved, self.rates, out=left, where=moves)
        return min(now + float(left.min()), float(self.arrives.min()))

    def pass_time(self, passed: float) -> list[_Step]:
        """Let bytes move; of which the first lane is sent now."""
        self.moved += self.rates * passed
        early = (self.rates > 0) & (self.early - self.moved <= self.rates * _TOGETHER)
        self.early[early] = np.inf
        return [self.steps[number] for number in np.flatnonzero(early).tolist()]

    def leave(self) -> tuple[list[_Step], list[_Step], list[_Step]]:
        """Which are sent, which have left their sender, and which their last stage."""
        leave = (self.rates > 0) & (self.leaves - self.moved <= self.rates * _TOGETHER)
        if not leave.any():
            return [], [], []
        sent, emptied, ended = [], [], []
        goes_on = np.ones(len(self.steps), bool)
        for number in np.flatnonzero(leave).tolist():
            step = self.steps[number]
            assert step.way is not None, "it goes somewhere"
            if not step.is_sent:
                step.is_sent = True
                sent.append(step)
                self._take_place(number, step, step.way)
                if self.leaves[number] - self.moved[number] > self.rates[number] * _TOGETHER:
                    continue
            if not step.left:
                emptied.append(step)
            step.left += 1
            if step.left == len(step.way.stages):
                ended.append(step)
                goes_on[number] = False
                continue
            self._take_place(number, step, step.way)
        if ended:
            self.steps = [self.steps[number] for number in np.flatnonzero(goes_on).tolist()]
            self.moved, self.leaves = self.moved[goes_on], self.leaves[goes_on]
            self.rates, self.arrives = self.rates[goes_on], self.arrives[goes_on]
            self.early = self.early[goes_on]
            self.least, self.uses = self.least[goes_on], self.uses[goes_on]
            self.weights = self.weights[goes_on]
        return sent, emptied, ended

    def _take_place(self, number: int, step: _Step, way: _Way) -> None:
        """Say what is used at the stages at which a message is, and when it leaves one."""
        first, count = step.left, len(step.reached)
        if first == count:  # all of it is on its way to the next one
            self.uses[number] = 0
            return
        self.uses[number] = way.stages[first].begin, way.stages[count - 1].end
        if step.is_sent:
            self.leaves[number] = step.reached[first] + step.size

    def arrive(self, now: float) -> None:
        """Let those whose first byte is at the next stage use what is there."""
        there = self.arrives <= now + _TOGETHER
        for number in np.flatnonzero(there).tolist():
            step = self.steps[number]
            way = step.way
            assert way is not None, "it goes somewhere"
            while len(step.reached) < len(way.stages):
                at = step.began + way.stages[len(step.reached)].latency
                if at > now + _TOGETHER:
                    self.arrives[number] = at
                    break
                step.reached.append(float(self.moved[number]))
            else:
                self.arrives[number] = np.inf
                self.least[number] = way.least(step.size, way.cap)
            self._take_place(number, step, way)

    def begin(self, steps: list[_Step], now: float) -> None:
        """Take in more."""
        ways = [step.way for step in steps if step.way is not None]
        for step in steps:
            step.began = now
            step.reached.append(0.0)
        self.steps += steps
        self.moved = np.append(self.moved, np.zeros(len(steps)))
        sent = [
            way.moved_when_sent(step.size) if step.frees else float(step.size)
            for step, way in zip(steps, ways, strict=True)
        ]
        self.leaves = np.append(self.leaves, sent)
        self.rates = np.append(self.rates, np.zeros(len(steps)))
        early = [step.size - step.early if step.early else np.inf for step in steps]
        self.early = np.append(self.early, early)
        self.arrives = np.append(self.arrives, [now + way.second for way in ways])
        self.least = np.append(self.least, [way.ahead for way in ways])
        self.weights = np.append(self.weights, [step.weight for step in steps])
        uses = [(way.stages[0].begin, way.stages[0].end) for way in ways]
        self.uses = np.concatenate([self.uses, uses])

    def share(self, resources: Numbers, times: Figures, link_count: int) -> None:
        """Give all of them their rates, by a table of what is used and for how long per byte."""
        moves = self.uses[:, 1] > self.uses[:, 0]
        self.rates = np.zeros(len(moves))
        if not moves.any():
            return
        # Those that use the same, as fast and with the same weight, have one rate.
        begins, ends = self.uses[moves, 0], self.uses[moves, 1]
        least, weight = self.least[moves], self.weights[moves]
        order = np.lexsort((weight, least, ends, begins))
        sorted_uses = (begins[order], ends[order], least[order], weight[order])
        is_new = np.ones(len(order), bool)
        is_new[1:] = np.logical_or.reduce([each[1:] != each[:-1] for each in sorted_uses])
        alike = np.diff(np.flatnonzero(is_new), append=len(order))
        begins, ends, least, weight = (each[is_new] for each in sorted_uses)
        counts, caps = ends - begins, 1 / least
        number = np.repeat(np.arange(len(counts)), counts)
        behind = np.concatenate([[0], np.cumsum(counts)[:-1]])
        entry = np.arange(len(number)) + (begins - behind)[number]
        link = resources[entry]
        if link_count > len(link):  # most are not used: number those that are
            present, link = np.unique(link, return_inverse=True)
            link_count = len(present)
        share = times[entry] * (caps * alike)[number]
        speeds = fair_speeds(Uses(number, link, share, link_count), weight * caps.max() / caps)
        rates = np.empty(len(order))
        rates[order] = np.repeat(speeds * caps, alike)
        self.rates[moves] = rates


class MessageGraph:
    """The steps of all ranks of a collective, and the recurrence of the module's text."""

    def __init__(
        self,
        machine: HardwareMachine,
        plan: Plan,
        lanes: Sequence[Lanes],
        layout: QueueLayout,
        work: Elements,
    ) -> None:
        self._machine, self._plan, self._lanes = machine, plan, lanes
        self._layout, self._work = layout, work
        self._lane_count = len(lanes[0].pes)
        self._pe = PeTimes(machine, lanes[0], 0, work)
        self._rates = self._pe.rates(self._lane_count)
        self._resources: dict[object, int] = {}
        self._used = array("q")
        self._times = array("d")
        self._ways: dict[tuple[int, int, tuple[bool, bool, bool]], _Way] = {}
        self._inside: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], _Inside] = {}
        self._known_stages: dict[tuple[tuple[int, _Used], ...], tuple[_Stage, ...]] = {}
        self._known_slots: dict[int, tuple[int, int]] = {}
        self._starts: list[tuple[float, int, _Step]] = []
        self._count = 0
        self._known: deque[tuple[Callable[[_Step], None], _Step]] = deque()
        """Steps of which a head or a tail has become known."""
        assert layout.vc_chunk_size is not None, "it is known by now"
        self._chunk_of_slots = layout.vc_chunk_size
        self._ways_found = self._wires_passed = 0
        self._chunk = machine.topology.machine.system.chunk_bytes
        self._memory_may_fill = self._arriving() > 1 / self._rates.memory
        self._loading: Counter[int] = Counter()
        self._loaded_only: Counter[int] = Counter()
        """By wire: messages under way there that follow no other slot by slot."""
        self._get_apart = (self._lane_count - 1) ** 2 * layout.vc_chunk_size // 3
        """The same that rings have (`message_execution`)."""
        self._uses_switch = machine.combines_in_switches
        classes = wire_classes(machine.topology, [each.sip for each in lanes], plan.symmetry)
        is_alike = all(each.pes == lanes[0].pes for each in lanes)
        self._classes = classes if is_alike else None
        self._steps = self._written()

    def times(self) -> GraphTimes:
        """Work out when each rank has its result."""
        # A message that a switch copies or combines is one step of several instructions.
        every = dict.fromkeys(step for steps in self._steps for step in steps)
        first = [step for step in every if not step.head_missing]
        for step in first:
            self._on_head(step)
            if step.kind != "send":
                self._on_tail(step)
            self._settle()
        moving = self._flow()
        stuck = [
            rank for rank, steps in enumerate(self._steps) if any(s.tail_missing for s in steps)
        ]
        assert not stuck, "a plan whose programs fit each other comes to its end"
        ends = [round(max((step.done for step in steps), default=0)) for steps in self._steps]
        if self._classes is not None:
            ends *= len(self._lanes)
        return GraphTimes(ends, round(moving))

    def _written(self) -> list[list[_Step]]:
        """The steps, and what waits for what."""
        all_steps: list[list[_Step]] = []
        mail: dict[tuple[int, int, int], deque[_Step]] = {}
        keeps = self._pe.keeps_bytes
        item = self._work.item_bytes
        for rank, program in self._programs():
            steps: list[_Step] = []
            local: _Step | None = None
            last_to: dict[tuple[int, int, str], _Step] = {}
            all_needs, first_of = dependencies(program), self._leaders(program)
            for number, (instruction, needs) in enumerate(zip(program, all_needs, strict=True)):
                if first_of[number] != number:
                    steps.append(steps[first_of[number]])
                    if isinstance(instruction, Send):
                        box = (*self._box(rank, instruction.peer), instruction.channel)
                        mail.setdefault(box, deque()).append(steps[-1])
                    continue
                match instruction:
                    case Send(peer, span, channel, switch):
                        step = _Step(rank, "send", span.length * item)
                        queue = peer, channel, switch if self._uses_switch else "passes"
                        self._follow_queue(step, last_to.get(queue))
                        last_to[queue] = step
                        box = (*self._box(rank, peer), channel)
                        mail.setdefault(box, deque()).append(step)
                        step.target = peer
                    case Receive(peer, span, combines):
                        step = _Step(rank, "receive", span.length * item)
                        step.combines = bool(combines)
                    case Copy(_, target):
                        step = _Step(rank, "local", target.length * item)
                        step.sources = 1
                    case Fold(sources, target):
                        step = _Step(rank, "local", target.length * item)
                        step.sources = len(sources)
                if step.kind == "local":  # a PE does one after the other
                    self._follow_queue(step, local)
                    local = step
                own = -(-step.size // self._lane_count)
                for need in needs:
                    before = steps[need.step]
                    in_tcm = (
                        step.kind == "send" and before.kind == "receive" and need.is_same_span
                    ) and own <= keeps
                    step.is_in_tcm |= in_tcm
                    self._wait(step, before, slot_by_slot=need.is_same_span, in_tcm=in_tcm)
                steps.append(step)
            all_steps.append(steps)
        self._match(all_steps, mail)
        return all_steps

    def _programs(self) -> list[tuple[int, tuple[Instruction, ...]]]:
        """The ranks that are looked at, and their programs."""
        symmetry = self._plan.symmetry
        if self._classes is None or symmetry is None:
            return list(enumerate(self._plan.programs))
        return [(symmetry.ranks[0], self._plan.model)]

    def _leaders(self, program: tuple[Instruction, ...]) -> Sequence[int]:
        """For each instruction, the first one that is the same message."""
        return leaders(program) if self._uses_switch else range(len(program))

    def _box(self, sender: int, receiver: int) -> tuple[int, int]:
        """Where messages from one rank to another wait to be matched."""
        symmetry = self._plan.symmetry
        if self._classes is None or symmetry is None:
            return sender, receiver
        first = symmetry.ranks[0]
        if sender == first:
            return first, symmetry.places[receiver]
        return first, symmetry.opposite(symmetry.places[sender])

    def _follow_queue(self, step: _Step, before: _Step | None) -> None:
        if before is not None:  # messages of a queue follow each other
            self._wait(step, before, slot_by_slot=False, in_tcm=False)

    @staticmethod
    def _wait(step: _Step, before: _Step, *, slot_by_slot: bool, in_tcm: bool) -> None:
        slot_by_slot &= "local" not in {step.kind, before.kind}  # which is done at a time
        if (before.kind, step.kind) == ("send", "local"):
            before.frees.append(step)
        else:
            before.followers.append((step, slot_by_slot, in_tcm))
        step.follows |= slot_by_slot
        step.depth = max(step.depth, before.depth + (before.kind == "receive"))
        step.head_missing += 1
        step.tail_missing += 1

    def _arriving(self) -> float:
        """Bytes per picosecond that messages ask of a device's memory, if all wires are busy."""
        sips = self._machine.topology.machine.system.sips
        wires = sum(
            _wires_of(each.graph, each.count) * float(each.link.rate)
            for each in sips.levels or (sips,)
            if each.link is not None
        )
        return _MOVED_AT_MOST * wires

    def _match(
        self, all_steps: list[list[_Step]], mail: dict[tuple[int, int, int], deque[_Step]]
    ) -> None:
        switched: dict[_Step, list[tuple[int, int]]] = {}
        received: list[tuple[_Step, _Step]] = []
        for steps, (rank, program) in zip(all_steps, self._programs(), strict=True):
            first_of = self._leaders(program)
            for number, (step, instruction) in enumerate(zip(steps, program, strict=True)):
                if isinstance(instruction, Receive):
                    box = self._box(instruction.peer, rank)
                    sent = mail[*box, instruction.channel].popleft()
                    sent.peers.append(step)
                    step.sources += 1
                    step.head_missing += 1
                    step.tail_missing += 2  # what is sent last, and its way through the stages
                    if self._uses_switch and instruction.switch != "passes":
                        switched.setdefault(sent, []).append((instruction.peer, rank))
                        continue
                    # A message that is passed on slot by slot keeps the pace of the one that it
                    # follows.
                    is_alone = not (sent.follows or any(each[1] for each in step.followers))
                    sent.way = self._way(
                        instruction.peer,
                        rank,
                        (not sent.is_in_tcm, step.combines, is_alone),
                    )
                    if any(each[0].kind == "local" for each in step.followers):
                        received.append((sent, step))
                elif isinstance(instruction, Send) and first_of[number] == number:
                    step.tail_missing += 1  # its own flow
        for sent, pairs in switched.items():
            sent.way = self._switched_way(sent, pairs)
        for sent, step in received:
            sent.early = step.early = self._before_the_end(sent)

    def _before_the_end(self, sent: _Step) -> float:
        """How many bytes of a message are missing when its first lane is done.

        Links serve lanes in turn, a chunk each: the lanes that came first are ahead by a part of
        their last chunk. On a wire that also passes on what others sent, that part is smaller.
        """
        assert sent.way is not None, "it goes somewhere"
        if not sent.way.uneven:  # within a device no wire serves lanes in turn
            return 0.0
        chunks = -(-sent.size // self._lane_count) / self._chunk_of_slots
        passed_on = self._wires_passed / self._ways_found
        return sent.size * sent.way.uneven / max(1.0, chunks) / passed_on

    def _slot_sizes(self, size: int) -> tuple[int, int]:
        """The first and the last slot of a lane's part of a message."""
        known = self._known_slots.get(size)
        if known is not None:
            return known
        own = -(-size // self._lane_count)
        slots = max(1, -(-own // self._layout.slot_size))
        slot_size = self._layout.slot_size
        known = self._known_slots[size] = min(own, slot_size), own - (slots - 1) * slot_size
        return known

    def _on_head(self, step: _Step) -> None:
        """All that it waits for has its first slot."""
        first, _ = self._slot_sizes(step.size)
        if step.kind == "send":
            load = 0 if step.is_in_tcm else self._pe.load(first) + self._wait_for_memory(step.rank)
            self._push(step.head + load, step)
            return
        if step.kind == "local":
            step.began = step.head
            self._begin_dma(step, step.head, step.sources)
            return
        if step.combines:
            step.head += self._pe.combine(first)
        self._tell_heads(step, step.head)

    def _tell_heads(self, step: _Step, head: float) -> None:
        first, _ = self._slot_sizes(step.size)
        stored = head
        if step.kind == "receive":
            stored += self._pe.store(first) + self._wait_for_memory(step.rank)
        for follower, slot_by_slot, in_tcm in step.followers:
            if slot_by_slot:
                self._add_head(
                    follower, head if in_tcm else stored + self._operand(follower, first)
                )

    def _operand(self, step: _Step, size: int) -> float:
        """How long it loads what it combines with, once that is stored."""
        if not step.combines:
            return 0
        return self._pe.load(size) + self._wait_for_memory(step.rank)

    def _wait_for_memory(self, rank: int) -> float:
        """How long a slot waits for those that are loaded ahead, if the memory is what is full."""
        slots = self._loading[self._looked_at(rank)] if self._memory_may_fill else 0
        return slots * self._pe.moving(self._layout.slot_size)

    def _loads_ahead(self, step: _Step) -> int:
        """How many slots of a lane a send has in the queue of the memory."""
        if step.kind != "send" or step.is_in_tcm:
            return 0
        own = -(-step.size // self._lane_count)
        return min(LOADS_AHEAD, -(-own // self._layout.slot_size))

    def _on_tail(self, step: _Step) -> None:
        """All that it waits for has its last slot; of a send, its flow has ended."""
        _, last = self._slot_sizes(step.size)
        if step.kind == "send":
            assert step.way is not None, "it goes somewhere"
            step.done = step.tail
            for peer in step.peers:
                peer.flowed_at = max(peer.flowed_at, step.done)
                peer.local = max(peer.local, self._spread(step))
                self._add_tail(peer, step.done + step.way.latency)
        elif step.kind == "receive":
            step.tail += self._pe.combine(last) if step.combines else 0
            step.done = step.tail + self._pe.store(last)
        else:
            self._end_local(step)
            return
        self._tell_tails(step)

    def _tell_tails(self, step: _Step) -> None:
        has_told_heads = step.kind == "local"
        for follower, slot_by_slot, in_tcm in step.followers:
            if slot_by_slot:
                self._add_tail(follower, step.tail if in_tcm else step.done)
                continue
            if not has_told_heads and not (step.early and follower.kind == "local"):
                self._add_head(follower, self._first_done(step))
            self._add_tail(follower, step.done)

    def _on_early(self, sent: _Step, now: float) -> None:
        """The first lane of a message is sent: at its end, it goes on with its local steps."""
        assert sent.way is not None, "it goes somewhere"
        (step,) = sent.peers
        _, last = self._slot_sizes(step.size)
        combined = self._pe.combine(last) if step.combines else 0
        instant = now + sent.way.latency + combined + self._pe.store(last)
        for follower, _, _ in step.followers:
            if follower.kind == "local":
                self._add_head(follower, instant)

    def _begin_dma(self, local: _Step, instant: float, loads: int) -> None:
        """Load what a local step reads, or store its result: all of it at a time."""
        dma = _Step(local.rank, "load" if loads else "store", max(1, loads) * local.size)
        dma.peers = [local]
        # It offers one chunk at a time; a message loads several slots ahead. One chunk is one turn.
        own = dma.size / self._lane_count
        chunk = max(self._chunk, own / CHUNKS_PER_FLOW_MAX)
        dma.weight = chunk / self._layout.slot_size if own > chunk else _AT_ONCE
        time = self._pe.moving(1 << 20) / (1 << 20) / self._lane_count
        uses = self._memory_uses(self._looked_at(local.rank), 1)
        key = ((0, tuple(uses)),)
        stages = self._known_stages.get(key)
        if stages is None:
            stages = self._known_stages[key] = (self._stage(0, uses),)
        dma.way = _Way(0, stages, time, time)
        self._push(instant, dma)

    def _on_moved(self, dma: _Step, now: float) -> None:
        """A load or a store of a local step has moved its bytes."""
        (local,) = dma.peers
        own = -(-local.size // self._lane_count)
        if dma.kind == "load":
            combining = (local.sources - 1) * self._pe.combine(own)
            self._begin_dma(local, now + self._pe.load(0) + combining, 0)
            return
        local.head = local.done = now + self._pe.store(0)
        for follower, _, _ in local.followers:
            self._add_head(follower, local.head)
        if not local.tail_missing:
            self._end_local(local)

    def _end_local(self, local: _Step) -> None:
        """The last lane has begun: it ends as long after the first one, once that has ended."""
        if local.done:
            local.tail = local.done = local.done + max(0.0, local.tail - local.began)
            self._tell_tails(local)

    def _memory_uses(self, rank: int, times: int) -> list[tuple[int, float]]:
        """What bytes that a rank's PEs load or store so many times take of their memory."""
        pe = self._rates
        return [
            (self._resource((rank, "memory")), times * pe.memory),
            (self._resource((rank, "engine")), times * pe.engine),
        ]

    def _looked_at(self, rank: int) -> int:
        """The rank that stands for a rank."""
        return rank if self._classes is None else self._programs()[0][0]

    def _spread(self, sent: _Step) -> float:
        """How long before the last lane of a message the first one has ended."""
        assert sent.way is not None, "it goes somewhere"
        apart = min((sent.depth + 1) * self._get_apart, sent.size) * sent.way.cap
        in_turn = apart * (self._lane_count - 1) / self._lane_count
        return max(in_turn, (sent.done - sent.began) * sent.way.uneven)

    @staticmethod
    def _first_done(step: _Step) -> float:
        """When the first lane is done. While it goes on, others still have the links."""
        if step.kind != "receive":
            return step.done
        return max(step.flowed_at, step.done - step.local)

    def _add_head(self, step: _Step, instant: float) -> None:
        step.head = max(step.head, instant)
        step.head_missing -= 1
        if not step.head_missing:
            self._known.append((self._on_head, step))

    def _add_tail(self, step: _Step, instant: float) -> None:
        if step.kind == "send":
            # The last slot to come is sent last.
            _, last = self._slot_sizes(step.size)
            assert step.way is not None, "it goes somewhere"
            instant += last * step.way.cap
        self._lose_tail(step, instant)

    def _lose_tail(self, step: _Step, instant: float) -> None:
        """One less of what its tail waits for."""
        step.tail = max(step.tail, instant)
        step.tail_missing -= 1
        if not step.tail_missing:
            self._known.append((self._on_tail, step))

    def _settle(self) -> None:
        """Tell on what is known; a chain of steps may be longer than the stack is deep."""
        while self._known:
            tell, step = self._known.popleft()
            tell(step)

    def _push(self, instant: float, step: _Step) -> None:
        self._count += 1
        heappush(self._starts, (instant, self._count, step))

    def _flow(self) -> float:
        """Let all messages move, at the rates that their links give them."""
        now = moving = 0.0
        flows = _Flows()
        while self._starts or flows:
            begins = self._starts[0][0] if self._starts else float("inf")
            instant = min(flows.next_instant(now), begins)
            passed = max(0.0, instant - now)
            if flows:
                moving += passed
            now = max(now, instant)
            early = flows.pass_time(passed)
            sent, emptied, ended = flows.leave()
            flows.arrive(now)
            new: list[_Step] = []
            while self._starts and self._starts[0][0] <= now + _TOGETHER:
                new.append(heappop(self._starts)[2])
            if new:
                flows.begin(new, now)
                for step in new:
                    self._loading[self._looked_at(step.rank)] += self._loads_ahead(step)
                    self._note_loaded_only(step, 1)
            if flows:
                flows.share(
                    np.frombuffer(self._used, np.int64),
                    np.frombuffer(self._times),
                    len(self._resources),
                )
            for step in early:
                self._on_early(step, now)
                self._settle()
            for step in sent:
                assert step.way is not None, "it goes somewhere"
                instant = max(now, step.began + step.size * step.way.pace)
                for freed in step.frees:
                    self._add_head(freed, instant)
                    self._add_tail(freed, instant)
                self._settle()
            for step in emptied:
                if step.kind == "send":
                    self._loading[self._looked_at(step.rank)] -= self._loads_ahead(step)
                    self._note_loaded_only(step, -1)
                    self._lose_tail(step, now)
                    self._settle()
            for step in ended:
                if step.kind != "send":
                    self._on_moved(step, now)
                    self._settle()
                    continue
                for peer in step.peers:
                    self._add_tail(peer, now)
                self._settle()
            if new:
                for step, rate in zip(new, flows.rates[-len(new) :].tolist(), strict=True):
                    if step.kind == "send":
                        self._on_begun(step, rate, now)
                        self._settle()
        return moving

    def _note_loaded_only(self, step: _Step, change: int) -> None:
        assert step.way is not None, "it goes somewhere"
        if step.way.wire is not None and not step.follows:
            self._loaded_only[step.way.wire] += change

    def _on_begun(self, step: _Step, rate: float, now: float) -> None:
        assert step.way is not None, "it goes somewhere"
        first, _ = self._slot_sizes(step.size)
        # As round a ring, lanes get apart from message to message.
        others = max(0, min(first * self._lane_count, step.size) - first)
        apart = min(others, step.depth * self._get_apart)
        ahead = (first + others - apart) / rate
        # A wire serves lanes in turn, however far they are apart: all of those that only load
        # have a slot there.
        if step.way.wire is not None:
            beside = self._loaded_only[step.way.wire] - (not step.follows)
            ahead += beside * apart * step.way.cap
        self._tell_heads(step, now + ahead)
        for peer in step.peers:
            self._add_head(peer, now + step.way.latency + ahead)

    def _resource(self, key: object) -> int:
        return self._resources.setdefault(key, len(self._resources))

    def _way(self, source: int, target: int, manner: tuple[bool, bool, bool]) -> _Way:
        key = (source, target, manner)
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = self._found(source, target, *manner)
        return way

    def _found(self, source: int, target: int, loads: bool, combines: bool, is_alone: bool) -> _Way:
        one, other = self._lanes[source], self._lanes[target]
        is_apart = one.sip != other.sip
        key = (is_apart, one.pes, other.pes)
        inside = self._inside.get(key)
        if inside is None:
            inside = self._inside[key] = self._look_inside(one, other)
        wires = self._machine.sip_links(one.sip, other.sip) if is_apart else []
        uses, cap = self._uses(one.sip, other.sip, wires)
        pe = inside.pe
        # A message that is sent on is still there, or loaded; a received one is stored, and if it
        # is combined, its operand is loaded.
        source, target = self._looked_at(source), self._looked_at(target)
        later = [(self._resource((target, "in")), pe.port)]
        sender = [(self._resource((source, "out")), pe.port)]
        if loads:
            sender += self._memory_uses(source, 1)
        later += self._memory_uses(target, 1 + combines)
        latency = inside.latency + sum(link.latency for link in wires)
        wake = picoseconds(self._machine.topology.machine.pe.ipcq.wake_ns)
        assert self._layout.n_slots is not None, "it is known by now"
        window = self._layout.n_slots * self._layout.slot_size * self._lane_count
        narrowest = max(inside.cap, cap, pe.port)
        per_byte = max(pe.memory, pe.engine)
        moved = int(loads), 1 + combines
        # A latency at the beginning there are only loads, and as long at the end only stores.
        cap = max(narrowest, max(moved) * per_byte)
        ahead = max(narrowest, int(loads) * per_byte, latency / window) if is_alone else cap
        stages = self._stages(sender, uses, wires, (latency, later))
        alone = max([inside.alone, *(1 / float(link.rate) for link in wires)])
        pace = max(alone / self._lane_count, pe.port, int(loads) * per_byte)
        round_trip = 2 * latency + wake
        if not is_apart:
            return _Way(latency, stages, cap, ahead, pace, window, round_trip)
        self._ways_found += 1
        self._wires_passed += len(stages) - 1
        wire, uneven = uses[0][0], inside.uneven
        return _Way(latency, stages, cap, ahead, pace, window, round_trip, uneven, wire)

    def _switched_way(self, sent: _Step, pairs: Sequence[tuple[int, int]]) -> _Way:
        """That of a message of which a switch makes copies, or which it combines with others.

        A copy takes the wire to the switch once. Of what is combined, each takes its part of the
        wire behind it.
        """
        sharing = max(peer.sources for peer in sent.peers) if len(pairs) == 1 else 1
        manner = (not sent.is_in_tcm, sent.peers[0].combines, False)
        ways = [self._way(source, target, manner) for source, target in pairs]
        first = ways[0]
        at_once = self._uses_of(first.stages[0])
        behind = len(at_once) - 1  # the wire behind the switch
        down = [self._uses_of(way.stages[0])[behind] for way in ways]
        later = [each for way in ways for each in self._uses_of(way.stages[-1])]
        stages = (
            self._stage(0, [*at_once[:behind], *((link, time / sharing) for link, time in down)]),
            self._stage(first.latency, [(part, time / sharing) for part, time in later]),
        )
        return first._replace(stages=stages)

    def _uses_of(self, stage: _Stage) -> list[tuple[int, float]]:
        places = range(stage.begin, stage.end)
        return [(self._used[place], self._times[place]) for place in places]

    def _stages(
        self,
        sender: _Used,
        uses: _Used,
        wires: Sequence[Link],
        receiver: tuple[int, _Used],
    ) -> tuple[_Stage, ...]:
        """Write what a message uses into the table, in the order in which it is there."""
        at_once, apart = [*sender, *uses[:1]], list(zip(uses, wires, strict=True))[1:]
        sips = self._machine.topology.machine.system.sips
        if len(wires) == _BY_A_SWITCH and (sips.graph == "switch" or sips.multicast_unit):
            # All messages come to the second wire as late as each other.
            at_once, apart = [*sender, *uses], []
        parts = [(0, tuple(at_once))]
        latency = 0
        for before, (use, _) in zip(wires, apart, strict=False):
            latency += before.latency
            parts.append((latency, (use,)))
        parts.append((receiver[0], tuple(receiver[1])))
        key = tuple(parts)
        known = self._known_stages.get(key)
        if known is None:
            known = self._known_stages[key] = tuple(self._stage(*part) for part in parts)
        return known

    def _stage(self, latency: int, uses: _Used) -> _Stage:
        begin = len(self._used)
        for resource, time in uses:
            self._used.append(resource)
            self._times.append(time)
        return _Stage(latency, begin, len(self._used))

    def _uses(
        self, source: int, target: int, wires: Sequence[Link]
    ) -> tuple[list[tuple[int, float]], float]:
        """What a flow takes of each wire per byte, and how long the narrowest one takes."""
        own = [1 / float(link.rate) for link in wires]
        if self._classes is None:
            uses = [(self._resource(link), time) for link, time in zip(wires, own, strict=True)]
            return uses, max(own, default=0.0)
        uses = [
            # The flows of all ranks together, on each wire of the class.
            (self._resource(each), time * self._classes.count / each.size)
            for time, (_, each) in zip(own, self._classes.on_way(source, target), strict=True)
        ]
        return uses, max(own, default=0.0)

    def _look_inside(self, one: Lanes, other: Lanes) -> "_Inside":
        """The parts of both devices: their latency, and time per byte of a whole message."""
        machine = self._machine
        paths = [
            machine.path(machine.sip(one.sip).pe(here).tcm, machine.sip(other.sip).pe(there).tcm)
            for here, there in zip(one.pes, other.pes, strict=True)
        ]
        wires = set(machine.sip_links(one.sip, other.sip)) if one.sip != other.sip else set[Link]()
        users = Counter(link for path in paths for link in path if link not in wires)
        lanes = len(paths)

        def is_inside(link: Link) -> bool:
            return link not in wires

        narrowest = max(count / lanes / float(link.rate) for link, count in users.items())
        return _Inside(
            max(path.latency for path in paths) - sum(link.latency for link in wires),
            self._rates,
            narrowest,
            max(1 / float(link.rate) for link in users),
            self._unevenness([list(takewhile(is_inside, path)) for path in paths]),
        )

    def _unevenness(self, ways: Sequence[Sequence[Link]]) -> float:
        """How much earlier than the last lane the first one ends, as a part of the whole time.

        A wire serves what comes first. Lanes that share links inside of a device come later, at
        their max-min fair rates. By the time at which the fastest lane is done, all lanes have
        come as far as they are fast.
        """
        every = dict.fromkeys(link for way in ways for link in way)
        links = {link: number for number, link in enumerate(every)}
        number = np.repeat(np.arange(len(ways)), [len(way) for way in ways])
        link = np.array([links[each] for way in ways for each in way], np.int64)
        times = np.array([1 / float(each.rate) for way in ways for each in way])
        most = 1 / (self._rates.memory * len(ways))  # of one lane: what its memory loads
        speeds = fair_speeds(Uses(number, link, times * most, len(links)), np.ones(len(ways)))
        return float(1 - (speeds / speeds.max()).mean())


class _Inside(NamedTuple):
    """What a way has inside of its devices."""

    latency: int
    pe: PeRates
    cap: float
    """The time per byte of all lanes together."""
    alone: float
    """That of one lane alone, where it is narrowest."""
    uneven: float
    """The part of its time that the first lane ends before the last, if the wires are full."""


def _wires_of(graph: str, count: int) -> int:
    """How many wires a device has of a level, at most."""
    wires = {"ring_1d": 2, "mesh_2d": 4, "torus_2d": 4}
    return wires.get(graph, count - 1 if graph in {"fully_connected", "custom"} else 1)


_MOVED_AT_MOST = 3
"""For each byte on a wire: an operand and a result of what comes, or what is sent."""
_BY_A_SWITCH = 2
_AT_ONCE = 1024.0
"""The weight of what is served before all others."""
_TOGETHER = 1.0
"""Picoseconds within which flows begin or end together."""
