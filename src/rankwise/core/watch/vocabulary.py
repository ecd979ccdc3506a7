"""The stimuli and effects of the exit watch.

The watch gets the facts of the gang (`core/gang/vocabulary.py`), and orders when each is passed on.
This module has its questions to the host about the calls of ranks, and the answers. Call records
stay in the host: an answer has only the conclusions.
"""

from enum import StrEnum

import msgspec

from rankwise.base.units import Duration
from rankwise.core.gang.vocabulary import LookForProgress, RanksBlamed, Stimulus
from rankwise.core.rendezvous.records import Trouble


class WatchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reasons for which facts may be held back on a node; none by default."""

    stop_signals: tuple[int, ...] = ()
    """By which a whole run is asked to stop: a rank may die of one before its agent gets it."""
    asks_about_hangs: bool = False
    """True if the host can tell for whom ranks wait that make no progress."""


UNWATCHED = WatchSpec()


class HoldReason(StrEnum):
    """Why facts about ranks are held back."""

    ERROR = "error"
    """A rank has raised an exception that may be another rank's doing."""
    LIMIT = "limit"
    """The limit of its section, or NCCL's watchdog, has ended a rank."""
    ABORT = "abort"
    """A rank has aborted in a call in which ranks disagree."""
    LATENESS = "lateness"
    """All ranks have succeeded, and other nodes know which ranks made others wait."""
    STOP = "stop"
    """A rank has died of a signal, and a request to stop the whole run may follow."""


class HoldStep(StrEnum):
    """The thing that is awaited during a hold."""

    LOOKING = "looking"
    """The host reads the call records after the end of a rank."""
    STRAGGLING = "straggling"
    """Ranks may yet come to the call, and show by that which rank is to blame."""
    LOOKING_AGAIN = "looking-again"
    """The host reads the call records of those."""
    ASKING_RANKS = "asking-ranks"
    """The ranks tell what torch has recorded."""
    JUDGING = "judging"
    """The host compares the call records."""
    ASKING_NODES = "asking-nodes"
    """The other nodes tell what their ranks do."""
    AWAITING_STOP = "awaiting-stop"
    """A request to stop the run may come, or the gang is about to be stopped."""


# Stimuli


class CallsBegan(msgspec.Struct, frozen=True, tag=True):
    """Ranks of that attempt enter their collective calls in call records from now on."""

    attempt: int


class EndLooked(msgspec.Struct, frozen=True, tag=True):
    """The answer to `LookAtEnd`: what the call records show of a worker that has ended, or will."""

    attempt: int
    local_rank: int
    is_over_limit: bool = False
    """True if a limit has ended it while it waited; after an exception, one that it waits for."""
    may_come: bool = False
    """True if others that it waits for may yet come to the call."""
    is_ending: bool = False
    """True if one of those is done by its call record, and has not told how it ends."""
    blamed: RanksBlamed | None = None
    """Ranks that called something else than the others in its last call."""
    is_undecided: bool = False
    """True if ranks that are late to that call may tell which of two parties is right."""


class RanksAnswered(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AskRanks`: they have told what torch has recorded, or none can be asked."""

    attempt: int
    were_asked: bool = True


class CallsJudged(msgspec.Struct, frozen=True, tag=True):
    """The answer to `JudgeCalls`: who is to blame by what is known of this node's ranks."""

    attempt: int
    local_rank: int
    blamed: RanksBlamed | None = None
    is_open: bool = False
    """True if other nodes may know better."""


class PastLooked(msgspec.Struct, frozen=True, tag=True):
    """The answer to `LookAtPast`."""

    attempt: int
    blamed: RanksBlamed | None = None
    """Ranks that called something else in a call that was carried out all the same."""
    asks_who_is_late: bool = False
    """True if other nodes may know a rank that made others wait for a notable time."""


class AwaitedFound(msgspec.Struct, frozen=True, tag=True):
    """The answer to `FindAwaited`: the workers that keep all others waiting, if that is known."""

    attempt: int
    awaited: tuple[int, ...] = ()
    accused: tuple[int, ...] = ()
    """The same as ranks of the job."""


class NodesAnswered(msgspec.Struct, frozen=True, tag=True):
    """The other nodes have told what they know, or will not: the answer to `AskNodes`."""


class Passed(msgspec.Struct, frozen=True, tag=True):
    """The gang has handled what was passed on to it: the next fact may follow."""


HostAnswer = CallsBegan | EndLooked | RanksAnswered | CallsJudged | PastLooked | AwaitedFound
"""The facts that a host tells; `NodesAnswered` and `Passed` come from the agent."""
WatchStimulus = Stimulus | HostAnswer | NodesAnswered | Passed


# Effects


class LookAtEnd(msgspec.Struct, frozen=True, tag=True):
    """Read the call records after a worker's exit or exception; answer `EndLooked`."""

    attempt: int
    local_rank: int
    has_exited: bool
    """True if it has ended; otherwise it has told of the exception that it dies of."""


class AskRanks(msgspec.Struct, frozen=True, tag=True):
    """Ask the ranks what torch has recorded; answer `RanksAnswered`."""

    attempt: int


class JudgeCalls(msgspec.Struct, frozen=True, tag=True):
    """Find who is to blame for a worker's exit or exception; answer `CallsJudged`."""

    attempt: int
    local_rank: int
    has_exited: bool
    trouble: Trouble
    """TIMED_OUT if ranks that have merely not come are to blame, too."""


class LookAtPast(msgspec.Struct, frozen=True, tag=True):
    """All workers have ended: compare what they have called; answer `PastLooked`."""

    attempt: int


class FindAwaited(msgspec.Struct, frozen=True, tag=True):
    """Find for whom the workers wait that make no progress; answer `AwaitedFound`."""

    attempt: int


class HeldExit(msgspec.Struct, frozen=True):
    """An exit that was held back, and for how long."""

    local_rank: int
    held: Duration


class NoteHold(msgspec.Struct, frozen=True, tag=True):
    """Note in the journal that exits were held back, why, and for how long."""

    attempt: int
    local_rank: int
    """The rank whose end was the reason."""
    reason: HoldReason
    exits: tuple[HeldExit, ...]
    awaited: tuple[HoldStep, ...]
    """The things that were awaited meanwhile, in this order."""
    accused: tuple[int, ...] = ()
    """Ranks of the job that were found to be to blame by this node."""
    is_stop: bool = False
    """True if the run was stopped meanwhile."""


class PassOn(msgspec.Struct, frozen=True):
    """Tell the gang this fact, then say `Passed`."""

    fact: Stimulus


class AskNodes(msgspec.Struct, frozen=True):
    """Ask the other nodes about their ranks; answer `NodesAnswered`, at once if there are none."""

    trouble: Trouble


LookOrder = LookAtEnd | AskRanks | JudgeCalls | LookAtPast | FindAwaited
"""The questions to the host; `PassOn` and `AskNodes` are for the agent."""
WatchEffect = LookOrder | NoteHold | LookForProgress | PassOn | AskNodes
