"""Where one node stands: its lease, record and membership, the lead, and what they mean together.

These know little of each other. What concerns several of them at once is here: who leads, what
follows when the lease ends, when there is something to do next. On whom a node waits, for how long
at most, and when people are told, is here too.
"""

from rankwise.base.units import Duration, Instant, after, between, format_duration
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.founding import Succession
from rankwise.core.rendezvous.inquiry import NodeInquiry
from rankwise.core.rendezvous.lead import Lead
from rankwise.core.rendezvous.leader import last_end_in_words, named
from rankwise.core.rendezvous.leases import KeptLease
from rankwise.core.rendezvous.membership import Membership
from rankwise.core.rendezvous.own_record import OwnRecord
from rankwise.core.rendezvous.records import RoundPhase
from rankwise.core.rendezvous.requests import Purpose, Requests
from rankwise.core.rendezvous.shared import SharedKeys
from rankwise.core.rendezvous.storage import RunKeys
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
    Effect,
    EndWatch,
    LeaveSettled,
    MadeSpare,
    Notification,
    RefusalKind,
    Refused,
    Settled,
)


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
        who = leader.decode("utf-8", "backslashreplace")
        round_ = self._membership.round
        is_gathering = round_ is not None and round_.phase is RoundPhase.GATHERING
        why = round_.why if round_ is not None and is_gathering else ""
        return f"for node {who}, which gathers the others{last_end_in_words(why)}"

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


class NodeState:
    """The parts of one node's rendezvous.

    Args:
        run_id: names the run.
        config: who may join, and for how long anybody waits.
        offer: what the node brings along.
    """

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        self.config = config
        self.me = offer.node_id
        self.name = f"{offer.node_id} on {offer.host}".encode()
        """What this node writes where it leads, for the others to show."""
        self.keys = RunKeys(run_id)
        self.requests = Requests()
        self.shared = SharedKeys(self.keys, self.requests)
        self.lease = KeptLease(config.lease_ttl, self.requests)
        self.own = OwnRecord(
            self.keys.node(self.me), self.keys.done_note(self.me), offer, self.requests
        )
        self.membership = Membership(self.me, self.own, is_static=config.is_static)
        self.lead = Lead(config, self.name, self.keys, self.shared, self.requests)
        self.inquiry = NodeInquiry(self.keys.books_note(self.me), self.requests)
        self.inquiry_bytes: bytes | None = None
        """The leader's inquiry as it was last taken in."""
        self.succession = Succession(config, self.keys, self.shared)
        self.waiting = Waiting(config, self.membership, self.lead, self.shared, self.succession)
        self.effects: list[Effect] = []
        """What is to be done, and was not yet returned."""
        self.charter_agreed: bytes | None = None
        """The charter of the run that this node takes part in."""
        self.heard_at = Instant(0)
        """When the store last answered anything."""
        self.is_forgotten = False
        """Whether the store has forgotten the run."""
        self.is_leaving = False
        """Whether the agent is at its end."""
        self.is_over = False
        """Whether the goodbye is said."""

    @property
    def has_agreed(self) -> bool:
        """Whether the charter said what this node wants."""
        return self.charter_agreed is not None

    @property
    def is_leading(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return (
            self.lease.id is not None
            and not self.is_leaving
            and not self.is_forgotten
            and self.lead.is_held_with(self.lease.id)
        )

    @property
    def is_registered(self) -> bool:
        """Whether the others can see this node."""
        return self.lease.id is not None and self.own.lease == self.lease.id

    def may_found(self, now: Instant) -> bool:
        """Whether this node may try to found the run, in place of an earlier one if need be."""
        if self.lease.id is None or not self.shared.is_known:
            return False
        return not self.has_agreed and self.succession.is_due(now)

    @property
    def may_lead(self) -> bool:
        """Whether this node may try to take the lead, when its turn comes."""
        return (
            self.is_registered
            and not self.membership.is_told_the_end
            and self.lead.is_to_be_had(self.lease.id)
        )

    def take_effects(self) -> list[Effect]:
        """What is to be done, in this order."""
        effects, self.effects = self.effects, []
        return effects

    def say_left(self) -> None:
        """Tell the agent that nothing more will come."""
        self.is_over = True
        self.effects.append(LeaveSettled())

    def lose_lease(self, now: Instant, why: str) -> None:
        """The lease has ended, or must be believed to have: this node is cut off."""
        if self.lease.id is None:
            return
        self.lease.lose()
        self.own.revision = None
        self.shared.is_stale = True
        self.waiting.cut_off_since = now
        for purpose in (
            Purpose.LEASE, Purpose.OWN, Purpose.LEAD, Purpose.CHARTER, Purpose.ROUND,
            Purpose.BOOKS, Purpose.INQUIRY,
        ):  # fmt: skip
            self.requests.forget(purpose)
        self.stop_leading()
        trouble = self.waiting.store_trouble
        self.effects += self.membership.cut_off(f"{why}: {trouble}" if trouble else why)
        self.end_with_store(now)

    def end_with_store(self, now: Instant) -> None:
        """Give up when a store has gone that can only go for good.

        A node that was stopped itself loses its lease too; it asks once more before it gives up.
        """
        trouble, troubled = self.waiting.store_trouble, self.waiting.troubled
        is_silent = bool(trouble) and troubled is Purpose.LEASE
        if not (self.config.ends_with_store and self.is_bereft and is_silent):
            return
        silence = format_duration(between(self.heard_at, now))
        why = (
            f"the run ends here: the agent that serves its store, or its machine, is lost, or this "
            f"node is cut off from it; no answer for {silence}"
        )
        hint = "an etcd survives the loss of any machine"
        self.effects += self.membership.refuse(
            Refused(RefusalKind.STORE, f"{why}: {trouble}", hint)
        )

    @property
    def is_bereft(self) -> bool:
        """Whether this node has no lease any more, and had one."""
        return self.lease.id is None and self.lease.was_ever_held

    def compare(self, now: Instant) -> None:
        """Compare the round with this node's part in it, and tell the agent."""
        if self.is_leaving:
            return
        for notification in self.membership.compare(is_registered=self.is_registered):
            self.waiting.take_note(notification, now)
            self.effects.append(notification)

    def refuse(self, kind: RefusalKind, why: str, hint: str) -> None:
        """Tell the agent that it may not take part."""
        self.effects += self.membership.refuse(Refused(kind, why, hint))

    def stop_leading(self) -> None:
        """Lead no longer, if this node did."""
        watch = self.lead.watch
        self.lead.stop()
        self.end_watch(watch)

    def end_watch(self, watch: int | None) -> None:
        """End a watch that nobody listens to, if there is one."""
        if watch is not None and not self.is_watched(watch):
            self.effects.append(EndWatch(watch))

    def is_watched(self, token: int) -> bool:
        """Whether this node listens to the watch with that token."""
        return token in (self.shared.watch, self.lead.watch)

    def deadline_beside_lease(self, now: Instant) -> Instant | None:
        """The first instant at which there may be something to do but to keep the lease."""
        deadlines = [
            self.requests.next_deadline(now), self.waiting.announce_at, self.inquiry.due
        ]  # fmt: skip
        if not self.membership.is_told_the_end:
            deadlines += (self.waiting.deadline, self.own.flush_at, self.succession.abandoned_at)
        if self.is_leading:
            deadlines += (self.lead.run_lease.due_at, self.lead.inquiry.next_look(now))
        if self.may_lead and self.requests.may_begin(Purpose.LEAD, now):
            deadlines.append(self.lead.turn(self.membership.place))
        if self.lead.view is not None and self.requests.may_begin(Purpose.ROUND, now):
            deadlines.append(self.lead.looks_at)
        return min((each for each in deadlines if each is not None and each > now), default=None)
