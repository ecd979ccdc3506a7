"""One node's rendezvous, put together: its parts, and what the store's answers mean to them.

The parts know little of each other. Matters of several of them are here: who leads, what follows
when the lease ends, when there is something to do next.

Answers of the store come late, twice, in any order, or not at all: each is taken for what it
proves, and whatever is left uncertain is read again before anything is built on it.
"""

from contextlib import suppress

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import ABSENT, Revision, Snapshot
from rankwise.base.units import Instant
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.founding import Succession, forgotten, founder_in
from rankwise.core.rendezvous.inquiry import NodeInquiry
from rankwise.core.rendezvous.lead import Lead
from rankwise.core.rendezvous.membership import Membership, RoundWait
from rankwise.core.rendezvous.records import RunKeys, decode_inquiry, decode_round, places_in
from rankwise.core.rendezvous.registration import KeptLease, OwnRecord
from rankwise.core.rendezvous.requests import Purpose, SharedKeys, StoreRequest, StoreRequests
from rankwise.core.rendezvous.vocabulary import (
    Answer,
    Effect,
    EndWatch,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    LeaveSettled,
    RefusalKind,
    Refused,
    Reply,
    RequestFailed,
    StoreDenied,
    TransactionCommitted,
    TransactionConflicted,
    WatchLost,
)


class RendezvousState:
    """The parts of one node's rendezvous.

    Args:
        run_id: names the run.
        config: which nodes may join, and for how long they wait.
        offer: what the node brings along.
    """

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        self.config = config
        self.me = offer.node_id
        self.name = f"{offer.node_id} on {offer.host}".encode()
        """What this node writes where it leads, for the others to show."""
        self.keys = RunKeys(run_id)
        self.requests = StoreRequests()
        self.shared = SharedKeys(self.keys, self.requests)
        self.lease = KeptLease(config.lease_ttl, self.requests)
        self.own = OwnRecord(
            self.keys.node(self.me), self.keys.done_note(self.me), offer, self.requests
        )
        self.membership = Membership(self.me, self.own, is_static=config.is_static)
        self.lead = Lead(config, self.name, self.keys, self.shared, self.requests)
        self.inquiry = NodeInquiry(self.keys.call_records_note(self.me), self.requests)
        self.succession = Succession(config, self.keys, self.shared)
        self.waiting = RoundWait(config, self.membership, self.lead, self.shared, self.succession)
        self.effects: list[Effect] = []
        """What is to be done, and was not yet returned."""
        self.is_forgotten = False
        """Whether the store has forgotten the run."""
        self.is_leaving = False
        """Whether the agent is at its end."""
        self.is_over = False
        """Whether the goodbye is said."""

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
        return not self.succession.has_agreed and self.succession.is_due(now)

    @property
    def may_lead(self) -> bool:
        """Whether this node may try to take the lead, when its turn comes."""
        return (
            self.is_registered
            and not self.membership.knows_the_end
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
            Purpose.CALL_RECORDS, Purpose.INQUIRY,
        ):  # fmt: skip
            # An answer that comes later is of the lost lease: it would be taken for one of the
            # next.
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
        silence = self.waiting.silence(now)
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
        """End a watch that is no longer followed, if there is one."""
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
        if not self.membership.knows_the_end:
            deadlines += (self.waiting.deadline, self.own.flush_at, self.succession.abandoned_at)
        if self.is_leading:
            deadlines += (self.lead.run_lease.due_at, self.lead.inquiry.next_look(now))
        if self.may_lead and self.requests.may_begin(Purpose.LEAD, now):
            deadlines.append(self.lead.turn(self.membership.place))
        if self.lead.view is not None and self.requests.may_begin(Purpose.ROUND, now):
            deadlines.append(self.lead.looks_at)
        return min((each for each in deadlines if each is not None and each > now), default=None)

    # What the store says

    def on_answer(self, answer: Answer, now: Instant) -> None:
        """Take in whatever the store says."""
        if not isinstance(answer, RequestFailed):
            self.waiting.received_at = now
        match answer:
            case KeysChanged():
                self._on_changes(answer, now)
            case WatchLost():
                self._on_watch_lost(answer)
            case _:
                self._on_reply(answer, now)

    def _on_reply(self, stimulus: Reply, now: Instant) -> None:
        request = self.requests.settle(stimulus.token)
        if request is None:
            if isinstance(stimulus, KeysRead):
                self.end_watch(stimulus.watch)
            elif isinstance(stimulus, StoreDenied) and self.is_watched(stimulus.token):
                self._on_denied(stimulus)
            return
        # That leases are renewed says nothing of what cannot be read.
        if not isinstance(stimulus, RequestFailed) and request.purpose is self.waiting.troubled:
            self.waiting.store_trouble = ""
        match stimulus:
            case KeysRead():
                self._on_read(request, stimulus, now)
            case TransactionCommitted():
                self._on_committed(request, stimulus.revision, now)
            case TransactionConflicted():
                self._on_unsure(request, now)
            case LeaseGranted() if request.purpose is Purpose.RUN_LEASE:
                self.lead.run_lease.granted(stimulus.lease, now)
            case LeaseGranted():
                self.lease.granted(request, stimulus.lease)
            case LeaseRenewed():
                self.lease.renewed(request)
            case LeaseEnded() if request.purpose is Purpose.RUN_LEASE:
                self.lead.run_lease.lost()
                self.shared.is_stale = True
            case LeaseEnded():
                # An answer about a lease that this node has given up since says nothing of the
                # present one.
                if request.context == self.lease.id or request.purpose is not Purpose.LEASE:
                    self.lose_lease(now, "its lease has ended")
            case LeaseRevoked():
                self.say_left()
            case RequestFailed():
                self._on_failed(request, stimulus.reason, now)
            case StoreDenied():
                self._on_denied(stimulus)

    def _on_denied(self, denied: StoreDenied) -> None:
        # A node that has taken part has lost its store, and another run has one in that place.
        is_wrong_place = denied.is_of_another_run and not self.lease.was_ever_held
        kind = RefusalKind.CHARTER if is_wrong_place else RefusalKind.STORE
        self.refuse(kind, denied.reason, denied.hint)

    def _on_failed(self, request: StoreRequest, reason: str, now: Instant) -> None:
        self.waiting.store_trouble, self.waiting.troubled = reason, request.purpose
        self.end_with_store(now)
        if request.purpose is Purpose.ROUND:
            if self.membership.member_of is not None and not self.lead.round_trouble:
                self.waiting.begin(now)
            self.lead.round_trouble = reason
        if request.purpose is Purpose.RUN_LEASE:
            self.lead.run_lease.failed()
        if request.purpose is Purpose.GOODBYE:
            self.say_left()  # the lease will end by itself
            return
        self._on_unsure(request, now)
        if request.purpose is not Purpose.LEASE or self.lease.id is None:
            # A renewal is tried again at once: each pause would eat into the lease.
            self.requests.pause(request.purpose, now, self.config.retry_pause)

    def _on_unsure(self, request: StoreRequest, now: Instant) -> None:
        """The transaction conflicted, or may have taken place: know again before trying again."""
        match request.purpose:
            case Purpose.OWN:
                self.own.revision = None
            case Purpose.CHARTER | Purpose.LEAD | Purpose.RUN_LEASE | Purpose.INQUIRY:
                self.shared.is_stale = True
            case Purpose.ROUND:
                self.shared.is_stale = True
                # The round may have been written: decide anew when it is known what is in the
                # store.
                self.lead.looks_at = now
            case _:
                pass

    def _on_read(self, request: StoreRequest, read: KeysRead, now: Instant) -> None:
        match request.purpose:
            case Purpose.SHARED:
                self.shared.watch = self.shared.watch or read.watch
                self._on_shared_read(request.context, read.snapshot, now)
            case Purpose.OWN:
                self._on_own_read(read.snapshot, now)
            case Purpose.NODES if self.is_leading:
                self.lead.begin(read, self.membership.round, self.own.record.founder, now)
            case Purpose.NODES:
                self.end_watch(read.watch)
            case _:
                raise AssertionError(f"nothing is read for {request.purpose}")

    def _on_shared_read(self, founder_then: str, snapshot: Snapshot, now: Instant) -> None:
        # The watch may have been lost after this was asked without one: then this grows old.
        self.shared.is_stale = self.shared.watch is None
        founder = founder_in(snapshot, self.keys)
        if founder_then and founder != founder_then:
            self._forget(founder)
            return
        self.shared.learn_snapshot(snapshot)
        self._after_shared(now)

    def _forget(self, founder: str) -> None:
        """This node's run is not in the store any more, but perhaps that of another founder."""
        self.is_forgotten = True
        self.stop_leading()
        self.effects += self.membership.refuse(forgotten(self.keys, founder))

    def _on_own_read(self, snapshot: Snapshot, now: Instant) -> None:
        if self.own.learn(snapshot, self.lease.was_ours):
            self._after_own(now)
        else:
            self.refuse(
                RefusalKind.IDENTITY,
                f"another node of the run {self.keys.run_id} is called {self.me}",
                "every agent needs a new node id",
            )

    def _after_own(self, now: Instant) -> None:
        """The store may have this node's record."""
        if self.is_registered:
            self.waiting.cut_off_since = None
        self.compare(now)

    def _on_committed(self, request: StoreRequest, revision: Revision, now: Instant) -> None:
        shared = self.shared
        if request.purpose is Purpose.OWN:
            self.own.committed(request, revision)
            self._after_own(now)
            return
        if request.purpose is Purpose.DONE_NOTE:
            return
        if request.purpose is Purpose.CALL_RECORDS:
            self.inquiry.committed(request.context)
            return
        match request.purpose:
            case Purpose.CHARTER:
                shared.charter.learn(request.context, revision, shared.charter.lease, revision)
                # Founding deletes the round of an earlier run in the same transaction.
                shared.round.learn(None, ABSENT, None, revision)
                shared.leader.learn(self.name, revision, self.lease.id, revision)
            case Purpose.LEAD:
                shared.leader.learn(self.name, revision, self.lease.id, revision)
            case Purpose.ROUND:
                self.lead.written(request.context, revision, now)
            case Purpose.RUN_LEASE:
                self.lead.bound(request.context, revision, now)
            case Purpose.INQUIRY:
                self.lead.inquiry.committed(request.context)
            case _:
                raise AssertionError(f"nothing is committed for {request.purpose}")
        self._after_shared(now)

    def _on_changes(self, stimulus: KeysChanged, now: Instant) -> None:
        if self.is_leaving:
            return
        if stimulus.token == self.shared.watch:
            for changes in self.shared.lives(stimulus.changes):
                self.shared.learn_changes(changes)
                self._after_shared(now)
        elif stimulus.token == self.lead.watch:
            self.lead.on_changes(stimulus.changes, self.own.record.founder, now)

    def _on_watch_lost(self, stimulus: WatchLost) -> None:
        if stimulus.token == self.shared.watch:
            self.shared.watch = None
            self.shared.is_stale = True
        elif stimulus.token == self.lead.watch:
            self.lead.lose_sight()

    def _after_shared(self, now: Instant) -> None:
        """The charter, the leader or the round may have changed."""
        self.shared.note_free_lead(now)
        self._check_charter()
        if not self.is_leading:
            self.stop_leading()
        value = self.shared.round.value
        if (
            self.succession.has_agreed
            and not self.is_forgotten
            and value is not None
            # Most changes are of other keys: identity spares decoding the round for each.
            and value is not self.membership.round_bytes
        ):
            self._take_round(value, now)
        self._take_inquiry(now)

    def _take_inquiry(self, now: Instant) -> None:
        """Answer the leader's inquiry; a node without a gang in that round has nothing to tell."""
        value, member_of = self.shared.inquiry.value, self.membership.member_of
        if value is None or member_of is None or not self.inquiry.is_news(value):
            return
        with suppress(RemoteProtocolError):  # of another version, as the round will tell
            inquiry = decode_inquiry(value, self.keys.inquiry)
            if (inquiry.founder, inquiry.round) == (self.own.record.founder, member_of.round):
                ranks = range(member_of.first_rank, member_of.first_rank + member_of.slots)
                self.effects += self.inquiry.on_inquiry(inquiry, self.me, ranks, now)

    def _check_charter(self) -> None:
        if self.succession.has_agreed:
            # The run that this node takes part in may have vanished, or given way to another.
            founder = None if self.is_forgotten else self.succession.successor()
            if founder is not None:
                self._forget(founder)
            return
        if self.membership.knows_the_end:
            return
        found = self.succession.look()
        if isinstance(found, Refused):
            self.effects += self.membership.refuse(found)
        elif found is not None:
            self.own.rewrite(founder=found)

    def _take_round(self, value: bytes, now: Instant) -> None:
        try:
            round_ = decode_round(value, self.keys.round)
        except RemoteProtocolError as error:
            self.refuse(RefusalKind.STORE, error.message, error.hint or "")
            return
        place = places_in(value, self.keys.round).get(self.me)
        was_spare = self.membership.is_spare
        self.membership.turn_to(round_, value, place)
        if was_spare and not self.membership.is_spare:
            self.waiting.begin(now)  # it may have been in reserve for days, which was no waiting
        self.lease.share_with(len(round_.members))
        self.lead.turn_to(round_, now)
        self.compare(now)
