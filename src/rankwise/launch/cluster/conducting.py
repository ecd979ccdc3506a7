"""Conducts an agent on a session's stage: a node among several.

The agent machine of `core/agent` gets the stage's process host, a client of the store in threads,
and what `node_host` knows of the machine. Its end becomes the outcome of the run on this node.
"""

import secrets
import socket
from functools import partial

import msgspec

from rankwise.base.failure import Outcome, OutcomeStatus
from rankwise.base.units import Duration, Instant, after
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec, FinishRun, Stimulus
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import Stimulus as GangStimulus
from rankwise.core.gang.vocabulary import WorkerExited
from rankwise.core.rendezvous.configuration import NodeOffer
from rankwise.drivers.agent_dispatch import AgentDispatch
from rankwise.drivers.dispatch import Dispatch
from rankwise.drivers.real.store_client import StoreClient
from rankwise.drivers.real.stores.opening import open_store
from rankwise.launch.cluster.node_host import RealNodeHost
from rankwise.launch.cluster.plan import ClusterPlan
from rankwise.launch.cluster.telling import ClusterTeller
from rankwise.launch.stage import Conductor, Stage

NEVER = Instant(1 << 63)


def conduct_agent(plan: ClusterPlan) -> Conductor:
    """A conductor for a node that meets others as `plan` says."""
    return partial(ClusterDispatch, plan)


class ClusterDispatch(Dispatch):
    """Turns the agent of this node."""

    def __init__(self, plan: ClusterPlan, stage: Stage) -> None:
        job = stage.job
        self._stage = stage
        self._alive_until: Instant | None = None
        self._fence = NEVER
        self._agent = Agent(
            AgentSpec(
                run_id=job.run_id,
                rendezvous=plan.rendezvous,
                offer=NodeOffer(
                    node_id=secrets.token_hex(4),
                    host=socket.gethostname(),
                    address=plan.address,
                    slots=job.gang.size,
                    topology=plan.topology,
                    seat=plan.seat,
                ),
                gang=job.gang,
                leaves_alone=plan.leaves_alone,
            )
        )
        self._host = RealNodeHost(stage, plan, self._deliver)
        store = open_store(plan.backend, plan.endpoint, plan.store, run_id=job.run_id)
        self._client = stage.stack.enter_context(
            StoreClient(
                store,
                reactor=stage.reactor,
                clock=stage.clock,
                deliver=self._deliver,
                request_timeout=plan.rendezvous.request_timeout,
            )
        )
        self._teller = ClusterTeller(stage, plan)
        self._dispatch = AgentDispatch(
            self._agent,
            host=self._host,
            ask_store=self._client.submit,
            clock=stage.clock,
            journal=stage.journal,
            on_announcement=self._teller.tell,
        )
        self._outcome: Outcome | None = None

        if plan.health_port is not None:
            self._answer_for_health(plan.health_port, stage)

    @property
    def outcome(self) -> Outcome | None:
        """What became of the run, once the agent's life is over."""
        finished = self._dispatch.finished
        if finished is not None and self._outcome is None:
            self._outcome = outcome_of(finished, self._host.rounds, self._host.world_size)
            if finished.verdict is not None and self._host.rounds == 0:
                self._teller.tell_too_late(finished.verdict)
        return self._outcome

    @property
    def next_deadline(self) -> Instant | None:
        """When `tick` wants to be called next."""
        return self._dispatch.next_deadline

    @property
    def gang(self) -> Gang | None:
        """The gang of the present round."""
        return self._agent.gang

    def begin(self) -> None:
        """Let the agent begin its life."""
        self._dispatch.start()

    def deliver(self, stimulus: GangStimulus) -> None:
        """Tell the agent what its processes do, or that it shall stop."""
        if isinstance(stimulus, WorkerExited) and stimulus.at >= self._fence:
            # The guardian has killed it, since this process was stopped for longer than its lease.
            # It has not failed: the agent first finds out that it was cut off, then of the end.
            self.tick()
            stimulus = msgspec.structs.replace(stimulus, at=self._stage.clock.now())
        self._host.on_gang_stimulus(stimulus)

    def tick(self) -> None:
        """Let a deadline that has passed take effect."""
        self._dispatch.tick()
        self._put_fence()

    def _deliver(self, stimulus: Stimulus) -> None:
        self._dispatch.deliver(stimulus)
        self._put_fence()

    def _put_fence(self) -> None:
        """Tell the guardian until when workers may live, should this process get stuck."""
        rendezvous = self._agent.rendezvous
        alive_until = rendezvous.alive_until
        if alive_until == self._alive_until:
            return
        self._alive_until = alive_until
        if alive_until is None:  # the agent itself has noticed, and ends its workers
            self._stage.host.fence(None)
            return
        self._fence = after(alive_until, Duration(rendezvous.config.fence // 2))
        self._stage.host.fence(self._fence)

    def _answer_for_health(self, port: int, stage: Stage) -> None:
        from rankwise.launch.cluster.health import AgentStatus, HealthServer  # noqa: PLC0415  # rare

        def look() -> AgentStatus:
            agent = self._agent
            world = agent.world
            segment = stage.planner.segment
            step = None if segment is None else segment.steps()
            alive = sum(not link.is_over for link in stage.host.links.values())
            status = AgentStatus(
                run_id=agent.spec.run_id,
                node=agent.spec.offer.node_id,
                phase=str(agent.phase),
                workers=alive,
                leads=agent.rendezvous.is_leading,
                step=-1 if step is None else step,
            )
            if world is None:
                return status
            return msgspec.structs.replace(
                status,
                round=world.round,
                node_rank=world.node_rank,
                nodes=len(world.members),
                restarts=world.restarts,
            )

        server = stage.stack.enter_context(HealthServer(port, stage.reactor.post, look))
        if port == 0:
            stage.say(f"health is answered for on port {server.port}")


def outcome_of(finished: FinishRun, rounds: int, size: int | None) -> Outcome:
    """What a run on this node came to: the whole job's verdict, with this node's own failures.

    The root cause of the job comes first on every node, wherever it happened.
    """
    own = finished.outcome.failures if finished.outcome is not None else ()
    survivors = finished.outcome.survivors if finished.outcome is not None else ()
    verdict = finished.verdict
    if verdict is None:
        refusal = finished.refusal
        detail = finished.detail
        if refusal is not None:
            detail = f"{refusal.why} ({refusal.hint})" if refusal.hint else refusal.why
        # Who was told to go before its first round never had a gang that could say so.
        stop_signal = finished.stop_signal
        was_stopped = stop_signal is not None
        # Of a run that refuses this node, the agent has ended the gang unasked.
        is_gang_stopped = (
            finished.outcome is not None and finished.outcome.status is OutcomeStatus.STOPPED
        )
        if refusal is None and finished.outcome is not None and is_gang_stopped:
            was_stopped, stop_signal = True, stop_signal or finished.outcome.stop_signal
        return Outcome(
            status=OutcomeStatus.STOPPED if was_stopped else OutcomeStatus.FAILED,
            attempts=rounds,
            failures=() if is_gang_stopped else own,
            stop_signal=stop_signal if was_stopped else None,
            survivors=survivors,
            detail=detail,
        )
    root = verdict.root
    others = tuple(failure for failure in own if root is None or failure.rank != root.rank)
    return Outcome(
        status=verdict.status,
        attempts=verdict.restarts + 1,
        failures=()
        if verdict.status is OutcomeStatus.SUCCEEDED or root is None
        else (root, *others),
        stop_signal=verdict.signal,
        survivors=survivors,
        detail=verdict.detail,
        size=size,
        failed=verdict.failure_count,
    )
