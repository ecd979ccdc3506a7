"""The leader's duties: from what it knows of the nodes to the next round, or to none.

`decide` is a pure function of the view and the time, but for two notes that it leaves in the view:
since when enough nodes are ready, and since when all members of the last round have ended.

```
             enough ready nodes, last call over or all here
 GATHERING ────────────────────────────────────────────────────→ RUNNING
   │ ↑                                                             │ │
   │ └──member failed, lost or leaving, or more nodes wanted───────┘ │ a member is preempted
   │    (number + 1)                                                 ↓
   │ no budget, too few nodes                                     STOPPING
   ↓                                                                 ↓ all ended
 CLOSED ←──────────────────────────────all members done, or ended────┘
```

- No round runs before every member of the last one has ended: told so itself, or vanished and been
  given the time that it needs to kill its workers (the *fence*).
- A failure is judged when all have ended, and all have told (`view.judge`). Until then the next
  round is gathered: a lost node, which costs no restart, shows itself by failures first.
- A member that is preempted stops the whole job. One that leaves is a change of membership.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from rankwise.base.failure import OutcomeStatus, failure_in_words
from rankwise.base.units import Duration, Instant, after, format_duration
from rankwise.core.rendezvous.records import (
    HOSTS_MAX,
    Departure,
    Lineup,
    NodeRecord,
    Round,
    RoundPhase,
    Verdict,
)
from rankwise.core.rendezvous.view import (
    View,
    active_count,
    first_suspect,
    in_static_order,
    judge,
    ranked,
    verdict_on_failure,
)

SHOWN_MAX = 8
"""How many nodes a sentence names before it counts the rest."""
FIRST_ROUND = Round(number=0, phase=RoundPhase.GATHERING)


class Decision(NamedTuple):
    """What the leader does now, and when it looks again if nothing happens.

    Attributes:
        round: the record to write; None to leave it as it is.
        wake_at: when time alone changes the answer; None if it does not.
        waiting: on which nodes this one waits, for people; empty if on none.
    """

    round: Round | None = None
    wake_at: Instant | None = None
    waiting: str = ""


def decide(view: View, now: Instant) -> Decision:
    """What the view demands at `now`."""
    decision = _decide(view, now)
    if not view.config.is_static or decision.round is not None:
        return decision
    conflict_at = _next_conflict_at(view, now)
    wakings = [each for each in (decision.wake_at, conflict_at) if each is not None]
    return decision._replace(wake_at=min(wakings, default=None))


def _decide(view: View, now: Instant) -> Decision:
    round_ = FIRST_ROUND if view.round is None else view.round
    match round_.phase:
        case RoundPhase.GATHERING:
            return _gather(view, round_, now)
        case RoundPhase.RUNNING:
            return _watch_over(view, round_, now)
        case RoundPhase.STOPPING:
            return _see_off(view, round_)
        case RoundPhase.CLOSED:
            return Decision()


def labels(view: View, nodes: Sequence[str]) -> str:
    """Nodes for people: the first few by id and host, and how many more."""
    shown = ", ".join(view.label(node) for node in nodes[:SHOWN_MAX])
    more = len(nodes) - SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def last_end_in_words(why: str) -> str:
    """Tell, behind on whom a node waits, what ended the round before, if there was one."""
    return f"; the last round ended because {why}" if why else ""


def _gather(view: View, round_: Round, now: Instant) -> Decision:
    blockers = view.blockers()
    refusing = _refusing(view, round_, now)
    if refusing is not None:
        return Decision(refusing)
    if blockers:
        return Decision(waiting=f"until the workers of {labels(view, blockers)} have ended")
    if view.ended_since is None:
        # The back-off begins when all have ended: not before, or slow ends would use it up.
        view.ended_since = now
    closing = _closing(view, round_)
    if closing is not None:
        return Decision(closing)
    candidates = _without_struck(view, round_)
    enough = active_count(view.config, len(candidates))
    if enough == 0 or (view.config.is_static and in_static_order(candidates, enough) is None):
        # The last call begins anew: the others may have waited for the nodes that left.
        view.enough_since = None
        return _wait_for_more(view, round_, candidates, now)
    if view.enough_since is None:
        view.enough_since = now
    settle_at = max(
        view.fenced_until or now, _pause_ends(view, round_), _last_call_ends(view, candidates, now)
    )
    if now < settle_at:
        waiting = _why_not_yet(view, candidates) + last_end_in_words(_why_ended(view, round_))
        return Decision(wake_at=settle_at, waiting=waiting)
    return Decision(_settled(view, round_, candidates, enough))


def _closing(view: View, round_: Round) -> Round | None:
    """The end of the job, if the round before was its last one."""
    preempted = _departing(view, Departure.PREEMPTED)
    if preempted:
        return _stopped(view, round_, preempted)
    # No round has run yet: there is nothing to judge.
    if not round_.members:
        return None
    judgement = judge(view, round_)
    if judgement.obstacle is None:
        return None
    return _closed(round_, verdict_on_failure(judgement, round_))


def _stopped(view: View, round_: Round, preempted: list[str]) -> Round:
    records = [observed.record for node, observed in view.last_records() if node == preempted[0]]
    signal = next((record.signal for record in records if record is not None), None)
    verdict = Verdict(
        status=OutcomeStatus.STOPPED,
        detail=f"node {view.label(preempted[0])} was told to stop",
        signal=signal if round_.signal is None else round_.signal,
        restarts=round_.restarts,
    )
    return _closed(round_, verdict)


def _closed(round_: Round, verdict: Verdict) -> Round:
    return msgspec.structs.replace(round_, phase=RoundPhase.CLOSED, verdict=verdict, refusals={})


def _departing(view: View, departure: Departure) -> list[str]:
    return [
        node
        for node, observed in view.last_records()
        if observed.record is not None and observed.record.departure is departure
    ]


def _refusing(view: View, round_: Round, now: Instant) -> Round | None:
    """The same round with the refusals that are due; None if none is new."""
    found = dict(view.unreadable)
    if view.config.is_static:
        found |= _badly_placed(view, now)
    found = {node: why for node, why in found.items() if node not in round_.refusals}
    if not found:
        return None
    # Those who have gone need not be told any more.
    kept = {node: why for node, why in round_.refusals.items() if node in view.nodes}
    return msgspec.structs.replace(round_, refusals=kept | found)


def _badly_placed(view: View, now: Instant) -> dict[str, str]:
    """Nodes whose static rank does not exist, or is claimed by another node too.

    A claim is given the time in which the lease of a node that is dead ends: an agent that was
    killed and started again claims what its former self still seems to hold.
    """
    static_ranks = view.config.nodes_max
    claims: dict[int, list[str]] = {}
    refusals = {}
    for node, observed in sorted(view.nodes.items()):
        if observed.record is None or node in view.refusals:
            continue
        static_rank = observed.record.static_rank
        if static_rank is None or static_rank >= static_ranks:
            what = "no node rank" if static_rank is None else f"node rank {static_rank}"
            refusals[node] = (
                f"{what} was given, and this run has node ranks 0 to {static_ranks - 1}"
            )
        else:
            claims.setdefault(static_rank, []).append(node)
    members = view.membership
    for static_rank, nodes in claims.items():
        if len(nodes) < 2 or now < _conflict_is_true_at(view, nodes):
            continue
        for node in nodes:
            if node in members:
                continue  # it holds the rank; only nodes that come later are refused
            others = [other for other in nodes if other != node]
            refusals[node] = f"node rank {static_rank} is claimed by {labels(view, others)} too"
    return refusals


def _conflict_is_true_at(view: View, nodes: list[str]) -> Instant:
    latest = max(view.since[node] for node in nodes)
    return after(latest, Duration(view.config.lease_ttl + view.config.fence))


def _next_conflict_at(view: View, now: Instant) -> Instant | None:
    """When two present claims of one static rank will be believed."""
    claims: dict[int, list[str]] = {}
    for node, observed in view.nodes.items():
        if observed.record is not None and observed.record.static_rank is not None:
            claims.setdefault(observed.record.static_rank, []).append(node)
    due = [_conflict_is_true_at(view, nodes) for nodes in claims.values() if len(nodes) > 1]
    return min((instant for instant in due if instant > now), default=None)


def _without_struck(view: View, round_: Round) -> dict[str, NodeRecord]:
    """The candidates without those on hosts where too many failures began, if enough are left."""
    candidates = view.candidates()
    struck = _struck_hosts(view, round_)
    if not struck:
        return candidates
    sound = {node: record for node, record in candidates.items() if record.host not in struck}
    # A job on suspicious hosts is better than none.
    return sound if active_count(view.config, len(sound)) else candidates


def _struck_hosts(view: View, round_: Round) -> set[str]:
    strikes_max = view.config.policy.strikes_max
    if strikes_max is None or view.config.is_static:
        return set()
    strikes = judge(view, round_).strikes if round_.members else round_.strikes
    return {host for host, count in strikes.items() if count >= strikes_max}


def _wait_for_more(
    view: View, round_: Round, candidates: dict[str, NodeRecord], now: Instant
) -> Decision:
    config = view.config
    # Patience counts from the end of the last round: long rounds must not use it up.
    give_up_at = after(max(view.round_since, view.ended_since or now), config.join_timeout)
    present = labels(view, sorted(candidates)) or "none"
    here = f"{len(candidates)} of at least {config.nodes_min} nodes are ready ({present})"
    if config.is_static:
        static_ranks = {record.static_rank for record in candidates.values()}
        missing = [
            str(static_rank)
            for static_rank in range(config.nodes_max)
            if static_rank not in static_ranks
        ]
        here += f"; missing node ranks {', '.join(missing[:SHOWN_MAX])}" if missing else ""
    late = [node for node in view.nodes if _may_become_ready(view, node, candidates)]
    here += f"; not fit yet: {labels(view, late)}" if late else ""
    here += last_end_in_words(_why_ended(view, round_))
    if now < give_up_at:
        return Decision(wake_at=give_up_at, waiting=f"for more nodes: {here}")
    patience = format_duration(config.join_timeout)
    verdict = Verdict(
        status=OutcomeStatus.FAILED,
        detail=f"too few nodes came within {patience}: {here}",
        restarts=round_.restarts,
    )
    return Decision(_closed(round_, verdict))


def _pause_ends(view: View, round_: Round) -> Instant:
    """When the back-off before a restart is over."""
    assert view.ended_since is not None, "asked when all members have ended"
    if not round_.is_failure or view.lost:
        return view.ended_since
    # The loss of a node is no failure of the program, which a pause would help.
    pause = view.config.policy.backoff.before_restart(round_.restarts + 1)
    return after(view.ended_since, pause)


def _last_call_ends(view: View, candidates: dict[str, NodeRecord], now: Instant) -> Instant:
    """When the wait for further nodes ends, now that there are enough."""
    config = view.config
    assert view.enough_since is not None, "asked when there are enough"
    if config.is_static:
        return now
    last = after(view.enough_since, config.last_call)
    late = {node for node in view.nodes if _may_become_ready(view, node, candidates)}
    if len(candidates) >= config.nodes_max + config.spares:
        # A spare could have the place of a member that is slower than it; but with the member's
        # ranks that are alive, what they have in memory would be lost.
        keeps_place = bool(late & view.membership)
        return after(view.enough_since, config.settle_delay) if keeps_place else now
    if late & view.membership:
        # Without them the round would be dissolved for them as soon as they are ready.
        return max(last, after(view.enough_since, config.rejoin_timeout))
    if late:
        return last
    if view.run_number >= 0:
        return now  # all that were there are back or gone; newcomers are taken in while it runs
    return min(last, after(view.newcomer_at, config.last_call_min))


def _may_become_ready(view: View, node: str, candidates: dict[str, NodeRecord]) -> bool:
    record = view.nodes[node].record
    return (
        record is not None
        and node not in candidates
        and node not in view.refusals
        and record.departure is Departure.STAYS
        and not view.is_ready(node, record)
    )


def _why_not_yet(view: View, candidates: dict[str, NodeRecord]) -> str:
    late = [node for node in view.nodes if _may_become_ready(view, node, candidates)]
    if late:
        return f"until {labels(view, late)} are ready"
    return f"for the last call, the back-off or a lost node's fence: {len(candidates)} are ready"


def _settled(view: View, round_: Round, candidates: dict[str, NodeRecord], count: int) -> Round:
    if view.config.is_static:
        members = in_static_order(candidates, count)
        assert members is not None, "settled only when every node rank is taken"
    else:
        # Members keep their ranks where they can: what they have in memory or on disk is by rank.
        members = ranked(candidates, round_.members, count)
    slots = tuple(candidates[node].slots for node in members)
    first = candidates[members[0]]
    judgement = judge(view, round_) if round_.members else None
    struck = _struck_hosts(view, round_)
    excluded = {
        node: f"too many failures began on its host {observed.record.host}"
        for node, observed in view.nodes.items()
        if observed.record is not None and observed.record.host in struck and node not in members
    }
    kept = {node: why for node, why in round_.refusals.items() if node in view.nodes}
    return Round(
        number=round_.number,
        phase=RoundPhase.RUNNING,
        members=members,
        # One number for all: the record of a thousand nodes is read by each of them.
        slots=slots[:1] if len(set(slots)) == 1 else slots,
        master_address=first.address,
        master_port=first.port,
        restarts=round_.restarts + (judgement is not None and judgement.is_failure),
        rounds_without_progress=round_.rounds_without_progress
        if judgement is None
        else judgement.rounds_without_progress,
        best_step=round_.best_step if judgement is None else judgement.best_step,
        strikes=round_.strikes if judgement is None else judgement.strikes,
        refusals=kept | excluded,
        lineup=_lineup(view, round_.members, members, candidates),
        why=_why_ended(view, round_),
    )


def _lineup(
    view: View, before: tuple[str, ...], members: tuple[str, ...], candidates: dict[str, NodeRecord]
) -> Lineup:
    """The nodes of the round that begins; those that came, left and wait, by their names."""
    now = set(members)
    here, there = _Labels(view, {*candidates, *members}), _Labels(view, before)
    return Lineup(
        hosts=here.of(members),
        came=here.of(node for node in members if before and node not in before),
        left=there.of(node for node in before if node not in now),
        reserve=here.of(node for node in sorted(candidates) if node not in now),
    )


class _Labels:
    """What people call nodes: by host, and where several of them have one host, by id too."""

    def __init__(self, view: View, nodes: Iterable[str]) -> None:
        self._view = view
        self._counts = Counter(map(view.host, nodes))

    def of(self, nodes: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self._label, islice(nodes, HOSTS_MAX)))

    def _label(self, node: str) -> str:
        host = self._view.host(node)
        return host if host and self._counts[host] == 1 else f"{host}/{node}".lstrip("/")


def _why_ended(view: View, round_: Round) -> str:
    """What ended the last round, now that all have told.

    Failures may come of a lost node. One that was missed may be here again, as all of them are
    when the store was away for longer than their leases.
    """
    if any(node in view.nodes for node in round_.gone):
        return _why_gone(view, round_.gone)
    lost = list(view.lost)
    return f"{_nodes(view, lost)} lost" if round_.is_failure and lost else round_.why


def _watch_over(view: View, round_: Round, now: Instant) -> Decision:
    number = round_.number
    done = 0
    failing, gone, preempted, leaving = [], [], [], []
    for node in round_.members:
        observed = view.nodes.get(node)
        record = observed.record if observed is not None else _last_record_if_done(view, node)
        if record is not None and record.departure is Departure.PREEMPTED:
            # Before a failure: a scheduler's SIGTERM makes ranks fail, and the job must end as
            # stopped.
            preempted.append(node)
            done += record.ended >= number and record.is_done
        elif record is not None and record.failing == number:
            failing.append(node)
        elif record is None or record.ready > number:
            gone.append(node)
        elif record.ended >= number and record.is_done:
            # Also if it leaves, or was cut off and is back: what it had to do is done.
            done += 1
        elif node in view.returned:
            gone.append(node)
        elif record.departure is Departure.LEAVES:
            leaving.append(node)
        elif record.ended >= number:
            gone.append(node)
    if done == len(round_.members):
        success = Verdict(status=OutcomeStatus.SUCCEEDED, restarts=round_.restarts)
        return Decision(_closed(round_, success))
    if preempted:
        return Decision(_stopping(view, round_, preempted[0]))
    if failing:
        return Decision(_dissolved_by_failure(view, round_, failing[0]))
    if gone:
        return Decision(_dissolved(round_, _why_gone(view, gone), tuple(gone)))
    if leaving:
        return Decision(_dissolved(round_, f"{_nodes(view, leaving)} leaving"))
    refusing = _refusing(view, round_, now)
    if refusing is not None:
        return Decision(refusing)
    # A job that is about to be done does not begin again for a late node.
    return Decision() if done else _look_for_newcomers(view, round_, now)


def _why_gone(view: View, gone: Sequence[str]) -> str:
    """Nodes that are here again were cut off, all of them when the store itself was away."""
    lost = [node for node in gone if node not in view.nodes]
    if lost:
        return f"{_nodes(view, lost)} lost"
    return f"{_nodes(view, gone, were=True)} cut off from the store"


def _nodes(view: View, nodes: Sequence[str], *, were: bool = False) -> str:
    if len(nodes) == 1:
        return f"node {labels(view, nodes)} {'was' if were else 'is'}"
    return f"nodes {labels(view, nodes)} {'were' if were else 'are'}"


def _last_record_if_done(view: View, node: str) -> NodeRecord | None:
    gone = view.gone.get(node)
    if gone is None or gone.last is None or gone.last.record is None:
        return None
    record = gone.last.record
    return record if gone.has_ended and record.is_done else None


def _stopping(view: View, round_: Round, node: str) -> Round:
    observed = view.nodes.get(node)
    # It may have gone since: one that is done is a member all the same.
    record = _last_record_if_done(view, node) if observed is None else observed.record
    return msgspec.structs.replace(
        round_,
        phase=RoundPhase.STOPPING,
        why=f"node {view.label(node)} was told to stop",
        signal=None if record is None else record.signal,
    )


def _dissolved_by_failure(view: View, round_: Round, node: str) -> Round:
    suspect = first_suspect(view, round_.number)
    if suspect is None:
        why = f"workers of node {view.label(node)} failed"
    else:
        failure = suspect.failure
        why = failure_in_words(failure, suspect.host)
    return msgspec.structs.replace(_dissolved(round_, why), is_failure=True, suspect=suspect)


def _dissolved(round_: Round, why: str, gone: tuple[str, ...] = ()) -> Round:
    return msgspec.structs.replace(
        round_,
        number=round_.number + 1,
        phase=RoundPhase.GATHERING,
        master_address="",
        master_port=0,
        why=why,
        gone=gone,
        is_failure=False,
        suspect=None,
    )


def _look_for_newcomers(view: View, round_: Round, now: Instant) -> Decision:
    config = view.config
    if config.is_static or len(round_.members) >= config.nodes_max:
        return Decision()
    struck = _struck_now(view, round_)
    newcomers = [
        node
        for node, record in view.candidates().items()
        if node not in round_.members and record.host not in struck
    ]
    wanted = active_count(config, len(round_.members) + len(newcomers)) - len(round_.members)
    if wanted <= 0:
        return Decision()
    come = sorted(newcomers, key=lambda node: (view.since[node], node))[:wanted]
    settle_at = _settles_at(view, [view.since[node] for node in come])
    if now < settle_at:
        return Decision(wake_at=settle_at)
    return Decision(_dissolved(round_, f"{_nodes(view, come)} joining"))


def _settles_at(view: View, arrivals: list[Instant]) -> Instant:
    """When newcomers are taken in, so that those who come together cost one round.

    Only those who will be taken in count, and each new one puts it off, but not for ever: a node
    that comes and goes all the time must not keep the others out.
    """
    config = view.config
    latest = after(max(arrivals), config.settle_delay)
    last = after(min(arrivals), max(config.last_call, config.settle_delay))
    return max(min(latest, last), after(view.round_since, config.settle_delay))


def _struck_now(view: View, round_: Round) -> set[str]:
    strikes_max = view.config.policy.strikes_max
    if strikes_max is None:
        return set()
    return {host for host, count in round_.strikes.items() if count >= strikes_max}


def _see_off(view: View, round_: Round) -> Decision:
    """STOPPING: agree on the step as soon as all have told theirs; close when all have ended."""
    pending = view.blockers()
    if not pending:
        records = [observed.record for _, observed in view.last_records()]
        # The request may have come when all work was done: then the job has succeeded.
        if len(records) >= len(round_.members) and all(
            record is not None and record.is_done and record.ended == round_.number
            for record in records
        ):
            success = Verdict(status=OutcomeStatus.SUCCEEDED, restarts=round_.restarts)
            return Decision(_closed(round_, success))
        stopped = Verdict(
            status=OutcomeStatus.STOPPED,
            detail=round_.why,
            signal=round_.signal,
            restarts=round_.restarts,
        )
        return Decision(_closed(round_, stopped))
    waiting = f"until the workers of {labels(view, pending)} have stopped"
    if round_.stop_at is not None:
        return Decision(waiting=waiting)
    steps = [_step_of(view.nodes[node].record) for node in pending]
    told = [step for step in steps if step is not None]
    if len(told) < len(steps):
        return Decision(waiting=waiting)
    gone_steps = [
        observed.record.arrived_at
        for _, observed in view.last_records()
        if observed.record is not None and observed.record.arrived_at is not None
    ]
    # The latest step: a rank that is beyond another's cannot go back.
    return Decision(msgspec.structs.replace(round_, stop_at=max([*told, *gone_steps])))


def _step_of(record: NodeRecord | None) -> int | None:
    return None if record is None else record.arrived_at
