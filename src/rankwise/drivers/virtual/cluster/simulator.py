"""A simulated cluster from its first agent to its last: virtual time, and checkers that watch.

The agents, their dispatch and the store's keyspace are those of a real cluster. The world gives
them wrong clocks, a bad network and virtual workers, lets happen what the plan says, and goes on
until every agent has told what became of the run. A node that is alone is a cluster of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from rankwise.base.errors import SimulationError
from rankwise.base.keys import Revision
from rankwise.base.units import SECOND, ZERO, Duration, Instant, after
from rankwise.core.agent.alone import spec_alone
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec, FinishRun
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.records import RunKeys, Verdict
from rankwise.core.rendezvous.vocabulary import World
from rankwise.core.watch.vocabulary import WatchSpec
from rankwise.drivers.virtual.agenda import Agenda, VirtualClock
from rankwise.drivers.virtual.cluster.checkers import ClusterChecker
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan
from rankwise.drivers.virtual.cluster.host import SIGTERM
from rankwise.drivers.virtual.cluster.known_runs import RoundRecords
from rankwise.drivers.virtual.cluster.node import SimulatedNode
from rankwise.drivers.virtual.cluster.simulated_store import SimulatedStore
from rankwise.drivers.virtual.cluster.simulated_worker import SimulatedWorker
from rankwise.drivers.virtual.cluster.skewed_clocks import SkewedClock
from rankwise.drivers.virtual.cluster.traffic import Traffic
from rankwise.drivers.virtual.journal import MemoryJournal
from rankwise.drivers.virtual.random_streams import stream
from rankwise.sim.faults.vocabulary import (
    BlameWorker,
    CompactStore,
    CrashStore,
    FailWorker,
    FaultOfCluster,
    KillAgent,
    Leave,
    LoseGuardian,
    LoseStore,
    MissCall,
    Partition,
    Preempt,
    RefuseWorkers,
    SlowDisk,
    StartAgents,
)

RUN_ID = "simulated"
_WATCH = WatchSpec(stop_signals=(SIGTERM,))
STEPS_MAX = 50_000_000
PEERS_NOTICE = Duration(SECOND // 20)
"""Within which a worker's peers see its connections close."""


@dataclass(frozen=True)
class ClusterRun:
    """What a simulated cluster left.

    Attributes:
        verdict: what became of the job; None if no agent learned it.
        finished: what each agent told, by node id.
        ended_at: when the last agent had ended, in virtual time.
        rounds: the records of all rounds that ran, by number.
        traffic: what went through the store.
        steps: how many things happened.
        left_behind: processes that were alive when their agents had ended (pids).
    """

    verdict: Verdict | None
    finished: dict[str, FinishRun]
    ended_at: Instant
    rounds: dict[int, RoundRecords]
    traffic: Traffic
    steps: int
    left_behind: tuple[int, ...]


class ClusterSimulator:
    """A world for one run of a cluster.

    Args:
        plan: what the cluster is, and its faults.
        seed: decides all that is left to chance.
        keeps_journal: whether every stimulus and effect of every agent is remembered.
        make_agent: makes the machines; others than `Agent` show that the checkers can fail.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        seed: int,
        *,
        keeps_journal: bool = True,
        make_agent: Callable[[AgentSpec], Agent] = Agent,
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.journal = MemoryJournal()
        self._clock = VirtualClock()
        self._agenda = Agenda(self._clock)
        self.checker = ClusterChecker(plan, RUN_ID, self._clock.now)
        self._seen = Revision(0)
        self.store = SimulatedStore(
            agenda=self._agenda,
            clock=self._clock,
            network=plan.network,
            request_timeout=plan.rendezvous.request_timeout,
            chance=stream(seed, "network"),
            on_change=self._store_has_changed,
        )
        self._steps = 0
        self._starts_pending = 0
        self._timers: dict[int, Instant] = {}
        self._checked_rounds = (0, 0)
        self._configs: dict[int, RendezvousConfig] = {}
        """Of nodes whose agents want something else than the plan."""
        self._closing_chance = stream(seed, "closers")
        self._closings_seen = 0
        self._cuts: dict[int, int] = {}
        self._is_store_lost = False
        self._left_behind: list[int] = []
        self._preempted_later: dict[int, Preempt] = {}
        clock_chance = stream(seed, "clocks")
        self.nodes = [
            SimulatedNode(
                number=number,
                plan=plan,
                agenda=self._agenda,
                clock=SkewedClock(
                    self._clock,
                    Duration(clock_chance.randrange(plan.clocks.offset_max + 1)),
                    clock_chance.randint(-plan.clocks.drift_ppm_max, plan.clocks.drift_ppm_max),
                ),
                store=self.store,
                spec_of=self._spec_of,
                make_agent=make_agent,
                journal=self.journal if keeps_journal else None,
                witness=self,
                on_step=self._after_step_of,
                chance=stream(seed, "node", number),
            )
            for number in range(plan.nodes)
        ]

    def run(self) -> ClusterRun:
        """Live the cluster's life.

        Raises:
            InvariantBroken: the cluster did what no cluster may do.
        """
        self._write_agenda()
        limit = after(self.plan.last_fault, self.plan.patience)
        while self._starts_pending or self._up:
            following = self._agenda.next_instant
            if following is None or (following > limit and not self.plan.is_alone):
                self._judge_end()
                break
            self._agenda.run_next()
            self._steps += 1
            if self._steps > STEPS_MAX:
                raise SimulationError(f"no end after {STEPS_MAX} steps: {self._unfinished()[:8]}")
        ended_at = self._clock.now()
        self._drain()
        self._judge_end()
        self._let_leases_end()
        verdicts = [finish.verdict for finish in self.checker.finished.values()]
        return ClusterRun(
            verdict=next((verdict for verdict in verdicts if verdict is not None), None),
            finished=self.checker.finished,
            ended_at=ended_at,
            rounds=self.checker.rounds,
            traffic=self.store.traffic,
            steps=self._steps,
            left_behind=tuple(self._left_behind),
        )

    def _judge_end(self) -> None:
        if self.plan.is_alone:
            for node in self.nodes:
                if node.gang_checker is not None:
                    node.gang_checker.judge_end()
        else:
            self.checker.judge_end(self._clock.now(), self._unfinished())

    def _unfinished(self) -> list[str]:
        return [
            f"{node.node_id} is {node.agent.phase}"
            for node in self.nodes
            if node.is_up and node.agent is not None
        ]

    def _drain(self) -> None:
        """Let killed workers die, for a while; leases may go on ending for ever."""
        limit = after(self._clock.now(), Duration(SECOND))
        while (following := self._agenda.next_instant) is not None:
            if following > limit and not self.plan.is_alone:
                break
            self._agenda.run_next()

    def _let_leases_end(self) -> None:
        """Wait until the store must have forgotten the run, if it ever does."""
        run_ttl = self.plan.rendezvous.run_ttl
        if run_ttl is None or self.plan.is_alone:
            return
        limit = after(self._clock.now(), Duration(run_ttl + self.plan.rendezvous.lease_ttl))
        while self._agenda.next_instant is not None and self._agenda.next_instant <= limit:
            self._agenda.run_next()
        self.checker.judge_leftovers(self.store.keyspace.read("").entries)

    def _spec_of(self, number: int, node_id: str) -> AgentSpec:
        plan = self.plan
        if plan.is_alone:
            return spec_alone(plan.gang_spec, plan.rendezvous.policy, watch=_WATCH)
        static = plan.rendezvous.is_static
        return AgentSpec(
            run_id=RUN_ID,
            rendezvous=self._configs.get(number, plan.rendezvous),
            offer=NodeOffer(
                node_id=node_id,
                host=f"h{number}",
                address=f"10.0.{number // 256}.{number % 256}",
                slots=plan.workers.per_node,
                topology=f"rack{number // 16}",
                static_rank=number if static else None,
            ),
            gang=plan.gang_spec,
            watch=_WATCH,
            leaves_alone=plan.leaves_alone,
        )

    # The agenda

    def _write_agenda(self) -> None:
        self._up: set[int] = set()
        chance = stream(self.seed, "joins")
        for node in self.nodes:
            at = self.plan.late.get(node.number)
            if at is None:
                at = Instant(int(chance.random() * (self.plan.joins_within + 1)))
            self._start_later(node, at)
        for fault in self.plan.faults:
            self._starts_pending += isinstance(fault, StartAgents)
            self._agenda.at(fault.at, partial(self._strike, fault))

    def _start_later(self, node: SimulatedNode, at: Instant) -> None:
        self._starts_pending += 1
        self._agenda.at(at, partial(self._start, node))

    def _start(self, node: SimulatedNode) -> None:
        self._starts_pending -= 1
        if not node.is_up:
            self._up.add(node.number)
            self._timers.pop(node.number, None)
            node.start_agent()

    def _start_again(self, start: StartAgents) -> None:
        self._starts_pending -= 1
        config = self.plan.rendezvous
        if start.restarts_max is not None:
            policy = msgspec.structs.replace(config.policy, restarts_max=start.restarts_max)
            config = msgspec.structs.replace(config, policy=policy)
        if start.program:
            config = msgspec.structs.replace(config, settings={"program": start.program})
        for number in start.nodes:
            if not self.nodes[number].is_up:
                self._configs[number] = config
                self._start_later(self.nodes[number], self._clock.now())

    def _strike(self, fault: FaultOfCluster) -> None:
        match fault:
            case KillAgent():
                self._kill_agent(self.nodes[fault.node], fault.back_after)
            case FailWorker():
                self.nodes[fault.node].workers.fail_worker(fault)
            case LoseGuardian():
                self.nodes[fault.node].workers.lose_guardian()
            case BlameWorker():
                self.nodes[fault.node].workers.blame(fault.local_rank)
            case MissCall():
                self._miss_call(fault)
            case RefuseWorkers():
                node = self.nodes[fault.node]
                node.workers.refuses_until = after(self._clock.now(), fault.lasts)
            case Preempt():
                self._preempt(self.nodes[fault.node], fault)
            case Leave():
                if self.nodes[fault.node].is_up:
                    self.nodes[fault.node].ask_to_leave()
            case Partition():
                self._cut(fault.nodes)
                self._agenda.after(fault.lasts, partial(self._mend, fault.nodes))
            case CrashStore():
                self.store.crash()
                self._agenda.after(fault.lasts, partial(self._restart_store, fault))
            case LoseStore():
                self._kill_agent(self.nodes[fault.node], None)
                self.store.crash()
                self._is_store_lost = True
                if self.plan.rendezvous.ends_with_store:
                    patience = self.checker.orphan_patience
                    self._agenda.after(
                        patience, partial(self.checker.judge_orphans, self.nodes, self._clock.now())
                    )
            case SlowDisk():
                self.store.set_disk(fault.takes)
                self._agenda.after(fault.lasts, partial(self.store.set_disk, Duration(0)))
            case CompactStore():
                self.store.compact()
            case StartAgents():
                self._start_again(fault)

    def _miss_call(self, missed: MissCall) -> None:
        """All but one of the ranks of its round come to a collective."""
        absent = self.nodes[missed.node].workers.latest(missed.local_rank)
        if absent is None:
            return
        # Ranks that wait in a call, or have waited until they failed, come to no other.
        if not any(node.workers.stand_already(absent.round) for node in self.nodes):
            for node in self.nodes:
                node.workers.let_ranks_wait_for(absent, missed.patience)

    def _kill_agent(self, node: SimulatedNode, back_after: Duration | None) -> None:
        if not node.is_up:
            return
        node.kill_agent()
        if back_after is not None:
            self._start_later(node, after(self._clock.now(), back_after))

    def _preempt(self, node: SimulatedNode, preempt: Preempt) -> None:
        """Ask the agent to stop, now or when it is in the phase for which the plan waits."""
        if preempt.phase is not None and (node.agent is None or node.agent.phase != preempt.phase):
            self._preempted_later[node.number] = preempt
            return
        self._preempted_later.pop(node.number, None)
        if node.dispatch is None:
            return
        if preempt.ranks_before is not None:
            node.workers.signal_ranks()
            only_agent = msgspec.structs.replace(preempt, phase=None, ranks_before=None)
            self._agenda.after(preempt.ranks_before, partial(self._preempt, node, only_agent))
            return
        if not self.plan.is_alone:  # of one that is alone, the gang's deadlines say more
            judge = partial(self.checker.judge_stop, node, node.node_id, self._clock.now())
            self._agenda.after(self.checker.stop_patience, judge)
        if preempt.again_after is not None:
            self._agenda.after(preempt.again_after, partial(self._ask_again, node, node.lives))
        node.ask_to_stop(preempt.signal)

    def _ask_again(self, node: SimulatedNode, life: int) -> None:
        if node.is_up and node.lives == life:
            node.ask_to_stop(15)

    def _cut(self, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            self._cuts[node] = self._cuts.get(node, 0) + 1
            self.store.cut_off.add(node)

    def _mend(self, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            self._cuts[node] -= 1
            if not self._cuts[node]:
                self.store.cut_off.discard(node)
        self.store.catch_up()

    def _restart_store(self, crash: CrashStore) -> None:
        if self._is_store_lost:
            return
        if crash.forgets:
            self._seen = Revision(0)
            self.checker.store_emptied()
        self.store.come_back(forgets=crash.forgets)

    # What is told from below

    def _store_has_changed(self) -> None:
        keyspace = self.store.keyspace
        if keyspace.revision == self._seen:
            return
        changes = keyspace.changes_after(self._seen, "")
        self._seen = keyspace.revision
        self.checker.changed(changes)
        self._kill_closer()
        counts = (len(self.checker.runs), len(self.checker.rounds))
        if self.checker.rounds and counts > self._checked_rounds:
            run, number = self.checker.runs[-1], max(self.checker.rounds)
            self._agenda.after(
                self.checker.admission_patience,
                partial(self.checker.judge_admission, run, number, self._is_node_up),
            )
        self._checked_rounds = max(counts, self._checked_rounds)

    def _kill_closer(self) -> None:
        """Let the leader that has just written the end of a run die of it, if the plan says so."""
        run = self.checker.runs[-1] if self.checker.runs else None
        if run is None or not run.is_closed or run.number < self._closings_seen:
            return
        self._closings_seen = run.number + 1
        if self._closing_chance.randrange(100) >= self.plan.closers_die:
            return
        for entry in self.store.keyspace.read(RunKeys(RUN_ID).leader).entries:
            node = self._node_called(entry.value.decode().partition(" ")[0])
            if node is not None:
                self._agenda.after(ZERO, partial(self._kill_agent, node, None))

    def _is_node_up(self, node_id: str) -> bool:
        return self._node_called(node_id) is not None

    def _node_called(self, node_id: str) -> SimulatedNode | None:
        """The node whose living agent has that id."""
        node = self.nodes[int(node_id[1:].split(".", maxsplit=1)[0])]
        return node if node.is_up and node.node_id == node_id else None

    def _after_step_of(self, node: SimulatedNode) -> None:
        agent = node.agent
        if agent is None or not node.is_up:
            return
        if node.gang_checker is not None:
            node.gang_checker.after_step(node.clock.now())
        if agent.finished is not None:
            self.checker.agent_finished(node, agent.finished)
            self._left_behind += [process.pid for process in node.workers.processes()]
            node.end_agent()
            self._up.discard(node.number)
            return
        preempt = self._preempted_later.get(node.number)
        if preempt is not None and agent.phase == preempt.phase:
            del self._preempted_later[node.number]
            at_once = msgspec.structs.replace(preempt, phase=None)
            self._agenda.after(ZERO, partial(self._preempt, node, at_once))
        deadline = agent.next_deadline
        timer = self._timers.get(node.number)
        if deadline is not None and (timer is None or deadline < timer):
            self._arm(node, deadline)

    def _arm(self, node: SimulatedNode, deadline: Instant) -> None:
        self._timers[node.number] = deadline
        at = max(node.clock.truth_of(deadline), self._clock.now())
        self._agenda.at_deadline(at, partial(self._ring, node, deadline))

    def _ring(self, node: SimulatedNode, deadline: Instant) -> None:
        if self._timers.get(node.number) != deadline:
            return
        del self._timers[node.number]
        agent = node.agent
        if agent is None or not node.is_up:
            return
        due = agent.next_deadline
        if due is not None and due > deadline:  # it was put off meanwhile
            self._arm(node, due)
        else:
            node.wake()

    # The witness: passes the truth on to the checker, and lets peers notice

    def started(self, worker: SimulatedWorker) -> None:
        """A worker has come into being."""
        if not self.plan.is_alone:
            self.checker.started(worker)

    def ended(self, worker: SimulatedWorker) -> None:
        """A worker has ended: its peers' connections to it close."""
        if not self.plan.is_alone:
            self.checker.ended(worker)
        if self.plan.workers.cascade and not worker.succeeded:
            self._let_peers_notice(worker.node, worker.round)

    def vanished(self, node: SimulatedNode) -> None:
        """A node's agent was killed."""
        self._up.discard(node.number)

    def began(self, node: SimulatedNode, world: World) -> None:
        """A node's agent has begun a round."""
        if not self.plan.is_alone:
            self.checker.began(node, world)

    def _let_peers_notice(self, node: SimulatedNode, round_number: int) -> None:
        chance = stream(self.seed, "cascade", node.number, self._steps)
        for peer in self.nodes:
            if peer is not node and peer.workers.living:
                delay = Duration(int(chance.random() * PEERS_NOTICE))
                self._agenda.after(delay, partial(peer.workers.on_peer_vanished, round_number))
