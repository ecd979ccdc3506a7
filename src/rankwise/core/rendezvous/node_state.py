"""Where one node stands: its lease, record and membership, the lead, and what they mean together.

These know little of each other. What concerns several of them at once is here: who leads, what
follows when the lease ends, when there is something to do next.
"""

from rankwise.base.units import Instant, between, format_duration
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.in_flight import Purpose, Requests
from rankwise.core.rendezvous.inquiry import NodeInquiry
from rankwise.core.rendezvous.layout import RunKeys
from rankwise.core.rendezvous.lead import Lead
from rankwise.core.rendezvous.lease import KeptLease
from rankwise.core.rendezvous.membership import Membership
from rankwise.core.rendezvous.own_record import OwnRecord
from rankwise.core.rendezvous.requests import EndWatch
from rankwise.core.rendezvous.shared import SharedKeys
from rankwise.core.rendezvous.succession import Succession
from rankwise.core.rendezvous.vocabulary import Effect, LeaveSettled, RefusalKind, Refused
from rankwise.core.rendezvous.waiting import Waiting


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
