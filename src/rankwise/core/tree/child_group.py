"""The children of one worker as a group, from the order to start them until the last has gone.

Theory of operation
===================

    IDLE ─StartRequested→ STARTING ─all ready→ UP ─GroupCloseRequested→ CLOSING ─all gone→ IDLE
                             │ a refusal, an end, the deadline
                             └→ ABORTING ─all gone→ IDLE

*Starting* is all or nothing. The first child that refuses, ends or is late is the reason; all
others are killed.

*Up.* A replaceable child that ends gets a successor, unless it ends before it was ready once.

*Closing* goes by stage: the children of a stage are released together, the next stage follows when
they are gone. One deadline holds for all stages; what is left then is killed. A child that not even
that ends within its own deadline is stuck in the kernel and is told as a survivor. A child that
comes to a bad end meanwhile is told as lost, if no other could have taken its place: whether it has
done what it had to do in the end is unknown.

*The fork server* is the parent of all children. When it ends, they end with it, and no process is
left that could tell how.
"""

from enum import StrEnum

import msgspec

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import SECOND, Duration, Instant, after, format_duration


class ChildGroupPhase(StrEnum):
    """Where in its life a group is."""

    IDLE = "idle"
    STARTING = "starting"
    ABORTING = "aborting"
    UP = "up"
    CLOSING = "closing"


class ChildGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a group, and how long it may take.

    Attributes:
        names: what to call each child in messages.
        stages: for each child when it is released: those of stage 0 first.
        replaceable: for each child whether it gets a successor.
        start_patience: from the order to start until all are ready.
        close_patience: from the order to close until killing begins.
        kill_patience: from killing until a child is given up.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    replaceable: tuple[bool, ...]
    start_patience: Duration = Duration(120 * SECOND)
    close_patience: Duration = Duration(10 * SECOND)
    kill_patience: Duration = Duration(5 * SECOND)

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.stages) == len(self.replaceable), "one entry per child"


# Stimuli


class StartRequested(msgspec.Struct, frozen=True, tag=True):
    """A request to start the group."""


class ChildReady(msgspec.Struct, frozen=True, tag=True):
    """A child has come up."""

    child: int


class ChildRefused(msgspec.Struct, frozen=True, tag=True):
    """A child says why it cannot come up."""

    child: int
    message: str


class ChildEnded(msgspec.Struct, frozen=True, tag=True):
    """A child has ended.

    Attributes:
        child: which.
        how: that in words: `was killed by SIGKILL`.
        is_well: whether it has come to its end by itself, and says that all went well.
    """

    child: int
    how: str
    is_well: bool = False


class ForkServerEnded(msgspec.Struct, frozen=True, tag=True):
    """The parent of all children has ended, and they with it."""


class GroupCloseRequested(msgspec.Struct, frozen=True, tag="CloseRequested"):
    """The group is not needed any more."""


ChildGroupStimulus = (
    StartRequested | ChildReady | ChildRefused | ChildEnded | ForkServerEnded | GroupCloseRequested
)


# Effects


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Start this child."""

    child: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let this child come to its end."""

    child: int


class KillChild(msgspec.Struct, frozen=True, tag="Kill"):
    """End this child at once."""

    child: int


class CameUp(msgspec.Struct, frozen=True, tag=True):
    """All children are ready."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The group did not come up, and is gone.

    Attributes:
        child: whose fault it was; None when it was the fork server's.
        reason: what it said, or what became of it.
        refused: whether the child said so itself.
        survivors: children that could not be killed.
    """

    child: int | None
    reason: str
    refused: bool
    survivors: tuple[int, ...]


class ChildLost(msgspec.Struct, frozen=True, tag=True):
    """A child has ended that was up, or has come to a bad end while it was closed."""

    child: int
    how: str
    successor: bool


class ChildReplaced(msgspec.Struct, frozen=True, tag=True):
    """The successor of a lost child is ready."""

    child: int


class GroupLost(msgspec.Struct, frozen=True, tag=True):
    """The children that were left are gone, with the fork server."""

    children: tuple[int, ...]


class GroupClosed(msgspec.Struct, frozen=True, tag="Closed"):
    """The group is gone.

    Attributes:
        killed: children that had to be killed.
        survivors: children that could not be.
    """

    killed: tuple[int, ...]
    survivors: tuple[int, ...]


ChildGroupEffect = (
    Spawn
    | Release
    | KillChild
    | CameUp
    | StartFailed
    | ChildLost
    | ChildReplaced
    | GroupLost
    | GroupClosed
)


class ChildGroup:
    """The machine."""

    def __init__(self, spec: ChildGroupSpec) -> None:
        self.spec = spec
        self.phase = ChildGroupPhase.IDLE
        self._living: list[int] = []
        """Children that have been ordered and have not ended, in the order of their numbers."""
        self._ready: list[bool] = [False] * len(spec.names)
        self._successors: list[int] = []
        """Children whose predecessor died, and which have not been ready yet."""
        self._stage = 0
        self._killed: list[int] = []
        self._deadline: Instant | None = None
        self._failure: tuple[int | None, str, bool] = (None, "", False)

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next."""
        return self._deadline

    def handle(self, stimulus: ChildGroupStimulus, now: Instant) -> list[ChildGroupEffect]:
        """Take in a fact; return what is to be done, in this order."""
        match stimulus:
            case StartRequested():
                return self._start(now)
            case ChildReady():
                return self._on_ready(stimulus.child)
            case ChildRefused():
                return self._on_refusal(stimulus, now)
            case ChildEnded():
                return self._on_end(stimulus, now)
            case ForkServerEnded():
                return self._on_fork_server_end()
            case GroupCloseRequested():
                return self._close(now)

    def tick(self, now: Instant) -> list[ChildGroupEffect]:
        """Let a deadline that has passed take effect."""
        if self._deadline is None or now < self._deadline:
            return []
        match self.phase:
            case ChildGroupPhase.STARTING:
                late = next(child for child in self._living if not self._ready[child])
                patience = format_duration(self.spec.start_patience)
                return self._abort((late, f"was not ready within {patience}", False), now)
            case ChildGroupPhase.CLOSING if not self._killed:
                return self._kill_all(now)
            case _:
                return self._finish()

    def _start(self, now: Instant) -> list[ChildGroupEffect]:
        if self.phase is not ChildGroupPhase.IDLE:
            raise LocalProtocolError(f"the group cannot be started while it is {self.phase}")
        self._living = list(range(len(self.spec.names)))
        self._ready = [False] * len(self.spec.names)
        self._successors = []
        self._killed = []
        if not self._living:
            self.phase = ChildGroupPhase.UP
            return [CameUp()]
        self.phase = ChildGroupPhase.STARTING
        self._deadline = after(now, self.spec.start_patience)
        return [Spawn(child) for child in self._living]

    def _on_ready(self, child: int) -> list[ChildGroupEffect]:
        self._ready[child] = True
        if self.phase is ChildGroupPhase.UP and child in self._successors:
            self._successors.remove(child)
            return [ChildReplaced(child)]
        if self.phase is not ChildGroupPhase.STARTING or not all(self._ready):
            return []
        self.phase = ChildGroupPhase.UP
        self._deadline = None
        return [CameUp()]

    def _on_refusal(self, refusal: ChildRefused, now: Instant) -> list[ChildGroupEffect]:
        if self.phase is ChildGroupPhase.STARTING:
            return self._abort((refusal.child, refusal.message, True), now)
        return []  # a successor's: its end is told next, and says enough

    def _abort(self, failure: tuple[int | None, str, bool], now: Instant) -> list[ChildGroupEffect]:
        self.phase = ChildGroupPhase.ABORTING
        self._failure = failure  # told when all are gone, so that a listener finds nothing left
        return self._kill_all(now)

    def _kill_all(self, now: Instant) -> list[ChildGroupEffect]:
        if not self._living:
            return self._finish()
        self._killed = list(self._living)
        self._deadline = after(now, self.spec.kill_patience)
        return [KillChild(child) for child in self._living]

    def _on_end(self, end: ChildEnded, now: Instant) -> list[ChildGroupEffect]:
        child = end.child
        if child not in self._living:
            return []
        self._living.remove(child)
        match self.phase:
            case ChildGroupPhase.STARTING:
                return self._abort((child, end.how, False), now)
            case ChildGroupPhase.ABORTING:
                return self._finish() if not self._living else []
            case ChildGroupPhase.UP:
                return self._replace(child, end.how)
            case ChildGroupPhase.CLOSING:
                return [*self._on_end_at_close(end), *self._release_next()]
            case ChildGroupPhase.IDLE:
                return []

    def _on_end_at_close(self, end: ChildEnded) -> list[ChildGroupEffect]:
        is_expected = end.is_well or end.child in self._killed
        if is_expected or self.spec.replaceable[end.child]:
            return []
        # Whether a child without a possible successor has done its part in the end is unknown.
        return [ChildLost(end.child, end.how, successor=False)]

    def _replace(self, child: int, how: str) -> list[ChildGroupEffect]:
        was_ready, self._ready[child] = self._ready[child], False
        if child in self._successors:
            self._successors.remove(child)
        # The cause of an end before it was ready would kill the next one too.
        if not (self.spec.replaceable[child] and was_ready):
            return [ChildLost(child, how, successor=False)]
        self._living = sorted([*self._living, child])
        self._successors.append(child)
        return [ChildLost(child, how, successor=True), Spawn(child)]

    def _on_fork_server_end(self) -> list[ChildGroupEffect]:
        living, self._living = self._living, []
        match self.phase:
            case ChildGroupPhase.STARTING:
                self.phase = ChildGroupPhase.ABORTING
                self._failure = (None, "the fork server, their parent, has ended", False)
                return self._finish()
            case ChildGroupPhase.UP:
                return [GroupLost(tuple(living))]
            case ChildGroupPhase.CLOSING:
                unexpected = tuple(child for child in living if child not in self._killed)
                return [GroupLost(unexpected), *self._finish()]
            case ChildGroupPhase.ABORTING:
                return self._finish()
            case ChildGroupPhase.IDLE:
                return []

    def _close(self, now: Instant) -> list[ChildGroupEffect]:
        if self.phase is ChildGroupPhase.IDLE:
            return [GroupClosed((), ())]
        if self.phase is ChildGroupPhase.STARTING:
            return self._abort((None, "it was closed while it started", False), now)
        if self.phase is not ChildGroupPhase.UP:
            return []
        self.phase = ChildGroupPhase.CLOSING
        self._deadline = after(now, self.spec.close_patience)
        self._stage = -1
        return self._release_next()

    def _release_next(self) -> list[ChildGroupEffect]:
        """Go on to the next stage that has children, when none of this one is left."""
        if not self._living:
            return self._finish()
        stage = min(self.spec.stages[child] for child in self._living)
        if self._killed or stage == self._stage:
            return []
        self._stage = stage
        return [Release(child) for child in self._living if self.spec.stages[child] == stage]

    def _finish(self) -> list[ChildGroupEffect]:
        survivors = tuple(self._living)
        was, self.phase = self.phase, ChildGroupPhase.IDLE
        self._deadline = None
        self._living = []
        if was is ChildGroupPhase.ABORTING:
            child, reason, refused = self._failure
            return [StartFailed(child, reason, refused, survivors)]
        return [GroupClosed(tuple(self._killed), survivors)]
