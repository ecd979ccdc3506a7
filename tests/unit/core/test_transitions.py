"""The tables of transitions say what the machines do: all of it, and nothing else.

All lives of small gangs, of small child groups and of agents that are alone are explored, fact by
fact, in any world that may be slow, unlucky and rude, but not impossible. Seeds of clusters add
what a store has to say to agents.
"""

import io
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, ClassVar

import msgspec
from gangs import reported

from rankwise.base.failure import ExitStatus
from rankwise.base.machine import Ticked
from rankwise.base.units import Duration, Instant
from rankwise.core.agent import transitions as of_agents
from rankwise.core.agent.alone import spec_alone
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import (
    AgentSpec,
    AgentStarted,
    DescribeFailures,
    FailuresDescribed,
    LeaveRequested,
    PreparationFailed,
    PrepareRound,
    RoundPrepared,
)
from rankwise.core.gang import transitions as of_gangs
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.state import GangPhase, RecallState
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    DumpStacks,
    GangSpec,
    GuardianLost,
    LookForDumps,
    LookForProgress,
    ProgressLooked,
    RanksBlamed,
    RecallRequested,
    RecoveryMessage,
    RecoveryMessageSent,
    RecoveryOrder,
    Resumed,
    SpawnWorker,
    StacksDumped,
    Started,
    StopRequested,
    Sweep,
    Swept,
    TellWorker,
    WorkerExited,
    WorkerRefused,
    WorkerSpawned,
)
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig, RestartPolicy
from rankwise.core.rendezvous.vocabulary import Answer, Settled
from rankwise.core.rendezvous.vocabulary import World as AgreedWorld
from rankwise.core.tree import transitions as of_child_groups
from rankwise.core.tree.child_group import (
    ChildEnded,
    ChildGroup,
    ChildGroupSpec,
    ChildReady,
    ChildRefused,
    ForkServerEnded,
    GroupCloseRequested,
    Spawn,
    StartRequested,
)
from rankwise.drivers.virtual.cluster.random_plans import random_plan
from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator

Move = tuple[Any, Any, type]
"""From a phase to a phase, and the fact that led there."""
STOPS_MAX = 2
PEER_GONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
MAY_SAY = {
    RecallState.BOUND: (RecoveryMessage.OFFERS,),
    RecallState.OFFERED: (RecoveryMessage.EXCEPTION_HELD, RecoveryMessage.WITHDRAWS),
    RecallState.EXCEPTION_HELD: (),
    RecallState.RECALLED: (RecoveryMessage.YIELDED, RecoveryMessage.WITHDRAWS),
    RecallState.YIELDED: (),
}
"""What a worker may say next (`rankwise.recover`)."""
UNTOLD = ("_deadline", "_failure", "_fact", "spec")
"""What a child group remembers, but does not go by."""
CLUSTER_SEEDS = 80
"""The 69th is the last that adds a move."""


class Recorded:
    """Notes each change of a machine's phase."""

    moves: ClassVar[set[Move]]
    _fact: type = Ticked

    @property
    def phase(self) -> Any:
        return self.__dict__["phase_now"]

    @phase.setter
    def phase(self, phase: Any) -> None:
        before = self.__dict__.get("phase_now", phase)
        if before is not phase:
            self.moves.add((before, phase, self._fact))
        self.__dict__["phase_now"] = phase

    def handle(self, stimulus: Any, now: Instant) -> Any:
        self._fact = of_agents.Answer if isinstance(stimulus, Answer) else type(stimulus)
        return super().handle(stimulus, now)  # type: ignore[misc]

    def tick(self, now: Instant) -> Any:
        self._fact = Ticked
        return super().tick(now)  # type: ignore[misc]


class RecordedGang(Recorded, Gang):
    moves: ClassVar[set[Move]] = set()


class RecordedAgent(Recorded, Agent):
    moves: ClassVar[set[Move]] = set()


class RecordedChildGroup(Recorded, ChildGroup):
    moves: ClassVar[set[Move]] = set()


class World:
    """A machine, and what may happen to it next. What differs in time alone counts as the same."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.now = Instant(0)
        self.owed: list[Any] = []
        """Orders that have not been answered."""
        self.alive: list[tuple[int, int]] = []
        self.stops = 0
        self.recalls = 0

    def facts(self) -> Iterator[Any]:
        """Whatever may happen next."""
        if self.machine.next_deadline is not None:
            yield Ticked()

    def take(self, fact: Any) -> None:
        """Let it happen."""
        if isinstance(fact, Ticked):
            self.now = max(self.now, self.machine.next_deadline)
            effects = self.machine.tick(self.now)
        else:
            effects = self.machine.handle(fact, self.now)
        self.ordered = effects
        self.owed += [effect for effect in effects if isinstance(effect, self.answered)]

    answered: ClassVar[tuple[type, ...]] = ()

    def key(self) -> Any:
        """What decides how it may go on."""
        raise NotImplementedError


class NodeWorld(World):
    """The world of a gang, or of an agent that is alone."""

    answered = (
        SpawnWorker, Sweep, DumpStacks, LookForProgress, LookForDumps, PrepareRound,
        DescribeFailures,
    )  # fmt: skip

    recovers = False
    """Whether workers may offer to be called again, which is explored without hangs and reports."""

    def facts(self) -> Iterator[Any]:
        machine = self.machine
        if str(machine.phase) == "idle":
            yield AgentStarted(machine.spec) if isinstance(machine, Agent) else Started()
            return
        yield from super().facts()
        for order in self.owed:
            yield from self.answers(order)
        for rank, attempt in self.alive:
            yield WorkerExited(rank, attempt, ExitStatus(0), self.now)
            yield WorkerExited(rank, attempt, ExitStatus(1), self.now)
            if isinstance(machine, Gang) and not self.recovers:
                yield reported(rank, raised_at=self.now, attempt=attempt)
            if (
                isinstance(machine, Gang)
                and not self.recovers
                and machine.phase is GangPhase.RUNNING
            ):
                yield RanksBlamed((rank,), attempt, "it has not come")
        yield from self.facts_of_recovery()
        if self.stops < (1 if self.recovers else STOPS_MAX):
            yield StopRequested(15)
        yield GuardianLost("killed")
        if isinstance(machine, Agent) and not self.stops:
            yield LeaveRequested()

    def facts_of_recovery(self) -> Iterator[Any]:
        machine = self.machine
        gang = machine.gang if isinstance(machine, Agent) else machine
        if gang is None or not self.recovers:
            return
        for rank, attempt in self.alive:
            for word in MAY_SAY[gang.workers[rank].recall_state]:
                yield RecoveryMessageSent(rank, attempt, word, Duration(3))
        if gang is machine and gang.phase in (GangPhase.CLEARING, GangPhase.PAUSED):
            yield Resumed(1, recovers=False)
        if gang is machine and not self.recalls and not self.stops:
            yield RecallRequested()

    def answers(self, order: Any) -> Iterator[Any]:
        match order:
            case SpawnWorker(rank, attempt):
                yield WorkerSpawned(rank, attempt, 100 + rank)
                yield WorkerRefused(rank, attempt, "no")
            case Sweep(attempt, spares):
                yield Swept(attempt, (), spares)
                yield Swept(attempt, (71,), spares)
            case DumpStacks(attempt):
                yield StacksDumped(attempt)
            case LookForProgress(attempt):
                yield ProgressLooked(attempt, self.now)
                yield ProgressLooked(attempt, Instant(0))
            case LookForDumps(attempt):
                yield DumpsLooked(attempt)
                yield DumpsLooked(attempt, (0,))
            case PrepareRound(number):
                yield RoundPrepared(number, 29500)
                yield PreparationFailed(number, "no")
            case DescribeFailures(number, failures):
                yield FailuresDescribed(number, failures)
            case _:
                raise AssertionError(f"nobody answers {order}")

    def take(self, fact: Any) -> None:
        self.owed = [order for order in self.owed if fact not in list(self.answers(order))]
        match fact:
            case WorkerSpawned(rank, attempt):
                self.alive.append((rank, attempt))
            case WorkerExited(rank, attempt):
                self.alive.remove((rank, attempt))
            case Swept(spares=spares):
                self.alive = [each for each in self.alive if each[0] in spares]
            case GuardianLost():
                self.alive.clear()
                self.owed = [each for each in self.owed if not isinstance(each, SpawnWorker)]
            case StopRequested():
                self.stops += 1
            case RecallRequested():
                self.recalls += 1
            case _:
                pass
        super().take(fact)
        for order in self.ordered:
            if isinstance(order, TellWorker) and order.word is RecoveryOrder.AGAIN:
                self.alive = [(rank, order.attempt) for rank, _ in self.alive]

    def key(self) -> Any:
        """Ranks are alike: states in which two have changed places are the same."""
        machine = self.machine
        gang = machine.gang if isinstance(machine, Agent) else machine
        owed = [(getattr(order, "local_rank", None), type(order).__name__) for order in self.owed]
        of_ranks = sorted(self.key_of_rank(gang, rank, owed) for rank in self.ranks_of(gang))
        of_node = sorted(name for rank, name in owed if rank is None)
        world = (of_node, of_ranks, self.stops, self.recalls)
        if isinstance(machine, Agent):
            return repr((world, self.key_of_agent(machine), self.key_of_gang(gang)))
        return repr((world, self.key_of_gang(gang)))

    def ranks_of(self, gang: Any) -> range:
        return range(len(gang.workers) if gang else 0)

    def key_of_rank(self, gang: Any, rank: int, owed: list[tuple[Any, str]]) -> str:
        w = gang.workers[rank]
        known = (
            w.pid is None, w.has_ended, w.has_failed, w.refusal, w.hung_at is None,
            w.error is None, w.blamed_at is None, w.must_end_by is None, w.has_lingered,
            w.recall_state, w.says_peer_is_gone, w.dumps_core,
        )  # fmt: skip
        alive = [attempt for each, attempt in self.alive if each == rank]
        return repr((known, alive, sorted(name for each, name in owed if each == rank)))

    def key_of_gang(self, gang: Any) -> Any:
        if gang is None:
            return None
        due, exits = gang._deadline, gang._exits_due  # what it remembers
        return (
            gang.phase, due is None, exits is None, bool(due and exits and exits <= due),
            gang._stop is None, gang._stop_came_first,  # the same
            gang.recovers, gang.attempt, gang._exceptions_due is None, gang._resumed is None,
            gang._is_stuck_killed, gang._is_pause_reported, gang._stop_ordered_at is None,
            gang._is_recall_due, gang._verdict_due is None, gang._dumps_due is None,
        )  # fmt: skip

    def key_of_agent(self, agent: Any) -> Any:
        own = agent.__dict__
        flags = ("_deadline", "_loss", "_verdict", "_refusal", "_outcome")
        meeting = agent.rendezvous
        return (
            agent.phase, own["_is_going"], min(own["_stops_asked"], 2), own["_is_stop_agreed"],
            [bool(own[name]) for name in flags], meeting.round.phase, meeting.round.restarts,
            meeting.next_deadline is None, meeting._port,
        )  # fmt: skip


class ChildrenWorld(World):
    """The world of a child group."""

    answered = (Spawn,)

    def facts(self) -> Iterator[Any]:
        yield from super().facts()
        if str(self.machine.phase) == "idle" and not self.alive:
            yield StartRequested()
        for child, is_ready in self.alive:
            if not is_ready:
                yield ChildReady(child)
                yield ChildRefused(child, "no")
            yield ChildEnded(child, "ended", is_well=True)
            yield ChildEnded(child, "was killed")
        yield ForkServerEnded()
        yield GroupCloseRequested()

    def take(self, fact: Any) -> None:
        match fact:
            case ChildReady(child):
                self.alive[[each[0] for each in self.alive].index(child)] = (child, True)
            case ChildEnded(child):
                self.alive = [each for each in self.alive if each[0] != child]
            case ForkServerEnded():
                self.alive.clear()
            case _:
                pass
        super().take(fact)
        self.alive += [(order.child, False) for order in self.owed]
        self.owed.clear()

    def key(self) -> Any:
        own = {k: v for k, v in self.machine.__dict__.items() if k not in UNTOLD}
        return repr((sorted(self.alive), self.machine.next_deadline is None, sorted(own.items())))


class StatePickler(pickle.Pickler):
    """Writes a state, of which values that never change are kept once for all states.

    To make them anew in each of a hundred thousand states took most of the search's time.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum) or (
            isinstance(value, msgspec.Struct) and value.__struct_config__.frozen
        ):
            return kept, (keep(value),)
        return NotImplemented


KEPT: list[Any] = []
NUMBERS: dict[int, int] = {}
"""By identity, which is safe: what is kept is never freed."""


def keep(value: Any) -> int:
    number = NUMBERS.setdefault(id(value), len(KEPT))
    if number == len(KEPT):
        KEPT.append(value)
    return number


def kept(number: int) -> Any:
    return KEPT[number]


def written(world: World) -> bytes:
    buffer = io.BytesIO()
    StatePickler(buffer, pickle.HIGHEST_PROTOCOL).dump(world)
    return buffer.getvalue()


def explore(world: World) -> int:
    """Let everything happen that may, in every order; how many different states there were."""
    seen, waiting = {world.key()}, deque([written(world)])
    while waiting:
        state = waiting.popleft()
        for fact in list(pickle.loads(state).facts()):  # our own
            following: World = pickle.loads(state)  # our own
            following.take(fact)
            key = following.key()
            if key not in seen:
                seen.add(key)
                waiting.append(written(following))
    return len(seen)


def moves_of(table: Any) -> set[Move]:
    return {
        (before, after, fact)
        for before, ways in table.TRANSITIONS.items()
        for after, facts in ways.items()
        for fact in facts
    }


def told(moves: set[Move]) -> list[str]:
    return sorted(f"{before} -> {after}: {fact.__name__}" for before, after, fact in moves)


def gang_spec(size: int, grace: int) -> GangSpec:
    return GangSpec(
        size=size, grace=Duration(grace), hang_timeout=Duration(5), exit_timeout=Duration(2)
    )


def compare(recorded: Any, table: Any) -> None:
    assert told(recorded.moves - moves_of(table)) == [], "not in the table"
    assert told(moves_of(table) - recorded.moves) == [], "in the table, but it never happens"


def lose_peer(grace: int, *, recovers: bool) -> None:
    """A worker fails since its peer is gone, and none is dying: exploring that takes minutes."""
    gang, now = RecordedGang(GangSpec(size=2, grace=Duration(grace))), Instant(1)
    gang.recovers = recovers
    said = (RecoveryMessageSent(1, 0, RecoveryMessage.OFFERS, Duration(3)),) if recovers else ()
    for fact in (
        Started(), WorkerSpawned(0, 0, 100), WorkerSpawned(1, 0, 101), *said,
        reported(0, PEER_GONE), WorkerExited(0, 0, ExitStatus(1), now),
    ):  # fmt: skip
        gang.handle(fact, now)
    assert gang.next_deadline is not None, "it waits for the peer's death"
    gang.tick(gang.next_deadline)
    gang.handle(DumpsLooked(0), gang.next_deadline or now)


def test_gangs_go_from_phase_to_phase_as_their_table_says() -> None:
    for grace, recovers in ((10, False), (0, False), (10, True)):
        lose_peer(grace, recovers=recovers)
    for size, grace in ((1, 10), (1, 0), (2, 10), (2, 0)):
        explore(NodeWorld(RecordedGang(gang_spec(size, grace))))
    for grace in (10, 0):
        gang = RecordedGang(GangSpec(size=2, grace=Duration(grace)))
        gang.recovers = True
        world = NodeWorld(gang)
        world.recovers = True
        explore(world)

    compare(RecordedGang, of_gangs)


def explore_children(stages: Sequence[int]) -> None:
    names = tuple(f"child {index}" for index in range(len(stages)))
    replaceable = tuple(index == 1 for index in range(len(stages)))
    spec = ChildGroupSpec(names=names, stages=tuple(stages), replaceable=replaceable)
    explore(ChildrenWorld(RecordedChildGroup(spec)))


def test_child_groups_go_from_phase_to_phase_as_their_table_says() -> None:
    for stages in ((), (0, 0), (0, 1)):
        explore_children(stages)

    compare(RecordedChildGroup, of_child_groups)


def recorded_agent(spec: AgentSpec) -> Agent:
    agent: Agent = RecordedAgent(spec)
    return agent


def recovering_agent() -> World:
    """The world of an agent whose gang outlives a failure, once, after a pause."""
    agent = recorded_agent(spec_alone(GangSpec(size=2), RestartPolicy(restarts_max=2)))
    meeting: Any = agent.rendezvous
    meeting.round = msgspec.structs.replace(meeting.round, restarts=1)
    world = NodeWorld(agent)
    world.recovers = True
    return world


def blame_when_done() -> None:
    """All workers of a node have ended well, and ranks of another node wait for one of them."""
    offer = NodeOffer(node_id="a", host="h", address="addr", slots=1)
    meeting = RendezvousConfig(nodes_min=2, nodes_max=2)
    spec = AgentSpec(run_id="run", rendezvous=meeting, offer=offer, gang=GangSpec(size=1))
    agent, now = recorded_agent(spec), Instant(1)
    agent.handle(AgentStarted(spec), now)
    agent.handle(RoundPrepared(0, 1), now)
    place = AgreedWorld(
        round=0, node_rank=0, members=("a", "b"), first_rank=0, slots=1, size=2,
        master_address="addr", master_port=1,
    )  # fmt: skip
    agent._on_settled(Settled(place), now)  # as the store would have it
    for fact in (
        WorkerSpawned(0, 0, 100), WorkerExited(0, 0, ExitStatus(0), now), Swept(0, ()),
        RanksBlamed((0,), 0, "was done"),
    ):  # fmt: skip
        agent.handle(fact, now)


def test_agents_go_from_phase_to_phase_as_their_table_says() -> None:
    policy = RestartPolicy(restarts_max=2)
    alone = spec_alone(GangSpec(size=1), policy)
    for leaves_alone in (False, True):
        spec = msgspec.structs.replace(alone, leaves_alone=leaves_alone)
        explore(NodeWorld(recorded_agent(spec)))
    explore(recovering_agent())
    blame_when_done()
    for seed in range(CLUSTER_SEEDS):
        ClusterSimulator(
            random_plan(seed), seed, keeps_journal=False, make_agent=recorded_agent
        ).run()

    compare(RecordedAgent, of_agents)
