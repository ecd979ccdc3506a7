"""The facts that a rendezvous is told (stimuli), and its answers (effects).

Stimuli come from two sides: from the agent (what becomes of its gang), and from the store. Effects
go to the same two: *notifications* to the agent, and *orders* to the store. All are frozen and
tagged, so that the journal is their JSON.

Every order to the store carries a `token`, a number that the machine gives out once. The store's
answer bears the same token; an answer to a token that is no longer pending changes nothing, so
answers may come late or twice. The driver that carries out an order answers it exactly once in the
end, after at most `RendezvousConfig.request_timeout` with `RequestFailed`. The order in which two
requests that are under way together reach the store is not promised.
"""

from enum import StrEnum

import msgspec

from rankwise.base.failure import BlameIdentity, Failure, Mismatch
from rankwise.base.keys import Change, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import ZERO, Duration, Instant
from rankwise.core.rendezvous.records import Departure, LateRank, Lineup, Trouble, Verdict


class ReadKeys(msgspec.Struct, frozen=True, tag=True):
    """Read all keys that begin with `prefix`; answer `KeysRead`.

    With `watch`, also tell every later change under the prefix: `KeysChanged` with that token,
    again and again, until `EndWatch`. All changes of one transaction come together. A store that
    does not answer for a while is no end of a watch: it goes on where it was. Without `KeysRead`
    there is no watch.
    """

    token: int
    prefix: str
    watch: int | None = None


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Try a transaction; `TransactionCommitted`, `TransactionConflicted` or `LeaseEnded`."""

    token: int
    transaction: Transaction


class EndWatch(msgspec.Struct, frozen=True, tag=True):
    """End the watch with that token; no answer."""

    token: int


class GrantLease(msgspec.Struct, frozen=True, tag=True):
    """Begin a lease; answer `LeaseGranted`."""

    token: int
    ttl: Duration


class RenewLease(msgspec.Struct, frozen=True, tag=True):
    """Prolong a lease; answer `LeaseRenewed` or `LeaseEnded`."""

    token: int
    lease: LeaseId


class RevokeLease(msgspec.Struct, frozen=True, tag=True):
    """End a lease and delete its keys; answer `LeaseRevoked`."""

    token: int
    lease: LeaseId


Order = ReadKeys | Commit | EndWatch | GrantLease | RenewLease | RevokeLease


class KeysRead(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReadKeys`; `watch` is the order's."""

    token: int
    snapshot: Snapshot
    watch: int | None = None


class TransactionCommitted(msgspec.Struct, frozen=True, tag=True):
    """The transaction of `Commit` has taken place, as `revision`."""

    token: int
    revision: Revision


class TransactionConflicted(msgspec.Struct, frozen=True, tag=True):
    """A condition of `Commit` did not hold, and nothing was written."""

    token: int
    revision: Revision


class LeaseGranted(msgspec.Struct, frozen=True, tag=True):
    """The answer to `GrantLease`."""

    token: int
    lease: LeaseId


class LeaseRenewed(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RenewLease`: it lives for its whole time again."""

    token: int


class LeaseRevoked(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RevokeLease`: its keys are gone."""

    token: int


class LeaseEnded(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RenewLease`, or to a `Commit` that names it: the lease is over."""

    token: int


class KeysChanged(msgspec.Struct, frozen=True, tag=True):
    """Changes of the watch with that token: in order, complete, without repetition."""

    token: int
    changes: tuple[Change, ...]


class WatchLost(msgspec.Struct, frozen=True, tag=True):
    """The watch with that token has ended: some changes are forgotten. Read again."""

    token: int
    reason: str


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """No answer came in time. The store may have carried the request out, or may do so later."""

    token: int
    reason: str
    """One sentence: who was tried, and for how long."""


class StoreDenied(msgspec.Struct, frozen=True, tag=True):
    """The store answers, but refuses this node for good."""

    token: int
    reason: str
    hint: str = ""
    is_of_another_run: bool = False
    """True if it is another run's store: this node has come to the wrong place."""


Reply = (
    KeysRead
    | TransactionCommitted
    | TransactionConflicted
    | LeaseGranted
    | LeaseRenewed
    | LeaseRevoked
    | LeaseEnded
    | RequestFailed
    | StoreDenied
)
"""The end of a request."""
Answer = Reply | KeysChanged | WatchLost
"""Whatever the store says."""


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A settled round, as one of its members sees it.

    Attributes:
        round: its number; also the attempt number of the gang that runs in it.
        node_rank: this node's place among the members.
        members: all node ids in the order of their ranks.
        first_rank: the global rank of this node's local rank 0.
        slots: how many workers this node has.
        size: how many workers all nodes have together.
        master_address, master_port: where rank 0 can be reached.
        restarts: how many restarts the job has spent so far.
        lineup, why: who is in the round, and what ended the one before; for people.
    """

    round: int
    node_rank: int
    members: tuple[str, ...]
    first_rank: int
    slots: int
    size: int
    master_address: str
    master_port: int
    restarts: int = 0
    lineup: Lineup = Lineup()
    why: str = ""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The agent has begun, and wants to take part. Comes first, and once."""


class NodeReady(msgspec.Struct, frozen=True, tag=True):
    """No worker of this node runs, and it can take part in round `round` or any later one.

    Those that wait to be called again (`rankwise.recover`) do not run: they belong to no round.
    """

    round: int
    port: int = 0
    """The address on which its worker 0 would listen, should the node have rank 0."""


class GangFailing(msgspec.Struct, frozen=True, tag=True):
    """A worker has failed by itself, and its siblings are being stopped."""

    round: int
    failures: tuple[Failure, ...]
    """As far as known yet, the root cause first; with global ranks."""


class GangEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """None of the workers of that round runs any more, in whatever way they ended.

    Attributes:
        round: of which round.
        is_done: whether all of them succeeded.
        failures: those that failed by themselves, the root cause first; with global ranks.
        ran: how long the gang lived.
        step: the last step that its workers told of.
        was_stopped: whether a request to stop ended them, and not a failure that came first.
        obstacle: why this node can have no other gang; empty if it can.
        kept: how many of them live after all, and wait for the next round (`rankwise.recover`).
    """

    round: int
    is_done: bool
    failures: tuple[Failure, ...] = ()
    ran: Duration = ZERO
    step: int | None = None
    was_stopped: bool = False
    obstacle: str = ""
    kept: int = 0


class DepartureRequested(msgspec.Struct, frozen=True, tag=True):
    """This node has to go: alone, or (PREEMPTED) together with the whole job."""

    departure: Departure
    signal: int | None = None


class RanksArrived(msgspec.Struct, frozen=True, tag=True):
    """The ranks of this node wait to learn where to stop; `step` is the first none has begun."""

    round: int
    step: int


class TroubleReported(msgspec.Struct, frozen=True, tag="TroubleTold"):
    """A reason to ask all nodes for the calls of their ranks; NONE withdraws it.

    An awaited note is answered `InquiryAnswered`, at the latest when `ANSWER_WITHIN` is over.
    """

    round: int
    trouble: Trouble


class CallRecordsReported(msgspec.Struct, frozen=True, tag="BooksTold"):
    """The ranks' call records, which the leader has asked for, packed (`core/ledger/sheets.py`).

    If all ranks of a node are done, it is their timetable (`core/ledger/timetables.py`).
    """

    inquiry: str
    sheet: bytes


class InquiryJudged(msgspec.Struct, frozen=True, tag=True):
    """The answer to `SheetsGathered`: the ranks to blame; empty if unknown.

    `late` says who has made the others wait, if that was asked. `identity` tells the blame from
    other blame; journals of earlier versions have none.
    """

    inquiry: str
    blamed: tuple[int, ...] = ()
    text: str = ""
    is_certain: bool = False
    late: LateRank | None = None
    mismatch: Mismatch | None = None
    identity: BlameIdentity | None = None


class Left(msgspec.Struct, frozen=True, tag=True):
    """The agent is at its end: say goodbye. Comes last, and none of its workers lives."""


class DeadlinePassed(msgspec.Struct, frozen=True, tag=True):
    """The machine's next deadline has come: `tick` as a fact, for the journal."""


FromAgent = (
    Joined
    | NodeReady
    | GangFailing
    | GangEnded
    | DepartureRequested
    | RanksArrived
    | TroubleReported
    | CallRecordsReported
    | InquiryJudged
    | Left
    | DeadlinePassed
)
Stimulus = FromAgent | Answer


class Settled(msgspec.Struct, frozen=True, tag=True):
    """A round runs, and this node is a member."""

    world: World


class MadeSpare(msgspec.Struct, frozen=True, tag=True):
    """A round runs without this node, which waits in reserve."""

    round: int
    why: str
    lineup: Lineup = Lineup()


class Dissolved(msgspec.Struct, frozen=True, tag=True):
    """The round that this node was a member of is over: end its gang, and get ready for the next.

    `at_once` means that there is no time for a grace: others may soon have this node's ranks.
    """

    round: int
    next_round: int
    why: str
    at_once: bool = False


class StopAgreed(msgspec.Struct, frozen=True, tag=True):
    """The job is to stop: let the ranks agree on a step, then end the gang."""

    round: int
    why: str
    signal: int | None = None


class StopStepAgreed(msgspec.Struct, frozen=True, tag=True):
    """All ranks stop at that step."""

    round: int
    step: int


class CallRecordsWanted(msgspec.Struct, frozen=True, tag="BooksWanted"):
    """The leader asks for this node's call records; the answer may never come."""

    round: int
    inquiry: str
    trouble: Trouble
    with_recorders: bool = False


class SheetsGathered(msgspec.Struct, frozen=True, tag=True):
    """This node leads, and has the call records of all who answered; answer `InquiryJudged`."""

    inquiry: str
    trouble: Trouble
    sheets: dict[str, bytes]
    """By node."""
    asked_at: Instant
    received_at: dict[str, Instant] = msgspec.field(name="heard_at")
    """When the nodes were asked, and when each answered, by this node's clock."""


class RanksFound(msgspec.Struct, frozen=True, tag=True):
    """Ranks of the job, of this node or not, are to blame that others wait."""

    round: int
    ranks: tuple[int, ...]
    text: str
    mismatch: Mismatch | None = None


class InquiryAnswered(msgspec.Struct, frozen=True, tag=True):
    """The result of an inquiry that this node waits for.

    `text` says who is to blame, and is empty if that cannot be told; `silent` are nodes that did
    not answer; `late` says which rank made the others wait. Without `in_time` the leader has not
    answered. `identity` tells the blame from other blame.
    """

    round: int
    text: str = ""
    silent: tuple[str, ...] = ()
    in_time: bool = True
    late: LateRank | None = None
    identity: BlameIdentity | None = None


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The job is over, and this is what every node is told."""

    verdict: Verdict


class RefusalKind(StrEnum):
    """Why a node may not take part."""

    VERSION = "version"
    """Another version of rankwise wrote what lies in the store."""
    CHARTER = "charter"
    """The other nodes want another job: numbers of nodes, restarts, settings, another token."""
    STATIC_RANK = "seat"
    """Two nodes want one node rank, or no such node rank exists."""
    EXCLUDED = "excluded"
    """Too many failures began on its host."""
    IDENTITY = "identity"
    """Another node has the same id."""
    TIMEOUT = "timeout"
    """It could not register in time, or no round has begun with it."""
    STORE = "store"
    """The store does not let it in, has gone, or holds what cannot be understood."""
    UNFIT = "unfit"
    """A check of this node failed, or a process of it survives SIGKILL."""
    FORGOTTEN = "forgotten"
    """The store has lost everything that the nodes had written."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This node will never take part, or never again."""

    kind: RefusalKind
    why: str
    hint: str = ""


class LeaveSettled(msgspec.Struct, frozen=True, tag=True):
    """The goodbye is said, or no node is left to read it; nothing more will come."""


class AnnounceWaiting(msgspec.Struct, frozen=True, tag=True):
    """Announce what this node waits for, and since when."""

    round: int
    text: str
    waited: Duration


Notification = (
    Settled
    | MadeSpare
    | Dissolved
    | StopAgreed
    | StopStepAgreed
    | CallRecordsWanted
    | SheetsGathered
    | RanksFound
    | InquiryAnswered
    | Closed
    | Refused
    | LeaveSettled
    | AnnounceWaiting
)
Effect = Order | Notification
