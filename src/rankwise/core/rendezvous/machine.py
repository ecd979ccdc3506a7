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
  earlier rounds runs: they are dead, or wait to be called again. The machine believes its agent.
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

This module hears the agent and asks the store for what is missing; `answers.py` hears the store.
What they know of the node, each part in a file of its own, is its `standing.py`. `succession.py`
says how one run follows another under one id, `run_lease.py` how the store comes to forget them.
"""

import msgspec

from rankwise.base.errors import LocalProtocolError
from rankwise.base.keys import LeaseId
from rankwise.base.units import MILLISECOND, Duration, Instant, after, between, format_duration
from rankwise.core.rendezvous.answers import take_in
from rankwise.core.rendezvous.charter import founding
from rankwise.core.rendezvous.codec import encode
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.in_flight import Purpose
from rankwise.core.rendezvous.records import Departure, Phase, Round
from rankwise.core.rendezvous.requests import Commit, LeaseRenewed, RevokeLease
from rankwise.core.rendezvous.standing import Standing
from rankwise.core.rendezvous.vocabulary import (
    DeadlinePassed,
    DepartureRequested,
    Effect,
    GangEnded,
    GangFailing,
    Joined,
    Left,
    NodeReady,
    RanksArrived,
    Stimulus,
    World,
)

QUIET_FACTS = (LeaseRenewed, DeadlinePassed)
"""What a node hears that has nothing to do but to keep its lease."""
LAST_WORDS = (Purpose.OWN, Purpose.DONE_NOTE, Purpose.GOODBYE)
"""What a node that leaves still says, and waits for."""
COALESCE = Duration(20 * MILLISECOND)
"""How long a node that ended without news waits to say so together with being ready again."""


class Rendezvous:
    """One node's part in the meeting of all. See the module's text."""

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        self.config = config
        self.offer = offer
        self._standing = Standing(run_id, config, offer)
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
        return self._standing.is_over

    @property
    def round(self) -> Round | None:
        """The round as this node knows it."""
        return self._standing.part.round

    @property
    def member_of(self) -> World | None:
        """The round in which this node has, or had, a gang, until it is ready for another."""
        return self._standing.part.member_of

    @property
    def is_dissolved(self) -> bool:
        """Whether that round is over, so that this node is wanted for another."""
        return self._standing.part.is_dissolved

    @property
    def is_leading(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return self._standing.is_leading

    @property
    def is_awaited(self) -> bool:
        """Whether the others wait for this node to end its round, or for the next one."""
        round_ = self._standing.part.round
        is_open = round_ is not None and round_.phase is not Phase.CLOSED
        return is_open and self._standing.part.place is not None

    @property
    def is_cut_off(self) -> bool:
        """Whether nobody hears this node, as far as it knows."""
        return self._standing.lease.id is None

    @property
    def alive_until(self) -> Instant | None:
        """Until when the others believe that this node lives, by its own clock; None: not at all.

        None of its workers may run for longer than `config.fence` after that.
        """
        return None if self._standing.lease.id is None else self._standing.lease.until

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        if self.is_over:
            return []
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
                self._standing.own.rewrite(departure=stimulus.departure, signal=stimulus.signal)
            case RanksArrived():
                self._standing.own.rewrite(arrived_at=stimulus.step)
            case Left():
                self._on_left()
            case DeadlinePassed():
                pass  # `_advance` looks at the clock
            case _:
                take_in(self._standing, stimulus, now)
        self._advance(now)
        return self._standing.take_effects()

    def tick(self, now: Instant) -> list[Effect]:
        """Let deadlines that have passed take effect. Calling it too early changes nothing."""
        if self._deadline is None or now < self._deadline:
            return []
        return self.handle(DeadlinePassed(), now)

    def _keep_quiet(self, stimulus: LeaseRenewed | DeadlinePassed, now: Instant) -> list[Effect]:
        """Do what nodes do most of the time: keep the lease, and look at nothing else."""
        standing = self._standing
        if isinstance(stimulus, LeaseRenewed):
            take_in(standing, stimulus, now)
        effects: list[Effect] = []
        effects += standing.lease.keep(now)
        self._rest(self._others_rest_until)
        return effects

    # What the agent says

    def _on_joined(self, now: Instant) -> None:
        standing = self._standing
        if self._joined:
            raise LocalProtocolError("a node joined twice; make a rendezvous for each life")
        self._joined = True
        standing.waiting.cut_off_since = now
        standing.waiting.begin(now)

    def _on_ready(self, stimulus: NodeReady, now: Instant) -> None:
        standing = self._standing
        standing.part.begin_anew()
        standing.own.rewrite(ready=stimulus.round, port=stimulus.port, arrived_at=None)
        standing.own.flush_at = None
        standing.waiting.begin(now)
        standing.compare(now)

    def _on_failing(self, stimulus: GangFailing) -> None:
        standing = self._standing
        standing.own.failures = stimulus.failures
        standing.own.rewrite(failing=stimulus.round)
        standing.own.flush_at = None

    def _on_gang_ended(self, stimulus: GangEnded, now: Instant) -> None:
        standing = self._standing
        if stimulus.failures:
            standing.own.failures = stimulus.failures
            standing.own.rewrite(failing=stimulus.round)
        standing.own.rewrite(
            ended=stimulus.round, is_done=stimulus.is_done, ran=stimulus.ran, step=stimulus.step
        )
        is_news = (
            stimulus.failures
            or stimulus.is_done
            or not standing.part.is_dissolved
            or standing.own.record.departure is not Departure.STAYS
        )
        standing.own.flush_at = None if is_news else after(now, COALESCE)
        standing.part.has_ended = True
        standing.waiting.begin(now)
        standing.compare(now)

    def _on_left(self) -> None:
        standing = self._standing
        standing.is_leaving = True
        standing.own.flush_at = None
        for purpose in Purpose:
            # A last word that failed a moment ago is tried again at once.
            if purpose not in LAST_WORDS or not standing.requests.is_under_way(purpose):
                standing.requests.forget(purpose)

    # What is to be done

    def _advance(self, now: Instant) -> None:
        """Ask the store for what is missing, and set the next deadline."""
        standing = self._standing
        if standing.is_over or not self._joined:
            return
        if standing.is_leaving:
            self._say_goodbye(now)
            return
        if standing.lease.id is not None and now >= standing.lease.until:
            silence = format_duration(between(standing.heard_at, now))
            standing.lose_lease(now, f"which has not answered for {silence}")
        # Most facts change nothing in the store, so what need not be asked is not even looked into.
        standing.effects += standing.lease.keep(now)
        if standing.shared.is_stale:
            standing.effects += standing.shared.read(standing.own.record.founder, now)
        if not standing.part.is_told_the_end:
            self._take_part(now)
        is_leading = standing.is_leading
        if is_leading:
            standing.effects += standing.lead.run_lease.keep(now)
            standing.effects += standing.lead.work(now)
        standing.effects += standing.waiting.announce(now, is_leading=is_leading)
        self._rest(standing.deadline_beside_lease(now))

    def _rest(self, others: Instant | None) -> None:
        """Set the next deadline; until `others` there is nothing to do but to keep the lease."""
        lease = self._standing.lease
        self._others_rest_until = others
        if lease.id is None:
            self._deadline, self._quiet_until = others, Instant(0)
            return
        self._quiet_until = lease.until if others is None else min(others, lease.until)
        self._deadline = min(self._quiet_until, lease.renew_at)

    def _take_part(self, now: Instant) -> None:
        """Found the run, register, and take the lead, wherever that is still to be done."""
        standing = self._standing
        lease = standing.lease.id
        if lease is not None and standing.may_found(now):
            self._found_the_run(lease, now)
        standing.own.bind_note(standing.shared.charter.lease)
        if not standing.own.is_written or not standing.is_registered:
            self._write_record(now)
        standing.effects += standing.waiting.give_up(now)
        if lease is not None and standing.may_lead:
            standing.effects += standing.lead.take(lease, standing.part.place, now)

    def _found_the_run(self, lease: LeaseId, now: Instant) -> None:
        standing = self._standing
        if not standing.requests.may_begin(Purpose.CHARTER, now):
            return
        charter = encode(msgspec.structs.replace(self.config.charter, founder=standing.me))
        transaction = founding(charter, standing.name, standing.keys, standing.shared, lease)
        token = standing.requests.begin(Purpose.CHARTER, now, charter)
        standing.effects.append(Commit(token, transaction))

    def _write_record(self, now: Instant) -> None:
        standing = self._standing
        if standing.lease.id is not None and standing.has_agreed:
            run_lease = standing.shared.charter.lease
            standing.effects += standing.own.write(standing.lease.id, run_lease, now)

    def _say_goodbye(self, now: Instant) -> None:
        standing = self._standing
        self._deadline, self._quiet_until = None, Instant(0)
        shared, standing.shared.watch = standing.shared.watch, None
        nodes, standing.lead.watch = standing.lead.watch, None
        standing.end_watch(shared)
        standing.end_watch(nodes)
        if standing.lease.id is None:
            standing.say_left()
            return
        # The last word first, so that the leader need not wait for workers that are gone.
        own, is_told_the_end = standing.own, standing.part.is_told_the_end
        if not own.is_written and (own.revision is not None or not is_told_the_end):
            self._write_record(now)
        if is_told_the_end:
            standing.effects += own.take_back_note(now)
        requests = standing.requests
        if any(requests.is_under_way(purpose) for purpose in LAST_WORDS):
            return
        token = requests.begin(Purpose.GOODBYE, now)
        standing.effects.append(RevokeLease(token, standing.lease.id))
