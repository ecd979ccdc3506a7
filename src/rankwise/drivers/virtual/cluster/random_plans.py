"""Random plans: a cluster and its faults, all from one seed.

The dice are loaded, as with gangs: timeouts are short, so that they are reached; things that are
rare in life meet each other here. Every plan ends quietly: after the last fault the network is
whole and the store is up, so that the job can end, and must.
"""

from random import Random

import msgspec

from rankwise.base.backoff import Backoff
from rankwise.base.units import MICROSECOND, MILLISECOND, SECOND, ZERO, Duration, Instant
from rankwise.core.agent.state import AgentPhase
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.drivers.virtual.cluster.cluster_plan import (
    Clocks,
    ClusterPlan,
    Guardian,
    Network,
    Workers,
)
from rankwise.drivers.virtual.random_streams import between, happens, stream
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

SIZES = (1, 2, 2, 3, 3, 4, 5, 6, 8, 8, 12, 16)
SIGNALS = (6, 7, 9, 11, 13)
FAULTS_END = 40 * SECOND
STARTS_END = 100 * SECOND


def random_plan(seed: int) -> ClusterPlan:
    """The plan of a seed: the same in every process and on every machine."""
    chance, following = stream(seed, "plan"), stream(seed, "succession")
    nodes = chance.choice(SIZES)
    rendezvous = _random_rendezvous(chance, nodes)
    faults = _random_cluster_faults(stream(seed, "happenings"), nodes)
    faults = _with_stops(faults, stream(seed, "stops"), nodes)
    faults = _with_trouble_on_nodes(faults, stream(seed, "trouble on nodes"), nodes)
    faults = _with_missed_calls(faults, stream(seed, "missed calls"), nodes)
    rendezvous, faults = _with_its_store_in_an_agent(
        rendezvous, faults, stream(seed, "store"), nodes
    )
    plan = ClusterPlan(
        nodes=nodes,
        rendezvous=rendezvous,
        workers=_with_lateness(
            _with_recovery(
                _random_workers(chance, stream(seed, "endings")), stream(seed, "recovery")
            ),
            stream(seed, "lateness"),
        ),
        guardian=_random_guardian(stream(seed, "guardian")),
        network=_random_network(chance),
        clocks=Clocks(drift_ppm_max=chance.choice((0, 100, 1000))),
        joins_within=between(chance, ZERO, 3 * SECOND),
        late={
            node: Instant(between(chance, ZERO, FAULTS_END))
            for node in range(nodes)
            if happens(chance, 10)
        },
        faults=faults,
        grace=between(chance, ZERO, 3 * SECOND),
        leaves_alone=happens(chance, 20),
    )
    return _with_succession(plan, following) if happens(following, 60) else plan


def _with_succession(plan: ClusterPlan, chance: Random) -> ClusterPlan:
    """The same, but that the job is begun again under its id, and the store forgets it some day."""
    lease_ttl = plan.rendezvous.lease_ttl
    ttls = (None, between(chance, 5 * lease_ttl, 120 * SECOND), Duration(7200 * SECOND))
    starts = [_random_start(chance, plan) for _ in range(chance.choice((0, 1, 1, 2, 4)))]
    return msgspec.structs.replace(
        plan,
        rendezvous=msgspec.structs.replace(
            plan.rendezvous, replaces_ended=happens(chance, 85), run_ttl=chance.choice(ttls)
        ),
        faults=tuple(sorted((*plan.faults, *starts), key=lambda each: each.at)),
        closers_die=chance.choice((0, 0, 50, 100)),
    )


def _random_start(chance: Random, plan: ClusterPlan) -> StartAgents:
    some = chance.sample(range(plan.nodes), chance.randint(1, plan.nodes))
    if happens(chance, 50):
        some = list(range(plan.nodes))
    wishes = (None, None, plan.rendezvous.policy.restarts_max + 1)
    return StartAgents(
        program=chance.choice(("", "", "foreign")),
        at=Instant(between(chance, ZERO, STARTS_END)),
        nodes=tuple(some),
        restarts_max=chance.choice(wishes),
    )


def _random_rendezvous(chance: Random, nodes: int) -> RendezvousConfig:
    is_static = happens(chance, 12)
    nodes_min = nodes if is_static or happens(chance, 30) else chance.randint(1, nodes)
    nodes_max = nodes if is_static else chance.randint(nodes_min, nodes)
    spares = 0 if is_static else chance.choice((0, 0, 0, 1, 2))
    return RendezvousConfig(
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        spares=spares,
        is_static=is_static,
        policy=RestartPolicy(
            restarts_max=chance.choice((0, 1, 2, 3, 10)),
            backoff=Backoff(initial=between(chance, ZERO, 2 * SECOND)),
            final_exceptions=("ValueError",) if happens(chance, 50) else (),
            final_exit_codes=(17,) if happens(chance, 50) else (),
            retries_startup_errors=happens(chance, 50),
            rounds_without_progress_max=chance.choice((None, None, 3)),
            strikes_max=chance.choice((None, None, 2)),
        ),
        last_call=between(chance, ZERO, 5 * SECOND),
        last_call_min=between(chance, ZERO, SECOND),
        settle_delay=between(chance, ZERO, 3 * SECOND),
        join_timeout=between(chance, 15 * SECOND, 60 * SECOND),
        close_timeout=between(chance, 5 * SECOND, 20 * SECOND),
        lease_ttl=between(chance, 2 * SECOND, 6 * SECOND),
        request_timeout=between(chance, 300 * MILLISECOND, SECOND),
    )


def _random_workers(chance: Random, endings: Random) -> Workers:
    workers = Workers(
        per_node=chance.choice((1, 1, 2, 3)),
        work=between(chance, SECOND, 20 * SECOND),
        uneven=between(chance, ZERO, 3 * SECOND),
        prepare_takes=chance.choice((ZERO, Duration(MILLISECOND), Duration(2 * SECOND))),
        start_takes=between(chance, ZERO, 500 * MILLISECOND),
        stop_takes=between(chance, ZERO, 500 * MILLISECOND),
        stubborn=chance.choice((0, 0, 10, 50)),
        cascade=chance.choice((0, 50, 100)),
        asks_to_stop=happens(chance, 40),
    )
    if not happens(endings, 40):
        return workers
    # A job whose nodes finish at very different times, and do not all wait for one another.
    return msgspec.structs.replace(
        workers,
        uneven=between(endings, SECOND, 40 * SECOND),
        leaves_when_done=endings.choice((0, 0, 30, 100)),
        dies_when_done=endings.choice((0, 0, 10, 50)),
    )


def _with_recovery(workers: Workers, chance: Random) -> Workers:
    """The same, but that some of them can be called again."""
    if not happens(chance, 40):
        return workers
    return msgspec.structs.replace(
        workers, recovers=chance.choice((50, 100, 100)), stuck=chance.choice((0, 0, 0, 20))
    )


def _with_lateness(workers: Workers, chance: Random) -> Workers:
    """The same, but that the nodes ask each other at the end who was late."""
    late = Duration(50 * MILLISECOND) if happens(chance, 30) else ZERO
    return msgspec.structs.replace(workers, late=late)


def _random_network(chance: Random) -> Network:
    least = between(chance, 50 * MICROSECOND, 2 * MILLISECOND)
    return Network(
        latency_min=least,
        latency_max=Duration(least + chance.choice((0, 5, 50, 300)) * MILLISECOND),
        loss=chance.choice((0, 0, 10, 200)),
        duplicates=chance.choice((0, 0, 500)),
        until=Instant(FAULTS_END),
    )


def _random_cluster_faults(chance: Random, nodes: int) -> tuple[FaultOfCluster, ...]:
    count = chance.choice((0, 1, 2, 3, 5, 8))
    found = [_random_fault(chance, nodes) for _ in range(count)]
    return tuple(sorted(found, key=lambda fault: fault.at))


def _with_stops(
    faults: tuple[FaultOfCluster, ...], chance: Random, nodes: int
) -> tuple[FaultOfCluster, ...]:
    """The same, and some agents are asked to stop in a certain phase of their lives."""
    phases = (
        AgentPhase.PREPARING,
        AgentPhase.WAITING,
        AgentPhase.RUNNING,
        AgentPhase.ENDED,
        AgentPhase.LEAVING,
    )
    stops = [
        Preempt(
            at=Instant(between(chance, ZERO, FAULTS_END)),
            node=chance.randrange(nodes),
            phase=chance.choice(phases),
        )
        for _ in range(chance.choice((0, 0, 0, 0, 1, 2)))
    ]
    if happens(chance, 15):  # a scheduler signals every process of every node
        at = between(chance, ZERO, FAULTS_END)
        stops += [
            Preempt(
                at=Instant(at + between(chance, ZERO, 100 * MILLISECOND)),
                node=node,
                ranks_before=between(chance, ZERO, 200 * MILLISECOND),
            )
            for node in range(nodes)
        ]
    return tuple(sorted((*faults, *stops), key=lambda fault: fault.at))


def _with_trouble_on_nodes(
    faults: tuple[FaultOfCluster, ...], chance: Random, nodes: int
) -> tuple[FaultOfCluster, ...]:
    """The same, and on some nodes the guardian is lost or a worker is blamed."""
    trouble: list[FaultOfCluster] = []
    for kind in (LoseGuardian, BlameWorker):
        if happens(chance, 10):
            at = Instant(between(chance, ZERO, FAULTS_END))
            trouble.append(kind(at=at, node=chance.randrange(nodes)))
    return tuple(sorted((*faults, *trouble), key=lambda fault: fault.at))


def _with_missed_calls(
    faults: tuple[FaultOfCluster, ...], chance: Random, nodes: int
) -> tuple[FaultOfCluster, ...]:
    """The same, and now and then a rank does not come to a collective."""
    missed = [
        MissCall(
            at=Instant(between(chance, ZERO, FAULTS_END)),
            node=chance.randrange(nodes),
            patience=between(chance, SECOND, 20 * SECOND),
        )
        for _ in range(chance.choice((0, 0, 0, 1, 2)))
    ]
    return tuple(sorted((*faults, *missed), key=lambda fault: fault.at))


def _random_guardian(chance: Random) -> Guardian:
    if not happens(chance, 20):
        return Guardian()
    latency_max = Duration(chance.choice((1, 5, 20)) * MILLISECOND)
    return Guardian(latency_max=latency_max, delays_orders=happens(chance, 50))


def _with_its_store_in_an_agent(
    rendezvous: RendezvousConfig, faults: tuple[FaultOfCluster, ...], chance: Random, nodes: int
) -> tuple[RendezvousConfig, tuple[FaultOfCluster, ...]]:
    """The same where an agent serves the store, as in some clusters; its machine may be lost."""
    if not happens(chance, 20):
        return rendezvous, faults
    rendezvous = msgspec.structs.replace(rendezvous, ends_with_store=True)
    if happens(chance, 60):
        at = Instant(between(chance, ZERO, FAULTS_END))
        loss = LoseStore(at=at, node=chance.randrange(nodes))
        faults = tuple(sorted((*faults, loss), key=lambda fault: fault.at))
    return rendezvous, faults


def _random_fault(chance: Random, nodes: int) -> FaultOfCluster:
    at = Instant(between(chance, ZERO, FAULTS_END))
    node = chance.randrange(nodes)
    lasts = between(chance, 100 * MILLISECOND, 12 * SECOND)
    match chance.randrange(16):
        case 0 | 1 | 2:
            back = between(chance, ZERO, 10 * SECOND) if happens(chance, 80) else None
            return KillAgent(at=at, node=node, back_after=back)
        case 3 | 4 | 5 | 6:
            return _random_failure(chance, at, node)
        case 7:
            return RefuseWorkers(at=at, node=node, lasts=lasts)
        case 8:
            again = between(chance, ZERO, 3 * SECOND) if happens(chance, 40) else None
            return Preempt(at=at, node=node, again_after=again)
        case 9:
            return Leave(at=at, node=node)
        case 10 | 11:
            some = chance.sample(range(nodes), chance.randint(1, nodes))
            return Partition(at=at, nodes=tuple(some), lasts=lasts)
        case 12 | 13:
            return CrashStore(at=at, lasts=lasts, forgets=happens(chance, 15))
        case 14:
            takes = between(chance, MILLISECOND, 400 * MILLISECOND)
            return SlowDisk(at=at, lasts=lasts, takes=takes)
        case _:
            return CompactStore(at=at)


def _random_failure(chance: Random, at: Instant, node: int) -> FailWorker:
    local_rank = chance.randrange(2)
    match chance.randrange(4):
        case 0:
            return FailWorker(at=at, node=node, local_rank=local_rank, code=chance.choice((1, 17)))
        case 1:
            signal = chance.choice(SIGNALS)
            return FailWorker(at=at, node=node, local_rank=local_rank, code=-signal)
        case _:
            exception = chance.choice(("RuntimeError", "ValueError"))
            return FailWorker(at=at, node=node, local_rank=local_rank, raises=exception)
