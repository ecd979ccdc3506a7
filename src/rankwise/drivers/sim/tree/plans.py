"""Random task graphs, and the faults of the children that run them, all from one seed.

The dice are loaded: the ring and the heap are often too small, tasks touch overlapping bytes,
failures come early enough to spoil something, and children die in the middle of groups.
"""

from random import Random

import msgspec

from rankwise.base.units import MICROSECOND, Duration
from rankwise.core.tree.heap import ALIGNMENT
from rankwise.core.tree.vocabulary import HOST, Access, GraphSpec, Pool
from rankwise.drivers.sim.streams import happens, stream

CELL_BYTES = 8
CELL_COUNT = 24
HEAP_START = 64 * ALIGNMENT


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is submitted.

    Attributes:
        pool: who may take it.
        children: for each member the child that must take it; one member is a plain task.
        accesses: bytes of fixed memory that it touches.
        slabs: which of the allocations before it, counted from the latest, it reads and writes.
        takes: how long each member runs.
        raises: whether it raises.
    """

    pool: Pool
    children: tuple[int | None, ...] = (None,)
    accesses: tuple[Access, ...] = ()
    slabs: tuple[int, ...] = ()
    takes: tuple[Duration, ...] = (Duration(MICROSECOND),)
    raises: bool = False


class Allocate(msgspec.Struct, frozen=True):
    """The orchestration function asks for memory."""

    size_bytes: int


class OpenScope(msgspec.Struct, frozen=True):
    """The orchestration function opens a scope."""


class CloseScope(msgspec.Struct, frozen=True):
    """The orchestration function closes a scope."""


class Think(msgspec.Struct, frozen=True):
    """The orchestration function computes for a while."""

    takes: Duration


Step = PlannedTask | Allocate | OpenScope | CloseScope | Think


class Death(msgspec.Struct, frozen=True):
    """A child is killed, `takes` after it has begun its word number `word` of this life."""

    child: int
    life: int
    word: int
    takes: Duration


class TreePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a simulated run.

    Attributes:
        seed: of the rest that is left to chance: latencies.
        spec: the graph's.
        replaceable: for each child whether it gets a successor.
        runs: the steps of each run.
        deaths: which children die when.
        abandoned_after: how many steps of the last run happen before it is abandoned, or None.
        latency: what a word takes at most.
    """

    seed: int
    spec: GraphSpec
    replaceable: tuple[bool, ...]
    runs: tuple[tuple[Step, ...], ...]
    deaths: tuple[Death, ...]
    abandoned_after: int | None
    latency: Duration


def random_plan(seed: int) -> TreePlan:
    """The plan of a seed: the same in every process and on every machine."""
    chance = stream(seed, "tree")
    pools = (Pool.NEXT_LEVEL,) * chance.choice((0, 1, 2, 3)) + (Pool.SUB,) * chance.choice(
        (1, 2, 3)
    )
    ring_depth = chance.choice((3, 4, 8, 16, 64))
    spec = GraphSpec(
        pools=pools,
        ring_depth=ring_depth,
        heap_start=HEAP_START,
        heap_bytes=ALIGNMENT * chance.choice((2, 4, 64)),
        batch=chance.choice((1, 2, 8, 32)),
        depth=chance.choice((32, 64, 192)),
        hold=Duration(chance.choice((0, 50, 500)) * MICROSECOND),
    )
    runs = tuple(_random_run(chance, spec) for _ in range(chance.choice((1, 2, 3))))
    return TreePlan(
        seed=seed,
        spec=spec,
        replaceable=tuple(pool is Pool.SUB or happens(chance, 30) for pool in pools),
        runs=runs,
        deaths=_random_deaths(chance, len(pools)),
        abandoned_after=chance.randrange(len(runs[-1]) + 1) if happens(chance, 10) else None,
        latency=Duration(chance.choice((1, 10, 200)) * MICROSECOND),
    )


def _random_deaths(chance: Random, child_count: int) -> tuple[Death, ...]:
    if happens(chance, 50):
        return ()
    return tuple(
        Death(
            child=chance.randrange(child_count),
            life=chance.choice((0, 0, 1)),
            word=chance.randrange(12),
            takes=Duration(chance.choice((0, 1, 5, 20)) * MICROSECOND),
        )
        for _ in range(chance.choice((1, 1, 2, 4)))
    )


def _random_run(chance: Random, spec: GraphSpec) -> tuple[Step, ...]:
    failing = chance.choice((0, 0, 3, 10))
    is_narrow = happens(chance, 30)
    steps: list[Step] = []
    depth = 0
    for _ in range(chance.choice((1, 5, 20, 60))):
        match chance.choices(("task", "think", "alloc", "open", "close"), (80, 6, 6, 4, 4))[0]:
            case "task":
                steps.append(_random_task(chance, spec, failing, is_narrow=is_narrow))
            case "think":
                steps.append(Think(Duration(chance.choice((1, 30, 300)) * MICROSECOND)))
            case "alloc":
                steps.append(Allocate(ALIGNMENT * chance.choice((1, 1, 2))))
            case "open":
                depth += 1
                steps.append(OpenScope())
            case _ if depth:
                depth -= 1
                steps.append(CloseScope())
            case _:
                pass
    return (*steps, *[CloseScope()] * depth)


def _random_task(chance: Random, spec: GraphSpec, failing: int, *, is_narrow: bool) -> PlannedTask:
    pool = chance.choice(spec.pools)
    own = [index for index, other in enumerate(spec.pools) if other is pool]
    width = min(chance.choice((1, 1, 1, 1, 2, 3)), len(own), spec.ring_depth)
    children: list[int | None] = [None] * width
    if happens(chance, 20):
        children = list(chance.sample(own, width))
    return PlannedTask(
        pool=pool,
        children=tuple(children),
        accesses=tuple(
            _random_access(chance, is_narrow=is_narrow)
            for _ in range(chance.choice((0, 1, 1, 2, 3)))
        ),
        slabs=tuple(sorted({chance.randrange(3) for _ in range(chance.choice((0, 0, 1, 2)))})),
        takes=tuple(
            Duration(chance.choice((1, 1, 3, 10, 100)) * MICROSECOND) for _ in range(width)
        ),
        raises=happens(chance, failing),
    )


def _random_access(chance: Random, *, is_narrow: bool) -> Access:
    """Some cells in a row; narrow graphs have few cells, and so long chains."""
    cell_count = 2 if is_narrow else CELL_COUNT
    first = chance.randrange(cell_count)
    count = min(chance.choice((1, 1, 2, 5)), cell_count - first)
    reads, writes = chance.choice(((True, False), (False, True), (True, True)))
    space = chance.choice((HOST, HOST, HOST, 0))
    return Access(space, first * CELL_BYTES, (first + count) * CELL_BYTES, reads, writes)
