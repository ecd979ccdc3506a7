"""What the two ends of a mailbox are told (stimuli) and what they order (effects)."""

import msgspec

from rankwise.base.units import Duration
from rankwise.core.mailbox.frames import Frame, Lane

# The parent's end.


class Called(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants something done by the worker.

    Attributes:
        call: the caller's own number for it, used once.
        body: what the worker is told.
        patience: how long it may take from now on; None waits as long as the worker lives.
    """

    call: int
    lane: Lane
    body: bytes = b""
    patience: Duration | None = None


class FrameArrived(msgspec.Struct, frozen=True, tag=True):
    """A whole frame came from the other end."""

    frame: Frame


class ChannelBroke(msgspec.Struct, frozen=True, tag=True):
    """What came from the other end is no frame, or a cut one; `reason` is for people."""

    reason: str


class PeerEnded(msgspec.Struct, frozen=True, tag=True):
    """The other end's process is gone; all that it had sent has been delivered before this."""

    reason: str


class CloseRequested(msgspec.Struct, frozen=True, tag=True):
    """The worker shall end, after what it has been asked before; `patience` bounds its wait."""

    patience: Duration


ParentStimulus = Called | FrameArrived | ChannelBroke | PeerEnded | CloseRequested


class SendFrame(msgspec.Struct, frozen=True, tag=True):
    """Hand a frame to the other end, and ring."""

    frame: Frame


class AnnounceReady(msgspec.Struct, frozen=True, tag=True):
    """The worker is up; `body` is what it said about itself."""

    body: bytes


class Deliver(msgspec.Struct, frozen=True, tag=True):
    """A call is answered.

    Attributes:
        succeeded: whether `body` is a result; if not, it is a failure as the worker wrote it.
    """

    call: int
    body: bytes
    succeeded: bool


class GiveUpCall(msgspec.Struct, frozen=True, tag=True):
    """A call will never be answered.

    Attributes:
        timed_out: whether the worker lives and took too long; if not, it is gone.
        was_sent: whether the worker may have begun, or even finished it.
    """

    call: int
    reason: str
    timed_out: bool
    was_sent: bool


class KillPeer(msgspec.Struct, frozen=True, tag=True):
    """The worker does not keep to the rules, or does not end: kill it. `PeerEnded` follows."""

    reason: str


class AnnounceEnd(msgspec.Struct, frozen=True, tag=True):
    """Nothing more comes from this mailbox; `reason` is empty if that was asked for."""

    reason: str


ParentEffect = SendFrame | AnnounceReady | Deliver | GiveUpCall | KillPeer | AnnounceEnd

# The worker's end. It shares FrameArrived, ChannelBroke, PeerEnded and SendFrame.


class Started(msgspec.Struct, frozen=True, tag=True):
    """The worker can take requests; `body` says what it is."""

    body: bytes = b""


class WorkFinished(msgspec.Struct, frozen=True, tag=True):
    """A request has been carried out, or has failed; `body` is the result or the failure."""

    lane: Lane
    sequence: int
    body: bytes = b""
    succeeded: bool = True


WorkerStimulus = Started | FrameArrived | WorkFinished | ChannelBroke | PeerEnded


class CarryOut(msgspec.Struct, frozen=True, tag=True):
    """Do what a request says; answer `WorkFinished`."""

    lane: Lane
    sequence: int
    body: bytes


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End the process; `reason` is empty if the parent asked for it."""

    reason: str


WorkerEffect = SendFrame | CarryOut | Leave
