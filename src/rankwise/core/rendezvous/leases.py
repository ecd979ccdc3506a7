"""The lease of a node, its promise of life, and that of a run, by which the store forgets it.

A node has one lease at a time, renewed for as long as it takes part. It counts from when its last
renewal was *sent*, so by this node's own clock it ends before the store can have ended it. It is
renewed all the time, without waiting for the answer before: what was lost on a way that is whole
again would be waited for in vain. So when the store has gone, the last renewal is less than
`RENEW_EVERY` old, and when it is back, the next one is as near: it may be away for the whole lease
but a second. Where many nodes share a store, which would have to bear all that, renewals are
farther apart, though not when one was not answered.

The charter and the round are bound to a lease of the run's. The leader renews it, a few times in
its life, which is hours; when nobody has led for that long, there is nothing left. The leader asks
for it when it begins to lead, and binds the charter together with the first round, so that nobody
is woken for it; if no round comes soon, by itself. A new leader finds it at the charter, and renews
it at once: the leader before may have renewed it long ago, and who founds a run in place of another
takes over a lease of which little may be left. A round that was written before the store had
answered is bound later, with the charter or without.
"""

from typing import NamedTuple

from rankwise.base.keys import LeaseId, Put, Transaction, Unchanged
from rankwise.base.units import MILLISECOND, Duration, Instant, after
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.requests import Purpose, Request, Requests
from rankwise.core.rendezvous.shared import SharedKeys
from rankwise.core.rendezvous.storage import RunKeys
from rankwise.core.rendezvous.vocabulary import Commit, GrantLease, Order, RenewLease

RENEW_EVERY = Duration(500 * MILLISECOND)
"""How far apart renewals are at most."""
TRIES_PER_LEASE = 10
"""How often a short lease is renewed, and how often that is tried while no answer comes."""
RENEWALS_PER_LEASE = 3
"""How often it is renewed at least, however many nodes there are."""
NODES_AT_EASE = 256
"""So many nodes may renew their leases as often as that."""


class KeptLease:
    """The lease that this node has, if it has one.

    Args:
        ttl: how long it lives without being renewed.
        requests: those of this node.
    """

    def __init__(self, ttl: Duration, requests: Requests) -> None:
        self.id: LeaseId | None = None
        self.until = Instant(0)
        self.renew_at = Instant(0)
        self._ttl = ttl
        self._retry_every = Duration(min(RENEW_EVERY, ttl // TRIES_PER_LEASE))
        self._renew_every = self._retry_every
        self._requests = requests
        self._ever: set[LeaseId] = set()

    @property
    def was_ever_held(self) -> bool:
        """Whether this node ever had a lease."""
        return bool(self._ever)

    def was_ours(self, lease: LeaseId | None) -> bool:
        """Whether this node has, or had, that lease."""
        return lease in self._ever

    def share_with(self, nodes: int) -> None:
        """So many nodes use the store."""
        every = Duration(self._retry_every * max(nodes, NODES_AT_EASE) // NODES_AT_EASE)
        self._renew_every = min(every, Duration(self._ttl // RENEWALS_PER_LEASE))

    def keep(self, now: Instant) -> list[Order]:
        """Ask for a lease, or for its renewal when that is due."""
        if self.id is None:
            if not self._requests.may_begin(Purpose.LEASE, now):
                return []
            return [GrantLease(self._requests.begin(Purpose.LEASE, now), self._ttl)]
        if now < self.renew_at:
            return []
        self._requests.release(Purpose.LEASE)
        token = self._requests.begin(Purpose.LEASE, now, self.id)
        self.renew_at = after(now, self._retry_every)
        return [RenewLease(token, self.id)]

    def granted(self, request: Request, lease: LeaseId) -> None:
        """The store has begun it."""
        self.id = lease
        self._ever.add(lease)
        self.until = request.sent_at
        self._prolong(request.sent_at)

    def renewed(self, request: Request) -> None:
        """The store has renewed a lease: this one, if it is not an answer from long ago."""
        if self.id is not None and request.context == self.id:
            self._prolong(request.sent_at)

    def lose(self) -> None:
        """It has ended, or must be believed to have."""
        self.id = None

    def _prolong(self, sent_at: Instant) -> None:
        until = after(sent_at, self._ttl)
        if until > self.until:  # answers may overtake each other
            self.until = until
            self.renew_at = after(sent_at, self._renew_every)


RENEWALS_PER_LIFE = 4


class Bound(NamedTuple):
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
        self, config: RendezvousConfig, keys: RunKeys, shared: SharedKeys, requests: Requests
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
        bound = Bound(lease, tuple(put.key for put in puts))
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
