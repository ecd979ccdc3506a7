"""Streams and events of a rank whose device has a clock of its own.

FSDP and programs order their work by streams and events, of `torch.cuda` on modelled devices and of
`torch.cpu` otherwise, which says of both that they do nothing. On a machine that exists they are
lanes of the rank's clock. Without such a machine a stream does everything at once, and an event is
a moment of the rank's own clock.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch

from rankwise.simranks.prediction.queued_clocks import LaneMark
from rankwise.simranks.world.world import present_world, running_rank

if TYPE_CHECKING:
    from rankwise.simranks.prediction.queued_clocks import Lane, QueuedClock

_KEY = "streams"


class RankStreams:
    """The streams of one rank: that which it uses now, and the default one."""

    def __init__(self) -> None:
        self.default = self.present = LaneStream()


def streams_of_rank() -> RankStreams:
    """Those of the rank that runs; of a thread that is no rank's, new ones."""
    rank = running_rank()
    if rank is None:
        return RankStreams()
    streams: RankStreams | None = rank.own_state.get(_KEY)
    if streams is None:
        streams = rank.own_state[_KEY] = RankStreams()
        clock = queued_clock()
        if clock is not None:
            streams.default.begin_on(clock)
    return streams


def queued_clock() -> "QueuedClock | None":
    """The clock of the rank that runs, if its device has lanes."""
    rank = running_rank()
    prediction = None if rank is None else present_world().prediction
    if rank is None or prediction is None:
        return None
    clock = prediction.clock_of(rank)
    return clock if hasattr(clock, "default_lane") else None


class LaneStream:
    """A stream: a lane on the device of each rank that uses it.

    Most streams have one rank. Torch keeps that of captured graphs in a class, for all of them.
    """

    def __init__(self, *_: Any, priority: int = 0, **__: Any) -> None:
        self.priority = priority
        self.cuda_stream = 0
        self.lanes: dict[QueuedClock, Lane] = {}
        self._before: list[LaneStream] = []

    def lane_on(self, clock: "QueuedClock") -> "Lane":
        """Its lane, new before it is used."""
        lane = self.lanes.get(clock)
        if lane is None:
            lane = self.lanes[clock] = clock.new_lane()
        return lane

    def begin_on(self, clock: "QueuedClock") -> None:
        """It is the default stream of a rank."""
        self.lanes[clock] = clock.default_lane

    def synchronize(self) -> None:
        """Let the host wait until all is done that it has been given."""
        clock = queued_clock()
        if clock is not None:
            clock.synchronize(self.lane_on(clock).ends_at)

    def wait_stream(self, other: "LaneStream") -> None:
        """Go on when another stream has done what it has been given until now."""
        clock = queued_clock()
        if clock is not None:
            clock.let_wait(self.lane_on(clock), clock.mark(other.lane_on(clock)))

    def wait_event(self, event: "LaneEvent") -> None:
        """Go on when an event has happened."""
        event.wait(self)

    def query(self) -> bool:
        """Whether all is done: always, since a program asks only to do other work meanwhile."""
        return True

    def record_event(self, event: "LaneEvent | None" = None) -> "LaneEvent":
        """Record an event, or a new one."""
        event = event or LaneEvent()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        streams = streams_of_rank()
        self._before.append(streams.present)
        use_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        use_stream(self._before.pop())


class LaneEvent:
    """A moment of a stream; without lanes, of the rank that records it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded_ns: float | None = None
        self._lane_mark = LaneMark()

    def record(self, stream: LaneStream | None = None) -> None:
        """It is when the stream has done what it has been given until now."""
        clock = queued_clock()
        if clock is None:
            self.recorded_ns = time.perf_counter_ns()
            return
        lane = (stream or streams_of_rank().present).lane_on(clock)
        mark = clock.mark(lane, self._lane_mark)
        clock.be_launched(mark)
        self.recorded_ns = mark.ends_at / 1e3

    def synchronize(self) -> None:
        """Let the host wait for it."""
        clock = queued_clock()
        if clock is not None:
            clock.synchronize(self._lane_mark.ends_at)

    def wait(self, stream: LaneStream | None = None) -> None:
        """Let a stream wait for it, the present one if none is given."""
        clock = queued_clock()
        if clock is not None:
            lane = (stream or streams_of_rank().present).lane_on(clock)
            clock.let_wait(lane, self._lane_mark)

    def query(self) -> bool:
        """Whether it has happened: always, since a program asks only to do other work meanwhile."""
        return True

    def elapsed_time(self, end: "LaneEvent") -> float:
        """Milliseconds until a later event."""
        if self.recorded_ns is None or end.recorded_ns is None:
            raise RuntimeError("both events must have been recorded")
        return (end.recorded_ns - self.recorded_ns) / 1e6


def use_stream(stream: LaneStream) -> None:
    """Give the stream what is launched from now on."""
    streams_of_rank().present = stream
    clock = queued_clock()
    if clock is not None:
        clock.use_lane(stream.lane_on(clock))


class InStream(AbstractContextManager["LaneStream | None"]):
    """`torch.cuda.stream`: gives a stream what is launched inside of it; None changes nothing."""

    def __init__(self, stream: LaneStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> LaneStream | None:
        return None if self._stream is None else self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)


def current_stream(_device: Any = None) -> LaneStream:
    """The stream that gets what is launched now."""
    return streams_of_rank().present


def default_stream(_device: Any = None) -> LaneStream:
    """The first stream of the rank."""
    return streams_of_rank().default


def synchronize(_device: Any = None) -> None:
    """Let the host wait for its device."""
    clock = queued_clock()
    if clock is not None:
        clock.synchronize()


def order_by_streams() -> Callable[[], None]:
    """Let `torch.cpu`, which FSDP uses, have such streams and events; returns what undoes it."""

    def wait_for_device(device: Any = None) -> None:  # dynamo wants others than CUDA's
        synchronize(device)

    names = {
        "Stream": LaneStream, "Event": LaneEvent, "stream": InStream, "StreamContext": InStream,
        "current_stream": current_stream, "synchronize": wait_for_device,
    }  # fmt: skip
    before = {name: getattr(torch.cpu, name) for name in names}
    for name, value in names.items():
        setattr(torch.cpu, name, value)

    def undo() -> None:
        for name, value in before.items():
            setattr(torch.cpu, name, value)

    return undo
