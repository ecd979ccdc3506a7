"""What the task graph orders, one fact at a time."""

import pytest

from rankwise.base.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from rankwise.base.units import MICROSECOND, MILLISECOND, Instant
from rankwise.core.tree.held_memory import SCOPE_DEPTH_MAX
from rankwise.core.tree.machine import TaskGraph
from rankwise.core.tree.vocabulary import (
    FAILED_BIT,
    HOST,
    RETURNED_BIT,
    Access,
    AllocationGranted,
    AllocationRefused,
    AllocationRequested,
    ChildDied,
    ChildJoined,
    ChildPool,
    ChildrenReported,
    Discard,
    Dispatch,
    DrainBegan,
    Drained,
    Effect,
    EndCause,
    GraphSpec,
    GroupSubmitted,
    Recall,
    RunAbandoned,
    ScopeClosed,
    ScopeOpened,
    SlotsRecalled,
    Stimulus,
    TaskSubmitted,
    Unfinished,
)

NOW = Instant(1_000_000)


def graph_of(subs: int = 2, chips: int = 0, **options: int) -> TaskGraph:
    return TaskGraph(
        GraphSpec(
            pools=(ChildPool.NEXT_LEVEL,) * chips + (ChildPool.SUB,) * subs,
            ring_depth=options.get("ring_depth", 16),
            heap_start=1 << 20,
            heap_bytes=options.get("heap_bytes", 4096),
            favourite=options.get("favourite"),
        )
    )


def tell(graph: TaskGraph, *stimuli: Stimulus, now: Instant = NOW) -> list[Effect]:
    return [effect for stimulus in stimuli for effect in graph.handle(stimulus, now)]


def touching(start: int, end: int, *, reads: bool = True, writes: bool = True) -> TaskSubmitted:
    return TaskSubmitted(ChildPool.SUB, accesses=(Access(HOST, start, end, reads, writes),))


def sent(*slots: int, child: int, ahead: bool = False, epoch: int = 0) -> Dispatch:
    return Dispatch(child, list(slots), [ahead] * len(slots), epoch)


def test_a_task_for_an_idle_child_is_sent_at_once() -> None:
    graph = graph_of()

    assert tell(graph, TaskSubmitted(ChildPool.SUB)) == [sent(0, child=1)]
    assert tell(graph, TaskSubmitted(ChildPool.SUB)) == [sent(1, child=0)]


def test_the_favourite_is_sent_a_task_whenever_it_is_idle() -> None:
    graph = graph_of(subs=3, chips=1, favourite=1)

    assert tell(graph, TaskSubmitted(ChildPool.SUB)) == [sent(0, child=1)]
    assert tell(graph, TaskSubmitted(ChildPool.SUB)) == [sent(1, child=3)]
    tell(graph, ChildrenReported([0]), ChildrenReported([1]))
    (effect,) = tell(graph, TaskSubmitted(ChildPool.SUB), now=Instant(NOW + MILLISECOND))

    assert isinstance(effect, Dispatch)
    assert effect.child == 1, "although child 3 became idle later"


def test_words_for_busy_children_are_held_back_until_the_deadline() -> None:
    graph = graph_of(subs=1)
    tell(graph, TaskSubmitted(ChildPool.SUB))

    assert tell(graph, TaskSubmitted(ChildPool.SUB), TaskSubmitted(ChildPool.SUB)) == []
    deadline = graph.next_deadline

    assert deadline == NOW + 200 * MICROSECOND
    assert graph.tick(Instant(deadline - 1)) == []
    assert graph.tick(deadline) == [sent(1, 2, child=0)]
    assert graph.next_deadline is None


def test_a_consumer_is_queued_ahead_behind_its_producer() -> None:
    graph = graph_of()
    tell(graph, touching(0, 8))

    assert tell(graph, touching(4, 12), DrainBegan()) == [sent(1, child=1, ahead=True)]


def test_a_consumer_of_producers_at_two_children_waits_for_both() -> None:
    graph = graph_of()
    tell(graph, touching(0, 8), touching(8, 16), touching(0, 16), DrainBegan())

    assert tell(graph, ChildrenReported([0])) == []
    assert tell(graph, ChildrenReported([1])) == [sent(2, child=0)]


def test_reads_of_the_same_bytes_do_not_wait_for_each_other() -> None:
    graph = graph_of()

    effects = tell(graph, touching(0, 8, writes=False), touching(0, 8, writes=False))

    assert effects == [sent(0, child=1), sent(1, child=0)]


def test_what_needs_the_data_of_a_failed_task_is_skipped_and_what_only_overwrites_it_runs() -> None:
    graph = graph_of(subs=1)
    tell(graph, touching(0, 8), touching(0, 8), touching(0, 8, reads=False), DrainBegan())

    effects = tell(graph, ChildrenReported([FAILED_BIT, 1 | RETURNED_BIT, 2 | RETURNED_BIT]))

    assert effects == [sent(2, child=0, epoch=3)]
    assert tell(graph, ChildrenReported([2])) == [
        Drained(
            3,
            (
                Unfinished(0, "", EndCause.RAISED, child=0),
                Unfinished(1, "", EndCause.SKIPPED, because=0),
            ),
        )
    ]


def test_bytes_that_nobody_wrote_spoil_readers_until_somebody_writes_them() -> None:
    graph = graph_of(subs=1)
    tell(graph, touching(0, 8), ChildrenReported([FAILED_BIT]))

    assert tell(graph, touching(0, 8, writes=False)) == []
    assert tell(graph, touching(0, 8, reads=False)) == []  # held back: it follows closely
    tell(graph, touching(0, 8, writes=False), DrainBegan())
    (drained,) = tell(graph, ChildrenReported([0, 1]))

    assert isinstance(drained, Drained)
    assert [unfinished.number for unfinished in drained.unfinished] == [0, 1]


def test_a_group_goes_to_distinct_children_all_at_once() -> None:
    graph = graph_of(subs=3)

    effects = tell(graph, GroupSubmitted(ChildPool.SUB, (None, 0, None)))

    assert {effect.child for effect in effects if isinstance(effect, Dispatch)} == {0, 1, 2}
    assert tell(graph, ChildrenReported([0, 1]), DrainBegan()) == []
    assert tell(graph, ChildrenReported([2])) == [Drained(1, ())]


def graph_with_queues(count: int) -> tuple[TaskGraph, dict[int, list[int]]]:
    """Two children with `count` tasks queued between them, and their slots."""
    graph = graph_of()
    effects = tell(graph, *[TaskSubmitted(ChildPool.SUB)] * count)
    effects += graph.tick(Instant(NOW + MILLISECOND))
    queues: dict[int, list[int]] = {0: [], 1: []}
    for effect in effects:
        assert isinstance(effect, Dispatch)
        queues[effect.child] += effect.slots
    return graph, queues


def test_an_idle_child_gets_what_another_has_not_begun() -> None:
    graph, queues = graph_with_queues(6)
    tell(graph, DrainBegan())

    assert tell(graph, ChildrenReported(queues[1])) == [Recall(0)]
    begun, second, third = queues[0]
    effects = tell(graph, SlotsRecalled(0, [second, third]))

    assert effects == [Dispatch(1, [second, third], [False, False], 0)]
    assert tell(graph, ChildrenReported([begun, second, third])) == [Drained(6, ())]


def test_a_recall_that_brought_nothing_is_not_repeated_before_something_happens() -> None:
    graph, queues = graph_with_queues(6)
    tell(graph, DrainBegan(), ChildrenReported(queues[1]))

    assert tell(graph, SlotsRecalled(0, [])) == []
    assert tell(graph, ChildrenReported([])) == []
    assert tell(graph, ChildrenReported(queues[0][:1])) == [Recall(0)]


def test_a_dead_child_leaves_one_task_failed_and_the_rest_to_others() -> None:
    graph, queues = graph_with_queues(6)
    _, died_in, never_begun = queues[0]

    tell(graph, DrainBegan(), ChildDied(0, begun=2, done=1, successor=False))
    (drained,) = tell(graph, ChildrenReported([*queues[1], never_begun]))

    assert isinstance(drained, Drained)
    (unfinished,) = drained.unfinished
    assert (unfinished.cause, unfinished.child) == (EndCause.DIED, 0)
    assert unfinished.number == died_in


def test_a_death_is_told_of_a_group_in_which_another_member_has_failed_before() -> None:
    graph = graph_of(subs=2)
    assert sent(0, child=0) in tell(graph, GroupSubmitted(ChildPool.SUB, (0, 1)), DrainBegan())

    tell(graph, ChildrenReported([0 | FAILED_BIT]))
    (drained,) = tell(graph, ChildDied(1, begun=1, done=0, successor=False))

    assert isinstance(drained, Drained)
    assert drained.unfinished == (Unfinished(0, "", EndCause.RAISED, child=0, deaths=(1,)),)


def test_without_a_child_that_could_run_it_a_task_is_lost() -> None:
    graph = graph_of(subs=1)
    tell(graph, ChildDied(0, 0, 0, successor=False))

    effects = tell(graph, TaskSubmitted(ChildPool.SUB, "late"), DrainBegan())

    assert effects == [Drained(1, (Unfinished(0, "late", EndCause.LOST),))]


def test_a_task_waits_for_the_successor_of_a_dead_child() -> None:
    graph = graph_of(subs=1)
    tell(graph, ChildDied(0, 0, 0, successor=True))

    assert tell(graph, TaskSubmitted(ChildPool.SUB), DrainBegan()) == []
    assert tell(graph, ChildJoined(0)) == [sent(0, child=0)]


def test_an_abandoned_run_cancels_what_has_not_begun() -> None:
    graph = graph_of(subs=1)
    tell(graph, *[TaskSubmitted(ChildPool.SUB)] * 3)

    assert tell(graph, RunAbandoned()) == [Recall(0)]
    assert tell(graph, SlotsRecalled(0, [])) == []
    (drained,) = tell(graph, ChildrenReported([0]))

    assert isinstance(drained, Drained)
    assert [each.cause for each in drained.unfinished] == [EndCause.CANCELLED] * 2


def test_memory_lives_as_long_as_its_scope_and_the_tasks_that_touch_it() -> None:
    graph = graph_of(subs=1)
    (granted,) = tell(graph, ScopeOpened(), AllocationRequested(4000))
    assert granted == AllocationGranted(1 << 20, 4096)
    tell(graph, touching(1 << 20, (1 << 20) + 4))

    assert tell(graph, ScopeClosed(), ScopeOpened(), AllocationRequested(100)) == []
    assert tell(graph, ChildrenReported([0])) == [
        Discard(1 << 20, 4096),
        AllocationGranted(1 << 20, 1024),
    ]


def test_memory_that_can_never_be_had_is_refused_with_who_holds_it() -> None:
    graph = graph_of()
    tell(graph, AllocationRequested(4096))

    (refused,) = tell(graph, AllocationRequested(1))

    assert isinstance(refused, AllocationRefused)
    assert "the open scope at depth 1 holds 4 KiB" in refused.reason


@pytest.mark.parametrize(
    ("stimulus", "message"),
    [
        (TaskSubmitted(ChildPool.NEXT_LEVEL), "a task for next-level workers can never run"),
        (TaskSubmitted(ChildPool.SUB, child=9), "child 9 is not a sub worker"),
        (GroupSubmitted(ChildPool.SUB, (None,) * 3), "a group of 3 members for sub workers"),
        (GroupSubmitted(ChildPool.SUB, ()), "no members"),
        (GroupSubmitted(ChildPool.SUB, (1, 1)), "for the same child"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_no_trace(
    stimulus: Stimulus, message: str
) -> None:
    graph = graph_of()

    with pytest.raises(ConfigError, match=message):
        tell(graph, stimulus)

    assert tell(graph, DrainBegan()) == [Drained(0, ())]


def test_a_group_wider_than_the_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the ring's 2 slots"):
        graph_of(subs=3, ring_depth=2).next_slots(3)


def test_scopes_have_a_bottom_and_a_top() -> None:
    graph = graph_of()

    with pytest.raises(LocalProtocolError, match="none is open"):
        tell(graph, ScopeClosed())
    with pytest.raises(LocalProtocolError, match="nested deeper than 64"):
        tell(graph, *[ScopeOpened()] * (SCOPE_DEPTH_MAX + 1))


@pytest.mark.parametrize("end", [0, 5, 99])
def test_a_report_of_what_was_not_queued_there_is_refused(end: int) -> None:
    with pytest.raises(RemoteProtocolError, match="a child reported"):
        tell(graph_of(), ChildrenReported([end]))


def test_a_task_begins_in_simulated_time_when_all_it_needs_is_there() -> None:
    graph = graph_of(subs=2)
    tell(graph, touching(0, 8), touching(8, 16), touching(0, 16), DrainBegan())

    tell(graph, ChildrenReported([0], {0: 500}), ChildrenReported([1], {1: 300}))

    assert graph.clock_of(2) == 500
