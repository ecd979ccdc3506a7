"""A single node: what a rendezvous is to a node among several, with nothing to agree on.

An agent that is alone is told and answers the same words as among others (`Rendezvous`), at once
and without a store: its node has rank 0 of 1, every round begins as soon as the node is ready, and
what a failed round means is judged by the same rules (`configuration.py`).

```
         NodeReady, pause over           GangEnded, or a stop
 GATHERING ───────────────→ RUNNING ─────────────────────────→ CLOSED
     ↑                         │ GangEnded with failures, and
     └─────────────────────────┘ the policy allows another round
```

- A failure that is followed by another round is announced with its pause (`AnnounceRestart`); the
  pause runs while the node gets ready.
- A request to stop is agreed to at once. The first fact counts: a gang that had failed has failed,
  also when the request comes in the pause before the next round.
"""

import msgspec

from rankwise.base.failure import Failure, OutcomeStatus
from rankwise.base.units import Duration, Instant, after, postponed
from rankwise.core.agent.vocabulary import AgentSpec, AnnounceRestart
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import (
    NodeOffer,
    RendezvousConfig,
    RestartPolicy,
    has_progressed,
    obstacle_to_another,
)
from rankwise.core.rendezvous.records import Round, RoundPhase, Verdict
from rankwise.core.rendezvous.vocabulary import (
    Closed,
    DeadlinePassed,
    DepartureRequested,
    Dissolved,
    Effect,
    GangEnded,
    LeaveSettled,
    Left,
    NodeReady,
    RanksArrived,
    Settled,
    Stimulus,
    StopAgreed,
    StopStepAgreed,
    World,
)
from rankwise.core.watch.vocabulary import UNWATCHED, WatchSpec

AloneEffect = Effect | AnnounceRestart


def spec_alone(
    gang: GangSpec,
    policy: RestartPolicy,
    *,
    run_id: str = "simulated",
    watch: WatchSpec = UNWATCHED,
) -> AgentSpec:
    """The spec of an agent whose node needs no name, since no other node will ever see it."""
    return AgentSpec(
        run_id=run_id,
        rendezvous=RendezvousConfig(nodes_min=1, nodes_max=1, policy=policy),
        offer=NodeOffer(node_id="0", host="localhost", address="127.0.0.1", slots=gang.size),
        gang=gang,
        watch=watch,
        is_alone=True,
    )


class Alone:
    """The rendezvous of a node with itself. See the module's text."""

    is_leading = True
    is_awaited = True
    is_cut_off = False
    alive_until: Instant | None = None
    """No node believes that this one is dead: there is no lease that could end."""

    def __init__(self, config: RendezvousConfig, offer: NodeOffer) -> None:
        self.config = config
        self.round = Round(number=0, phase=RoundPhase.GATHERING)
        self.next_deadline: Instant | None = None
        self._offer = offer
        self._pause_ends = Instant(0)
        self._port: int | None = None
        """Set while the node is ready for a round."""
        self._last_failures: tuple[Failure, ...] = ()

    @property
    def is_dissolved(self) -> bool:
        """Whether the node is wanted for another round than its last one."""
        return self.round.phase is RoundPhase.GATHERING

    def handle(self, stimulus: Stimulus, now: Instant) -> list[AloneEffect]:
        """Take in a fact; return what is to be done, in this order."""
        match stimulus:
            case NodeReady():
                self._port = stimulus.port
                return self._settle(now)
            case DeadlinePassed():
                return self._settle(now)
            case GangEnded():
                return self._on_gang_ended(stimulus, now)
            case DepartureRequested():
                return self._on_departure_requested(stimulus)
            case RanksArrived():
                return [StopStepAgreed(stimulus.round, stimulus.step)]
            case Left():
                return [LeaveSettled()]
            case _:  # messages for other nodes, and answers of a store
                return []

    def on_suspended(self, duration: Duration) -> None:
        """Let a pause not count the time in which this node was stopped."""
        self._pause_ends = after(self._pause_ends, duration)
        self.next_deadline = postponed(self.next_deadline, duration)

    def _settle(self, now: Instant) -> list[AloneEffect]:
        """Begin the round if the node is ready and the pause is over."""
        if self._port is None or self.round.phase is not RoundPhase.GATHERING:
            return []
        if now < self._pause_ends:
            # Ready before the pause is over, as a rule: the deadline begins the round.
            self.next_deadline = self._pause_ends
            return []
        self.next_deadline = None
        self.round = msgspec.structs.replace(self.round, phase=RoundPhase.RUNNING)
        port, self._port = self._port, None
        world = World(
            round=self.round.number,
            node_rank=0,
            members=(self._offer.node_id,),
            first_rank=0,
            slots=self._offer.slots,
            size=self._offer.slots,
            master_address=self._offer.address,
            master_port=port,
            restarts=self.round.restarts,
        )
        return [Settled(world)]

    def _on_gang_ended(self, ended: GangEnded, now: Instant) -> list[AloneEffect]:
        if ended.was_stopped:
            return self._close(OutcomeStatus.STOPPED)
        if ended.is_done:
            return self._close(OutcomeStatus.SUCCEEDED)
        self._last_failures = ended.failures
        obstacle = self._judge(ended)
        if obstacle is not None:
            return self._close(OutcomeStatus.FAILED, obstacle)
        return self._begin_again(ended, now)

    def _judge(self, ended: GangEnded) -> str | None:
        """Take note of what the round came to; return why there can be no other one."""
        policy, round_ = self.config.policy, self.round
        steps = [] if ended.step is None else [ended.step]
        progressed = has_progressed(policy, steps, round_.best_step, ended.ran)
        best = [step for step in (*steps, round_.best_step) if step is not None]
        self.round = msgspec.structs.replace(
            round_,
            rounds_without_progress=0 if progressed else round_.rounds_without_progress + 1,
            # Kept over restarts: a run that starts anew at step 0 each time makes no progress.
            best_step=max(best, default=None),
        )
        if round_.phase is RoundPhase.STOPPING or round_.restarts >= policy.restarts_max:
            return ""  # no restart was due, so there is no reason to give
        obstacle = obstacle_to_another(
            policy,
            root=ended.failures[0] if ended.failures else None,
            is_failure=True,
            rounds_without_progress=self.round.rounds_without_progress,
            restarts=round_.restarts,
        )
        failed = round_.restarts + 1
        if obstacle is None and policy.strikes_max is not None and failed >= policy.strikes_max:
            times = "failure" if failed == 1 else "failures"
            obstacle = f"not restarted: {failed} {times} began on this node, and there is no other"
        return obstacle or ended.obstacle or None

    def _begin_again(self, ended: GangEnded, now: Instant) -> list[AloneEffect]:
        policy, round_ = self.config.policy, self.round
        restarts = round_.restarts + 1
        pause = policy.backoff.before_restart(restarts)
        self._pause_ends = after(now, pause)
        self.round = msgspec.structs.replace(
            round_, number=round_.number + 1, phase=RoundPhase.GATHERING, restarts=restarts
        )
        left = policy.restarts_max - restarts
        return [
            AnnounceRestart(round_.number, left, pause, ended.failures, ended.kept),
            Dissolved(round_.number, self.round.number, why="a rank failed"),
        ]

    def _on_departure_requested(self, request: DepartureRequested) -> list[AloneEffect]:
        round_ = self.round
        match round_.phase:
            case RoundPhase.RUNNING:
                self.round = msgspec.structs.replace(
                    round_, phase=RoundPhase.STOPPING, signal=request.signal
                )
                return [StopAgreed(round_.number, "this run was told to stop", request.signal)]
            case RoundPhase.GATHERING:
                self.round = msgspec.structs.replace(round_, signal=request.signal)
                # A failure that came before the stop stays one: the restart it was given never
                # happened.
                if not self._last_failures:
                    return self._close(OutcomeStatus.STOPPED)
                # The restart that was due did not come about.
                self.round = msgspec.structs.replace(self.round, restarts=round_.restarts - 1)
                return self._close(OutcomeStatus.FAILED)
            case RoundPhase.STOPPING | RoundPhase.CLOSED:
                return []

    def _close(self, status: OutcomeStatus, detail: str = "") -> list[AloneEffect]:
        failures = self._last_failures if status is OutcomeStatus.FAILED else ()
        verdict = Verdict(
            status=status,
            detail=detail,
            root=failures[0] if failures else None,
            node=self._offer.node_id if failures else "",
            host=self._offer.host if failures else "",
            failure_count=len(failures),
            signal=self.round.signal,
            restarts=self.round.restarts,
        )
        self.round = msgspec.structs.replace(self.round, phase=RoundPhase.CLOSED, verdict=verdict)
        self.next_deadline = None
        return [Closed(verdict)]
