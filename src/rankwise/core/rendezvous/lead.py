"""Leading: how a node gets the lead, and what it does with it.

The node that holds the key `leader` with its present lease leads: it reads and watches `nodes/`,
and writes what `leader.decide` answers, bound to `leader` and `round` being unchanged. When the
lead is free the last round's members try in the order of their ranks, a little apart, so that one
try is the rule.

The charter and the round are bound to a lease of the run's. The leader renews it, a few times in
its life, which is hours; without a leader for that long, there is nothing left. The leader asks for
it when it begins to lead, and binds the charter together with the first round, which wakes no node
for it; if no round comes soon, by itself. A new leader finds it at the charter, and renews it at
once: the leader before may have renewed it long ago, and a node that founds a run in place of
another takes over a lease of which little may be left. A round that was written before the store
had answered is bound later, with the charter or without.
"""

from contextlib import suppress
from typing import NamedTuple

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import Change, LeaseId, Put, Revision, Transaction, Unchanged
from rankwise.base.units import MILLISECOND, Duration, Instant, after
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.inquiry import LeaderInquiry
from rankwise.core.rendezvous.leader import Decision, decide
from rankwise.core.rendezvous.records import (
    Round,
    RunKeys,
    decode_call_records_note,
    decode_node,
    encode,
)
from rankwise.core.rendezvous.requests import Purpose, SharedKeys, StoreRequests
from rankwise.core.rendezvous.view import ObservedRecord, View
from rankwise.core.rendezvous.vocabulary import (
    Commit,
    GrantLease,
    KeysRead,
    Order,
    ReadKeys,
    RenewLease,
)

TURN = Duration(5 * MILLISECOND)
"""How far apart the members try to take a free lead."""
TURNS_MAX = 50
LOOK_EVERY = Duration(2 * MILLISECOND)
"""How often the leader of many nodes looks at their changes at most."""
RENEWALS_PER_LIFE = 4
"""How often the lease of a run is renewed in the time that it lasts."""


class LeaseBinding(NamedTuple):
    """What a transaction of the leader binds to the run's lease, as it lies there."""

    lease: LeaseId | None
    keys: tuple[str, ...]


class RunLease:
    """The lease of a run, as its leader looks after it.

    Args:
        config: how long it lives without a leader.
        keys: where the run's records lie.
        shared: what lies there.
        requests: those of this node.
    """

    def __init__(
        self, config: RendezvousConfig, keys: RunKeys, shared: SharedKeys, requests: StoreRequests
    ) -> None:
        self._config = config
        self._keys = keys
        self._shared = shared
        self._requests = requests
        self._granted: LeaseId | None = None
        """One that nothing is bound to yet."""
        self._due_at: Instant | None = None
        """When it is bound, or renewed; None for at once."""

    @property
    def id(self) -> LeaseId | None:
        """What the round is to be bound to."""
        return self._shared.charter.lease or self._granted

    @property
    def due_at(self) -> Instant | None:
        """When there is something to do."""
        return self._due_at

    def binding(self) -> tuple[Put, ...]:
        """What binds the charter, for a transaction that is bound to its being unchanged."""
        charter = self._shared.charter
        if charter.lease is not None or self._granted is None or charter.value is None:
            return ()
        return (Put(self._keys.charter, charter.value, self._granted),)

    def keep(self, now: Instant) -> list[Order]:
        """Ask for it, bind the charter to it, or renew it, whatever is due."""
        ttl = self._config.run_ttl
        if ttl is None or self._shared.is_stale:
            return []
        if not self._requests.may_begin(Purpose.RUN_LEASE, now):
            return []
        bound = self._shared.charter.lease
        if bound is None and self._granted is None:
            return [GrantLease(self._requests.begin(Purpose.RUN_LEASE, now), ttl)]
        if self._due_at is not None and now < self._due_at:
            return []
        if bound is None or self._is_round_unbound:
            return self._bind(now)
        self._renew_after(now, ttl)
        return [RenewLease(self._requests.begin(Purpose.RUN_LEASE, now, bound), bound)]

    def _bind(self, now: Instant) -> list[Order]:
        """Bind the charter and the round, whichever is not."""
        charter, round_ = self._shared.charter, self._shared.round
        lease = self.id
        conditions: tuple[Unchanged, ...] = (Unchanged(self._keys.charter, charter.revision),)
        puts = self.binding()
        if self._is_round_unbound and round_.value is not None:
            conditions = (*conditions, Unchanged(self._keys.round, round_.revision))
            puts = (*puts, Put(self._keys.round, round_.value, lease))
        bound = LeaseBinding(lease, tuple(put.key for put in puts))
        token = self._requests.begin(Purpose.RUN_LEASE, now, bound)
        return [Commit(token, Transaction(conditions=conditions, puts=puts))]

    @property
    def _is_round_unbound(self) -> bool:
        round_ = self._shared.round
        return round_.value is not None and round_.lease is None

    def granted(self, lease: LeaseId, now: Instant) -> None:
        """The store has begun it."""
        ttl = self._config.run_ttl
        assert ttl is not None, "a run that is remembered for ever asks for no lease"
        self._granted = lease
        soon = min(self._config.lease_ttl, ttl // RENEWALS_PER_LIFE)
        self._due_at = after(now, Duration(soon))

    def bound(self, now: Instant) -> None:
        """The charter is bound, or the round: no more is to be done for long."""
        ttl = self._config.run_ttl
        assert ttl is not None, "a run that is remembered for ever is bound to no lease"
        self._granted = None
        self._renew_after(now, ttl)

    def failed(self) -> None:
        """The store has not answered: ask again as soon as requests may be made."""
        if self._granted is None:
            self._due_at = None

    def lost(self) -> None:
        """It has ended, before anything was bound to it or with all that was."""
        self._granted = self._due_at = None

    def stop(self) -> None:
        """This node leads no longer; what was asked for and not used ends by itself."""
        self._granted = self._due_at = None
        if self._requests.is_under_way(Purpose.RUN_LEASE):
            self._requests.forget(Purpose.RUN_LEASE)

    def _renew_after(self, now: Instant, ttl: Duration) -> None:
        self._due_at = after(now, Duration(ttl // RENEWALS_PER_LIFE))


class WrittenRound(NamedTuple):
    """What a transaction of the leader writes."""

    value: bytes
    lease: LeaseId | None
    binds_charter: bool


class Lead:
    """The lead, as this node has it or may come to have it.

    Args:
        config: which nodes may join, and how long they wait.
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
        requests: StoreRequests,
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
        # A lead bound to an earlier lease of this node ends with that: no other node leads by it.
        return (self._shared.is_lead_free or is_mine) and self._shared.is_known

    def turn(self, place: int | None) -> Instant | None:
        """When this node tries to take a free lead, with its place among the members."""
        since = self._shared.lead_free_since
        if since is None:
            return None
        # Nodes try one after the other: else each would lose against the first, and ask anew.
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
        # A new view knows no instants: waits begin anew, as this node cannot know when they began.
        self.view = View(self._config, now)
        self.inquiry.forget_nodes()
        for entry in read.snapshot.entries:
            self._on_change(self.view, entry.key, entry.value, founder, now)
        if round_ is not None:
            self.view.turn_to(round_, now)
        self.look_soon(now)

    def on_changes(self, changes: tuple[Change, ...], founder: str, now: Instant) -> None:
        """Take in what nodes have written."""
        if self.view is not None:
            for change in changes:
                self._on_change(self.view, change.key, change.value, founder, now)
            # Facts about calls change nothing about rounds.
            if not all(change.key.startswith(self._keys.call_records_notes) for change in changes):
                self.look_soon(now)

    def turn_to(self, round_: Round, now: Instant) -> None:
        """The round has been read, or written."""
        if self.view is not None:
            self.view.turn_to(round_, now)
            self.look_soon(now)

    def look_soon(self, now: Instant) -> None:
        """Look at the nodes now, or when enough of their changes have come together."""
        # Thousands of nodes register within a second: each decision looks at all of them.
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
        # Decided upon stale knowledge, a round would conflict in the store, and be lost time.
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
            # The charter is written again to bind it to the lease: it must be unchanged.
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
            self.bound(LeaseBinding(written.lease, (self._keys.charter,)), revision, now)

    def bound(self, bound: LeaseBinding, revision: Revision, now: Instant) -> None:
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
        """Lead no longer, if this node did; the caller ends the watch."""
        self.watch = None
        self.view = None
        self.decision = Decision()
        self.round_trouble = ""
        self.looks_at = None
        self.run_lease.stop()
        self.inquiry.forget_nodes()
        self.inquiry.begin_again()
        self._requests.forget(Purpose.NODES)

    def _on_change(
        self, view: View, key: str, value: bytes | None, founder: str, now: Instant
    ) -> None:
        node = self._keys.node_id(key)
        if key.startswith(self._keys.done_notes):
            self._on_done_note(view, node, key, value, founder)
            return
        if key.startswith(self._keys.call_records_notes):
            self._on_call_records_note(node, key, value, founder, now)
            return
        if value is None:
            view.delete(node, now)
            return
        try:
            record = decode_node(value, key, node)
            if record.founder != founder:
                return  # of a run that the store has forgotten; it will find out
            observed = ObservedRecord(record, now)
        except RemoteProtocolError as error:
            # A record of another version still holds a node rank: the node is refused with this
            # text, and does not count as gone.
            observed = ObservedRecord(None, now, str(error))
        view.put(node, observed)

    def _on_call_records_note(
        self, node: str, key: str, value: bytes | None, founder: str, now: Instant
    ) -> None:
        if value is None:
            self.inquiry.on_note(node, None, now)
            return
        with suppress(RemoteProtocolError):  # told of its node's record
            note = decode_call_records_note(value, key, node)
            if note.founder == founder:
                self.inquiry.on_note(node, note, now)

    def _on_done_note(
        self, view: View, node: str, key: str, value: bytes | None, founder: str
    ) -> None:
        if value is None:
            view.done.pop(node, None)
            return
        with suppress(RemoteProtocolError):  # told of its node's record, if it still is there
            record = decode_node(value, key, node)
            if record.founder == founder:
                view.done[node] = record
