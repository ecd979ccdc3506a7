"""The rendezvous machine: one node's way into rounds and out of them.

Theory of operation
===================

A node keeps alive with a lease, reads and watches what all share (`shared/`), writes its own record
whenever what it wants others to know has changed, and takes the lead if it is free. All this is one
loop, run after every fact (`_advance`): compare what should be with what is known to be in the
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
  earlier rounds runs: they are dead, or wait to be called again. The machine believes its agent.
- *Cut off*: the lease counts from when its last renewal was *sent*, so by this node's own clock it
  ends before the store can have ended it. From then on the workers must go at once (`Dissolved`
  with `at_once`); the leader gives them `fence` to do so. Back again, the node writes its record
  anew.
- *Lost answers*: after `RequestFailed` a transaction may have taken place, or may yet. Every one is
  bound to the revisions that it was thought out for, so that it takes place at most once, and not
  after another; before the next, the keys are read again.
- *The lead*: the node that holds `leader` with its present lease leads: it reads and watches
  `nodes/`, and writes what `leader.decide` answers, bound to `leader` and `round` being unchanged.
  When the lead is free the last round's members try in the order of their ranks, a little apart, so
  that one try is the rule.
- *Who dies*: this node: its lease ends, the leader sees it. The leader: the same, and another takes
  the lead, with nothing but what lies in the store. The store: see *cut off*; one that has
  forgotten everything (no charter, where one was) ends the run with that sentence.

This module serves the agent and asks the store for what is missing; `node_state.py` serves the
store and holds what both know of the node, each part of which is an object with a text of its own:
`registration.py`, `membership.py`, `lead.py`. `founding.py` says how one run follows another under
one id, `lead.py` how the store comes to forget them, `inquiry.py` how nodes find out together which
rank keeps the others waiting in a collective.
"""

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import MILLISECOND, Duration, Instant, after
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.node_state import RendezvousState
from rankwise.core.rendezvous.records import Departure, Round, RoundPhase
from rankwise.core.rendezvous.requests import Purpose
from rankwise.core.rendezvous.vocabulary import (
    CallRecordsReported,
    DeadlinePassed,
    DepartureRequested,
    Effect,
    GangEnded,
    GangFailing,
    InquiryJudged,
    Joined,
    LeaseRenewed,
    Left,
    NodeReady,
    RanksArrived,
    RevokeLease,
    Stimulus,
    TroubleReported,
)

QUIET_FACTS = (LeaseRenewed, DeadlinePassed)
"""The facts after which a node has nothing to do but to keep its lease."""
LAST_WORDS = (Purpose.OWN, Purpose.DONE_NOTE, Purpose.GOODBYE)
"""What a node that leaves still says, and waits for."""
COALESCE = Duration(20 * MILLISECOND)
"""How long a node that ended without news waits to say so together with being ready again."""


class Rendezvous:
    """One node's part in the meeting of all. See the module's text."""

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        self.config = config
        self.offer = offer
        self._node = RendezvousState(run_id, config, offer)
        self._deadline: Instant | None = None
        self._joined = False
        self._quiet_until = Instant(0)
        """Until when the lease alone is to be kept, unless something else happens."""
        self._others_rest_until: Instant | None = None
        """The next deadline beside those of the lease."""

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next; None while only stimuli can change anything."""
        return self._deadline

    @property
    def is_over(self) -> bool:
        """Whether it has said goodbye, and takes in nothing more."""
        return self._node.is_over

    @property
    def round(self) -> Round | None:
        """The round as this node knows it."""
        return self._node.membership.round

    @property
    def is_dissolved(self) -> bool:
        """Whether that round is over, so that this node is wanted for another."""
        return self._node.membership.is_dissolved

    @property
    def is_leading(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return self._node.is_leading

    @property
    def is_awaited(self) -> bool:
        """Whether the others wait for this node to end its round, or for the next one."""
        round_ = self._node.membership.round
        is_open = round_ is not None and round_.phase is not RoundPhase.CLOSED
        return is_open and self._node.membership.place is not None

    @property
    def is_cut_off(self) -> bool:
        """Whether this node reaches no other, as far as it knows."""
        return self._node.lease.id is None

    @property
    def alive_until(self) -> Instant | None:
        """Until when the others believe that this node lives, by its own clock; None: not at all.

        None of its workers may run for longer than `config.fence` after that.
        """
        return None if self._node.lease.id is None else self._node.lease.until

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        if self.is_over:
            return []
        # A node that only keeps its lease is most of a large job's life, and of its messages.
        if now < self._quiet_until and isinstance(stimulus, QUIET_FACTS):
            return self._keep_quiet(stimulus, now)
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
                self._node.own.rewrite(departure=stimulus.departure, signal=stimulus.signal)
            case RanksArrived():
                self._node.own.rewrite(arrived_at=stimulus.step)
            case TroubleReported():
                self._node.inquiry.on_trouble(stimulus.round, stimulus.trouble, now)
            case CallRecordsReported():
                self._node.inquiry.on_call_records(stimulus.inquiry, stimulus.sheet)
            case InquiryJudged():
                if self._node.is_leading and self.round is not None:
                    self._node.lead.inquiry.on_judged(stimulus, self.round, now)
            case Left():
                self._on_left()
            case DeadlinePassed():
                pass  # `_advance` looks at the clock
            case _:
                self._node.on_answer(stimulus, now)
        self._advance(now)
        return self._node.take_effects()

    def tick(self, now: Instant) -> list[Effect]:
        """Let deadlines that have passed take effect. Calling it too early changes nothing."""
        if self._deadline is None or now < self._deadline:
            return []
        return self.handle(DeadlinePassed(), now)

    def _keep_quiet(self, stimulus: LeaseRenewed | DeadlinePassed, now: Instant) -> list[Effect]:
        """Do what nodes do most of the time: keep the lease, and look at nothing else."""
        node = self._node
        if isinstance(stimulus, LeaseRenewed):
            node.on_answer(stimulus, now)
        effects: list[Effect] = []
        effects += node.lease.keep(now)
        self._rest(self._others_rest_until)
        return effects

    # What the agent says

    def _on_joined(self, now: Instant) -> None:
        node = self._node
        if self._joined:
            raise LocalProtocolError("a node joined twice; make a rendezvous for each life")
        self._joined = True
        node.waiting.cut_off_since = now
        node.waiting.begin(now)

    def _on_ready(self, stimulus: NodeReady, now: Instant) -> None:
        node = self._node
        node.membership.begin_again()
        node.own.rewrite(ready=stimulus.round, port=stimulus.port, arrived_at=None)
        node.own.flush_at = None
        node.waiting.begin(now)
        node.compare(now)

    def _on_failing(self, stimulus: GangFailing) -> None:
        node = self._node
        node.own.tell_failures(stimulus.round, stimulus.failures)
        node.own.flush_at = None

    def _on_gang_ended(self, stimulus: GangEnded, now: Instant) -> None:
        node = self._node
        if stimulus.failures:
            node.own.tell_failures(stimulus.round, stimulus.failures)
        node.own.rewrite(
            ended=stimulus.round, is_done=stimulus.is_done, ran=stimulus.ran, step=stimulus.step
        )
        is_news = (
            stimulus.failures
            or stimulus.is_done
            or not node.membership.is_dissolved
            or node.own.record.departure is not Departure.STAYS
        )
        node.own.flush_at = None if is_news else after(now, COALESCE)
        node.membership.has_ended = True
        node.waiting.begin(now)
        node.compare(now)

    def _on_left(self) -> None:
        node = self._node
        node.is_leaving = True
        node.own.flush_at = None
        for purpose in Purpose:
            # A last word that failed a moment ago is tried again at once.
            if purpose not in LAST_WORDS or not node.requests.is_under_way(purpose):
                node.requests.forget(purpose)

    # What is to be done

    def _advance(self, now: Instant) -> None:
        """Ask the store for what is missing, and set the next deadline."""
        node = self._node
        if node.is_over or not self._joined:
            return
        if node.is_leaving:
            self._say_goodbye(now)
            return
        if node.lease.id is not None and now >= node.lease.until:
            node.lose_lease(now, f"which has not answered for {node.waiting.silence(now)}")
        # Most facts change nothing in the store, so what need not be asked is not even looked into.
        node.effects += node.lease.keep(now)
        if node.shared.is_stale:
            node.effects += node.shared.read(node.own.record.founder, now)
        if not node.membership.knows_the_end:
            self._take_part(now)
        is_leading = node.is_leading
        if is_leading:
            node.effects += node.lead.run_lease.keep(now)
            node.effects += node.lead.work(now)
        self._inquire(now)
        node.effects += node.waiting.announce(now, is_leading=is_leading)
        self._rest(node.deadline_beside_lease(now))

    def _inquire(self, now: Instant) -> None:
        """Tell the others of this node's calls, and ask for theirs where it leads."""
        node = self._node
        is_over = node.membership.is_dissolved or node.membership.knows_the_end
        node.effects += node.inquiry.end() if is_over else node.inquiry.give_up(now)
        lease, founder = node.lease.id, node.own.record.founder
        if lease is None or not node.succession.has_agreed:
            return
        node.effects += node.inquiry.write(lease, founder, now)
        if node.is_leading and not node.shared.is_stale:
            present = () if node.lead.view is None else node.lead.view.nodes
            node.effects += node.lead.inquiry.work(self.round, present, lease, founder, now)

    def _rest(self, others: Instant | None) -> None:
        """Set the next deadline; until `others` there is nothing to do but to keep the lease."""
        lease = self._node.lease
        self._others_rest_until = others
        if lease.id is None:
            self._deadline, self._quiet_until = others, Instant(0)
            return
        self._quiet_until = lease.until if others is None else min(others, lease.until)
        self._deadline = min(self._quiet_until, lease.renew_at)

    def _take_part(self, now: Instant) -> None:
        """Found the run, register, and take the lead, wherever that is still to be done."""
        node = self._node
        lease = node.lease.id
        if lease is not None and node.may_found(now):
            node.effects += node.succession.found(node.me, node.name, lease, node.requests, now)
        node.own.bind_note(node.shared.charter.lease)
        if not node.own.is_written or not node.is_registered:
            self._write_record(now)
        node.effects += node.waiting.give_up(now)
        if lease is not None and node.may_lead:
            node.effects += node.lead.take(lease, node.membership.place, now)

    def _write_record(self, now: Instant) -> None:
        node = self._node
        if node.lease.id is not None and node.succession.has_agreed:
            run_lease = node.shared.charter.lease
            node.effects += node.own.write(node.lease.id, run_lease, now)

    def _say_goodbye(self, now: Instant) -> None:
        node = self._node
        self._deadline, self._quiet_until = None, Instant(0)
        shared, node.shared.watch = node.shared.watch, None
        nodes, node.lead.watch = node.lead.watch, None
        node.end_watch(shared)
        node.end_watch(nodes)
        if node.lease.id is None:
            node.say_left()
            return
        # The last word first, so that the leader need not wait for workers that are gone.
        own, knows_the_end = node.own, node.membership.knows_the_end
        if not own.is_written and (own.revision is not None or not knows_the_end):
            self._write_record(now)
        if knows_the_end:
            node.effects += own.take_back_note(now)
        requests = node.requests
        if any(requests.is_under_way(purpose) for purpose in LAST_WORDS):
            return
        token = requests.begin(Purpose.GOODBYE, now)
        node.effects.append(RevokeLease(token, node.lease.id))
