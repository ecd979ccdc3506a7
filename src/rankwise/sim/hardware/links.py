"""Links and the flows over them: the one model for everything that moves bytes.

A *link* carries one chunk at a time at its rate, and its head arrives at the next link one latency
later. Wires, HBM channels, DMA engines and ports of scratch memories are all links; a *flow* is a
transfer on its way over a path of them.

**Cut-through.** A chunk is passed on as its head arrives, not when it is complete. Of a chunk of S
bytes whose head arrives at a free link at `head` and whose last byte arrives at `tail`:

    the link is busy        from head to head + S/B
    at the next link        head' = head + latency,  tail' = max(head + S/B, tail) + latency

So a flow alone on its path takes the sum of latencies + bytes / lowest bandwidth, to the picosecond
apart from rounding: the alpha-beta law is a theorem of the model, not a parameter. (That a fast
link behind a slow one carries a chunk in one go at its beginning, and not drop by drop, only moves
its busy time about by less than a chunk.)

**Pacing.** A flow offers its next chunk to the first link when the slowest link of its path would
be done with the one before. Nothing piles up on an idle machine.

**Fairness.** A busy link keeps one queue per lane and serves lanes in turn, a chunk each. A flow is
a lane of its own, except where flows follow each other in one queue between PEs: these are a lane
together. Two lanes over a link have half of it each, and a short message never waits for the whole
of a long one.

**Back-pressure.** A lane that waits for a link further on does not hold what others can use here: a
link passes over a lane while enough of it waits there, and serves the next one (`is_held_up`).
Enough is what that link takes as long for, in turn with its other lanes, as a chunk needs to get
there: one bandwidth-delay product of the lane. Round robin with such windows from hop to hop gives
max-min fair rates (Hahne, Round-robin scheduling for max-min fairness in data networks, 1991). If
all lanes are held up, the next one is served all the same: no other loses by it.

**Express.** As long as a flow shares no link, all of that is arithmetic: chunk i comes to a link at
`start + i * pace` and the latencies before it. So a flow that finds its whole path idle takes it as
an express, with one future for its end; the first chunk of another flow that comes to one of its
links puts it back to where it is at that instant, chunk by chunk. Times do not depend on it, cost
does.

**Flow transfers.** A collective on the message level moves no chunks: it is a *flow transfer* that
takes a share of each of its links (`flow_model`). Chunks that come to such a link take as much
longer as their share is less than the whole, and the transfer is told what they took from it.

Links do not refuse: a lane alone fills the buffers in front of a full link. Bounded resources
(slots of queues between PEs) have credits, in `ipcq`.
"""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rankwise.sim.hardware.paths import Path
from rankwise.sim.hardware.quantities import Rate
from rankwise.sim.kernel.futures import Future  # not from the package, which is not compiled
from rankwise.sim.kernel.simulator import Simulator

if TYPE_CHECKING:
    from rankwise.sim.hardware.flow_model import Sharing

CHUNKS_PER_FLOW_MAX = 64
"""Longer flows move in larger chunks: the cost of simulating them stays bounded."""


class Link:
    """One direction of a connection, or anything else that bytes pass at a rate."""

    __slots__ = (
        "_bytes", "_duration", "_expresses", "_free_at", "_rotation", "_simulator", "_size",
        "_work", "latency", "name", "rate", "sharing",
    )  # fmt: skip

    def __init__(self, simulator: Simulator, name: str, rate: Rate, latency: int) -> None:
        self._simulator = simulator
        self.name = name
        self.rate = rate
        self.latency = latency
        self._bytes = 0
        self._size = self._duration = 0
        """Of the last chunk: the next one is of the same size, most of the time."""
        self._free_at = 0
        self._work = 0
        self._rotation: deque[Backlog] | None = None
        self._expresses: list[Flow] = []
        self.sharing: Sharing | None = None
        """The transfers that have a share of it, if there are any."""

    @property
    def busy(self) -> int:
        """Picoseconds up to now in which it carried something."""
        now, work, free_at = self._simulator.now, self._work, self._free_at
        for express in self._expresses:
            carried, end = express.carried_by(self, now)
            work += express.work_on(self, carried)
            free_at = max(free_at, end)
        if self.sharing is not None:
            work += self.sharing.work_so_far(self)
        return work - max(0, free_at - now)

    @property
    def bytes_carried(self) -> int:
        """What has gone over it, or is on its way."""
        if not self._expresses and self.sharing is None:
            return self._bytes  # most links, most of the time: each launch asks all of a device
        now = self._simulator.now
        transfer = 0 if self.sharing is None else self.sharing.bytes_so_far(self)
        return (
            self._bytes
            + transfer
            + sum(express.bytes_of(express.carried_by(self, now)[0]) for express in self._expresses)
        )

    @property
    def amount(self) -> int:
        """What it has done, as `account` takes it."""
        return self.bytes_carried

    def is_idle(self, at: int) -> bool:
        """Whether a chunk that came at that instant would be carried at once, as far as we know."""
        return (
            self._rotation is None
            and self.sharing is None
            and self._free_at <= at
            and all(express.has_left(self, at) for express in self._expresses)
        )

    def reserve(self, flow: "Flow") -> None:
        """Let an express have the link, after those that have it now."""
        now = self._simulator.now
        for express in [each for each in self._expresses if each.has_left(self, now)]:
            self.settle(express)
        self._expresses.append(flow)

    def settle(self, flow: "Flow") -> None:
        """Account for what an express has carried over the link so far; it has it no longer."""
        if flow in self._expresses:
            self._expresses.remove(flow)
            carried, end = flow.carried_by(self, self._simulator.now)
            self._work += flow.work_on(self, carried)
            self._bytes += flow.bytes_of(carried)
            self._free_at = max(self._free_at, end)

    def offer(self, flow: "Flow", hop: int, chunk: int, tail: int) -> None:
        """Take a chunk whose head has arrived; carry it now, or when it is the flow's turn."""
        if self._expresses:
            self.make_way()
        if self._rotation is None:
            if self._free_at <= self._simulator.now:
                self._carry(flow, hop, chunk, tail)
                return
            self._rotation = deque()
            self._simulator.call_at(self._free_at, self._serve)
        backlog = flow.lane.backlog(self, hop)
        backlog.chunks.append((flow, chunk, tail))
        if len(backlog.chunks) == 1:
            backlog.lane.waiting_at += 1
            self._rotation.append(backlog)

    def make_way(self) -> None:
        """Have no expresses any more: those that are done are accounted for, the others stop."""
        for express in self._expresses.copy():
            if express.has_left(self, self._simulator.now):
                self.settle(express)
            else:
                express.stop_being_express()

    def _serve(self) -> None:
        rotation = self._rotation
        assert rotation, "the link is served only while something waits"
        backlog = rotation.popleft()
        # Most lanes wait at one link only, which holds them up itself.
        if backlog.lane.waiting_at > 1 and rotation:
            for _ in range(len(rotation)):
                if not backlog.is_held_up():
                    break
                rotation.append(backlog)
                backlog = rotation.popleft()
        flow, chunk, tail = backlog.chunks.popleft()
        self._carry(flow, backlog.hop, chunk, tail)
        if backlog.chunks:
            rotation.append(backlog)
        else:
            backlog.lane.waiting_at -= 1
        if rotation:
            self._simulator.call_at(self._free_at, self._serve)
        else:
            self._rotation = None

    def outlasts(self, chunk: int, count: int, latency: int) -> bool:
        """Whether so many waiting chunks of a lane are served, in turn, for so long and more."""
        assert self._rotation is not None, "something waits"
        return (count - 1) * len(self._rotation) * self.rate.time_for(chunk) >= latency

    def _carry(self, flow: "Flow", hop: int, chunk: int, tail: int) -> None:
        simulator = self._simulator
        start = simulator.now
        if chunk != self._size:
            self._size, self._duration = chunk, self.rate.time_for(chunk)
        duration = self._duration
        self._work += duration
        if self.sharing is not None:
            waiting = 0 if self._rotation is None else len(self._rotation)
            duration = self.sharing.stretched(self, duration, waiting + 1, chunk)
        end = self._free_at = start + duration
        self._bytes += chunk
        tail = (end if end > tail else tail) + self.latency  # noqa: FURB136 (three times as fast)
        hop += 1
        if hop == len(flow.path):
            simulator.call_at(tail, flow.arrive, chunk)
        else:
            simulator.call_at(start + self.latency, flow.path[hop].offer, flow, hop, chunk, tail)

    def account(self, size: int, work: int) -> None:
        """Add what a transfer or a replica has carried, and how long that takes the link alone."""
        self._bytes += size
        self._work += work

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Link {self.name}>"


class FlowLane:
    """Flows that follow each other over one path, and have one turn together at each link."""

    __slots__ = ("_backlogs", "waiting_at")

    def __init__(self) -> None:
        self._backlogs: dict[int, Backlog] = {}
        self.waiting_at = 0
        """At how many links chunks of it wait."""

    def backlog(self, link: Link, hop: int) -> "Backlog":
        """Its chunks that wait for a link of the path."""
        backlog = self._backlogs.get(hop)
        if backlog is None:
            backlog = self._backlogs[hop] = Backlog(self, link, hop)
        return backlog

    def backlogs(self) -> Iterable["Backlog"]:
        """Those of all links at which it has waited so far."""
        return self._backlogs.values()


class Backlog:
    """The chunks of a lane that wait for a link: of which flow, their size, and their tail."""

    __slots__ = ("chunks", "hop", "lane", "link")

    def __init__(self, lane: FlowLane, link: Link, hop: int) -> None:
        self.lane = lane
        self.link = link
        self.hop = hop
        self.chunks: deque[tuple[Flow, int, int]] = deque()

    def is_held_up(self) -> bool:
        """Whether enough of the lane waits further on: what is sent now comes before its turn."""
        for other in self.lane.backlogs():
            if other.hop > self.hop and other.chunks:
                flow, chunk, _ = other.chunks[0]
                latency = sum(link.latency for link in flow.path[self.hop : other.hop])
                if other.link.outlasts(chunk, len(other.chunks), latency):
                    return True
        return False


class Flow:
    """A transfer of some bytes over a path of links; `done` happens when the last has arrived."""

    __slots__ = (
        "_chunk", "_chunk_count", "_is_express", "_lane", "_last_chunk", "_left_to_arrive",
        "_pace", "_sent", "_simulator", "_slowest", "_start", "done", "path",
    )  # fmt: skip

    def __init__(
        self,
        simulator: Simulator,
        path: Path,
        size: int,
        chunk: int,
        name: object = "",
        *,
        may_be_express: bool = True,
        lane: FlowLane | None = None,
    ) -> None:
        self._lane = lane
        self._simulator = simulator
        self.path = path
        self.done = simulator.future(name)
        self._start = simulator.now
        self._sent = 0
        self._left_to_arrive = size
        self._is_express = False
        if path.slowest is None or not size:
            simulator.call_at(self._start + path.latency, self.done.succeed)
            return
        self._chunk = min(max(chunk, -(-size // CHUNKS_PER_FLOW_MAX)), size)
        self._chunk_count = -(-size // self._chunk)
        self._last_chunk = size - (self._chunk_count - 1) * self._chunk
        self._slowest = path.slowest
        self._pace = self._slowest.time_for(self._chunk)
        if may_be_express and self._finds_path_idle():
            self._go_express(path.latency)
        else:
            self._send_next()

    def _finds_path_idle(self) -> bool:
        arrival = self._start
        for link in self.path:
            if not link.is_idle(arrival):
                return False
            arrival += link.latency
        return True

    def _go_express(self, latency: int) -> None:
        self._is_express = True
        for link in self.path:
            link.reserve(self)
        end = self._start + (self._chunk_count - 1) * self._pace + latency
        self._simulator.call_at(end + self._slowest.time_for(self._last_chunk), self._end_express)

    def _end_express(self) -> None:
        if self._is_express:
            self._is_express = False
            for link in self.path:
                link.settle(self)
            self.done.succeed()

    def stop_being_express(self) -> None:
        """Go on chunk by chunk, from where everything is now."""
        self._is_express = False
        now = self._simulator.now
        entered = []
        for link in self.path:
            entered.append(self.carried_by(link, now)[0])
            link.settle(self)
        self._sent = entered[0]
        if self._sent < self._chunk_count:
            self._simulator.call_at(self._start + self._sent * self._pace, self._send_next)
        offset, slowest = self._start, 0
        durations = [link.rate.time_for(self._chunk) for link in self.path]
        last_durations = [link.rate.time_for(self._last_chunk) for link in self.path]
        for hop, link in enumerate(self.path):
            offset += link.latency
            following = entered[hop + 1] if hop + 1 < len(self.path) else 0
            for index in range(following, entered[hop]):
                is_last = index == self._chunk_count - 1
                chunk = self._last_chunk if is_last else self._chunk
                slowest = max((last_durations if is_last else durations)[: hop + 1])
                head = offset + index * self._pace
                tail = head + slowest
                if hop + 1 < len(self.path):
                    self._simulator.call_at(
                        head, self.path[hop + 1].offer, self, hop + 1, chunk, tail
                    )
                elif tail >= now:
                    self._simulator.call_at(tail, self.arrive, chunk)
                else:
                    self._left_to_arrive -= chunk

    def _first_entry(self, link: Link) -> int:
        entry = self._start
        for each in self.path:
            if each is link:
                break
            entry += each.latency
        return entry

    def carried_by(self, link: Link, now: int) -> tuple[int, int]:
        """Of an express: how many chunks have come to a link, and when it is done with them."""
        entry = self._first_entry(link)
        if now < entry:
            return 0, 0
        count = min(self._chunk_count, (now - entry) // self._pace + 1)
        last = self._last_chunk if count == self._chunk_count else self._chunk
        return count, entry + (count - 1) * self._pace + link.rate.time_for(last)

    def has_left(self, link: Link, now: int) -> bool:
        """Of an express: whether the last chunk has left a link."""
        count, end = self.carried_by(link, now)
        return count == self._chunk_count and end <= now

    def work_on(self, link: Link, count: int) -> int:
        """How long a link is busy with the first so many chunks."""
        if count < self._chunk_count:
            return count * link.rate.time_for(self._chunk)
        whole = (count - 1) * link.rate.time_for(self._chunk)
        return whole + link.rate.time_for(self._last_chunk)

    def bytes_of(self, count: int) -> int:
        """How many bytes the first so many chunks are."""
        if count < self._chunk_count:
            return count * self._chunk
        return (count - 1) * self._chunk + self._last_chunk

    @property
    def lane(self) -> FlowLane:
        """With which flows it has a turn at each link."""
        if self._lane is None:
            self._lane = FlowLane()  # most flows never wait
        return self._lane

    def arrive(self, chunk: int) -> None:
        """Count bytes that have come to the end of the path."""
        self._left_to_arrive -= chunk
        if not self._left_to_arrive:
            self.done.succeed()

    def _send_next(self) -> None:
        self._sent += 1
        chunk = self._chunk if self._sent < self._chunk_count else self._last_chunk
        if self._sent < self._chunk_count:
            self._simulator.call_at(self._simulator.now + self._pace, self._send_next)
        self.path[0].offer(self, 0, chunk, 0)


def start_flow(
    simulator: Simulator,
    path: list[Link],
    size: int,
    chunk: int,
    name: object = "",
    *,
    may_be_express: bool = True,
    lane: FlowLane | None = None,
) -> Future:
    """Send `size` bytes over `path`; the future happens when the last byte has arrived."""
    way = path if isinstance(path, Path) else Path(path)
    return Flow(simulator, way, size, chunk, name, may_be_express=may_be_express, lane=lane).done
