"""What one node has asked the store, and knows from its answers of the keys that all share.

For each purpose at most one request is under way. One that failed is repeated after a pause; an
answer that comes late or twice finds no request that waits for it.

News of a shared key come by three ways (a read, the watch, the answer to a transaction of one's
own) and may overtake each other. The store's revision tells which is newer.
"""

from enum import StrEnum
from typing import Any, NamedTuple

from rankwise.base.keys import ABSENT, Change, LeaseId, Revision, Snapshot
from rankwise.base.units import Duration, Instant, after
from rankwise.core.rendezvous.records import RunKeys
from rankwise.core.rendezvous.vocabulary import Order, ReadKeys


class Purpose(StrEnum):
    """What a request is for."""

    LEASE = "lease"
    SHARED = "shared"
    CHARTER = "charter"
    OWN = "own"
    DONE_NOTE = "done-note"
    LEAD = "lead"
    NODES = "nodes"
    ROUND = "round"
    RUN_LEASE = "run lease"
    GOODBYE = "goodbye"
    CALL_RECORDS = "books"
    INQUIRY = "inquiry"


class StoreRequest(NamedTuple):
    """A request that is under way: what it is for, since when, and what its answer needs."""

    purpose: Purpose
    sent_at: Instant
    context: Any = None


class StoreRequests:
    """Requests under way, by token, and pauses before those that failed are repeated."""

    def __init__(self) -> None:
        self._tokens_given = 0
        self._by_token: dict[int, StoreRequest] = {}
        self._latest: dict[Purpose, int] = {}
        self._busy: set[Purpose] = set()
        self._paused_until: dict[Purpose, Instant] = {}

    def new_token(self) -> int:
        """A token that was never given out before."""
        self._tokens_given += 1
        return self._tokens_given

    def begin(self, purpose: Purpose, now: Instant, context: Any = None) -> int:
        """Note a request, and return its token."""
        assert purpose not in self._busy, f"a second request for {purpose}"
        token = self.new_token()
        self._by_token[token] = StoreRequest(purpose, now, context)
        self._latest[purpose] = token
        self._busy.add(purpose)
        self._paused_until.pop(purpose, None)
        return token

    def settle(self, token: int) -> StoreRequest | None:
        """Take the request that is answered; None if it is not pending any more."""
        request = self._by_token.pop(token, None)
        if request is not None and self._latest.get(request.purpose) == token:
            self._busy.discard(request.purpose)
        return request

    def pause(self, purpose: Purpose, now: Instant, pause: Duration) -> None:
        """Ask nothing for that purpose for a while."""
        self._paused_until[purpose] = after(now, pause)

    def may_begin(self, purpose: Purpose, now: Instant) -> bool:
        """Whether a request for that purpose may be made."""
        if purpose in self._busy:
            return False
        return now >= self._paused_until.get(purpose, now)

    def is_under_way(self, purpose: Purpose) -> bool:
        """Whether a request for that purpose is under way."""
        return purpose in self._busy

    def release(self, purpose: Purpose) -> None:
        """Let another request begin though one is under way; the answers to both are welcome."""
        self._busy.discard(purpose)

    def forget(self, purpose: Purpose) -> None:
        """Wait no longer for the answer to the request for that purpose, and end its pause."""
        for token, request in list(self._by_token.items()):
            if request.purpose is purpose:
                del self._by_token[token]
        self._busy.discard(purpose)
        self._paused_until.pop(purpose, None)

    def next_deadline(self, now: Instant) -> Instant | None:
        """When the first pause is over."""
        if not self._paused_until:
            return None
        return min((until for until in self._paused_until.values() if until > now), default=None)


class SharedKey:
    """One key: its value as of some revision of the store."""

    __slots__ = ("as_of", "lease", "revision", "value")

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.revision = ABSENT
        self.lease: LeaseId | None = None
        self.as_of = Revision(-1)

    def learn(
        self, value: bytes | None, revision: Revision, lease: LeaseId | None, as_of: Revision
    ) -> None:
        """Take in news, unless newer ones came before."""
        if as_of > self.as_of:
            self.as_of = as_of
            self.value, self.revision, self.lease = value, revision, lease


class SharedKeys:
    """The charter, the leader, the round and the leader's inquiry.

    Args:
        keys: where they lie.
        requests: those of this node.
    """

    def __init__(self, keys: RunKeys, requests: StoreRequests) -> None:
        self.charter = SharedKey()
        self.leader = SharedKey()
        self.round = SharedKey()
        self.inquiry = SharedKey()
        self.watch: int | None = None
        """The token of the watch that tells of them."""
        self.is_read = False
        """Whether they were ever read."""
        self.is_stale = True
        """Whether they must be read (again) before they can be relied on."""
        self.lead_free_since: Instant | None = None
        """Since when this node knows that there is no leader."""
        self._keys = keys
        self._requests = requests
        self._by_key = {
            keys.charter: self.charter,
            keys.leader: self.leader,
            keys.round: self.round,
            keys.inquiry: self.inquiry,
        }

    @property
    def is_known(self) -> bool:
        """Whether they can be relied on."""
        return self.is_read and not self.is_stale

    @property
    def is_lead_free(self) -> bool:
        """True if there is no leader. A leader key without a lease was not written by rankwise."""
        return self.leader.value is None or self.leader.lease is None

    def read(self, founder: str, now: Instant) -> list[Order]:
        """Ask for them if they are stale; `founder` comes back with the answer."""
        if not self.is_stale or not self._requests.may_begin(Purpose.SHARED, now):
            return []
        token = self._requests.begin(Purpose.SHARED, now, founder)
        watch = self._requests.new_token() if self.watch is None else None
        return [ReadKeys(token, self._keys.shared, watch)]

    def learn_snapshot(self, snapshot: Snapshot) -> None:
        """Take in what was read."""
        self.is_read = True
        found = {entry.key: entry for entry in snapshot.entries}
        for key, shared in self._by_key.items():
            entry = found.get(key)
            if entry is None:
                shared.learn(None, ABSENT, None, snapshot.revision)
            else:
                shared.learn(entry.value, entry.revision, entry.lease, snapshot.revision)

    def learn_changes(self, changes: tuple[Change, ...]) -> None:
        """Take in what the watch tells."""
        for change in changes:
            shared = self._by_key.get(change.key)
            if shared is not None:
                revision = ABSENT if change.value is None else change.revision
                shared.learn(change.value, revision, change.lease, change.revision)

    def lives(self, changes: tuple[Change, ...]) -> list[tuple[Change, ...]]:
        """Changes in parts, each of one run's: another begins where the charter is written.

        A slow node is told both at once, and must not miss how the first has ended.
        """
        starts = [each.revision for each in changes if each.key == self._keys.charter]
        parts: list[list[Change]] = [[]]
        for change in changes:
            if starts and change.revision >= starts[0]:
                del starts[0]
                parts.append([])
            parts[-1].append(change)
        return [tuple(part) for part in parts if part]

    def note_free_lead(self, now: Instant) -> None:
        """Note since when there is no leader, if there is none."""
        if not self.is_lead_free:
            self.lead_free_since = None
        elif self.lead_free_since is None:
            self.lead_free_since = now
