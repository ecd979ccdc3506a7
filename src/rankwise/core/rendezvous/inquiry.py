"""How nodes find out together which rank keeps the others waiting (ADR 0024).

Theory of operation
===================

A node sees the calls of its own ranks only. What it makes of them is told in two records: a node's
*note* says what its trouble is, and later holds its ranks' call records; the leader's *inquiry*
asks all members for theirs, and says what was found. A healthy run whose calls move writes neither.

```
 a rank stands, or has failed           every member has answered, or `ANSWERS_BY` is over
 node: note with a trouble ─→ leader: inquiry ─→ node: note with call records ─→ leader: finding
                                  ↑   nothing found: again, after pauses that double   │
                                  └────────────────────────────────────────────────────┘
```

- *What is opened when.* A trouble that somebody waits to have answered: at once. Ranks that stand:
  once a second at most, and while the same ones stand, after pauses that double.
- *Who is accused.* After an exception, the ranks that one inquiry finds. While ranks only stand,
  two inquiries running must find the same; `CONFIRM` lies between. Torch's recorders cost ranks
  time, and are read where entries alone have found nothing, and for the second of the two: ranks
  that have entered different calls may have made the same ones.
- *Who has made others wait.* A node whose ranks have all succeeded asks before it counts as done.
  Nobody is accused then, and the sheets are timetables. The leader notes when it asked and when it
  heard each node, since that is how their clocks are compared. What was found for one serves all
  whose ranks end within `RECENT`: else N nodes that end together would tell N² sheets.
- *Who is heard first.* A node whose rank has failed for another's sake holds that back until the
  round is over for the culprit: so the round ends, on all nodes, because of that one.
- *Who dies.* A node: it is silent, or its record is gone, so that nobody waits for it; the others'
  call records are judged without it. The leader: its
  record goes with its lease. A node waits for an answer for `ANSWER_WITHIN` and no longer.
- *Lost requests.* Notes are bound to nothing but the node's lease, and inquiries to the lead. One
  that overtakes another costs an answer, and so at most that patience.

What the call records mean is judged elsewhere: this is the carriage.
"""

from collections.abc import Collection

import msgspec

from rankwise.base.failure import BlameIdentity
from rankwise.base.keys import LeaseId, Put, Transaction, Unchanged
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant, after
from rankwise.core.rendezvous.records import (
    CallRecordsNote,
    Finding,
    Inquiry,
    Round,
    RoundPhase,
    RunKeys,
    Trouble,
    encode,
)
from rankwise.core.rendezvous.requests import Purpose, SharedKey, StoreRequests
from rankwise.core.rendezvous.vocabulary import (
    CallRecordsWanted,
    Commit,
    InquiryAnswered,
    InquiryJudged,
    Notification,
    Order,
    RanksFound,
    SheetsGathered,
)

ANSWERS_BY = Duration(1 * SECOND)
"""How long the leader waits for call records. A node with recorders waits half of that."""
ANSWER_WITHIN = Duration(2 * SECOND)
"""How long a node holds back what it would do without an answer."""
CONFIRM = Duration(250 * MILLISECOND)
RECENT = Duration(1 * SECOND)
"""For how long it is known who made others wait, without another inquiry."""
PAUSE_MIN, PAUSE_MAX = Duration(1 * SECOND), Duration(60 * SECOND)


class NodeInquiry:
    """A node's part: its note, and what it does about inquiries.

    Args:
        key: where the note lies.
        requests: those of this node.
    """

    def __init__(self, key: str, requests: StoreRequests) -> None:
        self.due: Instant | None = None
        """When who waits for an answer is told that there is none."""
        self._key = key
        self._requests = requests
        self._note = CallRecordsNote()
        self._lasting = Trouble.NONE
        """What is told when nothing is awaited: whether ranks stand."""
        self._written: tuple[CallRecordsNote, LeaseId | None] = (self._note, None)
        self._asked = self._received = ""
        self._read: bytes | None = None
        """The leader's inquiry as it was last taken in."""
        self._answer: InquiryAnswered | None = None
        """What was found of ranks of other nodes: these are to be heard of first."""
        self._late: tuple[InquiryAnswered, Instant] | None = None
        """The latest answer on lateness, and until when it serves."""

    def on_trouble(self, number: int, trouble: Trouble, now: Instant) -> None:
        """The node's ranks are in some trouble, or in none any more."""
        self._turn_to(number)
        if not trouble.is_awaited:
            self._lasting = trouble
        if self.due is not None and trouble not in (Trouble.FAILED, Trouble.TIMED_OUT):
            return  # what is awaited already answers it too
        if trouble is Trouble.DONE and self._late is not None:
            # Nodes end one after the other: each would have all call records read once more.
            late, until = self._late
            if late.round == number and now < until:
                self.due, self._answer = now, late
                return
        self._tell(trouble)
        if trouble.is_awaited:
            # An answer to an earlier question is none to this one.
            self.due, self._answer = after(now, ANSWER_WITHIN), None

    def _turn_to(self, number: int) -> None:
        """Let no trouble of an earlier round pass for one of this round."""
        if number != self._note.round:
            self._lasting = Trouble.NONE
            self._note = msgspec.structs.replace(self._note, round=number, trouble=Trouble.NONE)

    def _tell(self, trouble: Trouble) -> None:
        self._note = msgspec.structs.replace(
            self._note, trouble=trouble, number=self._note.number + 1
        )

    def on_call_records(self, inquiry: str, sheet: bytes) -> None:
        """The node's ranks have told."""
        if inquiry == self._asked:
            self._note = msgspec.structs.replace(self._note, inquiry=inquiry, sheet=sheet)

    def is_news(self, value: bytes) -> bool:
        """Whether this is another inquiry than the one that was asked about last."""
        if value is self._read:
            return False
        self._read = value
        return True

    def on_inquiry(
        self, inquiry: Inquiry, me: str, ranks: range, now: Instant
    ) -> list[Notification]:
        """Take in what the leader asks, and has found, in the round of this node's gang.

        Args:
            inquiry: that.
            me: this node's id.
            ranks: those of this node.
            now: when it was heard.
        """
        told: list[Notification] = []
        finding = inquiry.finding
        if finding is not None and finding.inquiry != self._received:
            self._received = finding.inquiry
            if finding.blamed:
                told.append(
                    RanksFound(inquiry.round, finding.blamed, finding.text, finding.mismatch)
                )
            answer = InquiryAnswered(
                inquiry.round,
                finding.text,
                finding.silent,
                late=finding.late,
                identity=finding.identity,
            )
            if inquiry.trouble is Trouble.DONE and finding.inquiry == inquiry.id:
                self._late = answer, after(now, RECENT)
            if self.due is not None and finding.settles.get(me, -1) >= self._note.number:
                # Kept back if only ranks of other nodes are blamed: their agents end the round,
                # and this node should hear of that as the reason.
                self._answer = answer
                if not finding.blamed or set(finding.blamed) & set(ranks):
                    told += self._answered()
        is_open = finding is None or finding.inquiry != inquiry.id
        if is_open and inquiry.id != self._asked:
            # Once per inquiry: its key is written again with the finding.
            self._asked = inquiry.id
            self._turn_to(inquiry.round)
            wanted = CallRecordsWanted(
                inquiry.round, inquiry.id, inquiry.trouble, inquiry.with_recorders
            )
            told.append(wanted)
        return told

    def give_up(self, now: Instant) -> list[Notification]:
        """Tell who waits that there is no answer, if its time is over."""
        return [] if self.due is None or now < self.due else self._answered()

    def _answered(self) -> list[Notification]:
        """No answer is awaited any more; ranks that waited before may still wait."""
        told = self.end()
        if self._note.trouble is not self._lasting:
            self._tell(self._lasting)
        return told

    def end(self) -> list[Notification]:
        """Tell who waits what is known by now."""
        if self.due is None:
            return []
        answer, self._answer, self.due = self._answer, None, None
        return [answer or InquiryAnswered(self._note.round, in_time=False)]

    def write(self, lease: LeaseId, founder: str, now: Instant) -> list[Order]:
        """Ask the store to take the note, if it says something new."""
        if self._note.round < 0 or self._written == (self._note, lease):
            return []
        if not self._requests.may_begin(Purpose.CALL_RECORDS, now):
            return []
        token = self._requests.begin(Purpose.CALL_RECORDS, now, (self._note, lease))
        value = encode(msgspec.structs.replace(self._note, founder=founder))
        return [Commit(token, Transaction(puts=(Put(self._key, value, lease),)))]

    def committed(self, written: tuple[CallRecordsNote, LeaseId]) -> None:
        """The store has taken that one."""
        self._written = written


class LeaderInquiry:
    """The leader's part: when it asks, and for how long it waits.

    Args:
        me: this node's id.
        keys: where the run's records lie.
        leader: the key whose revision shows that this node leads.
        requests: those of this node.
    """

    def __init__(self, me: str, keys: RunKeys, leader: SharedKey, requests: StoreRequests) -> None:
        self._me = me
        self._keys = keys
        self._leader = leader
        self._requests = requests
        self._notes: dict[str, CallRecordsNote] = {}
        self._begun = 0
        self.begin_again()

    def begin_again(self) -> None:
        """Another round has begun, or this node leads no longer: nothing is asked."""
        self._round = -1
        self._open: Inquiry | None = None
        self._asked_at = Instant(0)
        self._received_at: dict[str, Instant] = {}
        self._due: Instant | None = None
        self._unwritten: Inquiry | None = None
        self._finding: Finding | None = None
        self._covered: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        self._standing: dict[str, int] = {}
        self._suspicion: BlameIdentity | None = None
        """What the inquiry before has found, where ranks only stand: it counts if found twice."""
        self._pause = PAUSE_MIN
        self._is_first = True
        self._next_at = Instant(0)

    def forget_nodes(self) -> None:
        """All notes are read anew, or never again."""
        self._notes = {}

    def on_note(self, node: str, note: CallRecordsNote | None, now: Instant) -> None:
        """A node has written its note, or it has vanished."""
        if note is None:
            self._notes.pop(node, None)
            return
        self._notes[node] = note
        if self._open is not None and note.inquiry == self._open.id:
            # The first answer: clocks are compared by the shortest way, and later writes only
            # repeat it.
            self._received_at.setdefault(node, now)

    def next_look(self, now: Instant) -> Instant | None:
        """When time alone changes what is to be done."""
        if self._open is not None:
            return self._due
        return self._next_at if self._next_at > now and self._stands else None

    @property
    def _stands(self) -> dict[str, int]:
        return {
            node: note.number
            for node, note in self._notes.items()
            if note.round == self._round and note.trouble is Trouble.STANDS
        }

    def work(
        self,
        round_: Round | None,
        present: Collection[str],
        lease: LeaseId,
        founder: str,
        now: Instant,
    ) -> list[Order | Notification]:
        """Ask, gather, or do nothing.

        Args:
            round_: whose members are asked.
            present: nodes that have a record; nobody waits for a member without.
            lease: of what is written.
            founder: of the run.
            now: the time.
        """
        if round_ is None or round_.phase is not RoundPhase.RUNNING or len(round_.members) < 2:
            return []
        if round_.number != self._round:
            self.begin_again()
            self._round = round_.number
        if self._open is None and self._unwritten is None:
            self._open_if_wanted(round_, now)
        return [*self._write(lease, founder, now), *self._gather(round_, present, now)]

    def _awaited(self, round_: Round) -> dict[str, CallRecordsNote]:
        """The notes that somebody waits to have answered."""
        return {
            node: note
            for node in round_.members
            if (note := self._notes.get(node)) is not None
            and note.round == self._round
            and note.trouble.is_awaited
            and note.number > self._settled.get(node, 0)
        }

    def _open_if_wanted(self, round_: Round, now: Instant) -> None:
        awaited = self._awaited(round_)
        stands = self._stands
        self._covered = {node: note.number for node, note in awaited.items()}
        if awaited:
            # After a time-out more may be said than after another exception.
            order = (Trouble.TIMED_OUT, Trouble.FAILED, Trouble.WHY, Trouble.DONE)
            worst = min((note.trouble for note in awaited.values()), key=order.index)
            self._ask(worst, with_recorders=True, now=now)
            return
        if not stands:
            self._standing, self._suspicion = {}, None
            return
        if stands != self._standing:
            # Something has moved, so what was suspected is no deadlock.
            self._standing, self._suspicion = stands, None
            self._pause, self._is_first = PAUSE_MIN, True
        if now >= self._next_at:
            # Recorders take long to read, and most calls that look stuck are merely slow.
            is_cheap = self._is_first and self._suspicion is None
            self._ask(Trouble.STANDS, with_recorders=not is_cheap, now=now)

    def _ask(self, trouble: Trouble, *, with_recorders: bool, now: Instant) -> None:
        self._begun += 1
        self._open = self._unwritten = Inquiry(
            round=self._round,
            id=f"{self._me}.{self._begun}",
            trouble=trouble,
            with_recorders=with_recorders,
            # The last finding goes along: a node may not have read the key in between.
            finding=self._finding,
        )
        self._due = after(now, ANSWERS_BY)
        self._asked_at, self._received_at = now, {}

    def _write(self, lease: LeaseId, founder: str, now: Instant) -> list[Order]:
        if self._unwritten is None or not self._requests.may_begin(Purpose.INQUIRY, now):
            return []
        inquiry = self._unwritten
        token = self._requests.begin(Purpose.INQUIRY, now, inquiry)
        value = encode(msgspec.structs.replace(inquiry, founder=founder))
        transaction = Transaction(
            # A leader that was replaced must not ask any more: its answers would go nowhere.
            conditions=(Unchanged(self._keys.leader, self._leader.revision),),
            puts=(Put(self._keys.inquiry, value, lease),),
        )
        return [Commit(token, transaction)]

    def committed(self, written: Inquiry) -> None:
        """The store has taken that one."""
        if self._unwritten == written:
            self._unwritten = None

    def _gather(self, round_: Round, present: Collection[str], now: Instant) -> list[Notification]:
        inquiry = self._open
        if inquiry is None or self._due is None:
            return []
        sheets = {
            node: note.sheet
            for node in round_.members
            if (note := self._notes.get(node)) is not None and note.inquiry == inquiry.id
        }
        is_awaited = any(node in present and node not in sheets for node in round_.members)
        if is_awaited and now < self._due:
            return []
        self._due = None
        received_at = {node: self._received_at[node] for node in sheets}
        return [SheetsGathered(inquiry.id, inquiry.trouble, sheets, self._asked_at, received_at)]

    def on_judged(self, judged: InquiryJudged, round_: Round, now: Instant) -> None:
        """The call records have been read: close the inquiry with what was found."""
        inquiry = self._open
        if inquiry is None or inquiry.id != judged.inquiry:
            return
        self._open = None
        self._settled |= self._covered
        if inquiry.trouble is Trouble.DONE:
            awaited = self._awaited(round_).items()  # some of whose ranks have ended meanwhile
            self._settled |= {node: n.number for node, n in awaited if n.trouble is Trouble.DONE}
        identity = _identity_of(judged)
        is_found = identity is not None
        if inquiry.trouble is Trouble.STANDS:
            is_found = is_found and judged.is_certain and identity == self._suspicion
            self._suspicion = identity if judged.is_certain else None
            self._plan_next(now)
        finding = Finding(
            inquiry=inquiry.id,
            settles=dict(self._settled),
            blamed=judged.blamed if is_found and inquiry.trouble is not Trouble.WHY else (),
            text=judged.text if is_found else "",
            mismatch=judged.mismatch if is_found else None,
            late=judged.late,
            silent=tuple(
                node
                for node in round_.members
                if node not in self._notes or self._notes[node].inquiry != inquiry.id
            ),
            identity=judged.identity if is_found else None,
        )
        self._finding = finding
        self._unwritten = msgspec.structs.replace(inquiry, finding=finding)

    def _plan_next(self, now: Instant) -> None:
        if self._suspicion is not None:
            self._next_at = after(now, CONFIRM)
            return
        self._is_first = False
        self._next_at = after(now, self._pause)
        self._pause = min(Duration(2 * self._pause), PAUSE_MAX)


def _identity_of(judged: InquiryJudged) -> BlameIdentity | None:
    """What tells the blame from other blame; None if no rank is blamed."""
    if not judged.blamed:
        return None
    # A journal of an earlier version has less of it, and is replayed all the same.
    return judged.identity or BlameIdentity(judged.blamed, judged.mismatch)
