"""Broken agents, each in one way: the checkers must catch every one of them."""

from collections.abc import Callable

import msgspec
import pytest

from rankwise.base.errors import SimulationError
from rankwise.base.failure import OutcomeStatus
from rankwise.base.keys import Put, Snapshot, Transaction
from rankwise.base.units import DURATION_MAX, MILLISECOND, SECOND, Duration, Instant, after
from rankwise.core.agent.machine import Agent
from rankwise.core.agent.vocabulary import AgentSpec
from rankwise.core.gang.machine import Gang
from rankwise.core.gang.vocabulary import Effect as GangEffect
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
from rankwise.core.rendezvous.founding import Succession
from rankwise.core.rendezvous.lead import WrittenRound
from rankwise.core.rendezvous.machine import Rendezvous
from rankwise.core.rendezvous.node_state import RendezvousState
from rankwise.core.rendezvous.records import Round, RoundPhase, Verdict
from rankwise.core.rendezvous.registration import KeptLease
from rankwise.core.rendezvous.requests import Purpose
from rankwise.core.rendezvous.vocabulary import (
    Closed,
    Commit,
    Dissolved,
    Effect,
    Joined,
    KeysRead,
    Order,
    Refused,
    RenewLease,
    Settled,
    Stimulus,
)
from rankwise.core.watch import machine as watch_machine
from rankwise.drivers.virtual.cluster.cluster_plan import Clocks, ClusterPlan, Network, Workers
from rankwise.drivers.virtual.cluster.random_plans import random_plan
from rankwise.drivers.virtual.cluster.simulator import ClusterSimulator
from rankwise.drivers.virtual.invariants import InvariantBroken
from rankwise.sim.faults.vocabulary import CrashStore, FailWorker, Partition, Preempt, StartAgents

SEEDS = 400


class TrustedForEver(KeptLease):
    """A lease of which its node never notices by its own clock that it has ended."""

    def _prolong(self, sent_at: Instant) -> None:
        super()._prolong(sent_at)
        self.until = after(sent_at, DURATION_MAX)


class Writes(Rendezvous):
    """A leader that does not write what it has decided."""

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        super().__init__(run_id, config, offer)
        self._write = self._node.lead.write
        self._node.lead.write = self.write  # type: ignore[method-assign]

    def write(self, round_: Round, now: Instant) -> list[Order]:
        raise NotImplementedError


class WithoutConditions(Writes):
    """A leader that writes the round whatever lies there."""

    def write(self, round_: Round, now: Instant) -> list[Order]:
        value = msgspec.json.encode(round_)
        written = WrittenRound(value, None, binds_charter=False)
        token = self._node.requests.begin(Purpose.ROUND, now, written)
        return [Commit(token, Transaction(puts=(Put(self._node.keys.round, value),)))]


class Changes(Writes):
    """A leader that writes something else than it has decided."""

    def changed(self, round_: Round) -> Round:
        raise NotImplementedError

    def write(self, round_: Round, now: Instant) -> list[Order]:
        return self._write(self.changed(round_), now)


class SpendsTwice(Changes):
    def changed(self, round_: Round) -> Round:
        before = 0 if self.round is None else self.round.restarts
        spent = round_.restarts - before
        return msgspec.structs.replace(round_, restarts=before + 2 * spent)


class SpendsNothing(Changes):
    def changed(self, round_: Round) -> Round:
        before = 0 if self.round is None else self.round.restarts
        return msgspec.structs.replace(round_, restarts=before)


class SpendsForMembership(Changes):
    def changed(self, round_: Round) -> Round:
        is_new = round_.phase is RoundPhase.RUNNING and round_.number > 0
        before = 0 if self.round is None else self.round.restarts
        return msgspec.structs.replace(round_, restarts=before + 1) if is_new else round_


class SkipsARound(Changes):
    def changed(self, round_: Round) -> Round:
        return msgspec.structs.replace(round_, number=round_.number + (round_.number == 1))


class PlacesOneTwice(Changes):
    def changed(self, round_: Round) -> Round:
        if round_.phase is not RoundPhase.RUNNING or len(round_.members) < 2:
            return round_
        members = (*round_.members[:-1], round_.members[0])
        return msgspec.structs.replace(round_, members=members)


class TakesTooMany(Changes):
    def changed(self, round_: Round) -> Round:
        view = self._node.lead.view
        if round_.phase is not RoundPhase.RUNNING or view is None:
            return round_
        return msgspec.structs.replace(round_, members=tuple(view.candidates()))


class CallsEverythingASuccess(Changes):
    def changed(self, round_: Round) -> Round:
        if round_.verdict is None:
            return round_
        return msgspec.structs.replace(round_, verdict=Verdict(status=OutcomeStatus.SUCCEEDED))


class BlamesAnybody(Changes):
    def changed(self, round_: Round) -> Round:
        verdict = round_.verdict
        if verdict is None or verdict.root is None:
            return round_
        root = msgspec.structs.replace(verdict.root, rank=verdict.root.rank + 1)
        return msgspec.structs.replace(round_, verdict=msgspec.structs.replace(verdict, root=root))


class BlamesRank1(Changes):
    def changed(self, round_: Round) -> Round:
        verdict = round_.verdict
        if verdict is None or verdict.root is None:
            return round_
        root = msgspec.structs.replace(verdict.root, rank=1)
        return msgspec.structs.replace(round_, verdict=msgspec.structs.replace(verdict, root=root))


class NeverCloses(Writes):
    """A leader that keeps the verdict to itself."""

    def write(self, round_: Round, now: Instant) -> list[Order]:
        return [] if round_.phase is RoundPhase.CLOSED else self._write(round_, now)


class Mishears(Rendezvous):
    """A node that tells its agent something else than it should."""

    def changed_on_the_way(self, effect: Effect) -> list[Effect]:
        raise NotImplementedError

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        return [
            each
            for effect in super().handle(stimulus, now)
            for each in self.changed_on_the_way(effect)
        ]


class BeginsAtRankZero(Mishears):
    def changed_on_the_way(self, effect: Effect) -> list[Effect]:
        if not isinstance(effect, Settled):
            return [effect]
        return [Settled(msgspec.structs.replace(effect.world, first_rank=0))]


class DoesNotBegin(Mishears):
    def changed_on_the_way(self, effect: Effect) -> list[Effect]:
        is_last = isinstance(effect, Settled) and effect.world.node_rank == effect.world.size - 1
        return [] if is_last else [effect]


class DoesNotStop(Mishears):
    def changed_on_the_way(self, effect: Effect) -> list[Effect]:
        return [] if isinstance(effect, Dissolved) else [effect]


class HasAVerdictOfItsOwn(Mishears):
    def changed_on_the_way(self, effect: Effect) -> list[Effect]:
        if not isinstance(effect, Closed):
            return [effect]
        return [Closed(msgspec.structs.replace(effect.verdict, detail=self.offer.node_id))]


class ForgetsWhoWasDone(Rendezvous):
    """A leader that takes whoever was gone when it began to lead for lost."""

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        if isinstance(stimulus, KeysRead):
            entries = tuple(
                entry
                for entry in stimulus.snapshot.entries
                if not entry.key.startswith(self._node.keys.done_notes)
            )
            stimulus = KeysRead(
                stimulus.token, Snapshot(entries, stimulus.snapshot.revision), stimulus.watch
            )
        return super().handle(stimulus, now)


class TakesEveryRunForOver(Rendezvous):
    """A newcomer that founds another run in place of one that goes on."""

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        super().__init__(run_id, config, offer)
        node = self._node
        eager = Eager(config, node.keys, node.shared)
        node.succession = node.waiting._succession = eager


class Eager(Succession):
    @property
    def is_over(self) -> bool:
        return self._shared.round.value is not None


class LetsTheRunBeForgotten(Rendezvous):
    """A leader that binds the run to a lease, and does not renew it."""

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        return [
            effect
            for effect in super().handle(stimulus, now)
            if not isinstance(effect, RenewLease) or effect.lease != self._node.shared.charter.lease
        ]


class BindsNothing(Rendezvous):
    """A leader that leaves charter and round in the store for ever."""

    def __init__(self, run_id: str, config: RendezvousConfig, offer: NodeOffer) -> None:
        super().__init__(run_id, msgspec.structs.replace(config, run_ttl=None), offer)


class TakesPartInAnyRun(Rendezvous):
    """A node that joins the next run under the same name when the store has forgotten its own."""

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        effects = super().handle(stimulus, now)
        if not any(isinstance(effect, Refused) for effect in effects):
            return effects
        self._node = RendezvousState(self._node.keys.run_id, self.config, self.offer)
        self._joined = False
        return super().handle(Joined(), now)


class ReadyTooEarly(Agent):
    """An agent that says that it is ready while its workers are still ending."""

    def _on_dissolved(self, dissolved: Dissolved, now: Instant) -> None:
        super()._on_dissolved(dissolved, now)
        assert isinstance(self.rendezvous, Rendezvous)
        self.rendezvous._node.own.rewrite(ready=dissolved.next_round)


class SaysNothingInTheEnd(Agent):
    """An agent that does not tell why it ended."""

    def _finish(self, now: Instant) -> None:
        self._verdict = self._refusal = None
        self._detail = ""
        super()._finish(now)


class TakesPartInAnyJob(Agent):
    """An agent that does not say which program it brings."""

    def __init__(self, spec: AgentSpec) -> None:
        nameless = msgspec.structs.replace(spec.rendezvous, settings={})
        super().__init__(msgspec.structs.replace(spec, rendezvous=nameless))
        self.spec = spec


class OutlivesItsStore(Agent):
    """An agent that waits for a store whose agent is lost."""

    def __init__(self, spec: AgentSpec) -> None:
        hopeful = msgspec.structs.replace(spec.rendezvous, ends_with_store=False)
        super().__init__(msgspec.structs.replace(spec, rendezvous=hopeful))
        self.spec = spec


class WaitsForTheOthersForEver(Agent):
    """An agent that is told to stop, and waits for a verdict however long nobody hears it."""

    def _await_verdict(self, now: Instant) -> None:
        self._deadline = after(now, Duration(3600 * SECOND))


class GangThatDoesNotWait(Gang):
    """A gang that pauses before all of its ranks have left their functions."""

    def _clear_if_all_yielded(self, now: Instant) -> list[GangEffect]:
        return self._begin_clearing(now)


class CallsRanksThatDoNotWait(Agent):
    """A node that is ready for the next round while ranks of it may still be in the last."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self.make_gang = GangThatDoesNotWait


@pytest.mark.parametrize(
    "kind",
    [
        WithoutConditions, SpendsTwice, SpendsNothing, SpendsForMembership,
        SkipsARound, PlacesOneTwice, TakesTooMany, CallsEverythingASuccess, BlamesAnybody,
        NeverCloses, ForgetsWhoWasDone, BeginsAtRankZero, DoesNotBegin, DoesNotStop,
        HasAVerdictOfItsOwn, TakesEveryRunForOver, LetsTheRunBeForgotten, BindsNothing,
    ],
)  # fmt: skip
def test_a_broken_rendezvous_is_caught(kind: type[Rendezvous]) -> None:
    assert any(is_caught(seed, with_rendezvous(kind)) for seed in range(SEEDS))


def with_rendezvous(kind: type[Rendezvous]) -> Callable[[AgentSpec], Agent]:
    def make_agent(spec: AgentSpec) -> Agent:
        agent = Agent(spec)
        agent.rendezvous = kind(spec.run_id, spec.rendezvous, spec.offer)
        return agent

    return make_agent


@pytest.mark.parametrize(
    "kind",
    [
        ReadyTooEarly,
        CallsRanksThatDoNotWait,
        SaysNothingInTheEnd,
        TakesPartInAnyJob,
        OutlivesItsStore,
        WaitsForTheOthersForEver,
    ],
)
def test_a_broken_agent_is_caught(kind: type[Agent]) -> None:
    assert any(is_caught(seed, kind) for seed in range(SEEDS))


def test_a_node_that_does_not_feel_its_lease_end_is_caught() -> None:
    def make_agent(spec: AgentSpec) -> Agent:
        agent = Agent(spec)
        assert isinstance(agent.rendezvous, Rendezvous)
        node = agent.rendezvous._node
        node.lease = TrustedForEver(spec.rendezvous.lease_ttl, node.requests)
        return agent

    world = ClusterSimulator(cut_off_with(fence=SECOND), 0, make_agent=make_agent)

    with pytest.raises(InvariantBroken, match=r"lives on|starts while"):
        world.run()


def test_a_node_that_goes_over_to_the_next_run_when_the_store_forgets_its_own_is_caught() -> None:
    def make_agent(spec: AgentSpec) -> Agent:
        agent = Agent(spec)
        agent.rendezvous = TakesPartInAnyRun(spec.run_id, spec.rendezvous, spec.offer)
        return agent

    world = ClusterSimulator(forgotten_at(5 * SECOND), 0, make_agent=make_agent)

    with pytest.raises(InvariantBroken, match="takes part in run 1, and took part in run 0"):
        world.run()


def test_who_comes_to_a_store_that_has_forgotten_a_closed_run_may_end_otherwise() -> None:
    world = ClusterSimulator(forgotten_at(10 * SECOND + 800 * MILLISECOND), 0)
    shown = whether_shown_when_emptied(world)

    world.run()

    assert shown == [False], "the store forgets the run between its end and its being told"
    ends = {node: end.verdict.detail for node, end in world.checker.finished.items() if end.verdict}
    assert sorted(ends) == ["n0.0", "n1.0", "n1.1"]
    assert ends["n0.0"] == ends["n1.0"]
    assert "too few nodes came" in ends["n1.1"]


def whether_shown_when_emptied(world: ClusterSimulator) -> list[bool]:
    """Of each closed run that the store forgets: whether an agent had told how it ended."""
    shown: list[bool] = []
    store_emptied = world.checker.store_emptied

    def note() -> None:
        shown.extend(run.is_shown for run in world.checker.runs if run.is_closed)
        store_emptied()

    world.checker.store_emptied = note  # type: ignore[method-assign]
    return shown


def forgotten_at(at: int) -> ClusterPlan:
    """A run of two fails after 10 s; the store forgets everything; one node comes again later."""
    latency = Duration(100 * MILLISECOND)
    return ClusterPlan(
        nodes=2,
        rendezvous=RendezvousConfig(nodes_min=2, nodes_max=2, join_timeout=Duration(20 * SECOND)),
        workers=Workers(work=Duration(60 * SECOND)),
        network=Network(latency_min=latency, latency_max=latency),
        faults=(
            FailWorker(at=Instant(10 * SECOND), node=0, local_rank=0, code=1),
            CrashStore(at=Instant(at), lasts=latency, forgets=True),
            StartAgents(at=Instant(40 * SECOND), nodes=(1,)),
        ),
    )


def test_no_fence_is_too_little_for_clocks_that_go_slow() -> None:
    def has_two_ranks(seed: int) -> bool:
        try:
            ClusterSimulator(cut_off_with(fence=0), seed).run()
        except InvariantBroken as error:
            return "lives on" in str(error) or "starts while" in str(error)
        return False

    assert any(has_two_ranks(seed) for seed in range(40))


def test_a_fence_is_enough_for_clocks_that_go_slow() -> None:
    for seed in range(40):
        ClusterSimulator(cut_off_with(fence=SECOND), seed).run()


def cut_off_with(*, fence: int) -> ClusterPlan:
    """Two of four nodes run, and one of each pair that could is cut off."""
    return ClusterPlan(
        nodes=4,
        rendezvous=RendezvousConfig(
            nodes_min=2, nodes_max=2, spares=2, fence=Duration(fence), last_call=Duration(0)
        ),
        clocks=Clocks(drift_ppm_max=100_000),
        faults=(
            Partition(at=Instant(6 * SECOND), nodes=(0, 1), lasts=Duration(12 * SECOND)),
            Partition(at=Instant(20 * SECOND), nodes=(2,), lasts=Duration(12 * SECOND)),
            Partition(at=Instant(20 * SECOND), nodes=(3,), lasts=Duration(8 * SECOND)),
        ),
    )


def is_caught(seed: int, make_agent: Callable[[AgentSpec], Agent]) -> bool:
    world = ClusterSimulator(random_plan(seed), seed, keeps_journal=False, make_agent=make_agent)
    try:
        world.run()
    except SimulationError:
        return True
    return False


def test_ranks_that_are_signalled_before_their_agents_are_no_failure() -> None:
    for seed in range(20):
        run = ClusterSimulator(signalled_first(), seed).run()
        assert run.verdict is not None
        assert run.verdict.status is OutcomeStatus.STOPPED


def test_blaming_ranks_that_were_signalled_before_their_agents_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_machine, "STOP_WINDOW", Duration(0))

    with pytest.raises(InvariantBroken, match="the root cause is told to be"):
        ClusterSimulator(signalled_first(), 0).run()


def test_blaming_a_rank_that_was_signalled_after_another_had_failed_is_caught() -> None:
    """Rank 0 fails, rank 2 loses it as a peer, and only then is rank 1 signalled."""
    latency = Duration(20 * MILLISECOND)
    plan = ClusterPlan(
        nodes=3,
        rendezvous=RendezvousConfig(nodes_min=3, nodes_max=3, last_call=Duration(0)),
        network=Network(latency_min=latency, latency_max=latency),
        workers=Workers(cascade=50, stubborn=100),
        grace=Duration(SECOND),
        faults=(
            FailWorker(at=Instant(9 * SECOND), node=0, raises="ValueError"),
            Preempt(
                at=Instant(9 * SECOND + 700 * MILLISECOND),
                node=1,
                ranks_before=Duration(200 * MILLISECOND),
            ),
        ),
    )

    def story(seed: int) -> set[tuple[int, bool, bool]]:
        """Rank, whether it has lost a peer, whether a scheduler has signalled it."""
        (only,) = ClusterSimulator(plan, seed).run().rounds.values()
        return {(each.rank, each.lost_peer, each.was_signalled) for each in only.workers}

    wanted = {(0, False, False), (1, False, True), (2, True, False)}
    seed = next(seed for seed in range(60) if story(seed) == wanted)

    with pytest.raises(InvariantBroken, match="the root cause is told to be"):
        ClusterSimulator(plan, seed, make_agent=with_rendezvous(BlamesRank1)).run()


def signalled_first() -> ClusterPlan:
    """A scheduler signals every process of both nodes, and the agents hear it last."""
    return ClusterPlan(
        nodes=2,
        rendezvous=RendezvousConfig(nodes_min=2, nodes_max=2, last_call=Duration(0)),
        faults=tuple(
            Preempt(at=Instant(9 * SECOND), node=node, ranks_before=Duration(200 * MILLISECOND))
            for node in range(2)
        ),
    )
