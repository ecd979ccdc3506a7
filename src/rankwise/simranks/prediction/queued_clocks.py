"""Host and device have clocks of their own: launches queue, streams and events order them.

Theory of operation
===================

On a machine that exists, a rank is a host that hands operations to a device. `time` is the host's:
each operation moves it by what a launch of its class takes, and the device carries it out later, on
a *lane*: a stream of the device. An operation begins when the lane is free and when it has been
launched. If lanes run empty since the host is too slow, the job is bound by its host; if more than
`queue` launches are pending, the host waits for its device.

A collective comes to its group when its lane has reached it. The lane waits for it, not the host:
work behind it begins at its end. A lane waits for an event of another in the same way. Only calls
that ask the device for a value, or for its end, let the host wait (`synchronize`).

The account is that of the default lane: it computes, waits for communication under way (exposed) or
for other ranks, or has nothing to do since its host is behind. Kernels on other lanes are taken to
run beside it, at no cost for either.

A CPU is host and device in one: its queue holds one launch, and its streams are one lane.

While a graph is captured the device does nothing. Its operations are kept with their lanes, and so
are the instants at which lanes are marked and the waits for them: each replay marks them anew.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from rankwise.core.matching import NO_RANK, CallSignature
from rankwise.sim.reporting.breakdown import BUBBLE, COMPUTE, EXPOSED, HOST, MESSAGES, WAITING
from rankwise.simranks.prediction.bill import LAUNCHES
from rankwise.simranks.prediction.clocks import (
    Account,
    Communicated,
    Passage,
    Prediction,
    PricedWork,
    RankClock,
)
from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.prediction.machines.catalogue import MachineTopology
from rankwise.simranks.prediction.machines.description import Figure, LaunchSpec
from rankwise.simranks.prediction.machines.device import is_attention
from rankwise.simranks.prediction.process_heap import ProcessHeap

_PICOSECONDS_PER_MICROSECOND = 1_000_000
_PICOSECONDS_PER_MILLISECOND = 1_000_000_000
_MESSAGES = frozenset({"send", "recv"})
"""One of two ranks waits for the other, which need not be the late one."""
OTHER_STREAMS = "other streams"
"""What a lane waits for on another one, as long as that has waited for no transfer."""
_FOREACH = ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad")


class Lane:
    """A stream of a device.

    Attributes:
        ends_at: when all that it has been given is done.
        waits_from: when the last transfer that it waited for began; until then it waited for ranks.
        waits_for: the kind of that transfer.
        late: from when to when it had nothing to do until its host launched that transfer.
    """

    __slots__ = ("ends_at", "late", "waits_for", "waits_from")

    def __init__(self, ends_at: int = 0) -> None:
        self.late = (0, 0)
        self.ends_at = ends_at
        self.waits_from = 0
        self.waits_for = OTHER_STREAMS


class LaneMark:
    """When a lane has done what it was given until it was marked; see `Lane`."""

    __slots__ = ("ends_at", "late", "waits_for", "waits_from")

    def __init__(self) -> None:
        self.late = (0, 0)
        self.ends_at = self.waits_from = 0
        self.waits_for = ""


class QueuedClock(RankClock):
    """The host and the lanes of one rank.

    Attributes:
        lane: the one that gets what is launched now.
        default_lane: the one of the default stream.
    """

    def __init__(self, prediction: Prediction, number: int, begun_at: int) -> None:
        super().__init__(prediction, number, begun_at)
        assert isinstance(prediction.topology, MachineTopology), "chips have no host of this kind"
        host = prediction.topology.real.host
        self._launches = _Launches(host.launch_us)
        self._pending: deque[int] = deque(maxlen=host.queue)
        self._is_host = host.queue == 1
        pages = host.new_pages
        self._heap = None if pages is None else ProcessHeap()
        self._page_rate = 0.0 if pages is None else pages.value / 1e3  # bytes per picosecond
        self._shared = 0.0 if host.shared is None else host.shared.value
        late = 0.0 if host.late_us is None else host.late_us.value
        self._late = late * _PICOSECONDS_PER_MICROSECOND / math.sqrt(_PICOSECONDS_PER_MILLISECOND)
        self._apart_from = 0
        self.lane = self.default_lane = Lane(begun_at)
        self._lanes = [self.default_lane]
        self._behind = 0
        self._captured_on = self.lane
        self._replayed: tuple[Lane, Lane] | None = None

    @property
    def latest(self) -> int:
        """When the host and all lanes are done."""
        return max(self.time, *(lane.ends_at for lane in self._lanes))

    @property
    def account(self) -> Account:
        """What its device has spent its time with so far."""
        return Account(
            self.latest, self._computing, self._exposed, self._waiting, self._asleep,
            self._communicating, self._for_peers, self._behind,
        )  # fmt: skip

    @property
    def stream_number(self) -> int:
        """The number of the present lane."""
        return self._lanes.index(self.lane)

    def stream_ends(self) -> dict[int, int]:
        """When each lane has done what it was given until now."""
        return {number: lane.ends_at for number, lane in enumerate(self._lanes)}

    def number_of(self, lane: Lane) -> int:
        """The number of one of its lanes."""
        return self._lanes.index(lane)

    def lane_with(self, number: int) -> Lane:
        """The lane that has this number."""
        return self._lanes[number]

    def use_lane(self, lane: Lane) -> None:
        """Give a lane what is launched from now on."""
        if self.recording is not None:
            self.recording.note_lane(self.number_of(lane))
        self.lane = lane

    def be_launched(self, mark: "LaneMark") -> None:
        """An event does not happen before the host has recorded it, which is now."""
        if self.recording is not None:
            self.recording.note_launched(mark)
        mark.ends_at = max(mark.ends_at, self.time)

    def new_lane(self) -> Lane:
        """Another stream, which has nothing to do yet; a CPU has one."""
        if self._is_host:
            return self.default_lane
        lane = Lane(self.time)
        self._lanes.append(lane)
        return lane

    def compute(self, priced: PricedWork) -> None:
        """Launch an operation."""
        if self.recording is not None:
            self.recording.note_work(priced)
        self._launch(self._launches.of(priced.work))
        if self.captured is None:
            self.compute_again(priced)
        else:
            self.captured.append(self.placed(partial(self.compute_again, priced)))

    def placed(self, run: Callable[[], object]) -> Callable[[], object]:
        """What a replay calls to have something done on the present lane."""
        lane = self.lane

        def replayed() -> None:
            before, self.lane = self.lane, self._in_replay(lane)
            try:
                run()
            finally:
                self.lane = before

        return replayed

    def begin_capture(self) -> None:
        """What the device is given from now on belongs to a graph, which begins on this lane."""
        if self.recording is not None:
            self.recording.refuse("it captures a graph")
        super().begin_capture()
        self._captured_on = self.lane

    def end_capture(self) -> Callable[[], None]:
        """The graph is complete; returns what replays it."""
        captured_on, replay_all = self._captured_on, super().end_capture()

        def replay() -> None:
            if self.recording is not None:
                self.recording.refuse("it replays a graph")
            self._replayed = captured_on, self.lane
            try:
                replay_all()
            finally:
                self._replayed = None

        return replay

    def _in_replay(self, lane: Lane) -> Lane:
        # The lane of the capture is, in a replay, the lane that launches the graph.
        captured_on, launched_on = self._replayed or (lane, lane)
        return launched_on if lane is captured_on else lane

    def compute_again(self, priced: PricedWork) -> None:
        """Have the device carry an operation out: one of a graph needs no launch of its own."""
        priced.count += 1
        self.counts[priced] += 1
        if priced.at_peak:
            self.work.count_products(priced.work, priced.at_peak)
        if self.trail is not None:
            self.trail.add(priced, self.stream_number)
        lane, duration = self.lane, priced.duration
        begun = self._begin(lane)
        lane.ends_at = begun + duration
        if self._is_host:
            self.time = lane.ends_at  # nothing of the host goes on beside the device
        self._pending.append(lane.ends_at)
        if lane is self.default_lane:
            self._computing += duration
            self.bill.add_work(priced, self.phase())
        if self._prediction.keeps_log:
            self._prediction.log(
                self, "KernelLaunch", priced.work.name, begun, lane.ends_at, priced.work
            )

    def note_free(self) -> None:
        """An operation has no kernel: a view, a query, a new tensor."""
        self.time += self._launches.view
        if self.recording is not None:
            self.recording.note_time(self._launches.view)

    def note_subclass(self) -> None:
        """An operation goes by a tensor subclass first, such as a DTensor."""
        launches = self._launches
        cost = launches.dtensor_update if self.is_updating else launches.dtensor
        self.time += cost
        if self.recording is not None:
            self.recording.note_time(cost)

    def note_taken(self, block: object, size: int) -> None:
        """A tensor takes memory: the processor maps and zeroes what of it is new."""
        new = 0 if self._heap is None else self._heap.take(id(block), size)
        if new:
            lane, cost = self.lane, round(new / self._page_rate)
            self.time = lane.ends_at = max(self.time, lane.ends_at) + cost
            self._computing += cost
            self.bill.add(COMPUTE, "new pages of memory", self.phase(), cost)

    def note_freed(self, block: object, size: int) -> None:
        """A tensor frees memory, which the heap may give back."""
        if self._heap is not None:
            self._heap.give_back(id(block), size)

    def come(
        self,
        load: object,
        size: int,
        call: CallSignature | None = None,
        ranks: tuple[int, ...] = (),
        at: int = NO_RANK,
    ) -> Passage:
        """Come to an operation when the present lane has got there."""
        if self.trail is not None:
            self.trail.add(Communicated.of(call, size, ranks, at), self.stream_number)
        if self._replayed is None:  # the launch of a graph is that of all that it has
            self._launch(self._launches.collective)
        came_at = max(self.time, self.lane.ends_at)
        is_message = call is not None and call.operation in _MESSAGES
        passage = Passage(load, size, came_at + (0 if is_message else self._lateness()))
        passage.late = self.lane.ends_at, came_at
        return passage

    def _lateness(self) -> int:
        """How much later than this rank the last one comes, in the mean."""
        if not self._late:
            return 0
        alone, self._apart_from = self._computing - self._apart_from, self._computing
        # Delays of one millisecond and of the next are independent: they grow with the root of the
        # time since the ranks last met.
        return round(self._late * math.sqrt(alone))

    def wait(self, passage: Passage) -> None:
        """Let the present lane go on when an operation is over; the host goes on at once."""
        if self.recording is not None:
            self.recording.note_wait(passage)
        ends_at = passage.ends_at
        if self._shared and passage.begins_at < self.lane.ends_at and not passage.is_paid:
            # Its threads shared the lane's processor while the lane computed.
            passage.is_paid = True
            hidden = min(ends_at, self.lane.ends_at) - passage.begins_at
            ends_at = max(ends_at, self.lane.ends_at) + round(self._shared * hidden)
        self._let_wait(self.lane, ends_at, passage.begins_at, passage.kind, passage.late)

    def mark(self, lane: Lane, mark: LaneMark | None = None) -> LaneMark:
        """When a lane has done what it has been given until now."""
        mark = mark or LaneMark()
        if self.recording is not None:
            self.recording.note_mark(self.number_of(lane), mark)
        if self.captured is not None:
            self.captured.append(partial(self._mark, lane, mark))
        self._mark(lane, mark)
        return mark

    def wait_for_lane(self, lane: Lane) -> None:
        """Let the present lane go on when another has done what it has been given until now."""
        self.let_wait(self.lane, self.mark(lane))

    def let_wait(self, lane: Lane, mark: LaneMark) -> None:
        """Let a lane go on at an instant at which an event of another happens."""
        if self.recording is not None:
            self.recording.note_let_wait(lane, self.number_of(lane), mark)
        if self.captured is not None:
            self.captured.append(partial(self._let_wait_again, lane, mark))
            return
        self._let_wait(lane, mark.ends_at, mark.waits_from, mark.waits_for, mark.late)

    def _mark(self, lane: Lane, mark: LaneMark) -> None:
        lane = self._in_replay(lane)
        mark.ends_at, mark.waits_from = lane.ends_at, lane.waits_from
        mark.waits_for, mark.late = lane.waits_for, lane.late

    def _let_wait_again(self, lane: Lane, mark: LaneMark) -> None:
        lane = self._in_replay(lane)
        self._let_wait(lane, mark.ends_at, mark.waits_from, mark.waits_for, mark.late)

    def _let_wait(
        self, lane: Lane, ends_at: int, waits_from: int, waits_for: str, late: tuple[int, int]
    ) -> None:
        begun = lane.ends_at
        if ends_at <= begun:
            return
        lane.ends_at, lane.waits_from, lane.waits_for = ends_at, waits_from, waits_for
        lane.late = late
        if self._is_host:  # a wait of the lane is one of the host
            self.time = max(self.time, ends_at)
        # Shares of a step are those of one lane: others overlap with it.
        if lane is not self.default_lane:
            return
        # First it waits for the others, in which it may have been late itself; then for the bytes.
        # Of a collective that its own host has launched late, the time up to the launch is the
        # host's.
        under_way = min(max(waits_from, begun), ends_at)
        late_from = min(max(begun, late[0]), under_way)
        late_to = min(max(late_from, late[1]), under_way)
        behind, waited = late_to - late_from, under_way - begun - (late_to - late_from)
        self._behind += behind
        self._waiting += waited
        is_message = waits_for == MESSAGES
        if is_message:
            self._for_peers += waited
        self._exposed += ends_at - under_way
        phase = self.phase()
        self.bill.add(HOST, LAUNCHES, phase, behind)
        self.bill.add(WAITING, BUBBLE if is_message else waits_for, phase, waited)
        self.bill.add(EXPOSED, waits_for, phase, ends_at - under_way)
        self._prediction.log(self, "Wait", "waits for others", begun, late_from)
        self._prediction.log(self, "Wait", "waits for its host", late_from, late_to)
        self._prediction.log(self, "Wait", "waits for others", late_to, under_way)
        self._prediction.log(self, "Wait", "waits for the transfer", under_way, ends_at)

    def synchronize(self, until: int | None = None) -> None:
        """Let the host wait for an instant of its device; for the end of all lanes if not given."""
        if self.recording is not None:
            self.recording.note_synchronize(until)
        self.time = max(self.time, self.latest if until is None else until)

    def _launch(self, cost: int) -> None:
        pending = self._pending
        if len(pending) == pending.maxlen:  # the queue is full: the host waits for its device
            self.time = max(self.time, pending[0])
        self.time += cost

    def _begin(self, lane: Lane) -> int:
        """When what has been launched now begins."""
        begun = max(lane.ends_at, self.time)
        if lane is self.default_lane and begun > lane.ends_at:
            self._behind += begun - lane.ends_at
            self.bill.add(HOST, LAUNCHES, self.phase(), begun - lane.ends_at)
        return begun


class _Launches:
    """What launches take on the host, in picoseconds."""

    def __init__(self, spec: LaunchSpec) -> None:
        def of(name: str) -> int:
            figure: Figure = getattr(spec, name)
            return round(figure.value * _PICOSECONDS_PER_MICROSECOND)

        self.view, self.dtensor, self.collective = of("view"), of("dtensor"), of("collective")
        self.dtensor_update = self.dtensor if spec.dtensor_update is None else of("dtensor_update")
        self._plain, self._attention = of("plain"), of("attention")
        self._foreach, self._fsdp = of("foreach"), of("fsdp")
        self._known: dict[str, int] = {}

    def of(self, work: DeviceOperation) -> int:
        """The cost of one operation, by its class."""
        cost = self._known.get(work.name)
        if cost is None:
            cost = self._known[work.name] = self._of_name(work.name)
        return cost

    def _of_name(self, name: str) -> int:
        if name.startswith("fsdp."):
            return self._fsdp
        if any(word in name for word in _FOREACH):
            return self._foreach
        return self._attention if is_attention(name) else self._plain
