"""The agent's own decisions; what it does among others is in tests/simulation/test_clusters.py."""

import pytest

from rankwise.base.errors import LocalProtocolError
from rankwise.base.failure import ErrorRecord, ExitStatus, FailureCause, Mismatch, MismatchKind
from rankwise.base.keys import LeaseId
from rankwise.base.units import SECOND, Instant
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.state import AgentPhase
from rankwise.core.agent.vocabulary import (
    AgentSpec,
    AgentStarted,
    AnnounceRound,
    AnnounceRoundEnd,
    AskRanksToStop,
    BeginAttempt,
    DescribeFailures,
    FailuresDescribed,
    FinishRun,
    PreparationFailed,
    PrepareRound,
    RanksStood,
    RoundPrepared,
    Stimulus,
    StopRanksAt,
)
from rankwise.core.gang.vocabulary import (
    DumpsLooked,
    GangSpec,
    GuardianLost,
    LookForDumps,
    RanksBlamed,
    SignalWorker,
    SpawnWorker,
    StacksDumped,
    StopRequested,
    Swept,
    WorkerExited,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.machine import Rendezvous
from rankwise.core.rendezvous.vocabulary import (
    Dissolved,
    RefusalKind,
    Settled,
    StopAgreed,
    World,
)

NOW = Instant(SECOND)


def spec(size: int = 2) -> AgentSpec:
    return AgentSpec(
        run_id="run",
        rendezvous=RendezvousConfig(nodes_min=1, nodes_max=1),
        offer=NodeOffer(node_id="a", host="h", address="addr", slots=size),
        gang=GangSpec(size=size),
    )


def started() -> Agent:
    agent = Agent(spec())
    agent.handle(AgentStarted(agent.spec), NOW)
    return agent


def settled(number: int = 4) -> Agent:
    """An agent whose gang has been ordered for round `number`, first rank 6."""
    agent = started()
    agent.handle(RoundPrepared(0, 29500), NOW)
    world = World(
        round=number, node_rank=3, members=("x", "y", "z", "a"), first_rank=6, slots=2, size=8,
        master_address="x", master_port=1,
    )  # fmt: skip
    agent._on_settled(Settled(world), NOW)
    rendezvous_of(agent)._node.membership.member_of = world
    return agent


def rendezvous_of(agent: Agent) -> Rendezvous:
    assert isinstance(agent.rendezvous, Rendezvous)
    return agent.rendezvous


def feed(agent: Agent, *stimuli: Stimulus) -> list[object]:
    return [effect for stimulus in stimuli for effect in agent.handle(stimulus, NOW)]


def test_an_agent_gets_ready_before_it_joins() -> None:
    agent = Agent(spec())

    effects = agent.handle(AgentStarted(agent.spec), NOW)

    assert PrepareRound(0) in effects
    assert agent.phase is AgentPhase.PREPARING


def test_an_agent_lives_once() -> None:
    agent = started()

    with pytest.raises(LocalProtocolError, match="started twice"):
        agent.handle(AgentStarted(agent.spec), NOW)


def test_a_gangs_attempt_is_the_number_of_its_round() -> None:
    agent = settled(number=4)

    assert agent.gang is not None
    assert agent.gang.attempt == 4


def test_the_world_is_told_before_its_workers_are_ordered() -> None:
    agent = started()
    agent.handle(RoundPrepared(0, 29500), NOW)
    world = World(
        round=0, node_rank=0, members=("a",), first_rank=0, slots=2, size=2,
        master_address="addr", master_port=1,
    )  # fmt: skip

    agent._on_settled(Settled(world), NOW)

    assert agent._effects == [
        BeginAttempt(world), AnnounceRound(world), SpawnWorker(0, 0), SpawnWorker(1, 0),
    ]  # fmt: skip


def test_a_node_that_is_not_fit_leaves_and_says_why() -> None:
    agent = started()

    effects = feed(agent, PreparationFailed(0, "the disk is full", "make room"))

    assert isinstance(effects[-1], FinishRun)
    assert effects[-1].refusal is not None
    assert effects[-1].refusal.kind is RefusalKind.UNFIT
    assert effects[-1].refusal.why == "the disk is full"


def test_a_check_that_does_not_end_is_not_waited_for_longer_than_allowed() -> None:
    agent = started()
    assert agent._deadline is not None

    agent.tick(agent._deadline)

    assert agent.finished is not None
    assert agent.finished.refusal is not None
    assert "was not fit for a round within 2 min" in agent.finished.refusal.why


def test_who_is_stopped_before_any_round_leaves_alone() -> None:
    agent = started()

    effects = feed(agent, StopRequested(15))

    assert effects[-1] == FinishRun(
        at=NOW, detail="this node was told to stop by signal 15", stop_signal=15
    )


def test_a_failure_bears_the_rank_that_its_worker_had_in_the_job() -> None:
    agent = settled()
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11))

    feed(agent, WorkerExited(1, 4, ExitStatus(3), NOW))

    (failure,) = rendezvous_of(agent)._node.own.failures
    assert (failure.rank, failure.local_rank, failure.attempt) == (7, 1, 4)
    assert rendezvous_of(agent)._node.own.record.failing == 4


PEER_DIED = "rankwise.base.errors.PeerDied"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (PEER_DIED, "PeerDied: x (perhaps a consequence: its peer was gone)"),
        ("KeyError", "KeyError"),
    ],
)
def test_a_rank_that_lost_a_peer_of_another_node_is_not_told_as_the_cause(
    kind: str, told: str
) -> None:
    agent = settled()
    error = ErrorRecord(type=kind, message="x", traceback="", raised_at=NOW, wall_ns=0)
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11), WorkerReported(0, 4, error))

    effects = feed(agent, WorkerExited(0, 4, ExitStatus(1), NOW))
    if kind == PEER_DIED:  # it waits for a death that explains it, and for cores that are written
        assert effects == [LookForDumps(4)]
        assert feed(agent, DumpsLooked(4)) == []
        agent.tick(Instant(NOW + 2 * SECOND))
        effects = feed(agent, DumpsLooked(4))

    assert AnnounceRoundEnd(4, f"rank 6 on h failed: {told}") in effects


def done() -> Agent:
    """An agent all of whose workers have ended well, while those of other nodes go on."""
    agent = settled()
    feed(
        agent,
        *(WorkerSpawned(rank, 4, 100 + rank) for rank in (0, 1)),
        *(WorkerExited(rank, 4, ExitStatus(0), NOW) for rank in (0, 1)),
        Swept(4, ()),
    )
    assert agent.phase is AgentPhase.ENDED
    return agent


def test_who_is_blamed_when_all_of_its_node_have_ended_well_has_failed_after_all() -> None:
    agent = done()

    left = Mismatch(MismatchKind.DEPARTURE)
    effects = feed(agent, RanksBlamed((1,), 4, "rank 7 was done", mismatch=left))

    (described,) = [each for each in effects if isinstance(each, DescribeFailures)]
    (failure,) = described.failures
    assert failure.mismatch == left
    assert (failure.rank, failure.cause, failure.detail) == (
        7, FailureCause.OUT_OF_STEP, "rank 7 was done",
    )  # fmt: skip
    feed(agent, FailuresDescribed(4, described.failures))
    record = rendezvous_of(agent)._node.own.record
    assert (record.failing, record.ended, record.is_done) == (4, 4, False)


def test_a_blame_of_another_round_changes_nothing() -> None:
    agent = done()

    assert feed(agent, RanksBlamed((1,), 3, "rank 7 was done")) == []
    assert agent.phase is AgentPhase.ENDED


def test_other_nodes_hear_who_is_to_blame_when_stacks_are_shown_and_before_any_rank_ends() -> None:
    agent = settled()
    feed(agent, *(WorkerSpawned(rank, 4, 100 + rank) for rank in (0, 1)))

    feed(agent, RanksBlamed((1,), 4, "rank 7 has not come"))
    told_before = rendezvous_of(agent)._node.own.record.failing
    feed(agent, StacksDumped(4))

    assert told_before == -1
    own = rendezvous_of(agent)._node.own
    assert own.record.failing == 4
    assert [(each.rank, each.exit) for each in own.failures] == [(7, None)]


def test_a_worker_that_was_called_off_has_not_failed() -> None:
    agent = settled()
    agent._on_dissolved(Dissolved(4, 5, "a node was lost", at_once=True), NOW)

    feed(agent, Swept(4))

    assert rendezvous_of(agent)._node.own.record.ended == 4
    assert rendezvous_of(agent)._node.own.failures == ()
    assert rendezvous_of(agent)._node.own.record.failing == -1


def test_a_round_that_must_end_at_once_is_killed_though_it_is_stopping() -> None:
    agent = settled()
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11))
    feed(agent, WorkerExited(1, 4, ExitStatus(3), NOW))
    agent._effects.clear()

    agent._on_dissolved(Dissolved(4, 5, "cut off", at_once=True), NOW)

    assert SignalWorker(0, 4, 9) in agent._effects


def test_a_second_request_to_stop_kills() -> None:
    agent = settled()
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11), StopRequested(15))

    effects = feed(agent, StopRequested(15))

    assert SignalWorker(0, 4, 9) in effects
    assert SignalWorker(1, 4, 9) in effects


def test_who_is_told_to_stop_twice_leaves_without_waiting_for_the_others() -> None:
    agent = settled()
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11), StopRequested(15))
    agent._on_stop_agreed(StopAgreed(4, "node a was told to stop", 15), NOW)

    feed(agent, StopRequested(15))
    for local_rank in (0, 1):
        feed(agent, WorkerExited(local_rank, 4, ExitStatus(-9), Instant(NOW + 1)))
    feed(agent, Swept(4))

    assert agent.finished is not None


def test_a_node_without_its_guardian_leaves_before_it_gets_ranks() -> None:
    agent = started()
    agent.handle(RoundPrepared(0, 29500), NOW)

    feed(agent, GuardianLost("the guardian has died"))

    assert agent.finished is not None
    assert agent.finished.refusal is not None
    assert "can start no more ranks: the guardian has died" in agent.finished.refusal.why


def test_a_node_whose_guardian_died_with_its_workers_takes_part_in_no_further_round() -> None:
    agent = settled()
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11))

    feed(agent, GuardianLost("the guardian has died"), FailuresDescribed(4, ()))

    assert agent.finished is not None
    assert agent.finished.refusal is not None


def test_a_stop_that_nobody_agrees_upon_is_carried_out_alone_after_a_lease() -> None:
    agent = settled()
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11), StopRequested(15))

    effects = agent.tick(Instant(NOW + 5 * SECOND))

    assert AskRanksToStop(4, 15) in effects
    assert SignalWorker(0, 4, 15) in effects
    assert StopRanksAt(4, 7) in feed(agent, RanksStood(4, 7))


def test_a_stop_waits_for_a_silent_store_for_half_a_lease_and_leaves_the_rest_to_the_ranks() -> (
    None
):
    agent = settled()
    keep_lease(agent, Instant(NOW + 5 * SECOND))
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11), StopRequested(15))

    keep_lease(agent, Instant(NOW + 6 * SECOND))  # one answer more, and then no other
    assert AskRanksToStop(4, 15) not in agent.tick(Instant(NOW + 5 * SECOND // 2))
    assert AskRanksToStop(4, 15) in agent.tick(Instant(NOW + 7 * SECOND // 2))


def keep_lease(agent: Agent, until: Instant) -> None:
    lease = rendezvous_of(agent)._node.lease
    lease.id, lease.until = LeaseId(1), until


def test_a_step_that_the_others_have_to_agree_on_is_not_chosen_alone() -> None:
    agent = settled()
    feed(agent, WorkerSpawned(0, 4, 10), WorkerSpawned(1, 4, 11), StopRequested(15))

    assert StopRanksAt(4, 7) not in feed(agent, RanksStood(4, 7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "a/b"}, "run_id is 'a/b'"),
        ({"gang": GangSpec(size=3)}, "3 workers and the offer says 2 slots"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(spec(), name) for name in AgentSpec.__struct_fields__} | changes

    with pytest.raises(ValueError, match=message):
        AgentSpec(**fields)
