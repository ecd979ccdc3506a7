"""What is known of one rank's calls: its call record. All call records together are the ledger.

A call record is a value, read at one moment. Its maker answers for it: a real rank writes its own
into memory that its agent reads (`rankwise.drivers.real.call_rings`).
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum

import msgspec

from rankwise.base.units import Instant
from rankwise.core.matching import CallSignature

NO_PEER = -1
INIT_GROUP = "torch init"
"""The key of the group of all ranks while they are in `init_process_group`."""
UNNUMBERED = ("", INIT_GROUP)
"""The keys of groups whose calls have no number for people: messages have no group."""


class Stage(IntEnum):
    """How far a call has come. The numbers are those in the memory of ranks."""

    WAITING = 0
    """The rank is in it."""
    ISSUED = 1
    """The rank has come to it, and went on without waiting: a handle tells when it is done."""
    DONE = 2
    FAILED = 3
    """It has raised an exception on this rank."""


class Fate(StrEnum):
    """What has become of a rank."""

    LIVES = "lives"
    RAISED = "raised"
    """It has told of the exception that it dies of, which may come of another rank's doing."""
    LEFT = "left"
    """It will never call anything again, though nothing went wrong on it."""
    DIED = "died"
    """Something went wrong on it, whatever that was."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that call operations together.

    Attributes:
        label: how people call it; empty for the group of all ranks.
        size: how many members it has.
        members: those whose call records can be had, perhaps not all.
    """

    label: str = ""
    size: int
    members: tuple[int, ...]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's call of an operation.

    Attributes:
        group: the group's key, the same on all its members; empty for a message to one rank.
        number: the call's number among the rank's calls of that group, from 1.
        signature: what is called.
        match: stands for all that the members must agree on; equal where they do.
        place: the line of the program, such as `train.py:88`.
        begun_at: when the rank came to it.
        ended_at: when it ended or was issued; 0 while the rank is in it.
        stage: how far it has come.
        peer: for a message, the rank at its other end.
        is_of_main_thread: whether the program's main thread called it, or one of its other threads.
        of_handle: whether the rank waits for the call here, which it has issued before.
        library_number: the call's number by the count of the library that carries it out, which
            has calls as well that the rank has not entered; 0 if that is not known.
    """

    group: str
    number: int
    signature: CallSignature
    match: int = 0
    place: str = ""
    begun_at: Instant = Instant(0)
    ended_at: Instant = Instant(0)
    stage: Stage = Stage.WAITING
    peer: int = NO_PEER
    is_of_main_thread: bool = True
    of_handle: bool = False
    library_number: int = 0

    @property
    def shown_number(self) -> int | None:
        """Its number for people; None where calls are not numbered."""
        return None if self.group in UNNUMBERED else self.number

    def meets(self, other: "Call") -> bool:
        """Whether it is the same call as another rank's, as far as is known."""
        if self.group != other.group:
            return False
        if self.library_number and other.library_number:
            return self.library_number == other.library_number
        return self.number == other.number


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one rank.

    Attributes:
        rank: whose call record it is.
        groups: its groups, by key.
        counts: how many calls of each group it has begun.
        calls: its latest calls, the oldest first; earlier ones may have been forgotten.
        fate: what has become of it.
    """

    rank: int
    groups: Mapping[str, Group] = {}
    counts: Mapping[str, int] = {}
    calls: tuple[Call, ...] = ()
    fate: Fate = Fate.LIVES

    @property
    def standing(self) -> tuple[Call, ...]:
        """The call that the rank is in, or that has raised what it dies of; empty if in none.

        An exception about calls that were issued may be about each of them: these are all told.
        """
        if self.fate in (Fate.LEFT, Fate.DIED):
            return ()
        waiting = tuple(call for call in self.calls if call.stage is Stage.WAITING)
        if waiting or self.fate is not Fate.RAISED:
            return waiting[-1:]
        if self.calls and self.calls[-1].stage is Stage.FAILED:
            return self.calls[-1:]
        return tuple(call for call in self.calls if call.stage is Stage.ISSUED)

    @property
    def call_of_main_thread(self) -> Call | None:
        """The call that the main thread of a rank that lives is in, whatever its others do."""
        waiting = (call for call in reversed(self.calls) if call.stage is Stage.WAITING)
        return next((call for call in waiting if call.is_of_main_thread), None)

    def latest(self, group: str) -> Call | None:
        """Its latest call of a group that is remembered."""
        return next((call for call in reversed(self.calls) if call.group == group), None)

    def call_that_meets(self, call: Call) -> Call | None:
        """Its call that goes with another rank's, if it has come so far and that is remembered."""
        return next((own for own in self.calls if own.meets(call)), None)
