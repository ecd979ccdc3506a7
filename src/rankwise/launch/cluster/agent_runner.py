"""Runs the agent of this node on a session's parts.

The agent machine of `core/agent` gets the session's process host, what `node_host` knows of the
machine, and, among several nodes, a client of the store in threads. Its end becomes the outcome of
the run on this node.
"""

import socket
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.failure import Absence, Outcome, OutcomeStatus
from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec, Announcement, FinishRun, Stimulus
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import (
    RecallRequested,
    RecoveryMessageSent,
    Resumed,
    Started,
    WorkerExited,
    WorkerSpawned,
)
from rankwise.core.gang.vocabulary import Stimulus as GangStimulus
from rankwise.core.rendezvous.configuration import NodeOffer
from rankwise.core.rendezvous.records import Trouble
from rankwise.core.rendezvous.vocabulary import InquiryAnswered, Order, RefusalKind, TroubleReported
from rankwise.core.watch.vocabulary import WatchSpec
from rankwise.drivers.agent_dispatch import AgentDispatch
from rankwise.launch.cluster.node_host import RealNodeHost
from rankwise.launch.cluster.plan import RendezvousPlan
from rankwise.launch.run.run_parts import RunParts

if TYPE_CHECKING:
    from rankwise.launch.cluster.console_announcements import ConsoleAnnouncements
    from rankwise.launch.cluster.metrics import AgentSnapshot
    from rankwise.launch.cluster.probe import Probe
    from rankwise.launch.looking.hang_explanation import NodesAnswer

NEVER = Instant(1 << 63)
_OF_PROCESSES = (WorkerSpawned, RecoveryMessageSent, WorkerExited)
"""What the recorder is told of ranks."""


class AgentRunner:
    """Runs the agent of this node, which meets others or is alone, as `plan` says."""

    def __init__(self, plan: RendezvousPlan, parts: RunParts) -> None:
        job = parts.job
        self._parts = parts
        self._plan = plan
        self._alive_until: Instant | None = None
        self._fence = NEVER
        self._agent = Agent(
            AgentSpec(
                run_id=job.run_id,
                rendezvous=plan.rendezvous,
                offer=NodeOffer(
                    node_id=plan.node_id,
                    host=socket.gethostname(),
                    address=plan.address,
                    slots=job.gang.size,
                    topology=plan.topology,
                    static_rank=plan.static_rank,
                ),
                gang=job.gang,
                watch=WatchSpec(stop_signals=tuple(sorted(job.signals)), asks_about_hangs=True),
                is_alone=plan.is_alone,
                leaves_alone=plan.leaves_alone,
            )
        )
        self._host = RealNodeHost(parts, plan, self.deliver)
        self._dispatch = AgentDispatch(
            self._agent,
            host=self._host,
            ask_store=None if plan.is_alone else self._meet(plan, parts),
            clock=parts.clock,
            journal=parts.journal,
            on_announcement=self._announce,
        )
        self._outcome: Outcome | None = None

        if plan.health_port is not None:
            self._answer_for_health(plan, plan.health_port, parts)
        if plan.telemetry:
            from rankwise.launch.cluster.telemetry import Telemetry  # noqa: PLC0415  # rare

            probe = self._probe(plan, parts)
            parts.stack.enter_context(Telemetry(probe, parts.reactor.post, parts.say))

    @property
    def outcome(self) -> Outcome | None:
        """What became of the run, once the agent's life is over."""
        finished = self._dispatch.finished
        if finished is not None and self._outcome is None:
            # Of one node, its own failures tell how many there were.
            size = None if self._agent.spec.is_alone else self._host.world_size
            outcome = finished.as_outcome(size)
            has_taken_part = finished.has_taken_part and not self._agent.spec.is_alone
            if finished.verdict is None and has_taken_part:
                outcome = msgspec.structs.replace(outcome, attempts=self._host.restarts + 1)
            self._outcome = msgspec.structs.replace(outcome, absence=self._absence(finished))
            was_late = self._was_late(finished)
            if was_late and not self._agent.spec.is_alone:
                assert finished.verdict is not None, "asked just above"
                self._announcements.tell_too_late(finished.verdict)
        return self._outcome

    @cached_property
    def _announcements(self) -> "ConsoleAnnouncements":
        """Loaded with the first one: a node that is alone and succeeds has nothing to say."""
        from rankwise.launch.cluster.console_announcements import ConsoleAnnouncements  # noqa: PLC0415

        return ConsoleAnnouncements(self._parts.job, self._plan, self._parts.say)

    def _announce(self, announcement: Announcement) -> None:
        self._announcements.tell(announcement)
        self._parts.history.note(announcement)

    def _was_late(self, finished: FinishRun) -> bool:
        """Whether a run had ended before this node came, which has not ended it itself."""
        verdict = finished.verdict
        if verdict is None or finished.has_taken_part:
            return False
        return verdict.status is not OutcomeStatus.FAILED or verdict.root is not None

    def _absence(self, finished: FinishRun) -> Absence | None:
        if finished.refusal is not None and finished.refusal.kind is RefusalKind.CHARTER:
            return Absence.ANOTHER_JOB
        config = self._agent.spec.rendezvous
        may_be_idle = self._agent.spec.is_alone or config.spares or not config.replaces_ended
        verdict = finished.verdict
        is_success = verdict is not None and verdict.status is OutcomeStatus.SUCCEEDED
        return (
            Absence.TOO_LATE
            if is_success and not (finished.has_taken_part or may_be_idle)
            else None
        )

    @property
    def next_deadline(self) -> Instant | None:
        """When `wake` wants to be called next."""
        return self._dispatch.next_deadline

    @property
    def lineup(self) -> str:
        """The nodes of the present round, and what has changed; empty while there is none."""
        world = self._agent.world
        if world is None or self._agent.spec.is_alone:
            return ""
        from rankwise.launch.cluster.console_announcements import lineup_text  # noqa: PLC0415  # rare

        return lineup_text(world)

    @property
    def gang(self) -> Gang | None:
        """The gang of the present round."""
        return self._agent.gang

    @property
    def failures_so_far(self) -> tuple[dict[str, int], str]:
        """How many ranks of this node have failed, by cause; and the latest root cause in words."""
        latest = self._host.latest_failure
        if latest is None:
            return {}, ""
        from rankwise.launch.telling.failure_report.sentences import one_line  # noqa: PLC0415  # rare

        return self._host.failure_counts, one_line(latest)

    def begin(self) -> None:
        """Let the agent begin its life."""
        self._dispatch.start()

    def on_rank(self, fact: GangStimulus) -> None:
        """Tell the agent what its processes do."""
        if isinstance(fact, WorkerExited):
            if fact.at >= self._fence:
                # The guardian has killed it, since this process was stopped for longer than its
                # lease. It has not failed: the agent first finds out that it was cut off.
                self.wake()
                fact = msgspec.structs.replace(fact, at=self._parts.clock.now())
            self._host.note_exit(fact)
        if isinstance(fact, _OF_PROCESSES) and (recorder := self._parts.recorder()) is not None:
            recorder.on_stimulus(fact)
        if isinstance(fact, WorkerSpawned):
            self._parts.watches.on_spawned()
        assert not isinstance(fact, Started | RecallRequested | Resumed), (
            "the agent starts its gangs itself"
        )
        self.deliver(fact)

    def deliver(self, stimulus: Stimulus) -> None:
        """Tell the agent a fact: its store's, its node's, or that it has to stop."""
        self._parts.host.note_ends()  # it may be a stop, and what is done by now stays done
        self._dispatch.deliver(stimulus)
        self._put_fence()

    def ask_nodes(self, trouble: Trouble) -> bool:
        """Have the other nodes asked what their ranks do; tells whether there are others."""
        world = self._agent.world
        if self._agent.spec.is_alone or world is None or len(world.members) < 2:
            return False
        self._dispatch.deliver(TroubleReported(world.round, trouble))
        return self._agent.has_workers

    def nodes_answered(self, answered: InquiryAnswered) -> "NodesAnswer | None":
        """That answer with the names of nodes; None if the round is over."""
        from rankwise.launch.looking.hang_explanation import HangExplanation, NodesAnswer  # noqa: PLC0415  # rare

        world = self._agent.world
        if world is None:
            return None
        names = dict(zip(world.members, world.lineup.hosts, strict=False))
        own = self._agent.spec.offer.node_id
        others = tuple(names.get(node, node) for node in world.members if node != own)
        silent = tuple(names.get(node, node) for node in answered.silent)
        if not answered.in_time:
            silent = others
        return NodesAnswer(HangExplanation(answered.text, answered.identity), others, silent)

    def wake(self) -> None:
        """Let a deadline that has passed take effect."""
        self._dispatch.wake()
        self._put_fence()

    @property
    def is_holding(self) -> bool:
        """Whether an exit is held back until ranks or nodes have answered."""
        return self._agent.watch is not None and self._agent.watch.awaits_answers

    def _meet(self, plan: RendezvousPlan, parts: RunParts) -> Callable[[Order], None]:
        """Become a client of the store where the nodes meet."""
        from rankwise.drivers.real.store_client import StoreClient  # noqa: PLC0415  # for several
        from rankwise.drivers.real.stores.opening import open_store, token_of  # noqa: PLC0415  # the same

        settings, run_id = plan.store, parts.job.run_id
        if plan.own_etcd:
            from pathlib import Path  # noqa: PLC0415  # the same

            from rankwise.launch.cluster.own_etcd import OwnEtcd  # noqa: PLC0415  # the same

            place = Path(parts.planner.private_path)
            token = token_of(settings, run_id)
            own = OwnEtcd(
                plan.endpoint, run_id, token, self._is_over, own_hosts=plan.own_hosts, place=place
            )
            settings = {**settings, **parts.stack.enter_context(own).settings}
        client = StoreClient(
            open_store(plan.backend, plan.endpoint, settings, run_id=run_id),
            reactor=parts.reactor,
            clock=parts.clock,
            deliver=self.deliver,
            request_timeout=plan.rendezvous.request_timeout,
        )

        def close(*exc_info: object) -> None:
            # A node that leaves before there is a verdict has nothing to tell that would end the
            # others.
            client.close(has_last_words=self._is_over() and not any(exc_info))

        parts.stack.push(close)
        return client.submit

    def _is_over(self) -> bool:
        # Also asked when a setting of the store is refused: then there is no dispatch yet.
        finished = self._agent.finished
        return finished is not None and finished.verdict is not None

    def _put_fence(self) -> None:
        """Tell the guardian until when workers may live, should this process get stuck."""
        rendezvous = self._agent.rendezvous
        alive_until = rendezvous.alive_until
        if alive_until == self._alive_until:
            return
        self._alive_until = alive_until
        if alive_until is None:  # the agent itself has noticed, and ends its workers
            self._parts.host.fence(None)
            return
        self._fence = after(alive_until, Duration(rendezvous.config.fence // 2))
        self._parts.host.fence(self._fence)

    def _answer_for_health(self, plan: RendezvousPlan, port: int, parts: RunParts) -> None:
        from rankwise.launch.cluster.health import HealthServer  # noqa: PLC0415  # rare

        server = parts.stack.enter_context(
            HealthServer(
                port, self._probe(plan, parts), host=plan.health_host, token=plan.health_token
            )
        )
        if port == 0:
            from rankwise.drivers.real.stores.connections import endpoint_text  # noqa: PLC0415  # rare

            endpoint = endpoint_text(self._agent.spec.offer.address, server.port)
            parts.say(f"health: http://{endpoint}/health")

    def _probe(self, plan: RendezvousPlan, parts: RunParts) -> "Probe":
        from rankwise.launch.cluster.probe import Probe  # noqa: PLC0415  # rare
        from rankwise.launch.control.addresses import shown_id  # noqa: PLC0415  # the same

        name = shown_id(self._agent.spec.run_id, is_secret=plan.is_id_secret)
        return Probe(parts.reactor.post, lambda: self._snapshot(name, parts))

    def _snapshot(self, run_name: str, parts: RunParts) -> "AgentSnapshot":
        from rankwise.launch.cluster.metrics import AgentSnapshot, AgentStatus  # noqa: PLC0415  # rare
        from rankwise.launch.looking.rank_status import ranks_now  # noqa: PLC0415  # the same

        agent, planner = self._agent, parts.planner
        segment, delays = planner.segment, parts.watches.delays()
        step = None if segment is None else segment.steps()
        status = AgentStatus(
            run_id=run_name,
            node=agent.spec.offer.node_id,
            phase=str(agent.phase),
            workers=sum(not link.is_over for link in parts.host.links.values()),
            failures=self._host.failure_counts.copy(),
            leads=agent.rendezvous.is_leading,
            step=-1 if step is None else step,
            xids={} if parts.evidence.gpus is None else parts.evidence.gpus.xid_counts(),
            waited_for_seconds={delay.rank: delay.waited / SECOND for delay in delays},
        )
        if (world := agent.world) is not None:
            status = msgspec.structs.replace(
                status,
                round=world.round,
                node_rank=world.node_rank,
                nodes=len(world.members),
                restarts=world.restarts,
            )
        if agent.gang is None:
            return AgentSnapshot(status=status)
        ranks = ranks_now(
            agent.gang,
            planner.ranks,
            segment,
            delays,
            parts.clock.now(),
            waited_so_far=parts.watches.waited_so_far,
        )
        # A rank for which the others wait is told while they do: that is when an alert is due.
        waited_for = {rank.rank: rank.waited_for_s for rank in ranks if delays or rank.waited_for_s}
        status = msgspec.structs.replace(status, waited_for_seconds=waited_for)
        return AgentSnapshot(status=status, ranks=tuple(ranks))
