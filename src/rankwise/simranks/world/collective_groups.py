"""Collectives: how simulated ranks call an operation together, and what is wrong if they do not.

A *group* is some of the ranks. Which calls of its members meet, `core.matching` decides. This is
the transport: each member brings a load with its call, and waits at a gate. The last one to come
carries the operation out for all, and opens the gate.

A collective whose members call different things fails on all of them when all have come, so its
message can tell each rank's line. If a rank never comes, no rank can continue, and the report
asks each pending collective which members are missing.

Messages from rank to rank meet by the same rules, by source and tag. A send is over when its
receive is there: that is how gloo and NCCL have it, and what lets a circle of sends be found.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.errors import CollectiveError, PeerDied
from rankwise.base.units import Duration, after, between
from rankwise.base.wording import ranks_in_words
from rankwise.core.matching import (
    CallSignature,
    GroupCalls,
    GroupMessages,
    Match,
    Matcher,
    describe_call,
    missing,
    missing_peer,
    parties,
)
from rankwise.simranks.world.alarms import Alarms
from rankwise.simranks.world.faults import FaultInjector
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.places import CallSite, place_here
from rankwise.simranks.world.scheduler import Scheduler
from rankwise.simranks.world.schedules import Schedule
from rankwise.simranks.world.waits import SHORTEST_WAIT, Waits

if TYPE_CHECKING:
    from rankwise.simranks.world.equals import Equals

SAME_ORDER = "all ranks must call the same operations in the same order, with equal arguments"
_NAMED = 4
"""How many members name a group that has no other name."""

_OF_ONE_SHAPE = "all_gather_single"
"""gloo wants its output to have the shape of the inputs."""

CarryOut = Callable[[Sequence[Any]], None]


class Conditions:
    """What the operations of a run meet with.

    Args:
        schedule: decides which message comes first; None takes the first.
        faults: the faults of the ranks.

    Attributes:
        waits: which rank has waited for which.
        alarms: what looks wrong.
        groups: those of the present attempt, by name.
        matcher: decides which of their calls meet.
        calls: how many operations and messages ranks have begun.
    """

    def __init__(
        self, schedule: Schedule | None = None, faults: FaultInjector | None = None
    ) -> None:
        self.schedule = schedule
        self.faults = faults
        self.waits = Waits()
        self.alarms = Alarms()
        self.groups: dict[str, CollectiveGroup] = {}
        self.matcher: Matcher[Came] = Matcher()
        self.calls = 0
        self.equals: Equals | None = None

    def present_of(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of the ranks that are simulated, and for each of all the one that stands for it."""
        if self.equals is None:
            return ranks, ranks
        present = tuple(rank for rank in ranks if rank in self.equals.simulated)
        return present, self.equals.representatives(ranks, present)

    def begin_attempt(self) -> None:
        """Forget what belongs to ranks that are no more."""
        self.groups = {}
        self.matcher = Matcher()  # threads of earlier ranks may still hold the one before
        self.alarms.begin_attempt()
        if self.faults is not None:
            self.faults.killed.clear()

    def add(self, group: "CollectiveGroup") -> None:
        """Take in a new group."""
        if self.equals is not None:
            self.equals.note_group(group.ranks)
        self.groups[group.name] = group

    def compare_order(self, pending: "PendingCollective", rank: int) -> None:
        """A rank has come to a collective: is the order over its groups that of the others?"""
        group = pending.group
        overlapping = self.matcher.overlapping(group.calls, rank)
        if not overlapping or group.is_of_threads:
            return
        others = [other for other in overlapping if not self.groups[other.key].is_of_threads]
        for found in self.matcher.order_breaks(pending.match, rank, others):
            self.alarms.note_order(pending, found, self.groups[found.group])


class Came(msgspec.Struct, frozen=True):
    """A member's call, as it is remembered."""

    number: int
    signature: CallSignature
    place: CallSite | None
    order: int
    """Counts the calls of all ranks."""


class CollectiveGroup:
    """Ranks that call collectives together.

    Attributes:
        name: stands for it; equal on all members.
        label: how people call it; empty for the group of all ranks.
        ranks: the members' numbers in the world, in the order of their ranks in the group.
        present: those of them that are simulated; see `Equals`.
        bringing: for each member, the one whose loads it brings: its own if it is simulated.
        calls: which of their calls meet.
        messages: which of their messages do.
        compares_sizes: whether tensors of equal size and other shape fit, as in gloo.
        has_other_shapes: whether the operation that is carried out has such tensors.
        is_of_threads: whether a rank has called an operation in a thread that it has started: such
            a group and others have no order.
        gives_up: whether operations fail as soon as a member that they lack has ended; otherwise
            the run goes on until no rank can continue, and the report tells where each waits.
    """

    gives_up = False
    compares_sizes = False
    has_other_shapes = False
    is_of_threads = False

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        ranks: tuple[int, ...],
        conditions: "Conditions | None" = None,
    ) -> None:
        self.name = name
        self.label = f"[{', '.join(map(str, ranks[:_NAMED]))}{', ...' * (len(ranks) > _NAMED)}]"
        self.ranks = ranks
        self._conditions = conditions or Conditions()
        self.present, self.bringing = self._conditions.present_of(ranks)
        self._scheduler = scheduler
        self.calls: GroupCalls[Came] = self._conditions.matcher.group(name, ranks, self.present)
        self._gone: dict[int, CollectiveError] = {}
        self.messages: GroupMessages[Post] = GroupMessages(ranks)
        self._creation = _Creation(self)

    def wait_for_creation(self, rank: int) -> None:
        """A member has made the group: wait until all have. No operation, and takes no time."""
        creation = self._creation
        creation.makers.add(rank)
        if len(creation.makers) == len(self.present):
            self._creation = _Creation(self)  # they may make it anew
            creation.open()
        else:
            self._scheduler.wait(creation)

    def meet(
        self, rank: int, signature: CallSignature, load: Any, carry_out: CarryOut
    ) -> "PendingCollective":
        """Come to this member's next operation; returns at once, the gate may still be shut.

        Args:
            rank: the member that comes, by its number in the world.
            signature: what it calls.
            load: what it brings.
            carry_out: does the operation, given the loads in the order of the members; what it
                raises, all members raise.
        """
        conditions, calls = self._conditions, self.calls
        if conditions.equals is not None:
            conditions.equals.check(self.ranks)
        if (faults := conditions.faults) is not None:
            # A rank that a fault delays has not come yet: others wait for it, and reports say so.
            faults.strike(self._scheduler.ranks[rank], self.name, calls.begun_by(rank) + 1, load)
        number = calls.begin(rank)
        conditions.calls += 1
        came = Came(number, signature, place_here(), conditions.calls)
        match = calls.join(rank, number, came)
        pending: PendingCollective = match.carrier or PendingCollective(self, match)
        if pending.error is None:
            pending.loads[rank] = load
        scheduler = self._scheduler
        if scheduler.helpers and scheduler.holder is not scheduler.ranks[rank].main:
            self.is_of_threads = True
        if self._gone and len(match.entries) == 1:
            pending.miss(*next(iter(self._gone.items())))  # which names what has been called
        if len(conditions.groups) > 1:
            conditions.compare_order(pending, rank)
        if match.have_all_come:
            calls.close(match)
            pending.complete(carry_out)
        return pending

    def matched(self, signature: CallSignature) -> CallSignature:
        """What of a call must be equal on all members."""
        if not self.compares_sizes or signature.operation == _OF_ONE_SHAPE:
            return signature
        return signature.in_sizes()

    def note_shapes(self, pending: "PendingCollective", doings: str) -> None:
        """Members have called an operation with tensors of equal size and other shape."""
        self._conditions.alarms.note_shapes(pending, doings)

    def note_layout(self, text: str) -> None:
        """The member that runs brings a tensor of which a backend would take more than it is."""
        self._conditions.alarms.note_layout(text)

    def open_handle(
        self, rank: int, gate: "PendingCollective | Post", interface: tuple[str, ...]
    ) -> int | None:
        """A member has begun an operation that it may wait for later; see `Alarms`."""
        return self._conditions.alarms.open_handle(rank, gate, interface)

    def close_handle(self, number: int, misuse: str = "") -> None:
        """It has waited for it; `misuse` is what it did to its tensors meanwhile, in words."""
        handle = self._conditions.alarms.close_handle(number)
        if handle is not None and misuse:
            self._conditions.alarms.note_misuse(handle, misuse)

    @property
    def is_awaited(self) -> bool:
        """Whether an operation or a message waits for a member."""
        return bool(self.calls.open or self.messages.open)

    def begun_by(self, rank: int) -> int:
        """How many operations a member has come to."""
        return self.calls.begun_by(rank)

    def calls_of(self, rank: int) -> "Iterator[tuple[Came, PendingCollective | Post | None]]":
        """What a member has come to, and what that waits for: all that is open, and the latest."""
        latest = self.calls.latest.get(rank)
        for came, match in self.calls.open_entries_of(rank):
            if came is not latest:
                yield msgspec.structs.replace(came, order=0), match.carrier
        if latest is not None:
            at_latest = self.calls.open.get(latest.number)
            yield latest, None if at_latest is None else at_latest.carrier
        latest_post = self.messages.latest.get(rank)
        for post in self.messages.open_ends_of(rank):
            if post is not latest_post:
                yield post.came, post
        if latest_post is not None:
            yield latest_post.came, latest_post

    def wait(self, gate: "PendingCollective | Post", patience: Duration | None = None) -> bool:
        """Wait for a collective or a message; returns whether it came in time.

        Raises:
            CollectiveError: it has failed.
        """
        if not gate.is_open:
            began = self._scheduler.now
            until = None if patience is None else after(began, patience)
            if not self._scheduler.wait(gate, until):
                return False
            took = between(began, self._scheduler.now)
            if took >= SHORTEST_WAIT and gate.error is None:
                waiter = self._scheduler.current
                assert waiter is not None, "a rank has waited"
                self._conditions.waits.note(waiter.number, gate.last, took, gate.label)
        if gate.error is not None:
            if isinstance(gate, PendingCollective) and gate.missing():
                self._scheduler.yield_to_others()  # the message names ranks that arrive now, too
            raise _own(gate.error)
        return True

    def poll(self, gate: "PendingCollective | Post") -> None:
        """The rank that runs has found an operation open."""
        self._scheduler.poll(gate)

    def lose(self, rank: int, error: CollectiveError) -> None:
        """Let everything fail that needs this member, which will never come: `error` says why."""
        if rank not in self.present or rank in self._gone:
            return  # for one that does not run, another one brings what it would
        self._gone[rank] = error
        for match in self.calls.open.values():
            if rank not in match.entries:
                match.carrier.miss(rank, error)

    def fail_all(self, error: BaseException) -> None:
        """Let everything fail that members wait for."""
        for match in list(self.calls.open.values()):
            match.carrier.fail(error)
        if not self._creation.is_open:
            self._creation.open()
        for post in self.messages.open:
            post.error = error
            post.open()

    def post(
        self, rank: int, peer: int, tag: int, signature: CallSignature, load: Any, *, is_send: bool,
        deliver: Callable[["Post", "Post"], None],
    ) -> "Post":  # fmt: skip
        """Post one end of a message; returns at once, its gate opens when the other end is there.

        Args:
            rank: the member that posts.
            peer: the other end, by its number in the world; `ANY_RANK` receives from any rank.
            tag: must be equal on both ends.
            signature: what it is.
            load: what it sends, or receives into.
            is_send: which end this is.
            deliver: moves the load of a send to that of a receive; what it raises, both raise.
        """
        if (equals := self._conditions.equals) is not None:
            equals.check_peer(self.ranks, rank, peer, signature)
        number = self.messages.begin(rank)
        self._conditions.calls += 1
        came = Came(number, signature, place_here(), self._conditions.calls)
        post = Post(self, rank, peer=peer, tag=tag, came=came, load=load, is_send=is_send)
        post.deliver = deliver
        other = self.messages.join(post, is_choice_open=self._conditions.schedule is not None)
        if other is not None:
            _settle(*((post, other) if is_send else (other, post)))
        return post

    def match_any_source(self) -> bool:
        """Match the first receive from any source that has a message, as the schedule chooses."""
        found = self.messages.choices()
        if found is None:
            return False
        schedule = self._conditions.schedule
        assert schedule is not None, "without one they are matched when they come"
        send = found.sends[schedule.choose(len(found.sends), is_message=True)]
        self.messages.close(send, found.receive)
        _settle(send, found.receive)
        return True

    def ended(self, ranks: Iterable[int]) -> list[PeerDied]:
        """Those of the ranks that have ended by themselves, in words."""
        present = self._scheduler.ranks
        members = [present[rank] for rank in ranks if rank in present]
        return [
            lost(rank.number, rank.exit_code)
            for rank in members
            if rank.exit_code is not None and not rank.is_given_up
        ]

    def describe(self) -> str:
        """Name the group and its members."""
        return f"{self.name} ({ranks_in_words(self.ranks)})"


class _Creation(Gate):
    """All members have made a group; `makers` are these members."""

    is_of_peers = True

    __slots__ = ("_group", "makers")

    def __init__(self, group: CollectiveGroup) -> None:
        super().__init__()
        self._group = group
        self.makers: set[int] = set()

    def describe(self) -> str:
        """Say what is waited for, and for whom."""
        absent = missing(self._group.present, self.makers)
        members = ranks_in_words(self._group.ranks)
        text = f"the group of {members}, not made by {ranks_in_words(absent)}"
        return text + "".join(f"; {error.message}" for error in self._group.ended(absent))


class PendingCollective(Gate):
    """One collective operation of a group.

    Attributes:
        match: whose calls it is, and which members are missing.
        loads: what each of them brings.
        group: whose it is.
        error: why it has failed, if it has.
    """

    __slots__ = ("error", "group", "loads", "match")

    def __init__(self, group: CollectiveGroup, match: Match[Came]) -> None:
        super().__init__()
        self.group = group
        self.match = match
        match.carrier = self
        self.loads: dict[int, Any] = {}
        self.error: BaseException | None = None

    def complete(self, carry_out: CarryOut) -> None:
        """All have come: do it, or say how they disagree."""
        if self.error is not None:
            pass
        elif self.match.is_agreed:
            self._carry_out(carry_out)
        elif len({self.group.matched(came.signature) for came in self.arrivals.values()}) == 1:
            self.group.note_shapes(self, self._doings())
            self.group.has_other_shapes = True
            self._carry_out(carry_out)
            self.group.has_other_shapes = False
        else:
            self.error = self._disagreement()
        self.loads = {}  # a rank remembers its latest collective, and must not keep tensors by that
        self.open()

    def _carry_out(self, carry_out: CarryOut) -> None:
        try:
            carry_out([self.loads[rank] for rank in self.group.bringing])
        except Exception as error:  # noqa: BLE001  # every member raises it
            self.error = _without_frames(error)

    def miss(self, rank: int, error: CollectiveError) -> None:
        """Fail, since a member will never come."""
        del rank
        text = f"{self._describe_call()} cannot be completed: {error.message}"
        self.fail(type(error)(text, hint=error.hint))

    def fail(self, error: BaseException) -> None:
        """Let all members that come raise this."""
        self.error = error
        self.loads = {}
        self.open()

    def describe(self) -> str:
        """Say what is waited for, and for whom."""
        absent = self.missing()
        text = f"{self._describe_call()} in group {self.group.describe()}"
        text += f", not called by {ranks_in_words(absent)}" if absent else ", called by all"
        text += "".join(f"; {error.message}" for error in self.group.ended(absent))
        return text if self.match.is_agreed else f"{text}; {self._doings()}"

    @property
    def arrivals(self) -> dict[int, Came]:
        """What each member that has come calls, and from where."""
        return self.match.entries

    def missing(self) -> list[int]:
        """The members that have not come."""
        return self.match.missing()

    def missing_text(self) -> str:
        """Say why it is open."""
        return f"{ranks_in_words(self.missing())} never did"

    @property
    def last(self) -> int:
        """The member that came last."""
        return self.match.last

    def label(self) -> str:
        """Name the operation and its group."""
        return f"{self._describe_call()} in group {self.group.name}"

    def _describe_call(self) -> str:
        return describe_call(self.match.signature, self.match.number)

    def _disagreement(self) -> CollectiveError:
        operation = f"operation #{self.match.number} of group {self.group.describe()}"
        return CollectiveError(
            f"{operation} differs between its ranks:\n{self._doings()}",
            hint=SAME_ORDER,
        )

    def _doings(self) -> str:
        calls = (
            (rank, (describe_call(came.signature, came.number), str(came.place or "")))
            for rank, came in sorted(self.arrivals.items())
        )
        return "\n".join(
            f"  {ranks_in_words(ranks)} called {call}" + (f" at {place}" if place else "")
            for (call, place), ranks in parties(calls).items()
        )


class Post(Gate):
    """One end of a message.

    Attributes:
        rank, peer, tag, load, is_send: see `CollectiveGroup.post`; once matched, `peer` is the rank
            found.
        came: what it is, and which rank has called it where.
        error: why it has failed, if it has.
        deliver: moves the message, once it is matched.
    """

    deliver: Callable[["Post", "Post"], None]

    __slots__ = (
        "_group",
        "came",
        "deliver",
        "error",
        "is_send",
        "load",
        "peer",
        "rank",
        "tag",
    )

    def __init__(
        self,
        group: CollectiveGroup,
        rank: int,
        *,
        peer: int,
        tag: int,
        came: Came,
        load: Any,
        is_send: bool,
    ) -> None:
        super().__init__()
        self._group = group
        self.rank = rank
        self.peer = peer
        self.tag = tag
        self.load = load
        self.is_send = is_send
        self.error: BaseException | None = None
        self.came = came

    def describe(self) -> str:
        """Say what is waited for."""
        return f"{self._numbered()} in group {self._group.describe()}"

    @property
    def last(self) -> int:
        """The rank at the other end."""
        return self.peer

    def missing(self) -> list[int]:
        """The rank that has not come."""
        return missing_peer(self)

    def missing_text(self) -> str:
        """Say why it is open."""
        return f"it was never {'received' if self.is_send else 'sent'}"

    def label(self) -> str:
        """Name the message and its group."""
        return f"{self._numbered()} in group {self._group.name}"

    def describe_with_place(self) -> str:
        """Say which rank called it, and where."""
        place = f" at {self.came.place}" if self.came.place else ""
        return f"rank {self.rank} called {self._numbered()}{place}"

    def _numbered(self) -> str:
        # The comma closes the description, as the number follows it.
        return f"{describe_call(self.came.signature, tells_tag=True)}, #{self.came.number}"


def _settle(send: Post, receive: Post) -> None:
    receive.peer = send.rank
    try:
        receive.deliver(send, receive)
    except Exception as error:  # noqa: BLE001  # both ends raise it
        send.error = receive.error = _without_frames(error)
    send.load = receive.load = None  # both are remembered as the latest of their ranks
    send.open()
    receive.open()


def _without_frames(error: Exception) -> Exception:
    """An error to be kept: the frames that raised it would keep the tensors of all members."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _own(error: BaseException) -> BaseException:
    """The same error for one of the ranks that raise it: a traceback belongs to one thread."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001  # a foreign `__reduce__` may raise anything
        return error


def lost(rank: int, code: int) -> PeerDied:
    """The error of those that wait for a rank that has ended."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return PeerDied(f"rank {rank} has ended ({how})")
