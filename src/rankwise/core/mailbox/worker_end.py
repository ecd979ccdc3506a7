"""The worker's end of a mailbox: each request is carried out once, and answered in order.

Theory of operation
===================

```
STARTING ─Started→ OPEN ─SHUTDOWN→ LEAVING ─nothing left to do→ LEFT
                     └── parent gone, broken channel ──────────→ LEFT
```

- A request has a number, one more than its predecessor on the lane. A number that was had before
  is a repetition (a doorbell rang twice): it is not carried out again. If it was answered, the
  answer is given again, as far as it is the lane's last one. A gap means that a request was lost,
  so nothing that follows can be right: the worker leaves.
- Requests that come while their lane is busy wait in order. Lanes do not wait for one another;
  whether two lanes really run at the same time is the driver's affair.
- When the parent is gone, nobody is left to answer to: the worker leaves at once, also from the
  middle of its work. The parent's end sees to it that unanswered calls are reported.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import Instant
from rankwise.core.mailbox.frames import Frame, FrameKind, Lane
from rankwise.core.mailbox.vocabulary import (
    CarryOut,
    ChannelBroke,
    FrameArrived,
    Leave,
    PeerEnded,
    SendFrame,
    Started,
    WorkerEffect,
    WorkerStimulus,
    WorkFinished,
)


class WorkerPhase(StrEnum):
    """Where in its life a mailbox is, as its worker sees it."""

    STARTING = "starting"
    OPEN = "open"
    LEAVING = "leaving"
    LEFT = "left"


@dataclass(slots=True)
class _LaneState:
    waiting: deque[Frame] = field(default_factory=deque)
    running: int = 0
    """The number of the request that is being carried out; 0 if none is."""
    last_arrived: int = 0
    last_answer: Frame | None = None


class WorkerEnd:
    """A worker's side of its mailbox."""

    next_deadline: Instant | None = None
    """Only stimuli change anything: it is the parent who loses patience."""

    def __init__(self) -> None:
        self.phase = WorkerPhase.STARTING
        self._lanes = {lane: _LaneState() for lane in Lane}

    def handle(self, stimulus: WorkerStimulus, now: Instant) -> list[WorkerEffect]:
        """Take in a fact; return what is to be done, in this order."""
        del now  # nothing here depends on it
        if self.phase is WorkerPhase.LEFT:
            return []
        match stimulus:
            case Started(body=body):
                return self._on_started(body)
            case FrameArrived(frame=frame):
                return self._on_frame(frame)
            case WorkFinished():
                return self._on_finished(stimulus)
            case ChannelBroke(reason=reason):
                return self._leave(f"the parent's messages cannot be read: {reason}")
            case PeerEnded(reason=reason):
                return self._leave(f"the parent is gone: {reason}")

    def tick(self, now: Instant) -> list[WorkerEffect]:
        """Nothing happens by itself."""
        del now
        return []

    def _on_started(self, body: bytes) -> list[WorkerEffect]:
        if self.phase is not WorkerPhase.STARTING:
            raise LocalProtocolError("a worker's mailbox was started twice")
        self.phase = WorkerPhase.OPEN
        effects: list[WorkerEffect] = [SendFrame(Frame(FrameKind.HELLO, Lane.CONTROL, 0, body))]
        for lane in Lane:
            effects += self._begin_next(lane)
        return effects

    def _on_frame(self, frame: Frame) -> list[WorkerEffect]:
        match frame.kind:
            case FrameKind.REQUEST:
                return self._on_request(frame)
            case FrameKind.SHUTDOWN:
                self.phase = WorkerPhase.LEAVING
                return self._leave_if_done()
            case FrameKind.HELLO | FrameKind.REPLY | FrameKind.FAILURE:
                return self._leave(
                    f"the parent sent a {frame.kind.name}, which is a worker's to send"
                )

    def _on_request(self, frame: Frame) -> list[WorkerEffect]:
        state = self._lanes[frame.lane]
        if frame.sequence <= state.last_arrived:
            answer = state.last_answer
            if answer is not None and answer.sequence == frame.sequence:
                return [SendFrame(answer)]
            return []  # still at it, or answered long ago
        lane = frame.lane.name.lower()
        if frame.sequence != state.last_arrived + 1:
            return self._leave(
                f"{lane} request #{state.last_arrived + 1} was lost: "
                f"#{frame.sequence} came in its place"
            )
        if self.phase is WorkerPhase.LEAVING:
            return self._leave(f"{lane} request #{frame.sequence} came after the order to end")
        state.last_arrived = frame.sequence
        state.waiting.append(frame)
        return self._begin_next(frame.lane)

    def _begin_next(self, lane: Lane) -> list[WorkerEffect]:
        state = self._lanes[lane]
        if self.phase is WorkerPhase.STARTING or state.running or not state.waiting:
            return []
        frame = state.waiting.popleft()
        state.running = frame.sequence
        return [CarryOut(lane, frame.sequence, frame.body)]

    def _on_finished(self, stimulus: WorkFinished) -> list[WorkerEffect]:
        state = self._lanes[stimulus.lane]
        if state.running != stimulus.sequence:
            raise LocalProtocolError(
                f"{stimulus.lane.name.lower()} request #{stimulus.sequence} was finished, but "
                f"#{state.running} is being carried out"
            )
        state.running = 0
        kind = FrameKind.REPLY if stimulus.succeeded else FrameKind.FAILURE
        state.last_answer = Frame(kind, stimulus.lane, stimulus.sequence, stimulus.body)
        effects: list[WorkerEffect] = [SendFrame(state.last_answer)]
        return effects + self._begin_next(stimulus.lane) + self._leave_if_done()

    def _leave_if_done(self) -> list[WorkerEffect]:
        busy = any(state.running or state.waiting for state in self._lanes.values())
        if self.phase is not WorkerPhase.LEAVING or busy:
            return []
        self.phase = WorkerPhase.LEFT
        return [Leave("")]

    def _leave(self, reason: str) -> list[WorkerEffect]:
        self.phase = WorkerPhase.LEFT
        return [Leave(reason)]
