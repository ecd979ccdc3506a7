"""What a simulated cluster is, and its faults: values, written as YAML or drawn from a seed.

Nodes are counted from 0; the machine of node 3 is `h3`. A node may live several times: each agent
that starts there is a new one, with an id of its own. A node that `is_alone` is a cluster of one,
whose agent meets no other and needs no store.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from rankwise.base.units import MICROSECOND, MILLISECOND, SECOND, ZERO, Duration, Instant
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.drivers.virtual.worker_behaviour import WorkerProgram
from rankwise.sim.faults.vocabulary import AmongOthers, FaultOfCluster, word_for


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way between each node and the store.

    Attributes:
        latency_min, latency_max: what a message takes; messages overtake each other, but those of
            one watch do not.
        loss: how many of 10,000 messages are lost. A lost answer leaves its request carried out.
        duplicates: how many of 10,000 requests arrive twice.
        until: after which nothing is lost any more; None for never.
    """

    latency_min: Duration = Duration(200 * MICROSECOND)
    latency_max: Duration = Duration(2 * MILLISECOND)
    loss: int = 0
    duplicates: int = 0
    until: Instant | None = None

    def __post_init__(self) -> None:
        _check_latency(self.latency_min, self.latency_max)
        for name in ("loss", "duplicates"):
            if not 0 <= getattr(self, name) < 10_000:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 to 9,999")


class Clocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How wrong the nodes' clocks are: each has an offset and a rate of its own, up to these."""

    offset_max: Duration = Duration(3600 * SECOND)
    drift_ppm_max: int = 100


class Guardian(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands between each agent and its workers, and how slow and unordered that is.

    Attributes:
        latency_min, latency_max: what news take. News of one worker stay in order, as its pipe and
            its parent keep them; news of different workers overtake each other.
        delays_orders: whether orders travel as slowly as news. They stay in order.
        sweep_takes: how long it takes to sweep; None for as long as the killing may take.
        stacks_take: how long the workers take to print their stacks.
        describe_takes: how long finding out more about failures takes; 0 for no time.
    """

    latency_min: Duration = Duration(200 * MICROSECOND)
    latency_max: Duration = Duration(200 * MICROSECOND)
    delays_orders: bool = False
    sweep_takes: Duration | None = None
    stacks_take: Duration = Duration(10 * MILLISECOND)
    describe_takes: Duration = Duration(200 * MICROSECOND)

    def __post_init__(self) -> None:
        _check_latency(self.latency_min, self.latency_max)


def _check_latency(least: Duration, most: Duration) -> None:
    if not 0 < least <= most:
        raise ValueError(
            f"latency_min is {least} ns and latency_max {most} ns, "
            "expected 0 < latency_min <= latency_max"
        )


class Workers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the workers do in every round.

    Attributes:
        per_node: how many there are on each node.
        lives: for each round the programs of a node's workers, by local rank; the last round's
            repeat. They replace `work`, `start_takes` and `stop_takes`; their durations are exact.
        work: how long a round must run undisturbed to succeed.
        uneven: how much longer it takes at most on some.
        prepare_takes: how long a node takes at most to get ready for a round; 0 for no time.
        start_takes: how long one takes at most to come into being.
        stop_takes: how long one takes at most to end after SIGTERM.
        stubborn: how many of 100 ignore SIGTERM.
        cascade: how many of 100 raise an exception of their own when a peer vanishes.
        asks_to_stop: whether they call `should_stop`, and so stop at one step.
        leaves_when_done: on how many of 100 nodes the agent leaves as soon as its own workers have
            all succeeded, as one under torch's handler does.
        dies_when_done: on how many of 100 it is killed then.
        recovers: how many of 100 run a function that can be called again (`rankwise.recover`).
        stuck: how many of 100 of those do not leave it when they are recalled.
        late: how much later than all others the job's last rank comes to the calls that all make; 0
            where lateness is not measured.
    """

    per_node: int = 1
    lives: tuple[tuple[WorkerProgram, ...], ...] = ()
    work: Duration = Duration(20 * SECOND)
    uneven: Duration = ZERO
    prepare_takes: Duration = ZERO
    start_takes: Duration = Duration(20 * MILLISECOND)
    stop_takes: Duration = Duration(20 * MILLISECOND)
    stubborn: int = 0
    cascade: int = 0
    asks_to_stop: bool = False
    leaves_when_done: int = 0
    dies_when_done: int = 0
    recovers: int = 0
    stuck: int = 0
    late: Duration = ZERO

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise ValueError(f"per_node is {self.per_node}, expected at least one worker")
        for number, life in enumerate(self.lives):
            if len(life) != self.per_node:
                raise ValueError(
                    f"lives[{number}] has {len(life)} programs, expected one for each of "
                    f"{self.per_node} workers"
                )


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a simulated run but its seed.

    Attributes:
        nodes: how many machines there are.
        rendezvous: what every agent is configured with.
        workers: what they do.
        guardian, network, clocks: how bad they are.
        joins_within: agents start at moments spread over this.
        late: nodes that start at another moment.
        faults: the faults of the cluster.
        grace: of every gang.
        gang: of every node, where more than its grace and its size is to be said.
        is_alone: whether there is one node, which meets no other and has no store.
        leaves_alone: what SIGTERM means to an agent (see `AgentSpec`).
        closers_die: of 100 leaders that write how the run ended, how many are killed before they
            learn that it is written.
        time_limit: after its last fault, how long the job may take to end; None works it out.
    """

    nodes: int
    rendezvous: RendezvousConfig
    workers: Workers = Workers()
    guardian: Guardian = Guardian()
    network: Network = Network()
    clocks: Clocks = Clocks()
    joins_within: Duration = Duration(1 * SECOND)
    late: dict[int, Instant] = {}
    faults: tuple[FaultOfCluster, ...] = ()
    grace: Duration = Duration(5 * SECOND)
    gang: GangSpec | None = None
    is_alone: bool = False
    leaves_alone: bool = False
    closers_die: int = 0
    time_limit: Duration | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes is {self.nodes}, expected at least one")
        if self.is_alone:
            self._check_alone()
        if self.gang_spec.size != self.workers.per_node:
            raise ValueError(
                f"gang.size is {self.gang_spec.size} and workers.per_node "
                f"{self.workers.per_node}, expected the same"
            )
        self._check_nodes("late", self.late)
        for fault in self.faults:
            named = getattr(fault, "nodes", (getattr(fault, "node", 0),))
            self._check_nodes(word_for(fault), named)

    def has(self, what: str) -> bool:
        """Whether a fault of this kind happens."""
        return any(word_for(each) == what for each in self.faults)

    @property
    def is_harsh(self) -> bool:
        """Whether something keeps nodes from the store, or it from remembering."""
        harsh = ("partition", "crash-store", "lose-store", "slow-disk", "compact-store")
        return bool(self.network.loss) or any(map(self.has, harsh))

    def _check_nodes(self, what: str, named: Iterable[int]) -> None:
        for node in named:
            if not 0 <= node < self.nodes:
                there = f"nodes 0 to {self.nodes - 1}" if self.nodes > 1 else "node 0 alone"
                raise ValueError(f"{what} names node {node}, and the cluster has {there}")

    def _check_alone(self) -> None:
        if self.nodes > 1:
            raise ValueError(f"nodes is {self.nodes}, expected 1 where is_alone is true")
        for name, expected in (("nodes_min", 1), ("nodes_max", 1), ("spares", 0)):
            value = getattr(self.rendezvous, name)
            if value != expected:
                raise ValueError(
                    f"rendezvous.{name} is {value}, expected {expected} where is_alone is true"
                )
        if self.time_limit is not None:
            raise ValueError(
                "time_limit is given, and is_alone is true: the gang's own deadlines end that run"
            )
        for name in ("recovers", "leaves_when_done"):
            value = getattr(self.workers, name)
            if value:
                raise ValueError(
                    f"workers.{name} is {value}, expected 0 where is_alone is true: what is "
                    "checked there knows nothing of it"
                )
        among_others = [each for each in self.faults if isinstance(each, AmongOthers)]
        if among_others:
            raise ValueError(
                f"{word_for(among_others[0])} is about a store or other nodes, and a node "
                "that is alone has neither"
            )

    @property
    def gang_spec(self) -> GangSpec:
        """The gang of every node."""
        return self.gang or GangSpec(size=self.workers.per_node, grace=self.grace)

    @property
    def last_fault(self) -> Instant:
        """When the last fault happens."""
        ends = [Instant(self.joins_within), *self.late.values()]
        for fault in self.faults:
            extra: Any = getattr(fault, "lasts", None) or getattr(fault, "back_after", None)
            again: Any = getattr(fault, "again_after", None)
            ends.append(Instant(fault.at + (extra or 0) + (again or 0)))
        return max(ends)

    @property
    def patience(self) -> Duration:
        """How long after the last fault the job must have ended."""
        if self.time_limit is not None:
            return self.time_limit
        config = self.rendezvous
        rounds = config.policy.restarts_max + 4
        pauses = sum(
            config.policy.backoff.before_restart(restart)
            for restart in range(1, config.policy.restarts_max + 2)
        )
        one_round = (
            self.workers.work
            + self.workers.uneven
            + self.gang_spec.grace
            + config.settle_delay
            + 4 * config.lease_ttl
        )
        gathering = 3 * config.join_timeout + config.last_call + 2 * config.close_timeout
        return Duration(rounds * one_round + pauses + gathering)
