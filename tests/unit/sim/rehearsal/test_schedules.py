"""The choices that a run leaves open, and the exploration of all of them."""

import random

from rankwise.simranks.world.schedules import Choice, Exploration, Schedule


def toy(schedule: Schedule) -> tuple[int, ...]:
    """A program with choices that depend on earlier ones: it can go in seven ways."""
    first = schedule.choose(2)
    second = schedule.choose(3, is_message=True)
    schedule.choose(1)
    return (first, second, schedule.choose(2)) if first and second == 2 else (first, second)


def test_an_exploration_takes_every_way_once() -> None:
    exploration = Exploration(seed=1)
    ways = []
    while (schedule := exploration.next_schedule()) is not None:
        ways.append(toy(schedule))
        exploration.learn(schedule)

    assert len(ways) == len(set(ways)) == 7
    assert ways[:3] == [(0, 0), (0, 1), (0, 2)]  # messages first


def test_equal_seeds_explore_alike() -> None:
    def ways(seed: int) -> list[tuple[int, ...]]:
        exploration = Exploration(seed)
        found = []
        while (schedule := exploration.next_schedule()) is not None:
            found.append(toy(schedule))
            exploration.learn(schedule)
        return found

    assert ways(3) == ways(3)


def test_a_schedule_is_what_was_chosen() -> None:
    drawn = Schedule(chance=random.Random(4))
    way = toy(drawn)
    again = Schedule([choice.chosen for choice in drawn.choices])

    assert toy(again) == way
    assert again.choices == drawn.choices
    assert not again.has_strayed


def test_a_choice_that_is_no_more_is_noticed() -> None:
    schedule = Schedule([5])

    assert schedule.choose(2) == 1
    assert schedule.has_strayed
    assert schedule.choices == [Choice(1, 2, is_message=False)]
