"""This node's promise of life: one lease at a time, renewed for as long as the node takes part.

The lease counts from when its last renewal was *sent*, so by this node's own clock it ends before
the store can have ended it. It is renewed all the time, without waiting for the answer before: what
was lost on a way that is whole again would be waited for in vain. So when the store has gone, the
last renewal is less than `RENEW_EVERY` old, and when it is back, the next one is as near: it may be
away for the whole lease but a second. Where many nodes share a store, which would have to bear all
that, renewals are farther apart, though not when one was not answered.
"""

from rankwise.base.keys import LeaseId
from rankwise.base.units import MILLISECOND, Duration, Instant, after
from rankwise.core.rendezvous.in_flight import Purpose, Request, Requests
from rankwise.core.rendezvous.requests import GrantLease, Order, RenewLease

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
