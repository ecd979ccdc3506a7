"""What the store says, and what follows for this node.

Answers come late, twice, in any order, or not at all: each is taken for what it proves, and
whatever is left uncertain is read again before anything is built on it.
"""

from contextlib import suppress

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import ABSENT, Revision, Snapshot
from rankwise.base.units import Instant
from rankwise.core.rendezvous.founding import agree, forgotten, founder_in
from rankwise.core.rendezvous.node_state import NodeState
from rankwise.core.rendezvous.requests import Purpose, Request
from rankwise.core.rendezvous.storage import (
    decode_charter,
    decode_inquiry,
    decode_round,
    places_in,
)
from rankwise.core.rendezvous.vocabulary import (
    Answer,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    RefusalKind,
    Refused,
    Reply,
    RequestFailed,
    StoreDenied,
    TransactionCommitted,
    TransactionConflicted,
    WatchLost,
)


def on_answer(node: NodeState, answer: Answer, now: Instant) -> None:
    """Take in whatever the store says."""
    if not isinstance(answer, RequestFailed):
        node.heard_at = now
    match answer:
        case KeysChanged():
            _on_changes(node, answer, now)
        case WatchLost():
            _on_watch_lost(node, answer)
        case _:
            _on_reply(node, answer, now)


def _on_reply(node: NodeState, stimulus: Reply, now: Instant) -> None:
    request = node.requests.settle(stimulus.token)
    if request is None:
        if isinstance(stimulus, KeysRead):
            node.end_watch(stimulus.watch)
        elif isinstance(stimulus, StoreDenied) and node.is_watched(stimulus.token):
            _on_denied(node, stimulus)
        return
    # That leases are renewed says nothing of what cannot be read.
    if not isinstance(stimulus, RequestFailed) and request.purpose is node.waiting.troubled:
        node.waiting.store_trouble = ""
    match stimulus:
        case KeysRead():
            _on_read(node, request, stimulus, now)
        case TransactionCommitted():
            _on_committed(node, request, stimulus.revision, now)
        case TransactionConflicted():
            _on_unsure(node, request, now)
        case LeaseGranted() if request.purpose is Purpose.RUN_LEASE:
            node.lead.run_lease.granted(stimulus.lease, now)
        case LeaseGranted():
            node.lease.granted(request, stimulus.lease)
        case LeaseRenewed():
            node.lease.renewed(request)
        case LeaseEnded() if request.purpose is Purpose.RUN_LEASE:
            node.lead.run_lease.lost()
            node.shared.is_stale = True
        case LeaseEnded():
            if request.context == node.lease.id or request.purpose is not Purpose.LEASE:
                node.lose_lease(now, "its lease has ended")
        case LeaseRevoked():
            node.say_left()
        case RequestFailed():
            _on_failed(node, request, stimulus.reason, now)
        case StoreDenied():
            _on_denied(node, stimulus)


def _on_denied(node: NodeState, denied: StoreDenied) -> None:
    # A node that has taken part has lost its store, and another run has one in that place.
    is_wrong_place = denied.is_of_another_run and not node.lease.was_ever_held
    kind = RefusalKind.CHARTER if is_wrong_place else RefusalKind.STORE
    node.refuse(kind, denied.reason, denied.hint)


def _on_failed(node: NodeState, request: Request, reason: str, now: Instant) -> None:
    node.waiting.store_trouble, node.waiting.troubled = reason, request.purpose
    node.end_with_store(now)
    if request.purpose is Purpose.ROUND:
        if node.membership.member_of is not None and not node.lead.round_trouble:
            node.waiting.begin(now)
        node.lead.round_trouble = reason
    if request.purpose is Purpose.RUN_LEASE:
        node.lead.run_lease.failed()
    if request.purpose is Purpose.GOODBYE:
        node.say_left()  # the lease will end by itself
        return
    _on_unsure(node, request, now)
    if request.purpose is not Purpose.LEASE or node.lease.id is None:
        node.requests.pause(request.purpose, now, node.config.retry_pause)


def _on_unsure(node: NodeState, request: Request, now: Instant) -> None:
    """The transaction conflicted, or may have taken place: know again before trying again."""
    match request.purpose:
        case Purpose.OWN:
            node.own.revision = None
        case Purpose.CHARTER | Purpose.LEAD | Purpose.RUN_LEASE | Purpose.INQUIRY:
            node.shared.is_stale = True
        case Purpose.ROUND:
            node.shared.is_stale = True
            node.lead.looks_at = now
        case _:
            pass


def _on_read(node: NodeState, request: Request, read: KeysRead, now: Instant) -> None:
    match request.purpose:
        case Purpose.SHARED:
            node.shared.watch = node.shared.watch or read.watch
            _on_shared_read(node, request.context, read.snapshot, now)
        case Purpose.OWN:
            _on_own_read(node, read.snapshot, now)
        case Purpose.NODES if node.is_leading:
            node.lead.begin(read, node.membership.round, node.own.record.founder, now)
        case Purpose.NODES:
            node.end_watch(read.watch)
        case _:
            raise AssertionError(f"nothing is read for {request.purpose}")


def _on_shared_read(node: NodeState, founder_then: str, snapshot: Snapshot, now: Instant) -> None:
    # The watch may have been lost after this was asked without one: then what was read grows old.
    node.shared.is_stale = node.shared.watch is None
    founder = founder_in(snapshot, node.keys)
    if founder_then and founder != founder_then:
        _forget(node, founder)
        return
    node.shared.learn_snapshot(snapshot)
    _after_shared(node, now)


def _forget(node: NodeState, founder: str) -> None:
    """This node's run is not in the store any more, but perhaps that of another founder."""
    node.is_forgotten = True
    node.stop_leading()
    node.effects += node.membership.refuse(forgotten(node.keys, founder))


def _on_own_read(node: NodeState, snapshot: Snapshot, now: Instant) -> None:
    if node.own.learn(snapshot, node.lease.was_ours):
        _after_own(node, now)
    else:
        node.refuse(
            RefusalKind.IDENTITY,
            f"another node of the run {node.keys.run_id} is called {node.me}",
            "every agent needs a new node id",
        )


def _after_own(node: NodeState, now: Instant) -> None:
    """The store may have this node's record."""
    if node.is_registered:
        node.waiting.cut_off_since = None
    node.compare(now)


def _on_committed(node: NodeState, request: Request, revision: Revision, now: Instant) -> None:
    shared = node.shared
    if request.purpose is Purpose.OWN:
        node.own.committed(request, revision)
        _after_own(node, now)
        return
    if request.purpose is Purpose.DONE_NOTE:
        return
    if request.purpose is Purpose.BOOKS:
        node.inquiry.committed(request.context)
        return
    match request.purpose:
        case Purpose.CHARTER:
            shared.charter.learn(request.context, revision, shared.charter.lease, revision)
            shared.round.learn(None, ABSENT, None, revision)
            shared.leader.learn(node.name, revision, node.lease.id, revision)
        case Purpose.LEAD:
            shared.leader.learn(node.name, revision, node.lease.id, revision)
        case Purpose.ROUND:
            node.lead.written(request.context, revision, now)
        case Purpose.RUN_LEASE:
            node.lead.bound(request.context, revision, now)
        case Purpose.INQUIRY:
            node.lead.inquiry.committed(request.context)
        case _:
            raise AssertionError(f"nothing is committed for {request.purpose}")
    _after_shared(node, now)


def _on_changes(node: NodeState, stimulus: KeysChanged, now: Instant) -> None:
    if node.is_leaving:
        return
    if stimulus.token == node.shared.watch:
        for changes in node.shared.lives(stimulus.changes):
            node.shared.learn_changes(changes)
            _after_shared(node, now)
    elif stimulus.token == node.lead.watch:
        node.lead.hear(stimulus.changes, node.own.record.founder, now)


def _on_watch_lost(node: NodeState, stimulus: WatchLost) -> None:
    if stimulus.token == node.shared.watch:
        node.shared.watch = None
        node.shared.is_stale = True
    elif stimulus.token == node.lead.watch:
        node.lead.lose_sight()


def _after_shared(node: NodeState, now: Instant) -> None:
    """The charter, the leader or the round may have changed."""
    node.shared.note_free_lead(now)
    _check_charter(node)
    if not node.is_leading:
        node.stop_leading()
    value = node.shared.round.value
    if (
        node.has_agreed
        and not node.is_forgotten
        and value is not None
        and value is not node.membership.round_bytes
    ):
        _take_round(node, value, now)
    _take_inquiry(node, now)


def _take_inquiry(node: NodeState, now: Instant) -> None:
    """The leader may have asked something; who has no gang in that round has nothing to tell."""
    value, member_of = node.shared.inquiry.value, node.membership.member_of
    if value is None or value is node.inquiry_bytes or member_of is None:
        return
    node.inquiry_bytes = value
    with suppress(RemoteProtocolError):  # of another version, as the round will tell
        inquiry = decode_inquiry(value, node.keys.inquiry)
        if (inquiry.founder, inquiry.round) == (node.own.record.founder, member_of.round):
            ranks = range(member_of.first_rank, member_of.first_rank + member_of.slots)
            node.effects += node.inquiry.hear(inquiry, node.me, ranks, now)


def _check_charter(node: NodeState) -> None:
    value = node.shared.charter.value
    if node.has_agreed:
        _check_founder(node, value)
        return
    if value is None or node.membership.is_told_the_end:
        return
    succession = node.succession
    succession.obstacle = ""
    if succession.is_over:
        return  # and another is founded in its place
    founder = agree(value, node.keys, node.config)
    if isinstance(founder, Refused):
        if founder.kind is RefusalKind.CHARTER and succession.may_be_abandoned:
            succession.obstacle = founder.why
            return
        node.effects += node.membership.refuse(founder)
        return
    node.charter_agreed = value
    node.own.rewrite(founder=founder)


def _check_founder(node: NodeState, value: bytes | None) -> None:
    """Notice that the run that this node takes part in has vanished, or given way to another."""
    if node.is_forgotten or value == node.charter_agreed:
        return
    try:
        founder = "" if value is None else decode_charter(value, node.keys.charter).founder
    except RemoteProtocolError:
        founder = ""
    _forget(node, founder)


def _take_round(node: NodeState, value: bytes, now: Instant) -> None:
    try:
        round_ = decode_round(value, node.keys.round)
    except RemoteProtocolError as error:
        node.refuse(RefusalKind.STORE, error.message, error.hint or "")
        return
    place = places_in(value, node.keys.round).get(node.me)
    was_spare = node.membership.is_spare
    node.membership.turn_to(round_, value, place)
    if was_spare and not node.membership.is_spare:
        node.waiting.begin(now)  # it may have been in reserve for days, which was no waiting
    node.lease.share_with(len(round_.members))
    node.lead.turn_to(round_, now)
    node.compare(now)
