"""Who comes last to calls of which only a sample is known."""

from collections.abc import Callable

from rankwise.base.units import MILLISECOND
from rankwise.core.ledger import Begun, Group, SampledLateness

RANKS = (0, 1, 2)
WORLD = {"world": Group(size=3, members=RANKS)}
STEP_MS, BUCKETS = 100, 4


def seen(
    late_ms: Callable[[int, int], float], steps: range = range(50, 66), group: Group | None = None
) -> SampledLateness:
    """Steps of four calls each, in which a rank is so late."""
    lateness = SampledLateness()
    for rank in RANKS:
        calls = [
            Begun(
                "world",
                step * BUCKETS + bucket,
                round((step * STEP_MS + bucket + late_ms(rank, step)) * MILLISECOND),
            )
            for step in steps
            for bucket in range(BUCKETS)
        ]
        lateness.see(rank, WORLD if group is None else {"world": group}, calls)
        lateness.see(rank, WORLD if group is None else {"world": group}, calls)
    return lateness


def test_a_rank_that_is_late_in_each_step_costs_that_part_of_a_step_once() -> None:
    straggler = seen(lambda rank, _: 14 * (rank == 1)).straggler()

    assert straggler is not None
    assert (straggler.rank, straggler.last, round(straggler.cost, 2)) == (1, 1.0, 0.14)
    assert 0.2 < straggler.seen < 0.3, "64 of 263"


def test_what_others_are_late_too_costs_nothing() -> None:
    straggler = seen(lambda rank, _: (0, 20, 30)[rank]).straggler()

    assert straggler is not None
    assert (straggler.rank, round(straggler.cost, 2)) == (2, 0.1)


def test_ranks_that_are_late_by_turns_and_one_that_paused_once_are_no_stragglers() -> None:
    assert seen(lambda rank, step: 30 * (rank == step % 3)).straggler() is None
    assert seen(lambda rank, step: 900 * (rank == 1 and step == 55)).straggler() is None
    assert seen(lambda rank, _: 4 * (rank == 1)).straggler() is None


def test_a_rank_that_is_last_a_little_more_often_on_a_busy_machine_is_no_straggler() -> None:
    def lateness(is_last_in: int) -> SampledLateness:
        return seen(lambda rank, step: 20 * (rank == (1 if step % 16 < is_last_in else 2)))

    assert lateness(9).straggler() is None
    straggler = lateness(16).straggler()
    assert straggler is not None
    assert straggler.rank == 1


def test_calls_that_come_one_by_one_are_volleys_of_their_own() -> None:
    lateness = SampledLateness()
    for rank in RANKS:
        took = [10 * number + 3 * (rank == 2) for number in range(2, 40)]
        calls = [Begun("world", n, ms * MILLISECOND) for n, ms in enumerate(took, 2)]
        lateness.see(rank, WORLD, calls)

    straggler = lateness.straggler()

    assert straggler is not None
    assert (straggler.rank, straggler.cost) == (2, 0.3)


def test_too_few_steps_and_groups_with_members_elsewhere_tell_nothing() -> None:
    def late(rank: int, _step: int) -> float:
        return 14 * (rank == 1)

    assert seen(late, range(50, 53)).straggler() is None
    assert SampledLateness().straggler() is None
    assert seen(late, group=Group(size=6, members=RANKS)).straggler() is None
