"""Random plans: a gang, what its workers do, and what the world does to it, all from one seed.

The dice are loaded. Most workers do well, as in life; but failures come in cascades, stop requests
come in pairs, deadlines are short enough to be missed, and rare things (a guardian killed, a
process stuck in the kernel, a sweep that never ends) are common enough to meet each other.
"""

from random import Random

import msgspec

from rankwise.base.backoff import Backoff
from rankwise.base.units import MICROSECOND, MILLISECOND, SECOND, ZERO, Duration, Instant
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.drivers.virtual.cluster.cluster_plan import ClusterPlan, Guardian
from rankwise.drivers.virtual.gang_simulator import plan_of_gang
from rankwise.drivers.virtual.random_streams import between, happens, stream
from rankwise.drivers.virtual.worker_behaviour import (
    PEER_IS_GONE,
    Dies,
    Ending,
    Exits,
    Raises,
    RunsForever,
    WorkerProgram,
)
from rankwise.sim.faults.vocabulary import BlameWorker, FaultOfCluster, LoseGuardian, Preempt

SIZES = (1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 8, 8, 16, 64)
FATAL_SIGNALS = (4, 6, 7, 8, 9, 11, 13)
STOP_SIGNALS = (15, 2, 1, 3, None)


def random_plan(seed: int) -> ClusterPlan:
    """The plan of a seed: the same in every process and on every machine."""
    spec = _random_spec(stream(seed, "spec"))
    policy = _random_policy(stream(seed, "policy"))
    lives = tuple(
        _random_life(stream(seed, "life", attempt), spec)
        for attempt in range(policy.restarts_max + 1)
    )
    guardian, faults = _random_faults(stream(seed, "faults"))
    faults += _random_accusations(stream(seed, "accusations"), spec)
    faults += _random_signals(stream(seed, "signals"))
    return plan_of_gang(spec, lives, policy, guardian, faults)


def _random_spec(chance: Random) -> GangSpec:
    return GangSpec(
        size=chance.choice(SIZES),
        grace=between(chance, SECOND, 10 * SECOND) if happens(chance, 85) else ZERO,
        hang_timeout=between(chance, SECOND, 20 * SECOND) if happens(chance, 30) else None,
        spawn_timeout=between(chance, SECOND, 10 * SECOND),
        stacks_timeout=between(chance, 100 * MILLISECOND, 2 * SECOND),
        sweep_timeout=between(chance, SECOND, 5 * SECOND),
        exit_timeout=between(chance, ZERO, 10 * SECOND),
    )


def _random_policy(chance: Random) -> RestartPolicy:
    return RestartPolicy(
        restarts_max=chance.choice((0, 0, 1, 2, 3)),
        backoff=Backoff(initial=between(chance, ZERO, 2 * SECOND), factor=chance.randint(1, 3)),
        retries_startup_errors=happens(chance, 50),
    )


def _random_life(chance: Random, spec: GangSpec) -> tuple[WorkerProgram, ...]:
    """One attempt's programs: all do well, or some fail, at times one after the other."""
    size = spec.size
    workers = [_well_meaning(chance) for _ in range(size)]
    victims = chance.sample(range(size), min(size, chance.choice((0, 0, 1, 1, 2, size))))
    is_cascade = happens(chance, 60)
    first_at = between(chance, ZERO, 10 * SECOND)
    for rank in victims:
        # Down to some milliseconds before the first: a peer that sees its connection close may
        # raise before the death that closed it is seen.
        since_first = between(chance, -5 * MILLISECOND, 100 * MILLISECOND)
        at = first_at + since_first if is_cascade else between(chance, ZERO, 30 * SECOND)
        workers[rank] = msgspec.structs.replace(
            workers[rank], ending=_failing(chance), after=Duration(max(0, at))
        )
    if spec.hang_timeout is not None and happens(chance, 25):
        workers = [_falling_silent(chance, program, first_at) for program in workers]
    return tuple(_with_odd_habits(chance, program) for program in workers)


def _well_meaning(chance: Random) -> WorkerProgram:
    return WorkerProgram(
        ending=Exits() if happens(chance, 90) else RunsForever(),
        after=between(chance, ZERO, 30 * SECOND),
        progress_every=between(chance, 10 * MILLISECOND, 2 * SECOND),
        stop_takes=between(chance, ZERO, 50 * MILLISECOND),
    )


def _falling_silent(
    chance: Random, program: WorkerProgram, silent_after: Duration
) -> WorkerProgram:
    """Stuck in the collective that the others are stuck in, for ever or for a while."""
    return msgspec.structs.replace(
        program,
        ending=RunsForever() if happens(chance, 90) else program.ending,
        silent_after=silent_after,
    )


def _failing(chance: Random) -> Ending:
    endings: tuple[Ending, ...] = (
        Exits(chance.randint(1, 255)),
        Dies(chance.choice(FATAL_SIGNALS)),
        Raises("loss is NaN", exit_takes=between(chance, ZERO, 100 * MILLISECOND)),
        Raises(PEER_IS_GONE, exception="RuntimeError", blames_peer=True),
        Raises("a thread lives on", exit_takes=between(chance, ZERO, 20 * SECOND)),
    )
    return chance.choice(endings)


def _with_odd_habits(chance: Random, program: WorkerProgram) -> WorkerProgram:
    changes: dict[str, object] = {}
    if happens(chance, 8):
        changes["stop_takes"] = None
    if happens(chance, 8):
        changes["stop_takes"] = between(chance, ZERO, 15 * SECOND)
    if happens(chance, 8):
        changes["stop_code"] = chance.choice((0, 0, 1, 143))
    if happens(chance, 5):
        changes["strays"] = chance.randint(1, 3)
    if happens(chance, 5):
        changes["start_takes"] = between(chance, ZERO, 4 * SECOND)
    if happens(chance, 8):
        changes["silent_after"] = between(chance, ZERO, 5 * SECOND)
    if happens(chance, 1):
        changes["start_takes"] = between(chance, ZERO, 20 * SECOND)
    if happens(chance, 1):
        changes["refusal"] = "no more processes are allowed"
    if happens(chance, 1):
        changes["kill_takes"] = chance.choice((None, between(chance, ZERO, 8 * SECOND)))
    if happens(chance, 1):
        changes["stray_kill_takes"] = None
    return msgspec.structs.replace(program, **changes) if changes else program


def _random_faults(chance: Random) -> tuple[Guardian, tuple[FaultOfCluster, ...]]:
    latency_min = between(chance, 10 * MICROSECOND, 1 * MILLISECOND)
    latency_max = chance.choice((latency_min, 20 * MILLISECOND, 200 * MILLISECOND))
    faults: list[FaultOfCluster] = []
    if happens(chance, 25):
        first = _random_stop(chance, ZERO, 20 * SECOND)
        faults.append(first)
        if happens(chance, 50):
            faults.append(_random_stop(chance, first.at, first.at + 5 * SECOND))
    # Whatever runs for ever is stopped in the end, so that every plan has an outcome.
    faults.append(Preempt(at=Instant(600 * SECOND), node=0))
    guardian = Guardian(
        latency_min=latency_min,
        latency_max=Duration(latency_max),
        delays_orders=True,
        sweep_takes=between(chance, ZERO, (8 if happens(chance, 3) else 1) * SECOND // 2),
        stacks_take=between(chance, ZERO, 3 * SECOND),
        describe_takes=ZERO,
    )
    if happens(chance, 6):
        faults.append(LoseGuardian(at=Instant(between(chance, ZERO, 20 * SECOND))))
    return guardian, tuple(faults)


def _random_accusations(chance: Random, spec: GangSpec) -> tuple[BlameWorker, ...]:
    if not happens(chance, 5):
        return ()
    at = Instant(between(chance, ZERO, 20 * SECOND))
    return (BlameWorker(at=at, local_rank=chance.randrange(spec.size)),)


def _random_signals(chance: Random) -> tuple[Preempt, ...]:
    """A scheduler signals every process of the node: the ranks sooner than the agent."""
    if not happens(chance, 5):
        return ()
    at = Instant(between(chance, ZERO, 20 * SECOND))
    return (Preempt(at=at, node=0, ranks_before=between(chance, ZERO, 600 * MILLISECOND)),)


def _random_stop(chance: Random, earliest: int, latest: int) -> Preempt:
    at = Instant(between(chance, earliest, latest))
    return Preempt(at=at, node=0, signal=chance.choice(STOP_SIGNALS))
