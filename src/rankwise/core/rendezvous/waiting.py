"""On whom a node waits, for how long at most, and when people are told."""

from typing import TYPE_CHECKING

from rankwise.base.units import Duration, Instant, after, between, format_duration
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.lead import Lead
from rankwise.core.rendezvous.leader import named
from rankwise.core.rendezvous.membership import Membership
from rankwise.core.rendezvous.shared import SharedKeys
from rankwise.core.rendezvous.succession import Succession
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
    MadeSpare,
    Notification,
    RefusalKind,
    Refused,
    Settled,
)

if TYPE_CHECKING:
    from rankwise.core.rendezvous.in_flight import Purpose


class Waiting:
    """A node's patience.

    Args:
        config: how long anybody waits.
        membership, lead, shared, succession: of the same node; looked at, never changed.
    """

    def __init__(
        self,
        config: RendezvousConfig,
        membership: Membership,
        lead: Lead,
        shared: SharedKeys,
        succession: Succession,
    ) -> None:
        self.cut_off_since: Instant | None = None
        """Since when the others cannot see this node; None while they can."""
        self.store_trouble = ""
        """Why a request to the store failed; empty once one like it has succeeded."""
        self.troubled: Purpose | None = None
        """What that request was for."""
        self.announce_at: Instant | None = None
        self._config = config
        self._membership = membership
        self._lead = lead
        self._shared = shared
        self._succession = succession
        self._since: Instant | None = None
        self._told = ""
        """What people were told last of this wait."""
        self._again_at = Instant(0)
        """When they are told again, though nothing has changed."""
        self._pause = config.announce_every

    def begin(self, now: Instant) -> None:
        """Count from now for how long this node waits, and tell people if it takes long."""
        self._since = now
        self._told = ""
        self._pause = self._config.announce_every
        self.announce_at = after(now, self._pause)

    def take_note(self, notification: Notification, now: Instant) -> None:
        """What the agent is told may be what was waited for."""
        if isinstance(notification, Settled):
            self._since = self.announce_at = None
        elif isinstance(notification, MadeSpare):
            self._since = now

    @property
    def deadline(self) -> Instant | None:
        """When this node waits no longer; the leader closes a run for which too few come before."""
        if self.cut_off_since is not None:
            return after(self.cut_off_since, self._config.join_timeout)
        if (
            self._since is None
            or self._membership.member_of is not None
            or self._membership.is_spare
        ):
            return None
        patience = 2 * self._config.join_timeout + self._config.close_timeout
        return after(self._since, Duration(patience))

    def give_up(self, now: Instant) -> list[Notification]:
        """Refuse to wait any longer when the deadline has passed."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        waited = format_duration(between(self._since or now, now))
        trouble = self.store_trouble or "the store has answered"
        why, kind = f"no round with this node has started within {waited}", RefusalKind.TIMEOUT
        if self.cut_off_since is not None:
            waited = format_duration(between(self.cut_off_since, now))
            why = f"this node could not register within {waited}"
            if self._membership.round is not None:
                why, kind = f"this node has been cut off for {waited}", RefusalKind.STORE
            if self._membership.was_done:
                why = f"its workers were done, but how the job ended was not heard within {waited}"
        hint = "" if self.store_trouble else "is the store reachable from here?"  # else it says so
        return self._membership.refuse(Refused(kind, f"{why}: {trouble}", hint))

    def announce(self, now: Instant, *, is_leading: bool) -> list[Notification]:
        """Tell people on whom is being waited, if that has changed; else more and more rarely."""
        if self.announce_at is None or now < self.announce_at:
            return []
        self.announce_at = after(now, self._config.announce_every)
        waiting = self._waiting_for(is_leading=is_leading)
        if not waiting or self._since is None or self._membership.is_told_the_end:
            return []
        # While others work on, perhaps for hours, what changes is who has ended.
        is_news = waiting != self._told and not (self._told and self._membership.member_of)
        if not is_news and now < self._again_at:
            return []
        self._pause = self._config.announce_every if is_news else Duration(2 * self._pause)
        self._told, self._again_at = waiting, after(now, self._pause)
        number = 0 if self._membership.round is None else self._membership.round.number
        return [AnnounceWaiting(number, waiting, between(self._since, now))]

    def _waiting_for(self, *, is_leading: bool) -> str:
        """On whom this node waits, for people; empty if on nobody."""
        if self._succession.obstacle:
            return f"whether anybody still leads, since {self._succession.obstacle}"
        if self.cut_off_since is not None:
            return f"for the store: {self.store_trouble or 'it has not answered yet'}"
        if self._lead.round_trouble and is_leading:
            trouble = self._lead.round_trouble
            return f"for the store, which does not take the next round: {trouble}"
        if self._membership.member_of is not None:
            return self._waiting_for_members()
        if self._membership.is_spare:
            return ""
        if not self._membership.is_fit:
            return "until this node is fit for a round: its checks have not ended"
        if is_leading:
            return self._lead.decision.waiting
        leader = self._shared.leader.value
        if leader is None:
            return "for a node that leads"
        return f"for node {leader.decode('utf-8', 'backslashreplace')}, which gathers the others"

    def _waiting_for_members(self) -> str:
        """On whom a node waits whose own workers have ended."""
        if not self._membership.has_ended:
            return ""
        if self._membership.is_dissolved:
            return "until this node is fit for the next round"
        view = self._lead.view
        if view is None:
            return "until the workers of the other nodes have ended"
        return f"until the workers of {named(view, view.blockers())} have ended"
