"""What nodes write into the store for each other: the records of a run, their keys, their bytes.

Each record has one writer (ADR 0007): a node its own `NodeRecord`, the leader the `Round`, the
first node the `Charter`. Round numbers count from 0, and -1 means none yet.

Keys that all nodes read and watch (`shared/`) lie apart from those of the leader alone (`nodes/`),
since a store reads and watches by prefix: otherwise each node that joins would read all others.

Records are JSON, so that a person with the store's own tool can read them, with the protocol's
version in each; what has its default is left out. An unreadable value is never guessed at. The
error names the key and who writes it, because that is where a person has to look: a node with
another version of rankwise, or another program that uses the same keys.
"""

from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.failure import BlameIdentity, Failure, Mismatch, OutcomeStatus
from rankwise.base.units import ZERO, Duration

PROTOCOL_VERSION = 3
"""Raised when a record changes in a way that an older node would misread."""


class Charter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all nodes of a run must want alike; a node that wants something else is refused.

    Attributes:
        version: of the protocol.
        nodes_min, nodes_max: how few nodes may run, and how many at most.
        spares: how many nodes are kept in reserve rather than run.
        restarts_max: how many failures the job survives.
        is_static: whether each node has a node rank of its own from the start.
        settings: what else must be equal, by the name of its option.
        founder: the node that wrote it. Tells a run from one that began anew in a store that has
            forgotten the first; the only field in which nodes differ.
    """

    version: int = PROTOCOL_VERSION
    nodes_min: int
    nodes_max: int
    spares: int = 0
    restarts_max: int = 0
    is_static: bool = False
    settings: dict[str, str] = {}
    founder: str = ""


class Departure(StrEnum):
    """Whether, and how, a node is about to go."""

    STAYS = "stays"
    LEAVES = "leaves"
    """It goes, and the others go on without it."""
    PREEMPTED = "preempted"
    """It is being taken away, and the whole job stops at one step."""


class FailureNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A failure, and how old it was when its node wrote it down: no clocks are compared."""

    failure: Failure
    age: Duration = ZERO


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node, as it describes itself. Rewritten by it alone, and only when something changes.

    Attributes:
        version: of the protocol.
        founder: of the run that it takes part in, see `Charter`.
        host: the machine's name, for people.
        address: where peers reach the machine.
        port: what its worker 0 would listen on, should it have rank 0 in the round it is ready for.
        slots: how many workers it runs.
        topology: where it stands in the network, as `rack7/switch2`: ranks follow its order.
        static_rank: the node rank that it must have (static only).
        ready: the first round that it could take part in; none of its earlier workers lives.
        ended: the last round of which none of its workers lives any more.
        is_done: whether its workers of round `ended` all succeeded.
        failing: the last round in which a worker of its own failed.
        failures: of round `failing`, the root cause first.
        cut_off: the last round that it gave up because the store did not answer it in time.
        ran: how long its gang of round `ended` lived.
        step: the last step that its workers told of in round `ended`.
        departure: whether, and how, it is about to go.
        signal: the signal by which it was told to.
        arrived_at: the first step that none of its ranks has begun, once they wait to learn the
            step at which all of them stop.
    """

    version: int = PROTOCOL_VERSION
    founder: str = ""
    host: str
    address: str
    slots: int
    port: int = 0
    topology: str = ""
    static_rank: int | None = msgspec.field(default=None, name="seat")
    ready: int = -1
    ended: int = -1
    is_done: bool = False
    failing: int = -1
    failures: tuple[FailureNote, ...] = ()
    cut_off: int = -1
    ran: Duration = ZERO
    step: int | None = None
    departure: Departure = Departure.STAYS
    signal: int | None = None
    arrived_at: int | None = None


class Trouble(StrEnum):
    """Why a node wants to know what the ranks of the others do."""

    NONE = "none"
    STANDS = "stands"
    """A rank of it stands in a collective call; nothing may be wrong."""
    FAILED = "failed"
    """A rank has raised an exception that may be another's doing."""
    TIMED_OUT = "timed-out"
    """The same, after a time-out: a rank that has merely not come is to blame."""
    WHY = "why"
    """A user asks why the run does not go on; no rank is to be accused."""
    DONE = "done"
    """Its ranks have all succeeded: who has made others wait, of all ranks, can be told."""

    @property
    def is_awaited(self) -> bool:
        """Whether the node waits for the answer."""
        return self not in (Trouble.NONE, Trouble.STANDS)


class CallRecordsNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node tells the leader about its ranks' calls. Lies beside its record (ADR 0024).

    Attributes:
        version: of the protocol.
        founder: of the run that it takes part in, see `Charter`.
        round: of which round it tells.
        trouble: what moves it, last.
        number: counts its troubles.
        inquiry: the inquiry that `sheet` answers.
        sheet: its ranks' call records, packed (`core/ledger/sheets.py`), or timetable (DONE).
    """

    version: int = PROTOCOL_VERSION
    founder: str = ""
    round: int = -1
    trouble: Trouble = Trouble.NONE
    number: int = 0
    inquiry: str = ""
    sheet: bytes = b""


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that has made the others wait, of all nodes.

    Attributes:
        rank: which one.
        last: the share of the calls to which it came last.
        waited: how long each of the others waited for it alone, on average.
        text: that in a sentence.
    """

    rank: int
    last: float
    waited: Duration
    text: str


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an inquiry has found.

    Attributes:
        inquiry: which one.
        settles: the troubles that it answers: by node, the number of the last one.
        blamed: ranks of the job that count as failed from now on.
        text: what they did, or do, in a sentence; empty if no rank is known to be to blame.
        mismatch: the same as a value.
        late: the rank that made the others wait (DONE), if one did notably.
        silent: nodes that have not answered in time.
        identity: what tells the blame from other blame; also set for WHY, which accuses no rank.
    """

    inquiry: str
    settles: dict[str, int] = {}
    blamed: tuple[int, ...] = ()
    text: str = ""
    mismatch: Mismatch | None = None
    late: LateRank | None = None
    silent: tuple[str, ...] = ()
    identity: BlameIdentity | None = None


class Inquiry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the leader wants to know of all members' ranks, and what it has found out before.

    Attributes:
        version: of the protocol.
        founder: of the run, see `Charter`.
        round: whose members are asked.
        id: names the inquiry; another leader's is another.
        trouble: the worst trouble that is the reason.
        with_recorders: whether torch's flight recorders are to be read for it.
        finding: of the last inquiry that has ended, perhaps this one.
    """

    version: int = PROTOCOL_VERSION
    founder: str = ""
    round: int
    id: str
    trouble: Trouble
    with_recorders: bool = False
    finding: Finding | None = None


class RoundPhase(StrEnum):
    """Where in its life a round is."""

    GATHERING = "gathering"
    """It is being put together; the members of the round before must end first."""
    RUNNING = "running"
    """Its members run."""
    STOPPING = "stopping"
    """The job was asked to stop: the members agree on a step, end, and tell how."""
    CLOSED = "closed"
    """The job is over, and the verdict is known."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of the whole job; every node shows the same one.

    Attributes:
        status: succeeded, failed or stopped.
        detail: one sentence for people: why it ended, why restarts that were left were not used.
        root: the failure that came first and explains the others, with its global rank.
        node: the id of the node on which it happened.
        host: that node's machine.
        failure_count: how many workers of the last round failed by themselves.
        signal: the signal that stopped the job, if one did.
        restarts: how many restarts were spent.
    """

    status: OutcomeStatus
    detail: str = ""
    root: Failure | None = None
    node: str = ""
    host: str = ""
    failure_count: int = 0
    signal: int | None = None
    restarts: int = 0


class Suspect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The failure that ended a round, as it arrived; kept in case that its node vanishes."""

    failure: Failure
    node: str
    host: str


HOSTS_MAX = 64
"""How many hosts a round's record names."""


class Lineup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The nodes of a round, and what has changed, by the names of hosts; for people.

    Long lists are cut. Where one host has several nodes, the id follows: `host/5ca46ed6`.

    Attributes:
        hosts: of the members, in the order of node ranks.
        came: who was not in the round before; empty for the first round.
        left: who was, and is not any more.
        reserve: nodes that are here and are no members.
    """

    hosts: tuple[str, ...] = ()
    came: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    reserve: tuple[str, ...] = ()


class Round(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one decision that all nodes share. Written by the leader alone.

    Attributes:
        version: of the protocol.
        number: counts the rounds of the run.
        phase: where in its life it is.
        members: node ids in the order of node ranks. While GATHERING: those of the round before.
        slots: how many workers each member has; one number if all have equally many.
        master_address, master_port: where rank 0 can be reached.
        restarts: how many restarts are used.
        rounds_without_progress: how many rounds in a row have failed without progress.
        best_step: the farthest step that was ever told.
        strikes: for each host, how many root causes happened there.
        refusals: for each node that may not take part (again), why.
        lineup: who is in it, by name; while GATHERING, who was in the round before.
        why: what ended the round before, for people; empty for the first.
        gone: the nodes that were missed then, if that was why (GATHERING).
        is_failure: whether that was a failure, so that a restart is spent when the next round runs.
        suspect: that failure.
        signal: the signal by which the job was told to stop (STOPPING).
        stop_at: the step at which all ranks stop, once agreed (STOPPING).
        verdict: what became of the job (CLOSED).
    """

    version: int = PROTOCOL_VERSION
    number: int
    phase: RoundPhase
    members: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    master_address: str = ""
    master_port: int = 0
    restarts: int = 0
    rounds_without_progress: int = msgspec.field(default=0, name="fruitless")
    best_step: int | None = None
    strikes: dict[str, int] = {}
    refusals: dict[str, str] = {}
    lineup: Lineup = Lineup()
    why: str = ""
    gone: tuple[str, ...] = ()
    is_failure: bool = False
    suspect: Suspect | None = None
    signal: int | None = None
    stop_at: int | None = None
    verdict: Verdict | None = None

    def slots_of(self, node_rank: int) -> int:
        """How many workers that member has."""
        return self.slots[0] if len(self.slots) == 1 else self.slots[node_rank]

    def workers_before(self, node_rank: int) -> int:
        """How many workers the members with lower node ranks have together."""
        if len(self.slots) == 1:
            return node_rank * self.slots[0]
        return sum(self.slots[:node_rank])


class RunKeys(NamedTuple):
    """The keys of one run. No key is the beginning of another, but for node ids that are."""

    run_id: str

    @property
    def shared(self) -> str:
        """The prefix of what every node reads and watches."""
        return f"rankwise/{self.run_id}/shared/"

    @property
    def charter(self) -> str:
        """What all nodes must want alike."""
        return f"{self.shared}charter"

    @property
    def leader(self) -> str:
        """The node that leads, as `<id> on <host>`."""
        return f"{self.shared}leader"

    @property
    def round(self) -> str:
        """The present round."""
        return f"{self.shared}round"

    @property
    def inquiry(self) -> str:
        """What the leader asks all nodes about their ranks' calls."""
        return f"{self.shared}inquiry"

    @property
    def nodes(self) -> str:
        """The prefix of all node records."""
        return f"rankwise/{self.run_id}/nodes/"

    def node(self, node_id: str) -> str:
        """The record of one node."""
        return f"{self.nodes}{node_id}"

    @property
    def done_notes(self) -> str:
        """The prefix of what remains of nodes that were done."""
        return f"{self.nodes}done/"

    def done_note(self, node_id: str) -> str:
        """The record of one node as it was when it was done; it outlives the node's lease."""
        return f"{self.done_notes}{node_id}"

    @property
    def call_records_notes(self) -> str:
        """The prefix of what nodes tell of their ranks' calls."""
        return f"{self.nodes}books/"

    def call_records_note(self, node_id: str) -> str:
        """What one node tells of its ranks' calls."""
        return f"{self.call_records_notes}{node_id}"

    def node_id(self, key: str) -> str:
        """The node whose record, or note, lies at `key`."""
        return key.rpartition("/")[2]


Record = Charter | NodeRecord | Round | CallRecordsNote | Inquiry
RecordT = TypeVar("RecordT", Charter, NodeRecord, Round, CallRecordsNote, Inquiry)

SHOWN_MAX = 60
_ENCODER = msgspec.json.Encoder()


class _Versioned(msgspec.Struct):
    """The part of a record that all versions have."""

    version: int = PROTOCOL_VERSION


_VERSION = msgspec.json.Decoder(_Versioned)
# Made here, since two threads that meet a type for the first time at once crash msgspec (0.22).
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (Charter, NodeRecord, Round, CallRecordsNote, Inquiry)
}


def encode(record: Record) -> bytes:
    """Write a record as it lies in the store."""
    return _ENCODER.encode(record)


def decode_charter(value: bytes, key: str) -> Charter:
    """Read the charter.

    Raises:
        RemoteProtocolError: it is of another version, or no charter.
    """
    return _decode(value, Charter, key, "the first node of the run")


def decode_node(value: bytes, key: str, node_id: str) -> NodeRecord:
    """Read a node's record.

    Raises:
        RemoteProtocolError: it is of another version, or no node record.
    """
    return _decode(value, NodeRecord, key, f"node {node_id}")


def decode_call_records_note(value: bytes, key: str, node_id: str) -> CallRecordsNote:
    """Read what a node tells of its ranks' calls.

    Raises:
        RemoteProtocolError: it is of another version, or no such note.
    """
    return _decode(value, CallRecordsNote, key, f"node {node_id}")


def decode_inquiry(value: bytes, key: str) -> Inquiry:
    """Read what the leader asks.

    Raises:
        RemoteProtocolError: it is of another version, or no inquiry.
    """
    return _decode(value, Inquiry, key, "the leader of the run")


# A round reaches every node; where many live in one process, as in a simulation, it is read once.
@lru_cache(maxsize=8)
def decode_round(value: bytes, key: str) -> Round:
    """Read the round.

    Raises:
        RemoteProtocolError: it is of another version, or no round.
    """
    return _decode(value, Round, key, "the leader of the run")


@lru_cache(maxsize=8)
def places_in(value: bytes, key: str) -> dict[str, int]:
    """Read the round for each member's place among all of them."""
    return {node: place for place, node in enumerate(decode_round(value, key).members)}


def _decode(value: bytes, kind: type[RecordT], key: str, writer: str) -> RecordT:
    try:
        version = _VERSION.decode(value).version
        if version == PROTOCOL_VERSION:
            record: RecordT = _DECODERS[kind].decode(value)
            return record
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = value[:SHOWN_MAX].decode("utf-8", "backslashreplace")
        dots = "…" if len(value) > SHOWN_MAX else ""
        raise RemoteProtocolError(
            f"the key {key}, which {writer} writes, holds {shown!r}{dots}: {error}",
            hint="does something else use this store under the same run id?",
        ) from error
    raise RemoteProtocolError(
        f"the key {key}, which {writer} writes, has protocol version {version}, and this rankwise "
        f"speaks version {PROTOCOL_VERSION}",
        hint="run the same version of rankwise on every node",
    )
