"""Requests to one child, one at a time: what is asked of it that is no task.

Theory of operation
===================

A call is *sent* when the one before it was answered, and ends in exactly one of `Deliver` and
`GiveUp`. Its maker may go away meanwhile, by Ctrl-C or because time was up: the call keeps its
place until it is answered.

```
OPEN ─PeerEnded→ ENDED
  └──an invalid answer (`KillPeer`)──→ ENDED
```
"""

from collections import deque

import msgspec

from rankwise.base.units import Instant
from rankwise.core.tasks.frames import Frame, FrameKind, RequestLane


class Called(msgspec.Struct, frozen=True, tag=True):
    """A request for work of the child; `call` is a number that is used once."""

    call: int
    body: bytes


class AnswerArrived(msgspec.Struct, frozen=True, tag=True):
    """A whole frame came from the child."""

    frame: Frame


class ChannelBroke(msgspec.Struct, frozen=True, tag=True):
    """What came from the child is no frame, or a cut one; `reason` is for people."""

    reason: str


class PeerEnded(msgspec.Struct, frozen=True, tag=True):
    """The child is gone; all that it had answered has been told before this."""

    reason: str


Stimulus = Called | AnswerArrived | ChannelBroke | PeerEnded


class SendFrame(msgspec.Struct, frozen=True, tag=True):
    """Hand a frame to the child, and tell it so."""

    frame: Frame


class Deliver(msgspec.Struct, frozen=True, tag=True):
    """A call is answered; `body` is a result, or a failure as the child wrote it."""

    call: int
    body: bytes
    succeeded: bool


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """A call will never be answered."""

    call: int
    reason: str


class KillPeer(msgspec.Struct, frozen=True, tag=True):
    """The child does not keep to the rules: kill it."""

    reason: str


Effect = SendFrame | Deliver | GiveUp | KillPeer


class Requests:
    """The calls to one child; `name` is what messages call it."""

    next_deadline: Instant | None = None
    """The caller's patience is over: the call is forgotten; nothing here happens by itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: deque[Called] = deque()
        """The first one has been sent."""
        self._end = ""
        """Why nothing is answered any more; empty while the child lives."""

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        del now  # nothing here depends on it
        match stimulus:
            case Called(call=call) if self._end:
                return [GiveUp(call, f"{self.name} takes no more requests: {self._end}")]
            case Called():
                # One at a time: there is one frame, and the next call would overwrite this one, or
                # take its answer for its own.
                self._calls.append(stimulus)
                return self._send() if len(self._calls) == 1 else []
            case AnswerArrived(frame=frame):
                return [] if self._end else self._on_answer(frame)
            case ChannelBroke(reason=reason):
                return self._break(reason)
            case PeerEnded(reason=reason):
                return self._end_all(reason)

    def tick(self, now: Instant) -> list[Effect]:
        """Nothing happens by itself."""
        del now
        return []

    def _send(self) -> list[Effect]:
        return [
            SendFrame(Frame(FrameKind.REQUEST, RequestLane.CONTROL, each.call, each.body))
            for each in list(self._calls)[:1]
        ]

    def _on_answer(self, frame: Frame) -> list[Effect]:
        # Both sides no longer agree: the meaning of the answer is not guessed.
        if frame.kind not in (FrameKind.REPLY, FrameKind.FAILURE):
            return self._break(f"it sent a {frame.kind.name}, which is the parent's to send")
        if not self._calls or frame.sequence != self._calls[0].call:
            return self._break(f"it answered request #{frame.sequence} out of turn")
        self._calls.popleft()
        is_reply = frame.kind is FrameKind.REPLY
        return [Deliver(frame.sequence, frame.body, succeeded=is_reply), *self._send()]

    def _break(self, reason: str) -> list[Effect]:
        return [] if self._end else [*self._end_all(reason), KillPeer(f"{self.name}: {reason}")]

    def _end_all(self, reason: str) -> list[Effect]:
        self._end = self._end or reason
        calls, self._calls = self._calls, deque()
        return [GiveUp(each.call, f"{self.name} is gone: {reason}") for each in calls]
