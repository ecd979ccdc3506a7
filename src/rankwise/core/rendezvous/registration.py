"""How one node shows the others that it is there: the record that it writes under its lease.

A node has one lease at a time, renewed for as long as it takes part, and without waiting for the
answer before. So when the store has gone, the last renewal is less than `RENEW_EVERY` old, and when
it is back, the next one is as near: it may be away for the whole lease but a second.

The record as it should be, and the one known to lie in the store, are versions of each other. It is
written whenever they differ, bound to the revision that was last seen of its key; after an answer
that was lost, or a conflict, the key is read first.

A node whose workers have all succeeded writes its record twice, in one transaction: the second, its
*done note*, is bound to the run's lease alone. So a later leader knows that the work was done,
wherever the node is then. It takes the note back when it is ready for another round, or the run is
over.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rankwise.base.keys import (
    ABSENT,
    Entry,
    LeaseId,
    Put,
    Revision,
    Snapshot,
    Transaction,
    Unchanged,
)
from rankwise.base.units import MILLISECOND, Duration, Instant, after, between
from rankwise.core.rendezvous.configuration import NodeOffer
from rankwise.core.rendezvous.records import FailureNote, NodeRecord, encode
from rankwise.core.rendezvous.requests import Purpose, StoreRequest, StoreRequests
from rankwise.core.rendezvous.vocabulary import Commit, GrantLease, Order, ReadKeys, RenewLease

if TYPE_CHECKING:
    from rankwise.base.failure import Failure

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

    def __init__(self, ttl: Duration, requests: StoreRequests) -> None:
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
        # One store has to bear the renewals of all.
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
        # The answer before is not waited for: a request lost in an outage would block until its
        # timeout.
        self._requests.release(Purpose.LEASE)
        token = self._requests.begin(Purpose.LEASE, now, self.id)
        self.renew_at = after(now, self._retry_every)
        return [RenewLease(token, self.id)]

    def granted(self, request: StoreRequest, lease: LeaseId) -> None:
        """The store has begun it."""
        self.id = lease
        self._ever.add(lease)
        # From when the request was sent: by this node's clock, the lease ends before the store can
        # have ended it.
        self.until = request.sent_at
        self._prolong(request.sent_at)

    def renewed(self, request: StoreRequest) -> None:
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


class RecordWrite(NamedTuple):
    """What a transaction of this node's record writes: which version, under which lease."""

    version: int
    lease: LeaseId


class Attempt(NamedTuple):
    """The last transaction of this node's record, of which perhaps no answer came."""

    written: RecordWrite
    value: bytes
    over: Revision
    """The revision of the key that it was bound to."""

    def is_found_in(self, entry: Entry) -> bool:
        """Whether the store has taken it.

        Once another revision lies there, no transaction that was bound to the one before can still
        take place. So what is found is known to stay, unless this node writes again.
        """
        return entry.revision != self.over and (entry.value, entry.lease) == (
            self.value,
            self.written.lease,
        )


class OwnRecord:
    """One node's record.

    Args:
        key: where it lies.
        note_key: where its done note lies.
        offer: what the node brings along.
        requests: those of this node.
    """

    def __init__(self, key: str, note_key: str, offer: NodeOffer, requests: StoreRequests) -> None:
        self.record = NodeRecord(
            host=offer.host,
            address=offer.address,
            slots=offer.slots,
            topology=offer.topology,
            static_rank=offer.static_rank,
        )
        self.failures: tuple[Failure, ...] = ()
        self.flush_at: Instant | None = None
        """Until when writing may wait for more to say; None to write at once."""
        self.lease: LeaseId | None = None
        """The lease under which it was last written."""
        self.revision: Revision | None = ABSENT
        """Of its key; None if that must be read."""
        self._key = key
        self._note_key = note_key
        self._is_noted = False
        self._note_lease: LeaseId | None = None
        self._requests = requests
        self._version = 1
        self._written_version = 0
        self._attempt: Attempt | None = None

    @property
    def is_written(self) -> bool:
        """Whether the store has its latest version, under whatever lease."""
        return self._written_version == self._version

    def tell_failures(self, number: int, failures: "tuple[Failure, ...]") -> None:
        """Say that these failures have ended the node's gang of round `number`."""
        self.failures = failures
        self.rewrite(failing=number)

    def rewrite(self, **changes: object) -> None:
        """Change what it should say."""
        self.record = msgspec.structs.replace(self.record, **changes)
        self._version += 1

    def write(self, lease: LeaseId, run_lease: LeaseId | None, now: Instant) -> list[Order]:
        """Ask the store to take it, or what lies there if that is not known.

        Args:
            lease: this node's.
            run_lease: the run's, with which a note vanishes that is not taken back.
            now: the time.
        """
        if not self._requests.may_begin(Purpose.OWN, now):
            return []
        if self.revision is None:
            return [ReadKeys(self._requests.begin(Purpose.OWN, now), self._key)]
        if self.flush_at is not None and now < self.flush_at:
            return []
        self.flush_at = None
        notes = tuple(FailureNote(each, between(each.at, now)) for each in self.failures)
        record = msgspec.structs.replace(self.record, failures=notes)
        value, written = encode(record), RecordWrite(self._version, lease)
        self._attempt = Attempt(written, value, self.revision)
        token = self._requests.begin(Purpose.OWN, now, written)
        return [Commit(token, self._written(value, lease, run_lease, self.revision))]

    def _written(
        self, value: bytes, lease: LeaseId, run_lease: LeaseId | None, revision: Revision
    ) -> Transaction:
        conditions = (Unchanged(self._key, revision),)
        record = Put(self._key, value, lease)
        if self.record.is_done and self.record.ready <= self.record.ended:
            self._is_noted, self._note_lease = True, run_lease
            return Transaction(
                conditions=conditions, puts=(record, Put(self._note_key, value, run_lease))
            )
        was_noted, self._is_noted = self._is_noted, False
        deletes = (self._note_key,) if was_noted else ()
        return Transaction(conditions=conditions, puts=(record,), deletes=deletes)

    def bind_note(self, run_lease: LeaseId | None) -> None:
        """Write once more, if the done note was left before the run had its lease."""
        if self._is_noted and self._note_lease is None and run_lease is not None:
            self.rewrite()

    def take_back_note(self, now: Instant) -> list[Order]:
        """Ask the store to forget the done note, if it may have one."""
        if not self._is_noted or not self._requests.may_begin(Purpose.DONE_NOTE, now):
            return []
        self._is_noted = False
        token = self._requests.begin(Purpose.DONE_NOTE, now)
        return [Commit(token, Transaction(deletes=(self._note_key,)))]

    def committed(self, request: StoreRequest, revision: Revision) -> None:
        """The store has taken it."""
        written: RecordWrite = request.context
        self.revision = revision
        self._written_version, self.lease = written

    def learn(self, snapshot: Snapshot, was_ours: Callable[[LeaseId | None], bool]) -> bool:
        """Take in what was read; returns False if the key is another node's."""
        self._written_version = 0
        entry = next((entry for entry in snapshot.entries if entry.key == self._key), None)
        if entry is None:
            self.revision = ABSENT
        elif was_ours(entry.lease):
            self.revision = entry.revision
            # The lost answer may have been a success. Where every answer takes too long, the node
            # would otherwise write the same for ever, and never believe that others can see it.
            if self._attempt is not None and self._attempt.is_found_in(entry):
                self._written_version, self.lease = self._attempt.written
        else:
            return False
        return True
