"""The rendezvous machine: one node's way into rounds and out of them.

Theory of operation
===================

A node keeps alive with a lease, reads and watches what all share (`shared/`), writes its own record
whenever what it wants others to know has changed, and takes the lead if nobody leads. All this is
one loop, run after every fact (`_advance`): compare what should be with what is known to be in the
store, and ask for what is missing, one request per purpose at a time. So it does not matter at
which step a request failed, or in which order answers come; what failed is asked again.

```
      lease ──→ own record ──→ ready ──RUNNING with us──→ member ──────┐
        ↑  ↑                     ↑  │                       │          │ gang ended
        │  └──cut off────────────┼──┼───────────────────────┘          │
        │                        │  └──RUNNING without us──→ spare     │
     store                       └─────────────────────────────────────┘
```

- *What others may rely on*: `ready` and `ended` in a node's record mean that none of its workers of
  earlier rounds lives. The machine believes its agent.
- *Cut off*: the lease counts from when its last renewal was *sent*, so by this node's own clock it
  ends before the store can have ended it. From then on the workers must go at once (`Dissolved`
  with `at_once`); the leader gives them `fence` to do so. Back again, the node writes its record
  anew.
- *Lost answers*: after `RequestFailed` a transaction may have taken place, or may yet. Every one is
  bound to the revisions that it was thought out for, so that it takes place at most once, and not
  after another; before the next, the keys are read again.
- *The lead*: whoever holds `leader` with its present lease leads: it reads and watches `nodes/`,
  and writes what `leader.decide` answers, bound to `leader` and `round` being unchanged. When the
  lead is free the last round's members try in the order of their ranks, a little apart, so that one
  try is the rule.
- *Who dies*: this node: its lease ends, the leader sees it. The leader: the same, and another takes
  the lead, with nothing but what lies in the store. The store: see *cut off*; one that has
  forgotten everything (no charter, where one was) ends the run with that sentence.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.errors import LocalProtocolError, RemoteProtocolError
from rankwise.base.keys import ABSENT, LeaseId, Put, Revision, Snapshot, Transaction, Unchanged
from rankwise.base.units import (
    MILLISECOND,
    Duration,
    Instant,
    after,
    between,
    format_duration,
)
from rankwise.core.rendezvous.codec import decode_charter, decode_node, decode_round, encode
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.in_flight import Purpose, Request, Requests
from rankwise.core.rendezvous.layout import RunKeys
from rankwise.core.rendezvous.leader import Decision, decide, named
from rankwise.core.rendezvous.records import (
    Charter,
    Departure,
    FailureNote,
    NodeRecord,
    Phase,
    Round,
)
from rankwise.core.rendezvous.requests import (
    Commit,
    EndWatch,
    GrantLease,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    ReadKeys,
    RenewLease,
    Reply,
    RequestFailed,
    RevokeLease,
    StoreDenied,
    TransactionCommitted,
    TransactionConflicted,
    WatchLost,
)
from rankwise.core.rendezvous.shared import SharedKeys
from rankwise.core.rendezvous.view import Heard, View
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
    Closed,
    DeadlinePassed,
    DepartureRequested,
    Dissolved,
    Effect,
    GangEnded,
    GangFailing,
    Joined,
    LeaveSettled,
    Left,
    MadeSpare,
    NodeReady,
    RanksArrived,
    RefusalKind,
    Refused,
    Settled,
    Stimulus,
    StopAgreed,
    StopStepAgreed,
    World,
)

if TYPE_CHECKING:
    from rankwise.base.failure import Failure

RENEWALS_PER_LEASE = 3
TRIES_PER_LEASE = 10
"""How often renewing is tried while no answer comes."""
TURN = Duration(5 * MILLISECOND)
"""How far apart the members try to take a free lead."""
TURNS_MAX = 50
COALESCE = Duration(20 * MILLISECOND)
"""How long a node that ended without news waits to say so together with being ready again."""
LOOK_EVERY = Duration(2 * MILLISECOND)
"""How often the leader of many nodes looks at their changes at most."""


class Rendezvous:
    """One node's part in the meeting of all. See the module's text."""

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        self.config = config
        self.offer = offer
        self.keys = RunKeys(run_id)
        self._me = offer.node_id.encode()
        self.member_of: World | None = None
        """The round in which this node has, or had, a gang, until it is ready for another."""
        self.round: Round | None = None
        self.is_over = False
        self.is_dissolved = False
        """Whether that round is over, so that this node is wanted for another."""
        self._effects: list[Effect] = []
        self._requests = Requests()
        self._joined = False
        self._is_leaving = False
        self._deadline: Instant | None = None

        self._lease: LeaseId | None = None
        self._leases: set[LeaseId] = set()
        self._lease_until = Instant(0)
        self._renew_at = Instant(0)
        self._cut_off_since: Instant | None = None
        self._store_trouble = ""

        self._shared = SharedKeys(self.keys)
        self._shared_is_read = False
        self._shared_is_stale = True
        self._shared_watch: int | None = None
        self._charter_is_fine = False
        self._is_forgotten = False
        self._round_bytes: bytes | None = None
        self._place: int | None = None
        """This node's place among the members of the round; None if it is none of them."""
        self._lead_free_since: Instant | None = None

        self._record = NodeRecord(
            host=offer.host,
            address=offer.address,
            slots=offer.slots,
            topology=offer.topology,
            seat=offer.seat,
        )
        self._failures: tuple[Failure, ...] = ()
        self._version = 1
        self._written_version = 0
        self._written_lease: LeaseId | None = None
        self._own_revision: Revision | None = ABSENT
        self._flush_at: Instant | None = None

        self._view: View | None = None
        self._nodes_watch: int | None = None
        self._decision = Decision()
        self._looks_at: Instant | None = None
        self._looked_at: Instant | None = None

        self._has_ended = False
        self._stop_is_told = False
        self._step_is_told = False
        self._spare_in = -1
        self._is_told_the_end = False
        self._waiting_since: Instant | None = None
        self._announce_at: Instant | None = None
        self._announce_pause = config.announce_every
        self._round_trouble = ""
        """Why the store has not taken the round that this node, as the leader, has decided upon."""

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        return self._deadline

    @property
    def is_leading(self) -> bool:
        """Whether this node leads, as far as it knows."""
        leader = self._shared.leader
        return (
            self._lease is not None
            and not self._is_leaving
            and not self._is_forgotten
            and leader.lease == self._lease
            and leader.value == self._me
        )

    @property
    def is_awaited(self) -> bool:
        """Whether the others wait for this node to end its round, or for the next one."""
        round_ = self.round
        return round_ is not None and round_.phase is not Phase.CLOSED and self._place is not None

    @property
    def alive_until(self) -> Instant | None:
        """Until when the others believe that this node lives, by its own clock; None: not at all.

        None of its workers may live for longer than `config.fence` after that.
        """
        return None if self._lease is None else self._lease_until

    @property
    def is_registered(self) -> bool:
        """Whether the others can see this node."""
        return self._lease is not None and self._written_lease == self._lease

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        if self.is_over:
            return []
        match stimulus:
            case Joined():
                self._on_joined(now)
            case NodeReady():
                self._on_ready(stimulus, now)
            case GangFailing():
                self._on_failing(stimulus)
            case GangEnded():
                self._on_gang_ended(stimulus, now)
            case DepartureRequested():
                self._rewrite(departure=stimulus.departure, signal=stimulus.signal)
            case RanksArrived():
                self._rewrite(arrived_at=stimulus.step)
            case Left():
                self._on_left()
            case DeadlinePassed():
                pass  # `_advance` looks at the clock
            case KeysChanged():
                self._on_changes(stimulus, now)
            case WatchLost():
                self._on_watch_lost(stimulus)
            case _:
                self._on_answer(stimulus, now)
        self._advance(now)
        effects, self._effects = self._effects, []
        return effects

    def tick(self, now: Instant) -> list[Effect]:
        """Let deadlines that have passed take effect. Calling it too early changes nothing."""
        if self._deadline is None or now < self._deadline:
            return []
        return self.handle(DeadlinePassed(), now)

    def _on_joined(self, now: Instant) -> None:
        if self._joined:
            raise LocalProtocolError("a node joined twice; make a rendezvous for each life")
        self._joined = True
        self._cut_off_since = now
        self._wait_from(now)

    def _on_ready(self, stimulus: NodeReady, now: Instant) -> None:
        self.member_of = None
        self._has_ended = self.is_dissolved = False
        self._stop_is_told = self._step_is_told = False
        self._rewrite(ready=stimulus.round, port=stimulus.port, arrived_at=None)
        self._flush_at = None
        self._wait_from(now)
        self._react(now)

    def _on_failing(self, stimulus: GangFailing) -> None:
        self._failures = stimulus.failures
        self._rewrite(failing=stimulus.round)
        self._flush_at = None

    def _on_gang_ended(self, stimulus: GangEnded, now: Instant) -> None:
        if stimulus.failures:
            self._failures = stimulus.failures
            self._rewrite(failing=stimulus.round)
        self._rewrite(
            ended=stimulus.round, is_done=stimulus.is_done, ran=stimulus.ran, step=stimulus.step
        )
        is_news = (
            stimulus.failures
            or stimulus.is_done
            or not self.is_dissolved
            or self._record.departure is not Departure.STAYS
        )
        self._flush_at = None if is_news else after(now, COALESCE)
        self._has_ended = True
        self._wait_from(now)
        self._react(now)

    def _on_left(self) -> None:
        self._is_leaving = True
        self._flush_at = None
        for purpose in Purpose:
            if purpose not in (Purpose.GOODBYE, Purpose.OWN):
                self._requests.forget(purpose)

    def _rewrite(self, **changes: object) -> None:
        self._record = msgspec.structs.replace(self._record, **changes)
        self._version += 1

    # What the store says

    def _on_answer(self, stimulus: Reply, now: Instant) -> None:
        request = self._requests.settle(stimulus.token)
        if request is None:
            if isinstance(stimulus, KeysRead):
                self._end_watch(stimulus.watch)
            elif isinstance(stimulus, StoreDenied) and self._is_watched(stimulus.token):
                self._refuse(RefusalKind.STORE, stimulus.reason, stimulus.hint)
            return
        if not isinstance(stimulus, RequestFailed):
            self._store_trouble = ""
        match stimulus:
            case KeysRead():
                self._on_read(request, stimulus, now)
            case TransactionCommitted():
                self._on_committed(request, stimulus.revision, now)
            case TransactionConflicted():
                self._on_unsure(request, now)
            case LeaseGranted():
                self._on_lease_granted(request, stimulus.lease)
            case LeaseRenewed():
                self._on_lease_renewed(request)
            case LeaseEnded():
                if request.context == self._lease or request.purpose is not Purpose.LEASE:
                    self._lose_lease(now, "its lease has ended")
            case LeaseRevoked():
                self._say_left()
            case RequestFailed():
                self._on_failed(request, stimulus.reason, now)
            case StoreDenied():
                self._refuse(RefusalKind.STORE, stimulus.reason, stimulus.hint)

    def _on_failed(self, request: Request, reason: str, now: Instant) -> None:
        self._store_trouble = reason
        if request.purpose is Purpose.ROUND:
            if self.member_of is not None and not self._round_trouble:
                self._wait_from(now)
            self._round_trouble = reason
        if request.purpose is Purpose.GOODBYE:
            self._say_left()  # the lease will end by itself
            return
        self._on_unsure(request, now)
        if request.purpose is not Purpose.LEASE or self._lease is None:
            self._requests.pause(request.purpose, now, self.config.retry_pause)

    def _on_unsure(self, request: Request, now: Instant) -> None:
        """The transaction conflicted, or may have taken place: know again before trying again."""
        match request.purpose:
            case Purpose.OWN:
                self._own_revision = None
            case Purpose.CHARTER | Purpose.LEAD:
                self._shared_is_stale = True
            case Purpose.ROUND:
                self._shared_is_stale = True
                self._looks_at = now
            case _:
                pass

    def _on_read(self, request: Request, read: KeysRead, now: Instant) -> None:
        match request.purpose:
            case Purpose.SHARED:
                self._shared_watch = self._shared_watch or read.watch
                self._on_shared_read(request, read.snapshot, now)
            case Purpose.OWN:
                self._on_own_read(read.snapshot)
            case Purpose.NODES:
                self._on_nodes_read(read, now)
            case _:
                raise AssertionError(f"nothing is read for {request.purpose}")

    def _on_shared_read(self, request: Request, snapshot: Snapshot, now: Instant) -> None:
        self._shared_is_stale = False
        founder_then: str = request.context
        if founder_then and self._founder_in(snapshot) != founder_then:
            self._is_forgotten = True
            self._stop_leading()
            self._refuse(
                RefusalKind.FORGOTTEN,
                f"the store has forgotten the run {self.keys.run_id}: it was started anew, or "
                "somebody has deleted its keys",
                "a store that survives its host, such as etcd with three members, does not forget",
            )
            return
        self._shared_is_read = True
        self._shared.learn_snapshot(snapshot)
        self._after_shared(now)

    def _founder_in(self, snapshot: Snapshot) -> str:
        """Who wrote the charter that was read; empty if there is none, or none to be read."""
        for entry in snapshot.entries:
            if entry.key == self.keys.charter:
                try:
                    return decode_charter(entry.value, entry.key).founder
                except RemoteProtocolError:
                    return ""
        return ""

    def _on_own_read(self, snapshot: Snapshot) -> None:
        key = self.keys.node(self.offer.node_id)
        entry = next((entry for entry in snapshot.entries if entry.key == key), None)
        self._written_version = 0
        if entry is None:
            self._own_revision = ABSENT
        elif entry.lease in self._leases:
            self._own_revision = entry.revision
        else:
            self._refuse(
                RefusalKind.IDENTITY,
                f"another node of the run {self.keys.run_id} is called {self.offer.node_id}",
                "node ids must be made anew for every agent",
            )

    def _on_nodes_read(self, read: KeysRead, now: Instant) -> None:
        if not self.is_leading:
            self._end_watch(read.watch)
            return
        self._nodes_watch = read.watch
        self._view = View(self.config, now)
        for entry in read.snapshot.entries:
            self._hear(self._view, entry.key, entry.value, now)
        if self.round is not None:
            self._view.turn_to(self.round, now)
        self._look_soon(now)

    def _hear(self, view: View, key: str, value: bytes | None, now: Instant) -> None:
        node = self.keys.node_id(key)
        if value is None:
            view.delete(node, now)
            return
        try:
            record = decode_node(value, key, node)
            if record.founder != self._record.founder:
                return  # of a run that the store has forgotten; it will find out
            heard = Heard(record, now)
        except RemoteProtocolError as error:
            heard = Heard(None, now, str(error))
        view.put(node, heard)

    def _on_committed(self, request: Request, revision: Revision, now: Instant) -> None:
        match request.purpose:
            case Purpose.OWN:
                self._own_revision = revision
                self._written_version, self._written_lease = request.context
                if self._written_lease == self._lease:
                    self._cut_off_since = None
                self._react(now)
            case Purpose.CHARTER:
                self._shared.charter.learn(request.context, revision, None, revision)
                self._learn_lead(revision)
                self._after_shared(now)
            case Purpose.LEAD:
                self._learn_lead(revision)
                self._after_shared(now)
            case Purpose.ROUND:
                self._round_trouble = ""
                self._shared.round.learn(request.context, revision, None, revision)
                self._after_shared(now)
            case _:
                raise AssertionError(f"nothing is committed for {request.purpose}")

    def _learn_lead(self, revision: Revision) -> None:
        self._shared.leader.learn(self._me, revision, self._lease, revision)

    def _on_lease_granted(self, request: Request, lease: LeaseId) -> None:
        self._lease = lease
        self._leases.add(lease)
        self._lease_until = request.sent_at
        self._prolong(request.sent_at)

    def _on_lease_renewed(self, request: Request) -> None:
        if self._lease is not None and request.context == self._lease:
            self._prolong(request.sent_at)

    def _prolong(self, sent_at: Instant) -> None:
        ttl = self.config.lease_ttl
        if after(sent_at, ttl) > self._lease_until:  # answers may overtake each other
            self._lease_until = after(sent_at, ttl)
            self._renew_at = after(sent_at, Duration(ttl // RENEWALS_PER_LEASE))

    def _lose_lease(self, now: Instant, why: str) -> None:
        if self._lease is None:
            return
        self._lease = None
        self._own_revision = None
        self._shared_is_stale = True
        self._cut_off_since = now
        for purpose in (Purpose.LEASE, Purpose.OWN, Purpose.LEAD, Purpose.CHARTER, Purpose.ROUND):
            self._requests.forget(purpose)
        self._stop_leading()
        world = self.member_of
        if world is not None and not self._has_ended:
            trouble = f": {self._store_trouble}" if self._store_trouble else ""
            self.is_dissolved = True
            self._rewrite(cut_off=world.round)
            self._effects.append(
                Dissolved(
                    world.round,
                    world.round + 1,
                    f"this node is cut off from the store, {why}{trouble}",
                    at_once=True,
                )
            )

    def _on_changes(self, stimulus: KeysChanged, now: Instant) -> None:
        if self._is_leaving:
            return
        if stimulus.token == self._shared_watch:
            self._shared.learn_changes(stimulus.changes)
            self._after_shared(now)
        elif stimulus.token == self._nodes_watch and self._view is not None:
            for change in stimulus.changes:
                self._hear(self._view, change.key, change.value, now)
            self._look_soon(now)

    def _on_watch_lost(self, stimulus: WatchLost) -> None:
        if stimulus.token == self._shared_watch:
            self._shared_watch = None
            self._shared_is_stale = True
        elif stimulus.token == self._nodes_watch:
            self._nodes_watch = None
            self._view = None

    # What all share

    def _after_shared(self, now: Instant) -> None:
        """The charter, the leader or the round may have changed."""
        self._check_charter()
        if not self._is_lead_free:
            self._lead_free_since = None
        elif self._lead_free_since is None:
            self._lead_free_since = now
        if not self.is_leading:
            self._stop_leading()
        value = self._shared.round.value
        if value is not None and value is not self._round_bytes:
            self._take_round(value, now)

    def _check_charter(self) -> None:
        value = self._shared.charter.value
        if value is None or self._charter_is_fine or self._is_told_the_end:
            return
        try:
            theirs = decode_charter(value, self.keys.charter)
        except RemoteProtocolError as error:
            self._refuse(RefusalKind.VERSION, error.message, error.hint or "")
            return
        ours = msgspec.structs.replace(self.config.charter, founder=theirs.founder)
        if theirs != ours:
            self._refuse(
                RefusalKind.CHARTER,
                f"the run {self.keys.run_id} was begun by others with {_differences(theirs, ours)}",
                "start every node with the same options, or choose another run id",
            )
            return
        self._charter_is_fine = True
        self._rewrite(founder=theirs.founder)

    def _take_round(self, value: bytes, now: Instant) -> None:
        try:
            round_ = decode_round(value, self.keys.round)
        except RemoteProtocolError as error:
            self._refuse(RefusalKind.STORE, error.message, error.hint or "")
            return
        self._round_bytes = value
        self.round = round_
        me = self.offer.node_id
        self._place = round_.members.index(me) if me in round_.members else None
        if self._view is not None:
            self._view.turn_to(round_, now)
            self._look_soon(now)
        self._react(now)

    def _react(self, now: Instant) -> None:
        """Compare the round with this node's part in it, and tell the agent."""
        round_ = self.round
        if round_ is None or self._is_told_the_end or self._is_leaving:
            return
        me = self.offer.node_id
        if me in round_.refusals:
            kind = RefusalKind.SEAT if self.config.is_static else RefusalKind.EXCLUDED
            self._refuse(kind, round_.refusals[me], "")
        elif round_.phase is Phase.CLOSED:
            assert round_.verdict is not None, "a closed round has a verdict"
            self._is_told_the_end = True
            self._effects.append(Closed(round_.verdict))
        elif self.member_of is not None:
            self._react_as_member(round_, self.member_of)
        elif round_.phase is Phase.RUNNING and self._record.ready >= 0 and self.is_registered:
            self._react_as_candidate(round_, now)

    def _react_as_member(self, round_: Round, world: World) -> None:
        if round_.number > world.round:
            if not self.is_dissolved:
                self.is_dissolved = True
                self._effects.append(Dissolved(world.round, world.round + 1, round_.why))
            return
        if round_.phase is not Phase.STOPPING or self.is_dissolved:
            return
        if not self._stop_is_told:
            self._stop_is_told = True
            self._effects.append(StopAgreed(world.round, round_.why, round_.signal))
        if round_.stop_at is not None and not self._step_is_told:
            self._step_is_told = True
            self._effects.append(StopStepAgreed(world.round, round_.stop_at))

    def _react_as_candidate(self, round_: Round, now: Instant) -> None:
        is_ready_for_it = self._record.ready <= round_.number and self._record.ended < round_.number
        if self._place is None:
            self._become_spare(round_, now)
        elif is_ready_for_it and self._record.departure is not Departure.STAYS:
            self._rewrite(ended=round_.number)  # chosen too late, and nothing was begun
        elif is_ready_for_it:
            self.member_of = _world(round_, self._place)
            self._has_ended = self.is_dissolved = False
            self._waiting_since = self._announce_at = None
            self._effects.append(Settled(self.member_of))

    def _become_spare(self, round_: Round, now: Instant) -> None:
        if self._spare_in == round_.number:
            return
        self._spare_in = round_.number
        self._waiting_since = now
        count = len(round_.members)
        others = "one other node" if count == 1 else f"{count} other nodes"
        why = f"round {round_.number} runs on {others}"
        self._effects.append(MadeSpare(round_.number, why))

    def _refuse(self, kind: RefusalKind, why: str, hint: str) -> None:
        if not self._is_told_the_end:
            self._is_told_the_end = True
            self._effects.append(Refused(kind, why, hint))

    def _say_left(self) -> None:
        self.is_over = True
        self._deadline = None
        self._effects.append(LeaveSettled())

    # What is to be done

    def _advance(self, now: Instant) -> None:
        """Ask the store for what is missing, and set the next deadline."""
        if self.is_over or not self._joined:
            return
        if self._is_leaving:
            self._say_goodbye(now)
            return
        if self._lease is not None and now >= self._lease_until:
            ttl = format_duration(self.config.lease_ttl)
            self._lose_lease(now, f"which has not answered for {ttl}")
        # Most facts change nothing in the store, so what need not be asked is not even looked into.
        if self._lease is None or now >= self._renew_at:
            self._keep_lease(now)
        if self._shared_is_stale:
            self._know_shared(now)
        if not self._is_told_the_end:
            if self._shared.charter.value is None:
                self._found_the_run(now)
            if self._written_version != self._version or not self.is_registered:
                self._write_record(now)
            self._give_up_joining(now)
            if self._may_lead:
                self._take_the_lead(now)
        if self.is_leading:
            self._lead(now)
        self._announce(now)
        self._deadline = self._earliest_deadline(now)

    def _say_goodbye(self, now: Instant) -> None:
        self._deadline = None
        shared, self._shared_watch = self._shared_watch, None
        nodes, self._nodes_watch = self._nodes_watch, None
        self._end_watch(shared)
        self._end_watch(nodes)
        if self._lease is None:
            self._say_left()
            return
        # The last word first, so that the leader need not wait for workers that are gone.
        if self._own_revision is not None and self._written_version != self._version:
            self._write_record(now)
        if self._requests.is_under_way(Purpose.OWN) or self._requests.is_under_way(Purpose.GOODBYE):
            return
        token = self._requests.begin(Purpose.GOODBYE, now)
        self._effects.append(RevokeLease(token, self._lease))

    def _keep_lease(self, now: Instant) -> None:
        if self._lease is None:
            if self._requests.may_begin(Purpose.LEASE, now):
                token = self._requests.begin(Purpose.LEASE, now)
                self._effects.append(GrantLease(token, self.config.lease_ttl))
        elif now >= self._renew_at:
            # Again before the last one is answered, if that takes long: what was lost on a way that
            # is whole again would be waited for in vain.
            self._requests.release(Purpose.LEASE)
            token = self._requests.begin(Purpose.LEASE, now, self._lease)
            self._effects.append(RenewLease(token, self._lease))
            self._renew_at = after(now, Duration(self.config.lease_ttl // TRIES_PER_LEASE))

    def _know_shared(self, now: Instant) -> None:
        if self._shared_is_stale and self._requests.may_begin(Purpose.SHARED, now):
            token = self._requests.begin(Purpose.SHARED, now, self._record.founder)
            watch = self._requests.new_token() if self._shared_watch is None else None
            self._effects.append(ReadKeys(token, self.keys.shared, watch))

    @property
    def _knows_shared(self) -> bool:
        return self._shared_is_read and not self._shared_is_stale

    def _found_the_run(self, now: Instant) -> None:
        """Write the charter, if nobody has, and take the lead with it."""
        shared = self._shared
        if (
            not self._knows_shared
            or shared.charter.value is not None
            or self._lease is None
            or not self._requests.may_begin(Purpose.CHARTER, now)
        ):
            return
        me = self.offer.node_id
        charter = encode(msgspec.structs.replace(self.config.charter, founder=me))
        transaction = Transaction(
            conditions=(
                Unchanged(self.keys.charter, ABSENT),
                Unchanged(self.keys.leader, shared.leader.revision),
            ),
            puts=(
                Put(self.keys.charter, charter),
                Put(self.keys.leader, self._me, self._lease),
            ),
        )
        token = self._requests.begin(Purpose.CHARTER, now, charter)
        self._effects.append(Commit(token, transaction))

    def _give_up_joining(self, now: Instant) -> None:
        deadline = self._join_deadline
        if deadline is None or now < deadline:
            return
        waited = format_duration(between(self._waiting_since or now, now))
        trouble = self._store_trouble or "the store has answered"
        why = f"no round has begun with this node within {waited}"
        if self._cut_off_since is not None:
            waited = format_duration(between(self._cut_off_since, now))
            why = f"this node could not register within {waited}"
        self._refuse(RefusalKind.TIMEOUT, f"{why}: {trouble}", "is the store reachable from here?")

    @property
    def _join_deadline(self) -> Instant | None:
        """When this node waits no longer; the leader closes a run for which too few come before."""
        if self._cut_off_since is not None:
            return after(self._cut_off_since, self.config.join_timeout)
        if self._waiting_since is None or self.member_of is not None or self._is_spare:
            return None
        patience = 2 * self.config.join_timeout + self.config.close_timeout
        return after(self._waiting_since, Duration(patience))

    @property
    def _is_spare(self) -> bool:
        return self.round is not None and self._spare_in == self.round.number

    def _write_record(self, now: Instant) -> None:
        if self._lease is None or not self._charter_is_fine:
            return
        if not self._requests.may_begin(Purpose.OWN, now):
            return
        key = self.keys.node(self.offer.node_id)
        if self._own_revision is None:
            token = self._requests.begin(Purpose.OWN, now)
            self._effects.append(ReadKeys(token, key))
            return
        if self._flush_at is not None and now < self._flush_at:
            return
        self._flush_at = None
        notes = tuple(FailureNote(each, between(each.at, now)) for each in self._failures)
        record = msgspec.structs.replace(self._record, failures=notes)
        transaction = Transaction(
            conditions=(Unchanged(key, self._own_revision),),
            puts=(Put(key, encode(record), self._lease),),
        )
        token = self._requests.begin(Purpose.OWN, now, (self._version, self._lease))
        self._effects.append(Commit(token, transaction))

    def _take_the_lead(self, now: Instant) -> None:
        if not self._requests.may_begin(Purpose.LEAD, now):
            return
        turn = self._my_turn
        if turn is not None and now < turn:
            return
        assert self._lease is not None, "only registered nodes lead"
        transaction = Transaction(
            conditions=(Unchanged(self.keys.leader, self._shared.leader.revision),),
            puts=(Put(self.keys.leader, self._me, self._lease),),
        )
        token = self._requests.begin(Purpose.LEAD, now)
        self._effects.append(Commit(token, transaction))

    @property
    def _may_lead(self) -> bool:
        """Whether the lead is free, or bound to a lease that this node had before."""
        leader = self._shared.leader
        is_mine = leader.value == self._me and leader.lease != self._lease
        return (
            (self._is_lead_free or is_mine)
            and self._knows_shared
            and self.is_registered
            and not self._is_told_the_end
        )

    @property
    def _is_lead_free(self) -> bool:
        """Whether nobody leads; who has put a name there without a lease is none of us."""
        return self._shared.leader.value is None or self._shared.leader.lease is None

    @property
    def _my_turn(self) -> Instant | None:
        """When this node tries to take a free lead."""
        if self._lead_free_since is None:
            return None
        position = sum(self._me) if self._place is None else self._place
        return after(self._lead_free_since, Duration(TURN * (position % TURNS_MAX)))

    def _lead(self, now: Instant) -> None:
        if self._view is None:
            if self._requests.may_begin(Purpose.NODES, now):
                token = self._requests.begin(Purpose.NODES, now)
                self._effects.append(ReadKeys(token, self.keys.nodes, self._requests.new_token()))
            return
        if self._looks_at is None or now < self._looks_at or self._shared_is_stale:
            return
        if not self._requests.may_begin(Purpose.ROUND, now):
            return
        self._looked_at = now
        self._decision = decide(self._view, now)
        self._looks_at = self._decision.wake_at
        if self._decision.round is not None:
            self._write_round(self._decision.round, now)

    def _write_round(self, round_: Round, now: Instant) -> None:
        shared = self._shared
        value = encode(round_)
        transaction = Transaction(
            conditions=(
                Unchanged(self.keys.leader, shared.leader.revision),
                Unchanged(self.keys.round, shared.round.revision),
            ),
            puts=(Put(self.keys.round, value),),
        )
        token = self._requests.begin(Purpose.ROUND, now, value)
        self._effects.append(Commit(token, transaction))

    def _end_watch(self, watch: int | None) -> None:
        """End a watch that nobody listens to, if there is one."""
        if watch is not None and not self._is_watched(watch):
            self._effects.append(EndWatch(watch))

    def _is_watched(self, token: int) -> bool:
        return token in (self._shared_watch, self._nodes_watch)

    def _stop_leading(self) -> None:
        nodes, self._nodes_watch = self._nodes_watch, None
        self._end_watch(nodes)
        self._view = None
        self._decision = Decision()
        self._round_trouble = ""
        self._looks_at = None
        self._requests.forget(Purpose.NODES)

    def _look_soon(self, now: Instant) -> None:
        """Look at the nodes now, or when enough of their changes have come together."""
        soonest = now if self._looked_at is None else after(self._looked_at, LOOK_EVERY)
        self._looks_at = max(now, soonest)

    def _wait_from(self, now: Instant) -> None:
        """Count from now for how long this node waits, and tell people if it takes long."""
        self._waiting_since = now
        self._announce_pause = self.config.announce_every
        self._announce_at = after(now, self._announce_pause)

    def _announce(self, now: Instant) -> None:
        if self._announce_at is None or now < self._announce_at:
            return
        self._announce_at = after(now, self._announce_pause)
        if self.member_of is not None:  # others may work on for hours
            self._announce_pause = Duration(2 * self._announce_pause)
        waiting = self._waiting_for()
        since = self._waiting_since
        if waiting and since is not None and not self._is_told_the_end:
            number = 0 if self.round is None else self.round.number
            self._effects.append(AnnounceWaiting(number, waiting, between(since, now)))

    def _waiting_for(self) -> str:
        """On whom this node waits, for people; empty if on nobody."""
        if self._cut_off_since is not None:
            return f"for the store: {self._store_trouble or 'it has not answered yet'}"
        if self._round_trouble and self.is_leading:
            return f"for the store, which does not take the next round: {self._round_trouble}"
        if self.member_of is not None:
            return self._waiting_for_members()
        if self._is_spare:
            return ""
        if self.is_leading:
            return self._decision.waiting
        leader = self._shared.leader.value
        if leader is None:
            return "for a node that leads"
        return f"for node {leader.decode('utf-8', 'backslashreplace')}, which gathers the others"

    def _waiting_for_members(self) -> str:
        """On whom a node waits whose own workers have ended."""
        if not self._has_ended:
            return ""
        if self.is_dissolved:
            return "until this node is fit for the next round"
        if self._view is None:
            return "for the other nodes, whose workers have not all ended"
        return f"until the workers of {named(self._view, self._view.blockers())} have ended"

    def _earliest_deadline(self, now: Instant) -> Instant | None:
        earliest = self._requests.next_deadline(now)
        for deadline in self._deadlines(now):
            if (
                deadline is not None
                and deadline > now
                and (earliest is None or deadline < earliest)
            ):
                earliest = deadline
        return earliest

    def _deadlines(self, now: Instant) -> Iterator[Instant | None]:
        """Every instant at which there may be something to do, past ones included."""
        yield self._announce_at
        if self._lease is not None:
            yield self._lease_until
            yield self._renew_at
        if not self._is_told_the_end:
            yield self._join_deadline
            yield self._flush_at
        if self._may_lead and self._requests.may_begin(Purpose.LEAD, now):
            yield self._my_turn
        if self._view is not None and self._requests.may_begin(Purpose.ROUND, now):
            yield self._looks_at


def _world(round_: Round, node_rank: int) -> World:
    return World(
        round=round_.number,
        node_rank=node_rank,
        members=round_.members,
        first_rank=round_.workers_before(node_rank),
        slots=round_.slots_of(node_rank),
        size=round_.workers_before(len(round_.members)),
        master_address=round_.master_address,
        master_port=round_.master_port,
        restarts=round_.restarts,
    )


def _differences(theirs: Charter, ours: Charter) -> str:
    """The fields in which two charters differ, for people."""
    found = []
    for field in msgspec.structs.fields(Charter):
        name = field.name
        if name in {"settings", "founder"}:
            continue
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            found.append(f"{name} {there} (here: {here})")
    for name in sorted(theirs.settings.keys() | ours.settings.keys()):
        there, here = theirs.settings.get(name), ours.settings.get(name)
        if there != here:
            found.append(f"{name} {there} (here: {here})")
    return ", ".join(found)
