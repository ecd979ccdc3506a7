"""How the store comes to forget a run: the charter and the round are bound to a lease of the run's.

Whoever leads renews it, a few times in its life, which is hours; when nobody has led for that long,
there is nothing left. The leader asks for it when it begins to lead, and binds the charter together
with the first round, so that nobody is woken for it; if no round comes soon, by itself. A new
leader finds it at the charter, and goes on renewing it.
"""

from rankwise.base.keys import LeaseId, Put, Transaction, Unchanged
from rankwise.base.units import Duration, Instant, after
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.in_flight import Purpose, Requests
from rankwise.core.rendezvous.layout import RunKeys
from rankwise.core.rendezvous.requests import Commit, GrantLease, Order, RenewLease
from rankwise.core.rendezvous.shared import SharedKeys

RENEWALS_PER_LIFE = 4


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
        """When it is bound, or renewed."""

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
        if ttl is None or not self._requests.may_begin(Purpose.RUN_LEASE, now):
            return []
        bound = self._shared.charter.lease
        if bound is None and self._granted is None:
            return [GrantLease(self._requests.begin(Purpose.RUN_LEASE, now), ttl)]
        if bound is not None and self._due_at is None:
            self._renew_after(now, ttl)
        if self._due_at is None or now < self._due_at:
            return []
        if bound is not None:
            self._renew_after(now, ttl)
            return [RenewLease(self._requests.begin(Purpose.RUN_LEASE, now, bound), bound)]
        transaction = Transaction(
            conditions=(Unchanged(self._keys.charter, self._shared.charter.revision),),
            puts=self.binding(),
        )
        token = self._requests.begin(Purpose.RUN_LEASE, now, self._granted)
        return [Commit(token, transaction)]

    def granted(self, lease: LeaseId, now: Instant) -> None:
        """The store has begun it."""
        ttl = self._config.run_ttl
        assert ttl is not None, "nobody asks for a lease that does not end"
        self._granted = lease
        soon = min(self._config.lease_ttl, ttl // RENEWALS_PER_LIFE)
        self._due_at = after(now, Duration(soon))

    def bound(self) -> None:
        """The charter is bound."""
        self._granted = self._due_at = None

    def stop(self) -> None:
        """This node leads no longer; what was asked for and not used ends by itself."""
        self._granted = self._due_at = None
        if self._requests.is_under_way(Purpose.RUN_LEASE):
            self._requests.forget(Purpose.RUN_LEASE)

    def _renew_after(self, now: Instant, ttl: Duration) -> None:
        self._due_at = after(now, Duration(ttl // RENEWALS_PER_LIFE))
