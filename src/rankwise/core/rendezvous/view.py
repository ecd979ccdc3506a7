"""What a leader knows of the nodes, and since when.

All instants are of the leader's own clock: when it heard of something, never when something was
said to have happened. A new leader begins with an empty view, reads every record, and takes each
member that is missing for lost at that moment, so that it errs on the side of waiting; unless it
has left a note that its workers have all succeeded, which nothing that happens to it can change.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rankwise.base.units import Instant, after
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.records import Departure, NodeRecord, Round, RoundPhase


@dataclass(slots=True, frozen=True)
class HeardRecord:
    """A node's record as last heard, and when that was.

    `record` is None if it cannot be read; `problem` then says why.
    """

    record: NodeRecord | None
    at: Instant
    problem: str = ""


@dataclass(slots=True, frozen=True)
class Gone:
    """A member whose record has vanished: what it was at last, and when that was seen."""

    last: HeardRecord | None
    at: Instant
    has_ended: bool
    """Whether it had told before that none of its workers lived any more."""


class View:
    """The nodes as their leader sees them.

    Args:
        config: who may join, and how long anybody waits.
        now: when this node began to lead.
    """

    def __init__(self, config: RendezvousConfig, now: Instant) -> None:
        self.config = config
        self.nodes: dict[str, HeardRecord] = {}
        self.unreadable: dict[str, str] = {}
        """Those whose record cannot be read, and why."""
        self.since: dict[str, Instant] = {}
        """When each of them was first heard of."""
        self.gone: dict[str, Gone] = {}
        """Members of the present or last round that have vanished."""
        self.done: dict[str, NodeRecord] = {}
        """What nodes have noted when they were done, in this round or an earlier one."""
        self.returned: set[str] = set()
        """Members that had vanished, and have written a new record since."""
        self.round: Round | None = None
        self.membership: frozenset[str] = frozenset()
        """The members, in no order."""
        self.round_since = now
        self.newcomer_at = now
        self.enough_since: Instant | None = None
        self.ended_since: Instant | None = None

    def put(self, node: str, heard: HeardRecord) -> None:
        """A node has written its record."""
        if node not in self.nodes:
            self.since[node] = heard.at
            self.newcomer_at = heard.at
            if node in self.gone:
                self.returned.add(node)
        self.nodes[node] = heard
        if heard.record is None:
            self.unreadable[node] = heard.problem
        else:
            self.unreadable.pop(node, None)

    def delete(self, node: str, now: Instant) -> None:
        """A node's record has vanished: it has said goodbye, or its lease has ended."""
        last = self.nodes.pop(node, None)
        self.unreadable.pop(node, None)
        self.since.pop(node, None)
        if node in self.membership:
            self.gone[node] = Gone(last, now, last is not None and self.has_ended(last.record))

    def turn_to(self, new: Round, now: Instant) -> None:
        """The round has been read, or written."""
        old, self.round = self.round, new
        if old is None or old.members is not new.members:
            self.membership = frozenset(new.members)
        if old is not None and (old.number, old.phase) == (new.number, new.phase):
            return
        self.round_since = now
        self.enough_since = self.ended_since = None
        if new.phase is RoundPhase.RUNNING:
            self.gone.clear()
            self.returned.clear()
        for node in new.members:
            if node not in self.nodes and node not in self.gone:
                self.gone[node] = self._gone_unseen(node, now)

    def _gone_unseen(self, node: str, now: Instant) -> Gone:
        """What is known of a member that vanished before this node led."""
        noted = self.done.get(node)
        if noted is None or noted.ended != self.run_number:
            return Gone(None, now, has_ended=False)
        return Gone(HeardRecord(noted, now), now, has_ended=True)

    @property
    def members(self) -> tuple[str, ...]:
        """Who is a member of the running round, or was of the last."""
        return () if self.round is None else self.round.members

    @property
    def run_number(self) -> int:
        """The number of the round that runs or ran last; -1 before the first."""
        if self.round is None:
            return -1
        return self.round.number - (self.round.phase is RoundPhase.GATHERING)

    def has_ended(self, record: NodeRecord | None) -> bool:
        """Whether a member has told that none of its workers of the last round lives any more."""
        number = self.run_number
        return record is not None and (record.ended >= number or record.ready > number)

    def is_ready(self, node: str, record: NodeRecord) -> bool:
        """Whether a node could take part in the next round."""
        return (
            record.departure is Departure.STAYS
            and record.ready >= 0
            and (record.ready > self.run_number or node not in self.membership)
            and node not in self.refusals
        )

    @property
    def refusals(self) -> dict[str, str]:
        """Nodes that may not take part, with the reason."""
        return {} if self.round is None else self.round.refusals

    def candidates(self) -> dict[str, NodeRecord]:
        """The nodes that could take part in the next round."""
        run_number, members, refusals = self.run_number, self.membership, self.refusals
        return {
            node: record
            for node, heard in self.nodes.items()
            if (record := heard.record) is not None
            and record.departure is Departure.STAYS
            and record.ready >= 0
            and (record.ready > run_number or node not in members)
            and node not in refusals
        }

    def blockers(self) -> list[str]:
        """Members of the last round that are here, and have workers that may still live."""
        number = self.run_number
        return [
            node
            for node in self.members
            if (heard := self.nodes.get(node)) is not None
            and (
                heard.record is None
                or (heard.record.ended < number and heard.record.ready <= number)
            )
        ]

    @property
    def lost(self) -> tuple[str, ...]:
        """Members that vanished, or gave up because they were cut off, in the order of their ranks.

        A member that had told of a failure of its own first is not lost: it has failed.
        """
        return tuple(node for node in self.members if self._is_lost(node))

    def _is_lost(self, node: str) -> bool:
        number = self.run_number
        gone = self.gone.get(node)
        words = [self.nodes.get(node), None if gone is None else gone.last]
        records = [
            heard.record for heard in words if heard is not None and heard.record is not None
        ]
        suspect = None if self.round is None else self.round.suspect
        is_suspect = suspect is not None and suspect.node == node
        if is_suspect or any(record.failing == number for record in records):
            return False
        if any(record.cut_off == number for record in records):
            return True
        return gone is not None and not gone.has_ended

    @property
    def fenced_until(self) -> Instant | None:
        """Until when workers of members that vanished may still live; None if none may."""
        vanished = [
            gone.at
            for node, gone in self.gone.items()
            if not gone.has_ended and node not in self.nodes
        ]
        return after(max(vanished), self.config.fence) if vanished else None

    def last_words(self) -> Iterator[tuple[str, HeardRecord]]:
        """Each member with its last record, whether it is here or gone, in the order of ranks."""
        for node in self.members:
            heard = self.nodes.get(node)
            gone = self.gone.get(node)
            if gone is not None and gone.last is not None:
                yield node, gone.last
            if heard is not None:
                yield node, heard

    def host(self, node: str) -> str:
        """The machine on which a node is or was, as far as is known."""
        heard = self.nodes.get(node)
        if heard is None and node in self.gone:
            heard = self.gone[node].last
        if heard is not None and heard.record is not None:
            return heard.record.host
        # It vanished before this node led; the leader before has written down who it was.
        hosts = () if self.round is None else self.round.lineup.hosts
        label = dict(zip(self.members, hosts, strict=False)).get(node, "")
        return label.partition("/")[0]

    def named(self, node: str) -> str:
        """A node for people: its id, and its host if known."""
        host = self.host(node)
        return f"{node} on {host}" if host else node
