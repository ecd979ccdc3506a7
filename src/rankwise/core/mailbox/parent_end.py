"""The parent's end of a mailbox: calls go out, each comes to exactly one end.

Theory of operation
===================

```
STARTING ─HELLO→ OPEN ─CloseRequested→ CLOSING ─PeerEnded→ ENDED
    │              │                      │ patience over: KillPeer
    └── hello too late, broken channel ───┴──→ LOST (KillPeer) ─PeerEnded→ ENDED
```

A call is *queued* until the worker is up and its lane has room, then *sent*, then answered. Every
call ends in exactly one of `Deliver` and `GiveUpCall`, whatever happens:

- The worker ends: all calls are given up at once, in the order in which they were made; those that
  were sent say so, since nobody can know how far they came.
- A deadline passes: the call is given up, but its place in the lane stays taken, because the worker
  may still be busy with it. The late answer frees the place and is dropped.
- An answer comes twice, or to a call that was given up: it is dropped. One that answers nothing
  that was ever asked, or in the wrong order, means that the two ends no longer agree: the worker is
  killed, as is one that sends what is no frame. What it might have meant is not guessed.

Requests of one lane are answered in their order, so the first unanswered one is the one that an
answer must belong to. Lanes do not wait for one another: a `malloc` goes out while a task runs.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import SECOND, Duration, Instant, after, format_duration
from rankwise.core.mailbox.frames import Frame, FrameKind, Lane
from rankwise.core.mailbox.vocabulary import (
    AnnounceEnd,
    AnnounceReady,
    Called,
    ChannelBroke,
    CloseRequested,
    Deliver,
    FrameArrived,
    GiveUpCall,
    KillPeer,
    ParentEffect,
    ParentStimulus,
    PeerEnded,
    SendFrame,
)

DEFAULT_START_PATIENCE = Duration(60 * SECOND)


class ParentPhase(StrEnum):
    """Where in its life a mailbox is, as its parent sees it."""

    STARTING = "starting"
    OPEN = "open"
    CLOSING = "closing"
    LOST = "lost"
    ENDED = "ended"


@dataclass(slots=True)
class _Call:
    number: int
    order: int
    lane: Lane
    body: bytes
    deadline: Instant | None
    patience: Duration | None
    sequence: int = 0
    is_given_up: bool = False


@dataclass(slots=True)
class _LaneState:
    depth: int
    queued: deque[_Call] = field(default_factory=deque)
    sent: deque[_Call] = field(default_factory=deque)
    last_sequence: int = 0
    last_answered: int = 0


class ParentEnd:
    """One worker's mailbox, from its start to its end.

    Args:
        name: how messages call the worker.
        started_at: when its process was started.
        start_patience: how long it may take to say that it is up.
        depth: how many requests of a lane may be at the worker at once.
    """

    def __init__(
        self,
        name: str,
        started_at: Instant,
        *,
        start_patience: Duration = DEFAULT_START_PATIENCE,
        depth: int = 1,
    ) -> None:
        if depth < 1:
            raise LocalProtocolError(f"depth is {depth}, expected at least 1")
        self.name = name
        self.phase = ParentPhase.STARTING
        self._lanes = {lane: _LaneState(depth) for lane in Lane}
        self._phase_deadline: Instant | None = after(started_at, start_patience)
        self._start_patience = start_patience
        self._calls_made = 0
        self._reason = ""
        self._was_told_to_end = False

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        deadlines = [
            call.deadline
            for call in self._calls()
            if call.deadline is not None and not call.is_given_up
        ]
        if self._phase_deadline is not None:
            deadlines.append(self._phase_deadline)
        return min(deadlines, default=None)

    @property
    def unanswered(self) -> int:
        """How many calls have not come to their end."""
        return sum(not call.is_given_up for call in self._calls())

    def handle(self, stimulus: ParentStimulus, now: Instant) -> list[ParentEffect]:
        """Take in a fact; return what is to be done, in this order."""
        match stimulus:
            case Called():
                return self._on_called(stimulus, now)
            case FrameArrived(frame=frame):
                return self._on_frame(frame)
            case ChannelBroke(reason=reason):
                return self._lose(reason)
            case PeerEnded(reason=reason):
                return self._on_peer_ended(reason)
            case CloseRequested(patience=patience):
                return self._on_close(patience, now)

    def tick(self, now: Instant) -> list[ParentEffect]:
        """Let deadlines that have passed take effect. Calling it too early changes nothing."""
        effects: list[ParentEffect] = []
        if self._phase_deadline is not None and self._phase_deadline <= now:
            self._phase_deadline = None
            if self.phase is ParentPhase.STARTING:
                waited = format_duration(self._start_patience)
                effects += self._lose(f"it did not come up within {waited}")
            else:
                effects.append(KillPeer(f"{self.name} did not end when it was told to"))
        for call in sorted(self._calls(), key=lambda each: each.order):
            if call.deadline is not None and call.deadline <= now and not call.is_given_up:
                effects.append(self._time_out(call))
        return effects + self._shutdown_if_idle()

    def _on_called(self, stimulus: Called, now: Instant) -> list[ParentEffect]:
        if self.phase not in (ParentPhase.STARTING, ParentPhase.OPEN):
            reason = self._reason or "it was told to end"
            words = f"{self.name} takes no more requests: {reason}"
            return [GiveUpCall(stimulus.call, words, timed_out=False, was_sent=False)]
        patience = stimulus.patience
        deadline = None if patience is None else after(now, patience)
        call = _Call(
            stimulus.call, self._calls_made, stimulus.lane, stimulus.body, deadline, patience
        )
        self._calls_made += 1
        self._lanes[stimulus.lane].queued.append(call)
        return self._send_queued(stimulus.lane)

    def _send_queued(self, lane: Lane) -> list[ParentEffect]:
        effects: list[ParentEffect] = []
        state = self._lanes[lane]
        if self.phase not in (ParentPhase.OPEN, ParentPhase.CLOSING):
            return effects
        while state.queued and len(state.sent) < state.depth:
            call = state.queued.popleft()
            state.last_sequence += 1
            call.sequence = state.last_sequence
            state.sent.append(call)
            effects.append(SendFrame(Frame(FrameKind.REQUEST, lane, call.sequence, call.body)))
            call.body = b""
        return effects

    def _on_frame(self, frame: Frame) -> list[ParentEffect]:
        if self.phase in (ParentPhase.LOST, ParentPhase.ENDED):
            return []
        if frame.kind is FrameKind.HELLO:
            return self._on_hello(frame)
        if frame.kind not in (FrameKind.REPLY, FrameKind.FAILURE):
            return self._lose(f"it sent a {frame.kind.name}, which is the parent's to send")
        return self._on_answer(frame)

    def _on_hello(self, frame: Frame) -> list[ParentEffect]:
        if self.phase is not ParentPhase.STARTING:
            return []  # said twice
        self.phase = ParentPhase.OPEN
        self._phase_deadline = None
        effects: list[ParentEffect] = [AnnounceReady(frame.body)]
        for lane in Lane:
            effects += self._send_queued(lane)
        return effects

    def _on_answer(self, frame: Frame) -> list[ParentEffect]:
        state = self._lanes[frame.lane]
        if frame.sequence <= state.last_answered:
            return []  # said twice
        if not state.sent or state.sent[0].sequence != frame.sequence:
            lane = frame.lane.name.lower()
            return self._lose(f"it answered {lane} request #{frame.sequence} out of turn")
        call = state.sent.popleft()
        state.last_answered = frame.sequence
        effects: list[ParentEffect] = []
        if not call.is_given_up:
            succeeded = frame.kind is FrameKind.REPLY
            effects.append(Deliver(call.number, frame.body, succeeded))
        return effects + self._send_queued(frame.lane) + self._shutdown_if_idle()

    def _time_out(self, call: _Call) -> ParentEffect:
        state = self._lanes[call.lane]
        was_sent = call.sequence > 0
        call.is_given_up = True
        if not was_sent:
            state.queued.remove(call)
        assert call.patience is not None, "only a call with patience can lose it"
        return GiveUpCall(
            call.number,
            f"{self.name} has not answered within {format_duration(call.patience)}",
            timed_out=True,
            was_sent=was_sent,
        )

    def _on_close(self, patience: Duration, now: Instant) -> list[ParentEffect]:
        if self.phase is ParentPhase.STARTING:
            # It may come up at any moment, or never: nobody waits for that any more.
            self.phase = ParentPhase.LOST
            self._phase_deadline = None
            return [
                *self._give_up_all("it was told to end before it was up"),
                KillPeer(f"{self.name} was told to end before it was up"),
            ]
        if self.phase is not ParentPhase.OPEN:
            return []
        self.phase = ParentPhase.CLOSING
        self._phase_deadline = after(now, patience)
        return self._shutdown_if_idle()

    def _shutdown_if_idle(self) -> list[ParentEffect]:
        """Say that it is over, once there is nothing left to send."""
        if self.phase is not ParentPhase.CLOSING:
            return []
        if any(state.queued for state in self._lanes.values()):
            return []
        if self._was_told_to_end:
            return []
        self._was_told_to_end = True
        return [SendFrame(Frame(FrameKind.SHUTDOWN, Lane.CONTROL, 0))]

    def _lose(self, reason: str) -> list[ParentEffect]:
        if self.phase in (ParentPhase.LOST, ParentPhase.ENDED):
            return []
        self.phase = ParentPhase.LOST
        self._phase_deadline = None
        self._reason = reason
        return [*self._give_up_all(reason), KillPeer(f"{self.name}: {reason}")]

    def _on_peer_ended(self, reason: str) -> list[ParentEffect]:
        if self.phase is ParentPhase.ENDED:
            return []
        was_asked = self.phase is ParentPhase.CLOSING and self._was_told_to_end
        why = self._reason if self.phase is ParentPhase.LOST and self._reason else reason
        effects = self._give_up_all(reason)
        self.phase = ParentPhase.ENDED
        self._phase_deadline = None
        self._reason = why
        return [*effects, AnnounceEnd("" if was_asked and not effects else why)]

    def _give_up_all(self, reason: str) -> list[ParentEffect]:
        effects: list[ParentEffect] = [
            GiveUpCall(
                call.number,
                f"{self.name} is gone: {reason}",
                timed_out=False,
                was_sent=call.sequence > 0,
            )
            for call in sorted(self._calls(), key=lambda each: each.order)
            if not call.is_given_up
        ]
        for state in self._lanes.values():
            state.queued.clear()
            state.sent.clear()
        return effects

    def _calls(self) -> list[_Call]:
        return [call for lane in self._lanes.values() for call in (*lane.sent, *lane.queued)]
