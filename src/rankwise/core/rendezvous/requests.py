"""What a rendezvous has asked the store, and has not heard the answer to.

For each purpose at most one request is under way. One that failed is repeated after a pause; an
answer that comes late or twice finds nobody who waits for it.
"""

from enum import StrEnum
from typing import Any, NamedTuple

from rankwise.base.units import Duration, Instant, after


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
    BOOKS = "books"
    INQUIRY = "inquiry"


class Request(NamedTuple):
    """A request that is under way: what it is for, since when, and what its answer needs."""

    purpose: Purpose
    sent_at: Instant
    context: Any = None


class Requests:
    """Requests under way, by token, and pauses before those that failed are repeated."""

    def __init__(self) -> None:
        self._tokens_given = 0
        self._by_token: dict[int, Request] = {}
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
        self._by_token[token] = Request(purpose, now, context)
        self._latest[purpose] = token
        self._busy.add(purpose)
        self._paused_until.pop(purpose, None)
        return token

    def settle(self, token: int) -> Request | None:
        """Take the request that is answered; None if nobody waits for the answer any more."""
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
