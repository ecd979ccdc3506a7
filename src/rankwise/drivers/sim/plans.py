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
from rankwise.drivers.sim.cluster.faults import (
    BlameWorker,
    ClusterPlan,
    Guardian,
    Happening,
    LoseGuardian,
    Preempt,
)
from rankwise.drivers.sim.programs import Dies, Ending, Exits, Program, Raises, RunsForever
from rankwise.drivers.sim.streams import stream
from rankwise.drivers.sim.world import plan_of_gang

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
    guardian, happenings = _random_faults(stream(seed, "faults"))
    happenings += _random_accusations(stream(seed, "accusations"), spec)
    return plan_of_gang(spec, lives, policy, guardian, happenings)


def _random_spec(chance: Random) -> GangSpec:
    return GangSpec(
        size=chance.choice(SIZES),
        grace=_between(chance, SECOND, 10 * SECOND) if _happens(chance, 85) else ZERO,
        hang_timeout=_between(chance, SECOND, 20 * SECOND) if _happens(chance, 30) else None,
        spawn_timeout=_between(chance, SECOND, 10 * SECOND),
        stacks_timeout=_between(chance, 100 * MILLISECOND, 2 * SECOND),
        sweep_timeout=_between(chance, SECOND, 5 * SECOND),
        exit_timeout=_between(chance, ZERO, 10 * SECOND),
    )


def _random_policy(chance: Random) -> RestartPolicy:
    return RestartPolicy(
        restarts_max=chance.choice((0, 0, 1, 2, 3)),
        backoff=Backoff(initial=_between(chance, ZERO, 2 * SECOND), factor=chance.randint(1, 3)),
        retries_startup_errors=_happens(chance, 50),
    )


def _random_life(chance: Random, spec: GangSpec) -> tuple[Program, ...]:
    """One attempt's programs: all do well, or some fail, at times one after the other."""
    size = spec.size
    workers = [_well_meaning(chance) for _ in range(size)]
    victims = chance.sample(range(size), min(size, chance.choice((0, 0, 1, 1, 2, size))))
    is_cascade = _happens(chance, 60)
    first_at = _between(chance, ZERO, 10 * SECOND)
    for rank in victims:
        # Down to some milliseconds before the first: a peer that sees its connection close may
        # raise before the death that closed it is seen.
        since_first = _between(chance, -5 * MILLISECOND, 100 * MILLISECOND)
        at = first_at + since_first if is_cascade else _between(chance, ZERO, 30 * SECOND)
        workers[rank] = msgspec.structs.replace(
            workers[rank], ending=_failing(chance), after=Duration(max(0, at))
        )
    if spec.hang_timeout is not None and _happens(chance, 25):
        workers = [_falling_silent(chance, program, first_at) for program in workers]
    return tuple(_with_odd_habits(chance, program) for program in workers)


def _well_meaning(chance: Random) -> Program:
    return Program(
        ending=Exits() if _happens(chance, 90) else RunsForever(),
        after=_between(chance, ZERO, 30 * SECOND),
        progress_every=_between(chance, 10 * MILLISECOND, 2 * SECOND),
        stop_takes=_between(chance, ZERO, 50 * MILLISECOND),
    )


def _falling_silent(chance: Random, program: Program, silent_after: Duration) -> Program:
    """Stuck in the collective that the others are stuck in, for ever or for a while."""
    return msgspec.structs.replace(
        program,
        ending=RunsForever() if _happens(chance, 90) else program.ending,
        silent_after=silent_after,
    )


def _failing(chance: Random) -> Ending:
    endings: tuple[Ending, ...] = (
        Exits(chance.randint(1, 255)),
        Dies(chance.choice(FATAL_SIGNALS)),
        Raises("loss is NaN", exit_takes=_between(chance, ZERO, 100 * MILLISECOND)),
        Raises("connection closed by peer", exception="ConnectionResetError"),
        Raises("a thread lives on", exit_takes=_between(chance, ZERO, 20 * SECOND)),
    )
    return chance.choice(endings)


def _with_odd_habits(chance: Random, program: Program) -> Program:
    changes: dict[str, object] = {}
    if _happens(chance, 8):
        changes["stop_takes"] = None
    if _happens(chance, 8):
        changes["stop_takes"] = _between(chance, ZERO, 15 * SECOND)
    if _happens(chance, 8):
        changes["stop_code"] = chance.choice((0, 0, 1, 143))
    if _happens(chance, 5):
        changes["strays"] = chance.randint(1, 3)
    if _happens(chance, 5):
        changes["start_takes"] = _between(chance, ZERO, 4 * SECOND)
    if _happens(chance, 8):
        changes["silent_after"] = _between(chance, ZERO, 5 * SECOND)
    if _happens(chance, 1):
        changes["start_takes"] = _between(chance, ZERO, 20 * SECOND)
    if _happens(chance, 1):
        changes["refusal"] = "no more processes are allowed"
    if _happens(chance, 1):
        changes["kill_takes"] = chance.choice((None, _between(chance, ZERO, 8 * SECOND)))
    if _happens(chance, 1):
        changes["stray_kill_takes"] = None
    return msgspec.structs.replace(program, **changes) if changes else program


def _random_faults(chance: Random) -> tuple[Guardian, tuple[Happening, ...]]:
    latency_min = _between(chance, 10 * MICROSECOND, 1 * MILLISECOND)
    latency_max = chance.choice((latency_min, 20 * MILLISECOND, 200 * MILLISECOND))
    happenings: list[Happening] = []
    if _happens(chance, 25):
        first = _random_stop(chance, ZERO, 20 * SECOND)
        happenings.append(first)
        if _happens(chance, 50):
            happenings.append(_random_stop(chance, first.at, first.at + 5 * SECOND))
    # Whatever runs for ever is stopped in the end, so that every plan has an outcome.
    happenings.append(Preempt(at=Instant(600 * SECOND), node=0))
    guardian = Guardian(
        latency_min=latency_min,
        latency_max=Duration(latency_max),
        delays_orders=True,
        sweep_takes=_between(chance, ZERO, (8 if _happens(chance, 3) else 1) * SECOND // 2),
        stacks_take=_between(chance, ZERO, 3 * SECOND),
        describe_takes=ZERO,
    )
    if _happens(chance, 6):
        happenings.append(LoseGuardian(at=Instant(_between(chance, ZERO, 20 * SECOND))))
    return guardian, tuple(happenings)


def _random_accusations(chance: Random, spec: GangSpec) -> tuple[BlameWorker, ...]:
    if not _happens(chance, 5):
        return ()
    at = Instant(_between(chance, ZERO, 20 * SECOND))
    return (BlameWorker(at=at, local_rank=chance.randrange(spec.size)),)


def _random_stop(chance: Random, earliest: int, latest: int) -> Preempt:
    at = Instant(_between(chance, earliest, latest))
    return Preempt(at=at, node=0, signal=chance.choice(STOP_SIGNALS))


def _between(chance: Random, least: int, most: int) -> Duration:
    return Duration(chance.randint(least, most))


def _happens(chance: Random, percent: int) -> bool:
    return chance.randrange(100) < percent
