"""Leading: how a node gets the lead, and what it does with it.

The node that holds the key `leader` with its present lease leads: it reads and watches `nodes/`,
and writes what `leader.decide` answers, bound to `leader` and `round` being unchanged. When the
lead is free the last round's members try in the order of their ranks, a little apart, so that one
try is the rule.
"""

from contextlib import suppress
from typing import NamedTuple

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import Change, LeaseId, Put, Revision, Transaction, Unchanged
from rankwise.base.units import MILLISECOND, Duration, Instant, after
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.inquiry import LeaderInquiry
from rankwise.core.rendezvous.leader import Decision, decide
from rankwise.core.rendezvous.leases import Bound, RunLease
from rankwise.core.rendezvous.records import Round
from rankwise.core.rendezvous.requests import Purpose, Requests
from rankwise.core.rendezvous.shared import SharedKeys
from rankwise.core.rendezvous.storage import RunKeys, decode_books_note, decode_node, encode
from rankwise.core.rendezvous.view import HeardRecord, View
from rankwise.core.rendezvous.vocabulary import Commit, KeysRead, Order, ReadKeys

TURN = Duration(5 * MILLISECOND)
"""How far apart the members try to take a free lead."""
TURNS_MAX = 50
LOOK_EVERY = Duration(2 * MILLISECOND)
"""How often the leader of many nodes looks at their changes at most."""


class WrittenRound(NamedTuple):
    """What a transaction of the leader writes."""

    value: bytes
    lease: LeaseId | None
    binds_charter: bool


class Lead:
    """The lead, as this node has it or may come to have it.

    Args:
        config: who may join, and how long anybody waits.
        me: this node's id and host.
        keys: where the run's records lie.
        shared: what all nodes share.
        requests: those of this node.
    """

    def __init__(
        self,
        config: RendezvousConfig,
        me: bytes,
        keys: RunKeys,
        shared: SharedKeys,
        requests: Requests,
    ) -> None:
        self.view: View | None = None
        """What the leader knows of the nodes; None while this node does not lead."""
        self.watch: int | None = None
        """The token of the watch that tells of the nodes."""
        self.decision = Decision()
        """What was decided last."""
        self.looks_at: Instant | None = None
        """When the leader looks at the nodes again."""
        self.round_trouble = ""
        """Why the store has not taken the round that was decided upon."""
        self.run_lease = RunLease(config, keys, shared, requests)
        self.inquiry = LeaderInquiry(me.partition(b" ")[0].decode(), keys, shared.leader, requests)
        self._config = config
        self._me = me
        self._keys = keys
        self._shared = shared
        self._requests = requests
        self._looked_at: Instant | None = None

    # Getting it

    def is_held_with(self, lease: LeaseId | None) -> bool:
        """Whether the lead is this node's, by that lease."""
        leader = self._shared.leader
        return leader.lease == lease and leader.value == self._me

    def is_to_be_had(self, lease: LeaseId | None) -> bool:
        """Whether the lead is free, or bound to a lease that this node had before."""
        leader = self._shared.leader
        is_mine = leader.value == self._me and leader.lease != lease
        return (self._shared.is_lead_free or is_mine) and self._shared.is_known

    def turn(self, place: int | None) -> Instant | None:
        """When this node tries to take a free lead, with its place among the members."""
        since = self._shared.lead_free_since
        if since is None:
            return None
        position = sum(self._me) if place is None else place
        return after(since, Duration(TURN * (position % TURNS_MAX)))

    def take(self, lease: LeaseId, place: int | None, now: Instant) -> list[Order]:
        """Try to take the lead, if it is this node's turn."""
        turn = self.turn(place)
        if not self._requests.may_begin(Purpose.LEAD, now) or (turn is not None and now < turn):
            return []
        transaction = Transaction(
            conditions=(Unchanged(self._keys.leader, self._shared.leader.revision),),
            puts=(Put(self._keys.leader, self._me, lease),),
        )
        return [Commit(self._requests.begin(Purpose.LEAD, now), transaction)]

    # Having it

    def begin(self, read: KeysRead, round_: Round | None, founder: str, now: Instant) -> None:
        """Take in the nodes as they were read: from now on there is a view."""
        self.watch = read.watch
        self.view = View(self._config, now)
        self.inquiry.forget_nodes()
        for entry in read.snapshot.entries:
            self._hear(self.view, entry.key, entry.value, founder, now)
        if round_ is not None:
            self.view.turn_to(round_, now)
        self.look_soon(now)

    def hear(self, changes: tuple[Change, ...], founder: str, now: Instant) -> None:
        """Take in what nodes have written."""
        if self.view is not None:
            for change in changes:
                self._hear(self.view, change.key, change.value, founder, now)
            # What concerns calls changes nothing about rounds.
            if not all(change.key.startswith(self._keys.books_notes) for change in changes):
                self.look_soon(now)

    def turn_to(self, round_: Round, now: Instant) -> None:
        """The round has been read, or written."""
        if self.view is not None:
            self.view.turn_to(round_, now)
            self.look_soon(now)

    def look_soon(self, now: Instant) -> None:
        """Look at the nodes now, or when enough of their changes have come together."""
        soonest = now if self._looked_at is None else after(self._looked_at, LOOK_EVERY)
        self.looks_at = max(now, soonest)

    def work(self, now: Instant) -> list[Order]:
        """Read the nodes if that was not done; look at them if it is time, and decide."""
        if self.view is None:
            if not self._requests.may_begin(Purpose.NODES, now):
                return []
            token = self._requests.begin(Purpose.NODES, now)
            return [ReadKeys(token, self._keys.nodes, self._requests.new_token())]
        if self.looks_at is None or now < self.looks_at or self._shared.is_stale:
            return []
        if not self._requests.may_begin(Purpose.ROUND, now):
            return []
        self._looked_at = now
        self.decision = decide(self.view, now)
        self.looks_at = self.decision.wake_at
        return [] if self.decision.round is None else self.write(self.decision.round, now)

    def write(self, round_: Round, now: Instant) -> list[Order]:
        """Ask the store to take a round."""
        value = encode(round_)
        lease, binding = self.run_lease.id, self.run_lease.binding()
        conditions: tuple[Unchanged, ...] = (
            Unchanged(self._keys.leader, self._shared.leader.revision),
            Unchanged(self._keys.round, self._shared.round.revision),
        )
        if binding:
            conditions = (*conditions, Unchanged(self._keys.charter, self._shared.charter.revision))
        transaction = Transaction(
            conditions=conditions, puts=(Put(self._keys.round, value, lease), *binding)
        )
        written = WrittenRound(value, lease, binds_charter=bool(binding))
        return [Commit(self._requests.begin(Purpose.ROUND, now, written), transaction)]

    def written(self, written: WrittenRound, revision: Revision, now: Instant) -> None:
        """The store has taken it."""
        self.round_trouble = ""
        shared = self._shared
        shared.round.learn(written.value, revision, written.lease, revision)
        if written.binds_charter:
            self.bound(Bound(written.lease, (self._keys.charter,)), revision, now)

    def bound(self, bound: Bound, revision: Revision, now: Instant) -> None:
        """The store has bound keys to the run's lease."""
        shared = self._shared
        for key, known in ((self._keys.charter, shared.charter), (self._keys.round, shared.round)):
            if key in bound.keys:
                known.learn(known.value, revision, bound.lease, revision)
        self.run_lease.bound(now)

    def lose_sight(self) -> None:
        """The watch is lost: read all nodes anew."""
        self.watch = None
        self.view = None

    def stop(self) -> None:
        """Lead no longer, if this node did; somebody ends the watch."""
        self.watch = None
        self.view = None
        self.decision = Decision()
        self.round_trouble = ""
        self.looks_at = None
        self.run_lease.stop()
        self.inquiry.forget_nodes()
        self.inquiry.begin_again()
        self._requests.forget(Purpose.NODES)

    def _hear(self, view: View, key: str, value: bytes | None, founder: str, now: Instant) -> None:
        node = self._keys.node_id(key)
        if key.startswith(self._keys.done_notes):
            self._hear_of_done(view, node, key, value, founder)
            return
        if key.startswith(self._keys.books_notes):
            self._hear_of_books(node, key, value, founder, now)
            return
        if value is None:
            view.delete(node, now)
            return
        try:
            record = decode_node(value, key, node)
            if record.founder != founder:
                return  # of a run that the store has forgotten; it will find out
            heard = HeardRecord(record, now)
        except RemoteProtocolError as error:
            heard = HeardRecord(None, now, str(error))
        view.put(node, heard)

    def _hear_of_books(
        self, node: str, key: str, value: bytes | None, founder: str, now: Instant
    ) -> None:
        if value is None:
            self.inquiry.hear(node, None, now)
            return
        with suppress(RemoteProtocolError):  # told of its node's record
            note = decode_books_note(value, key, node)
            if note.founder == founder:
                self.inquiry.hear(node, note, now)

    def _hear_of_done(
        self, view: View, node: str, key: str, value: bytes | None, founder: str
    ) -> None:
        if value is None:
            view.done.pop(node, None)
            return
        with suppress(RemoteProtocolError):  # told of its node's record, if it still is there
            record = decode_node(value, key, node)
            if record.founder == founder:
                view.done[node] = record
