"""Each rank's clock: computing, waiting, overlapping."""

from rankwise.sim import load_topology
from rankwise.sim.reporting.breakdown import BUBBLE, CAUSES, WAITING
from rankwise.simranks.prediction.clocks import Passage, Prediction, RankClock
from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.prediction.summary import (
    breakdown_of,
    figures_of,
    results_of,
    stages_of,
)
from rankwise.simranks.world.collective_groups import CollectiveGroup
from rankwise.simranks.world.equals import Division, Equals, GroupKind, RankChoice
from rankwise.simranks.world.scheduler import Scheduler

SIZE = 1 << 20
WORK = DeviceOperation("aten.add", "math", SIZE, 12 * SIZE, "f32")


class NoPerRankState:
    def move_in(self, rank: object) -> None: ...
    def move_out(self, rank: object) -> None: ...


def predicted(count: int) -> tuple[Prediction, CollectiveGroup, list[RankClock]]:
    prediction = Prediction(load_topology("switch8"), count)
    prediction.clocks = {number: RankClock(prediction, number, 0) for number in range(count)}
    group = CollectiveGroup(Scheduler(own_state=NoPerRankState()), "all", tuple(range(count)))
    return prediction, group, list(prediction.clocks.values())


def all_reduce(prediction: Prediction, group: CollectiveGroup, passages: list[Passage]) -> None:
    prediction.carry_out(group, "all_reduce", 0, lambda _: None, passages)


def test_an_operation_begins_when_the_last_one_comes() -> None:
    prediction, group, (early, late) = predicted(2)
    late.compute(late.price(WORK))

    passages = [clock.come(None, SIZE) for clock in (early, late)]
    all_reduce(prediction, group, passages)
    for clock, passage in zip((early, late), passages, strict=True):
        clock.wait(passage)

    duration = prediction.network.time("all_reduce", SIZE, (0, 1))
    assert early.time == late.time == late.account.computing + duration
    assert (early.account.waiting, late.account.waiting) == (late.account.computing, 0)
    assert early.account.exposed == late.account.exposed == duration


def test_what_is_computed_meanwhile_hides_an_operation() -> None:
    prediction, group, clocks = predicted(2)
    passages = [clock.come(None, SIZE) for clock in clocks]
    all_reduce(prediction, group, passages)
    work = clocks[0].price(WORK)
    while clocks[0].time < passages[0].ends_at:
        clocks[0].compute(work)

    before = clocks[0].time
    clocks[0].wait(passages[0])

    assert clocks[0].time == before
    assert clocks[0].account.exposed == 0


def test_operations_of_a_group_follow_each_other() -> None:
    prediction, group, clocks = predicted(2)
    both = [[clock.come(None, SIZE) for clock in clocks] for _ in range(2)]
    for passages in both:
        all_reduce(prediction, group, passages)

    assert both[1][0].begins_at == both[0][0].ends_at


def test_figures_are_of_the_steps_after_the_first() -> None:
    prediction, _, (clock,) = predicted(1)
    for _ in range(3):
        clock.compute(clock.price(WORK))
        clock.end_step()
    clock.compute(clock.price(WORK))

    figures = figures_of(prediction)

    assert (figures.steps, figures.time) == (2, prediction.costs.time(WORK))
    assert (figures.computing, figures.waiting) == (1, 0)


def test_messages_of_one_way_follow_each_other() -> None:
    prediction, _, (one, other) = predicted(2)
    sent, received = ([clock.come(None, SIZE) for _ in range(2)] for clock in (one, other))
    for ends in zip(sent, received, strict=True):
        prediction.deliver(0, 1, *ends)

    duration = prediction.network.message_time(0, 1, SIZE)
    assert [passage.ends_at for passage in received] == [duration, 2 * duration]


def test_a_rank_that_computes_longer_is_an_imbalance() -> None:
    prediction, group, clocks = predicted(2)
    for _ in range(20):
        clocks[1].compute(clocks[1].price(WORK))
    passages = [clock.come(None, 4) for clock in clocks]
    all_reduce(prediction, group, passages)
    for clock, passage in zip(clocks, passages, strict=True):
        clock.wait(passage)

    assert figures_of(prediction).held_back_by[0] == "imbalance of ranks"


def test_stages_that_wait_for_messages_are_a_pipeline_bubble() -> None:
    prediction, _, clocks = predicted(4)
    for _ in range(2):
        for number, clock in enumerate(clocks):
            if number:
                sent, received = clocks[number - 1].come(None, 4), clock.come(None, 4)
                prediction.deliver(number - 1, number, sent, received)
                clock.wait(received)
            for _ in range(20):
                clock.compute(clock.price(WORK))

    figures = figures_of(prediction)

    assert figures.held_back_by[0] == "pipeline bubble"
    assert figures.bubble == figures.waiting
    parts = [part for rank in breakdown_of(prediction, "").ranks for part in rank.parts]
    assert {part.kind for part in parts if part.cause == WAITING} == {BUBBLE}


def test_small_operations_are_held_back_by_their_launch() -> None:
    prediction, _, (clock,) = predicted(1)
    clock.compute(clock.price(WORK._replace(flops=1, size=12)))

    cause, share = figures_of(prediction).held_back_by

    assert cause == "launch"
    assert share > 0.9


def test_parts_of_each_rank_add_up_to_the_longest_rank() -> None:
    prediction, group, clocks = predicted(2)
    for _ in range(3):
        clocks[1].compute(clocks[1].price(WORK))
        clocks[0].oversleep(5)
        passages = [clock.come(None, SIZE) for clock in clocks]
        all_reduce(prediction, group, passages)
        for clock, passage in zip(clocks, passages, strict=True):
            clock.wait(passage)
            clock.end_step()
        clocks[1].compute(clocks[1].price(WORK))

    run = breakdown_of(prediction, "train.py")

    assert run.steps == 2
    assert [sum(part.time_ps for part in each.parts) for each in run.ranks] == [run.whole_ps] * 2
    kinds = {(part.cause, part.kind) for each in run.ranks for part in each.parts}
    assert {
        ("compute", "elementwise and others"),
        ("host", "launches of kernels"),
        ("exposed communication", "all_reduce"),
        ("waiting for others", "all_reduce"),
        ("asleep", "sleep"),
    } <= kinds


def test_parts_of_a_whole_run_agree_with_its_account() -> None:
    prediction, group, clocks = predicted(2)
    clocks[1].compute(clocks[1].price(WORK))
    passages = [clock.come(None, SIZE) for clock in clocks]
    all_reduce(prediction, group, passages)
    for clock, passage in zip(clocks, passages, strict=True):
        clock.wait(passage)

    run = breakdown_of(prediction, "train.py")

    for clock, each in zip(clocks, run.ranks, strict=True):
        spent = dict.fromkeys(CAUSES, 0)
        for part in each.parts:
            spent[part.cause] += part.time_ps
        account = clock.account
        assert spent["exposed communication"] == account.exposed
        assert spent["waiting for others"] == account.waiting
        assert spent["compute"] + spent["host"] == account.computing


def of_classes(choice: RankChoice, size: int) -> tuple[Prediction, list[RankClock]]:
    """A prediction of which some ranks run, and their clocks."""
    prediction = Prediction(load_topology("switch8"), size)
    prediction.equals = Equals(choice, size)
    prediction.clocks = {
        number: RankClock(prediction, number, 0) for number in sorted(choice.simulated)
    }
    return prediction, list(prediction.clocks.values())


def test_means_count_a_rank_for_all_that_it_stands_for() -> None:
    alone = Division(GroupKind(4, 1), (1,))
    prediction, (first, other) = of_classes(RankChoice(frozenset({0, 1}), divisions=(alone,)), 4)
    for _ in range(5):
        first.compute(first.price(WORK))
    other.compute(other.price(WORK))
    for ranks in ((0, 2), (1, 3)):  # both are the first stage
        prediction.pipelines[ranks] = {rank: at for at, rank in enumerate(ranks)}

    duration = other.account.computing
    (stage,), (result,) = stages_of(prediction), results_of(prediction, "train.py")

    assert (stage.computing, result.case) == (2 * duration, "aten.add x 2")
    assert result.time_ps == 2 * duration


def test_rank_that_sleeps_differs_from_those_of_its_class() -> None:
    prediction, (first, other) = of_classes(RankChoice(frozenset({0, 3})), 4)
    for clock in (first, other):
        clock.compute(clock.price(WORK))
    other.oversleep(2_000_000)

    assert prediction.difference(prediction.digests) == "rank 0 never sleeps, rank 3 sleeps 2 ms"
    assert prediction.following() is not None
