"""A parent, a worker and the channel between them, in virtual time and with seeded faults.

The channel carries bytes, in order, cut into pieces, each with a delay. A fault plan says what
becomes of it: frames are repeated, the stream is cut within a frame, the worker or the parent dies
at any instant, work takes longer than the caller's patience. `run_mailbox` lets one such world come
to rest and checks what must hold in every one of them.
"""

from collections.abc import Callable

import msgspec

from rankwise.base.errors import MailboxCorrupt
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.core.mailbox.frames import FrameDecoder, Lane, encode_frame
from rankwise.core.mailbox.parent_end import ParentEnd, ParentPhase
from rankwise.core.mailbox.vocabulary import (
    AnnounceEnd,
    AnnounceReady,
    Called,
    CarryOut,
    ChannelBroke,
    CloseRequested,
    Deliver,
    FrameArrived,
    GiveUpCall,
    KillPeer,
    Leave,
    ParentEffect,
    ParentStimulus,
    PeerEnded,
    SendFrame,
    Started,
    WorkerStimulus,
    WorkFinished,
)
from rankwise.core.mailbox.worker_end import WorkerEnd
from rankwise.drivers.sim.agenda import Agenda, VirtualClock
from rankwise.drivers.sim.streams import stream


class MailboxPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls one mailbox.

    Attributes:
        calls: how many are made.
        depth: how many of a lane may be under way.
        repeats: the chance in percent that a frame arrives twice.
        cuts: the chance in percent that the stream ends within a frame.
        failures: the chance in percent that a request fails.
        worker_dies_at: when the worker is killed, if it is.
        parent_dies_at: when the parent is killed, if it is.
        patience: how long each call waits, if not for ever.
        never_starts: whether the worker never says that it is up.
    """

    calls: int = 10
    depth: int = 1
    repeats: int = 0
    cuts: int = 0
    failures: int = 0
    worker_dies_at: Duration | None = None
    parent_dies_at: Duration | None = None
    patience: Duration | None = None
    never_starts: bool = False


def random_plan(seed: int) -> MailboxPlan:
    """Any mix of faults."""
    chance = stream(seed, "mailbox", "plan")

    def sometimes(value: int) -> int:
        return value if chance.random() < 0.3 else 0

    def instant() -> Duration | None:
        return Duration(chance.randrange(2 * SECOND)) if chance.random() < 0.25 else None

    return MailboxPlan(
        calls=chance.randrange(1, 25),
        depth=chance.randrange(1, 4),
        repeats=sometimes(30),
        cuts=sometimes(3),
        failures=sometimes(30),
        worker_dies_at=instant(),
        parent_dies_at=instant(),
        patience=Duration(chance.randrange(1, 500) * MILLISECOND) if sometimes(1) else None,
        never_starts=chance.random() < 0.03,
    )


class MailboxStory(msgspec.Struct):
    """What has happened.

    Attributes:
        ends: how each call ended: what was delivered or why not, every time that it was told.
        carried_out: the calls that the worker began, in its order.
        journal: every fact with its instant, as text.
    """

    ends: dict[int, list[Deliver | GiveUpCall]] = {}
    carried_out: list[int] = []
    journal: list[str] = []
    worker_left: str | None = None
    announced_end: str | None = None


def result_of(body: bytes) -> bytes:
    """What the worker makes of a request."""
    return body[::-1]


class MailboxWorld:
    """One mailbox from its start until nothing is left to happen."""

    def __init__(
        self, plan: MailboxPlan, seed: int, worker_end: type[WorkerEnd] = WorkerEnd
    ) -> None:
        self.plan = plan
        self.story = MailboxStory()
        self._chance = stream(seed, "mailbox", "world")
        self._clock = VirtualClock()
        self._agenda = Agenda(self._clock)
        self._parent = ParentEnd(
            "chip 0", self._now, start_patience=Duration(3 * SECOND), depth=plan.depth
        )
        self._worker = worker_end()
        self._worker_alive = self._parent_alive = True
        self._to_worker = _Channel(self, self._worker_hears)
        self._to_parent = _Channel(self, self._parent_hears)

    @property
    def _now(self) -> Instant:
        return self._clock.now()

    def run(self) -> MailboxStory:
        """Let everything happen."""
        plan = self.plan
        if not plan.never_starts:
            self._agenda.after(self._delay(), lambda: self._tell_worker(Started(b"up")))
        instant = Duration(0)
        for call in range(plan.calls):
            instant = Duration(instant + self._chance.randrange(80) * MILLISECOND)
            lane = Lane.CONTROL if self._chance.random() < 0.3 else Lane.TASK
            called = Called(call, lane, b"%d" % call, plan.patience)
            self._agenda.after(instant, lambda called=called: self._tell_parent(called))  # type: ignore[misc]
        close = CloseRequested(Duration(5 * SECOND))
        self._agenda.after(Duration(instant + SECOND), lambda: self._tell_parent(close))
        if plan.worker_dies_at is not None:
            self._agenda.after(plan.worker_dies_at, lambda: self._end_worker("signal 9 (SIGKILL)"))
        if plan.parent_dies_at is not None:
            self._agenda.after(plan.parent_dies_at, self._end_parent)
        while self._agenda.next_instant is not None:
            self._agenda.run_next()
        return self.story

    def check(self, where: str) -> None:
        """Assert what must hold in every world that has come to rest."""
        begun = self.story.carried_out
        assert len(begun) == len(set(begun)), f"a request was carried out twice: {where}"
        for call, ends in self.story.ends.items():
            assert len(ends) == 1, f"call {call} ended {len(ends)} times: {where}"
            match ends[0]:
                case Deliver(body=body):
                    assert body == result_of(b"%d" % call), f"call {call} got {body!r}: {where}"
                    assert call in begun, f"call {call} was answered but never begun: {where}"
                case GiveUpCall(was_sent=was_sent):
                    assert was_sent or call not in begun, f"call {call} was begun unsent: {where}"
        if self.plan.parent_dies_at is not None:
            return
        assert len(self.story.ends) == self.plan.calls, f"a call never ended: {where}"
        assert self.story.announced_end is not None, f"the end was never announced: {where}"
        assert self._parent.phase is ParentPhase.ENDED, f"the parent waits: {where}"
        assert self._parent.next_deadline is None, f"a deadline is left: {where}"
        assert not self._worker_alive, f"the worker lives on: {where}"

    def at_delay(self, action: Callable[[], None], *, not_before: Instant) -> Instant:
        """Let something happen after a random delay; returns when."""
        instant = max(after(self._now, self._delay()), not_before)
        self._agenda.at(instant, action)
        return instant

    def chance_of(self, percent: int) -> bool:
        """Whether something happens that happens so often."""
        return percent > 0 and self._chance.randrange(100) < percent

    def piece_of(self, size: int) -> int:
        """How many bytes travel together."""
        return self._chance.randrange(1, size + 1)

    def _delay(self) -> Duration:
        return Duration(self._chance.randrange(20 * MILLISECOND))

    def _tell_parent(self, stimulus: ParentStimulus) -> None:
        if not self._parent_alive:
            return
        self._note("parent", stimulus)
        for effect in self._parent.handle(stimulus, self._now):
            self._obey_parent(effect)
        self._wake_parent()

    def _wake_parent(self) -> None:
        deadline = self._parent.next_deadline
        if deadline is not None:
            self._agenda.at(max(deadline, self._now), self._tick_parent)

    def _tick_parent(self) -> None:
        deadline = self._parent.next_deadline
        if self._parent_alive and deadline is not None and deadline <= self._now:
            for effect in self._parent.tick(self._now):
                self._obey_parent(effect)
            self._wake_parent()

    def _obey_parent(self, effect: ParentEffect) -> None:
        self._note("parent orders", effect)
        match effect:
            case SendFrame(frame=frame):
                self._to_worker.send(encode_frame(frame))
            case Deliver(call=call) | GiveUpCall(call=call):
                self.story.ends.setdefault(call, []).append(effect)
            case KillPeer(reason=reason):
                self._end_worker(f"killed: {reason}")
            case AnnounceEnd(reason=reason):
                assert self.story.announced_end is None, "the end was announced twice"
                self.story.announced_end = reason
            case AnnounceReady():
                pass

    def _tell_worker(self, stimulus: WorkerStimulus) -> None:
        if not self._worker_alive:
            return
        self._note("worker", stimulus)
        for effect in self._worker.handle(stimulus, self._now):
            self._note("worker orders", effect)
            match effect:
                case SendFrame(frame=frame):
                    self._to_parent.send(encode_frame(frame))
                case CarryOut():
                    self._carry_out(effect)
                case Leave(reason=reason):
                    self.story.worker_left = reason
                    self._end_worker("exit code 0")

    def _carry_out(self, order: CarryOut) -> None:
        self.story.carried_out.append(int(order.body))
        failed = self.chance_of(self.plan.failures)
        done = WorkFinished(order.lane, order.sequence, result_of(order.body), succeeded=not failed)
        duration = Duration(self._chance.randrange(200 * MILLISECOND))
        self._agenda.after(duration, lambda: self._tell_worker(done))

    def _worker_hears(self, stimulus: FrameArrived | ChannelBroke) -> None:
        self._tell_worker(stimulus)

    def _parent_hears(self, stimulus: FrameArrived | ChannelBroke) -> None:
        self._tell_parent(stimulus)

    def _end_worker(self, reason: str) -> None:
        if self._worker_alive:
            self._worker_alive = False
            # What it has sent is delivered before its end is heard of.
            end = PeerEnded(reason)
            self.at_delay(lambda: self._tell_parent(end), not_before=self._to_parent.busy_until)

    def _end_parent(self) -> None:
        if self._parent_alive:
            self._parent_alive = False
            end = PeerEnded("signal 9 (SIGKILL)")
            self.at_delay(lambda: self._tell_worker(end), not_before=self._to_worker.busy_until)

    def _note(self, who: str, what: object) -> None:
        self.story.journal.append(f"{self._now} {who}: {what!r}")


class _Channel:
    """Bytes on their way to one end: in order, late, in pieces, and not always whole."""

    def __init__(
        self, world: MailboxWorld, deliver: Callable[[FrameArrived | ChannelBroke], None]
    ) -> None:
        self._world = world
        self._deliver = deliver
        self._decoder = FrameDecoder()
        self._is_broken = False
        self.busy_until = Instant(0)

    def send(self, data: bytes) -> None:
        """Take a frame on its way."""
        world = self._world
        if self._is_broken:
            return
        if world.chance_of(world.plan.repeats):
            data *= 2
        if world.chance_of(world.plan.cuts):
            data = data[: world.piece_of(len(data)) - 1]
            self._is_broken = True
        while data:
            size = world.piece_of(len(data))
            piece, data = data[:size], data[size:]
            self.busy_until = world.at_delay(
                lambda piece=piece: self._arrive(piece),  # type: ignore[misc]
                not_before=self.busy_until,
            )
        if self._is_broken:
            self.busy_until = world.at_delay(self._end, not_before=self.busy_until)

    def _arrive(self, piece: bytes) -> None:
        for frame in self._decoder.feed(piece):
            self._deliver(FrameArrived(frame))

    def _end(self) -> None:
        try:
            self._decoder.end()
        except MailboxCorrupt as error:
            self._deliver(ChannelBroke(str(error)))
        else:
            self._deliver(ChannelBroke("the channel was closed"))


def run_mailbox(
    plan: MailboxPlan, seed: int, worker_end: type[WorkerEnd] = WorkerEnd
) -> MailboxStory:
    """Run one world and check what must hold in every one.

    Raises:
        AssertionError: something does not; the message tells the seed.
    """
    world = MailboxWorld(plan, seed, worker_end)
    story = world.run()
    world.check(f"seed {seed}, {plan}")
    return story
