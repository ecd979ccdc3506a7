"""What a rendezvous asks of the store (orders), and what the store answers (stimuli).

Every order carries a `token`, a number that the machine gives out once. The store's answer bears
the same token; an answer to a token that nobody waits for any more changes nothing, so answers may
come late or twice. The driver that carries out an order answers it exactly once in the end, after
at most `RendezvousConfig.request_timeout` with `RequestFailed`. The order in which two requests
that are under way together reach the store is not promised.
"""

import msgspec

from rankwise.base.keys import Change, LeaseId, Revision, Snapshot, Transaction
from rankwise.base.units import Duration


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
    """Tell nothing more through the watch with that token; no answer."""

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
    """The watch with that token tells changes: in order, none missing, none twice."""

    token: int
    changes: tuple[Change, ...]


class WatchLost(msgspec.Struct, frozen=True, tag=True):
    """The watch with that token tells nothing more: some changes are forgotten. Read anew."""

    token: int
    reason: str


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """Nobody answered in time. The request may have been carried out, or may yet be."""

    token: int
    reason: str
    """One sentence: who was tried, and for how long."""


class StoreDenied(msgspec.Struct, frozen=True, tag=True):
    """The store answers, but will not let this node in, now or later."""

    token: int
    reason: str
    hint: str = ""
    is_of_another_run: bool = False
    """Whether it is another run's store: this node has come to the wrong place."""


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
