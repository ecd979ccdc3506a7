"""What the store says, and what follows for this node.

Answers come late, twice, in any order, or not at all: each is taken for what it proves, and
whatever is left uncertain is read again before anything is built on it.
"""

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.keys import ABSENT, Revision, Snapshot
from rankwise.base.units import Instant
from rankwise.core.rendezvous.charter import agree, forgotten, founder_in
from rankwise.core.rendezvous.codec import decode_charter, decode_round, places_in
from rankwise.core.rendezvous.in_flight import Purpose, Request
from rankwise.core.rendezvous.requests import (
    Answer,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    Reply,
    RequestFailed,
    StoreDenied,
    TransactionCommitted,
    TransactionConflicted,
    WatchLost,
)
from rankwise.core.rendezvous.standing import Standing
from rankwise.core.rendezvous.vocabulary import RefusalKind, Refused


def take_in(standing: Standing, answer: Answer, now: Instant) -> None:
    """Take in whatever the store says."""
    if not isinstance(answer, RequestFailed):
        standing.heard_at = now
    match answer:
        case KeysChanged():
            _on_changes(standing, answer, now)
        case WatchLost():
            _on_watch_lost(standing, answer)
        case _:
            _on_answer(standing, answer, now)


def _on_answer(standing: Standing, stimulus: Reply, now: Instant) -> None:
    request = standing.requests.settle(stimulus.token)
    if request is None:
        if isinstance(stimulus, KeysRead):
            standing.end_watch(stimulus.watch)
        elif isinstance(stimulus, StoreDenied) and standing.is_watched(stimulus.token):
            standing.refuse(RefusalKind.STORE, stimulus.reason, stimulus.hint)
        return
    # That leases are renewed says nothing of what cannot be read.
    if not isinstance(stimulus, RequestFailed) and request.purpose is standing.waiting.troubled:
        standing.waiting.store_trouble = ""
    match stimulus:
        case KeysRead():
            _on_read(standing, request, stimulus, now)
        case TransactionCommitted():
            _on_committed(standing, request, stimulus.revision, now)
        case TransactionConflicted():
            _on_unsure(standing, request, now)
        case LeaseGranted() if request.purpose is Purpose.RUN_LEASE:
            standing.lead.run_lease.granted(stimulus.lease, now)
        case LeaseGranted():
            standing.lease.granted(request, stimulus.lease)
        case LeaseRenewed():
            standing.lease.renewed(request)
        case LeaseEnded() if request.purpose is Purpose.RUN_LEASE:
            standing.lead.run_lease.lost()
            standing.shared.is_stale = True
        case LeaseEnded():
            if request.context == standing.lease.id or request.purpose is not Purpose.LEASE:
                standing.lose_lease(now, "its lease has ended")
        case LeaseRevoked():
            standing.say_left()
        case RequestFailed():
            _on_failed(standing, request, stimulus.reason, now)
        case StoreDenied():
            standing.refuse(RefusalKind.STORE, stimulus.reason, stimulus.hint)


def _on_failed(standing: Standing, request: Request, reason: str, now: Instant) -> None:
    standing.waiting.store_trouble, standing.waiting.troubled = reason, request.purpose
    standing.end_with_store(now)
    if request.purpose is Purpose.ROUND:
        if standing.part.member_of is not None and not standing.lead.round_trouble:
            standing.waiting.begin(now)
        standing.lead.round_trouble = reason
    if request.purpose is Purpose.RUN_LEASE:
        standing.lead.run_lease.failed()
    if request.purpose is Purpose.GOODBYE:
        standing.say_left()  # the lease will end by itself
        return
    _on_unsure(standing, request, now)
    if request.purpose is not Purpose.LEASE or standing.lease.id is None:
        standing.requests.pause(request.purpose, now, standing.config.retry_pause)


def _on_unsure(standing: Standing, request: Request, now: Instant) -> None:
    """The transaction conflicted, or may have taken place: know again before trying again."""
    match request.purpose:
        case Purpose.OWN:
            standing.own.revision = None
        case Purpose.CHARTER | Purpose.LEAD | Purpose.RUN_LEASE:
            standing.shared.is_stale = True
        case Purpose.ROUND:
            standing.shared.is_stale = True
            standing.lead.looks_at = now
        case _:
            pass


def _on_read(standing: Standing, request: Request, read: KeysRead, now: Instant) -> None:
    match request.purpose:
        case Purpose.SHARED:
            standing.shared.watch = standing.shared.watch or read.watch
            _on_shared_read(standing, request.context, read.snapshot, now)
        case Purpose.OWN:
            _on_own_read(standing, read.snapshot, now)
        case Purpose.NODES if standing.is_leading:
            standing.lead.begin(read, standing.part.round, standing.own.record.founder, now)
        case Purpose.NODES:
            standing.end_watch(read.watch)
        case _:
            raise AssertionError(f"nothing is read for {request.purpose}")


def _on_shared_read(
    standing: Standing, founder_then: str, snapshot: Snapshot, now: Instant
) -> None:
    # The watch may have been lost after this was asked without one: then what was read grows old.
    standing.shared.is_stale = standing.shared.watch is None
    founder = founder_in(snapshot, standing.keys)
    if founder_then and founder != founder_then:
        _forget(standing, founder)
        return
    standing.shared.learn_snapshot(snapshot)
    _after_shared(standing, now)


def _forget(standing: Standing, founder: str) -> None:
    """This node's run is not in the store any more, but perhaps that of another founder."""
    standing.is_forgotten = True
    standing.stop_leading()
    standing.effects += standing.part.refuse(forgotten(standing.keys, founder))


def _on_own_read(standing: Standing, snapshot: Snapshot, now: Instant) -> None:
    if standing.own.learn(snapshot, standing.lease.was_ours):
        _after_own(standing, now)
    else:
        standing.refuse(
            RefusalKind.IDENTITY,
            f"another node of the run {standing.keys.run_id} is called {standing.me}",
            "every agent needs a new node id",
        )


def _after_own(standing: Standing, now: Instant) -> None:
    """The store may have this node's record."""
    if standing.is_registered:
        standing.waiting.cut_off_since = None
    standing.compare(now)


def _on_committed(standing: Standing, request: Request, revision: Revision, now: Instant) -> None:
    shared = standing.shared
    if request.purpose is Purpose.OWN:
        standing.own.committed(request, revision)
        _after_own(standing, now)
        return
    if request.purpose is Purpose.DONE_NOTE:
        return
    match request.purpose:
        case Purpose.CHARTER:
            shared.charter.learn(request.context, revision, shared.charter.lease, revision)
            shared.round.learn(None, ABSENT, None, revision)
            shared.leader.learn(standing.name, revision, standing.lease.id, revision)
        case Purpose.LEAD:
            shared.leader.learn(standing.name, revision, standing.lease.id, revision)
        case Purpose.ROUND:
            standing.lead.written(request.context, revision, now)
        case Purpose.RUN_LEASE:
            standing.lead.bound(request.context, revision, now)
        case _:
            raise AssertionError(f"nothing is committed for {request.purpose}")
    _after_shared(standing, now)


def _on_changes(standing: Standing, stimulus: KeysChanged, now: Instant) -> None:
    if standing.is_leaving:
        return
    if stimulus.token == standing.shared.watch:
        for changes in standing.shared.lives(stimulus.changes):
            standing.shared.learn_changes(changes)
            _after_shared(standing, now)
    elif stimulus.token == standing.lead.watch:
        standing.lead.hear(stimulus.changes, standing.own.record.founder, now)


def _on_watch_lost(standing: Standing, stimulus: WatchLost) -> None:
    if stimulus.token == standing.shared.watch:
        standing.shared.watch = None
        standing.shared.is_stale = True
    elif stimulus.token == standing.lead.watch:
        standing.lead.lose_sight()


def _after_shared(standing: Standing, now: Instant) -> None:
    """The charter, the leader or the round may have changed."""
    standing.shared.note_free_lead(now)
    _check_charter(standing)
    if not standing.is_leading:
        standing.stop_leading()
    value = standing.shared.round.value
    if (
        standing.has_agreed
        and not standing.is_forgotten
        and value is not None
        and value is not standing.part.round_bytes
    ):
        _take_round(standing, value, now)


def _check_charter(standing: Standing) -> None:
    value = standing.shared.charter.value
    if standing.has_agreed:
        _check_founder(standing, value)
        return
    if value is None or standing.part.is_told_the_end:
        return
    succession = standing.succession
    succession.obstacle = ""
    if succession.is_over:
        return  # and another is founded in its place
    founder = agree(value, standing.keys, standing.config)
    if isinstance(founder, Refused):
        if founder.kind is RefusalKind.CHARTER and succession.may_be_abandoned:
            succession.obstacle = founder.why
            return
        standing.effects += standing.part.refuse(founder)
        return
    standing.charter_agreed = value
    standing.own.rewrite(founder=founder)


def _check_founder(standing: Standing, value: bytes | None) -> None:
    """Notice that the run that this node takes part in has vanished, or given way to another."""
    if standing.is_forgotten or value == standing.charter_agreed:
        return
    try:
        founder = "" if value is None else decode_charter(value, standing.keys.charter).founder
    except RemoteProtocolError:
        founder = ""
    _forget(standing, founder)


def _take_round(standing: Standing, value: bytes, now: Instant) -> None:
    try:
        round_ = decode_round(value, standing.keys.round)
    except RemoteProtocolError as error:
        standing.refuse(RefusalKind.STORE, error.message, error.hint or "")
        return
    place = places_in(value, standing.keys.round).get(standing.me)
    standing.part.turn_to(round_, value, place)
    standing.lease.share_with(len(round_.members))
    standing.lead.turn_to(round_, now)
    standing.compare(now)
