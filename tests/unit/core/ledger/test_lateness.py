"""Who made the others wait, told from when ranks came to calls and left them."""

from collections.abc import Mapping, Sequence

import pytest

from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.ledger import Arrival, Delay, Group, Lateness, delay_in_words
from rankwise.core.ledger.sentences import with_cpu_wait

RANKS = (0, 1, 2)
WORLD = {"world": Group(size=3, members=RANKS)}


def arrival(
    number: int, begun_ms: int, ended_ms: int | None = None, group: str = "world"
) -> Arrival:
    ended_ms = 1_000_000 if ended_ms is None else ended_ms
    return Arrival(group, number, begun_ms * MILLISECOND, ended_ms * MILLISECOND)


def lateness_of(
    calls: Mapping[int, Sequence[Arrival]], groups: Mapping[str, Group] = WORLD
) -> Lateness:
    lateness = Lateness(RANKS)
    for rank, arrivals in calls.items():
        lateness.see(rank, groups, arrivals)
    return lateness


def waited_ms(lateness: Lateness) -> list[float]:
    return [delay.waited / MILLISECOND for delay in lateness.delays()]


def test_the_last_one_is_waited_for_since_the_second_last_came() -> None:
    lateness = lateness_of({0: [arrival(2, 100)], 1: [arrival(2, 170)], 2: [arrival(2, 130)]})

    assert [delay.last for delay in lateness.delays()] == [0, 1, 0]
    assert waited_ms(lateness) == [0, 40, 0]


def test_who_was_released_last_is_not_late_by_that() -> None:
    calls = {
        0: [arrival(1, 0, 100), arrival(2, 200, 260), arrival(3, 300, 400)],
        1: [arrival(1, 0, 150), arrival(2, 250, 260), arrival(3, 300, 400)],
        2: [arrival(1, 0, 100), arrival(2, 200, 260), arrival(3, 320, 400)],
    }

    lateness = lateness_of(calls)

    assert [delay.last for delay in lateness.delays()] == [0, 0.5, 0.5]
    assert waited_ms(lateness) == [0, 0, 20]


def test_who_was_released_last_and_took_longer_is_late_by_what_it_took() -> None:
    calls = {
        0: [arrival(1, 0, 100), arrival(2, 200)],
        1: [arrival(1, 0, 150), arrival(2, 280)],
        2: [arrival(1, 0, 100), arrival(2, 200)],
    }

    assert waited_ms(lateness_of(calls)) == [0, 30, 0]


def test_who_goes_on_before_the_last_has_come_has_not_waited() -> None:
    issued = [arrival(2, 100, 101)]

    lateness = lateness_of({0: issued, 1: [arrival(2, 170)], 2: [arrival(2, 130, 150)]})

    assert waited_ms(lateness) == [0, 10, 0], "one of two waited for 20 ms"


@pytest.mark.parametrize("is_read_before", [True, False], ids=["early", "late"])
def test_who_waits_for_the_handle_of_a_call_waits_for_the_last_to_issue_it(
    *, is_read_before: bool
) -> None:
    issued = {rank: [arrival(2, at, at + 1)] for rank, at in ((0, 100), (1, 170), (2, 130))}
    waits = {
        rank: arrival(2, at, 171)._replace(of_handle=True) for rank, at in ((0, 110), (2, 150))
    }
    order = (0, 2, 1) if is_read_before else (1, 0, 2)

    lateness = Lateness(RANKS)
    for rank in order:
        lateness.see(rank, WORLD, issued[rank])
        if is_read_before and rank in waits:
            lateness.see(rank, WORLD, [waits[rank]])
    if not is_read_before:
        for rank, wait in waits.items():
            lateness.see(rank, WORLD, [wait])

    assert waited_ms(lateness) == [0, (40 + 1 + 20) / 2, 0]


def test_who_waits_for_each_handle_is_not_late_by_that() -> None:
    calls = {
        rank: [
            part
            for number, step in enumerate((0, 100, 200), 1)
            for part in (
                arrival(number, step + took, step + took + 1),
                arrival(number, step + took + 2, step + 60)._replace(of_handle=True),
            )
        ]
        for rank, took in ((0, 10), (1, 50), (2, 10))
    }

    lateness = lateness_of(calls)

    assert [delay.last for delay in lateness.delays()] == [0, 1, 0]
    assert waited_ms(lateness) == [0, 2 * (1 + 38), 0]


def test_waits_for_calls_of_which_one_rank_was_not_seen_are_forgotten() -> None:
    waits = [arrival(number, 1, 2)._replace(of_handle=True) for number in range(2, 600)]
    whole = {0: arrival(700, 0, 1), 2: arrival(700, 0, 1), 1: arrival(700, 50, 51)}

    lateness = lateness_of({0: waits})
    for rank, call in whole.items():
        lateness.see(rank, WORLD, [call])
    lateness.see(0, WORLD, [arrival(700, 10, 51)._replace(of_handle=True)])

    assert waited_ms(lateness)[1] > 0


def test_the_first_call_of_a_group_is_the_start_and_no_lateness() -> None:
    lateness = lateness_of({rank: [arrival(1, 5_000 * rank)] for rank in RANKS})

    assert lateness.delays() == ()
    assert lateness.worst(Duration(10 * SECOND)) is None


def test_of_a_group_with_members_elsewhere_those_here_are_judged_among_themselves() -> None:
    groups = {"world": Group(size=6, members=RANKS)}
    quick = {rank: [arrival(2, 500 * (rank == 1), 510)] for rank in RANKS}
    slow = {rank: [arrival(2, 500 * (rank == 1), 1_700)] for rank in RANKS}

    lateness = lateness_of(quick, groups)
    waits_for_another_node = lateness_of(slow, groups)

    assert waited_ms(lateness) == [0, 490, 0]
    assert waited_ms(waits_for_another_node) == [0, 0, 0]
    assert lateness.is_of_a_part
    assert not lateness_of(quick).is_of_a_part


def test_a_rank_that_has_no_other_of_its_group_here_is_not_judged() -> None:
    groups = {"world": Group(size=6, members=(1,))}

    lateness = lateness_of({1: [arrival(2, 500)]}, groups)

    assert lateness.delays() == ()


def test_a_call_counts_once_though_it_is_seen_again_and_in_any_order() -> None:
    lateness = Lateness(RANKS)
    for rank in (2, 0, 1, 0, 2):
        lateness.see(rank, WORLD, [arrival(2, 10 * rank), arrival(3, 100 + 10 * rank)])

    assert waited_ms(lateness) == [0, 0, 20]
    assert lateness.seen == 1


def test_what_was_seen_stands_for_the_rest_of_the_calls() -> None:
    lateness = lateness_of({rank: [arrival(11, 100 + (20 if rank == 1 else 0))] for rank in RANKS})

    assert waited_ms(lateness) == [0, 200, 0]
    assert lateness.seen == 0.1


def test_ranks_wait_in_the_calls_of_their_groups_only() -> None:
    groups = {"tp": Group(label="tp", size=2, members=(1, 2))}
    calls = {1: [arrival(2, 100, group="tp")], 2: [arrival(2, 140, group="tp")]}

    lateness = lateness_of(calls, groups)

    assert waited_ms(lateness) == [0, 0, 20], "one of two others waited for 40 ms"


def test_sums_go_on_in_another_attempt_whose_numbers_begin_anew() -> None:
    lateness = Lateness(RANKS)
    for _ in range(2):
        for rank in RANKS:
            lateness.see(rank, WORLD, [arrival(2, 10 * rank)])
        lateness.forget_groups()

    assert waited_ms(lateness) == [0, 0, 20]
    assert [delay.last for delay in lateness.delays()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("late_ms", "lasted_s", "is_notable"),
    [
        ((0, 0, 2_000), 30, True),
        ((0, 0, 2_000), 50, False),  # 4 % of the run
        ((0, 0, 900), 2, False),  # less than a second
        ((0, 1_500, 2_000), 10, False),  # the others waited for both
    ],
)
def test_a_rank_is_notable_that_costs_a_part_of_the_run_which_the_others_do_not(
    late_ms: tuple[int, int, int], lasted_s: int, *, is_notable: bool
) -> None:
    calls = {rank: [arrival(2, late)] for rank, late in enumerate(late_ms)}

    worst = lateness_of(calls).worst(Duration(lasted_s * SECOND))

    assert (worst is not None) == is_notable
    assert worst is None or worst.rank == 2


def test_ranks_that_come_last_by_turns_are_all_alike() -> None:
    calls = {
        rank: [
            arrival(number, 1_000 * number + 300 * (number % 3 == rank)) for number in range(2, 32)
        ]
        for rank in RANKS
    }
    lateness = lateness_of(calls)

    assert waited_ms(lateness) == [3_000, 3_000, 3_000]
    assert lateness.worst(Duration(32 * SECOND)) is None


def test_lateness_is_told_in_a_sentence_that_says_how_much_was_seen() -> None:
    calls = {
        rank: [arrival(n, 1_000 * n + (140 if rank == 1 else 0)) for n in range(2, 102)]
        for rank in RANKS
    }
    lateness = lateness_of(calls)
    worst = lateness.worst(Duration(100 * SECOND))
    assert worst is not None

    told = delay_in_words(worst, Duration(100 * SECOND), lateness.seen)
    sampled = delay_in_words(worst, Duration(100 * SECOND), 0.2)
    of_node = delay_in_words(worst, Duration(100 * SECOND), 1, is_of_a_part=True)

    assert told == (
        "rank 1 came last in 100 % of the calls; "
        "14 % of the time since the first call was spent waiting for it"
    )
    assert sampled == f"{told} (of the calls, 20 % were seen)"
    assert of_node.startswith("rank 1, of the ranks of its node, came last in 100 % of the calls; ")


def test_who_waited_while_everybody_was_stopped_waited_for_nobody() -> None:
    lateness = Lateness(RANKS)
    lateness.on_suspended(Instant(200 * MILLISECOND), Instant(3_600 * MILLISECOND))

    for rank, begun_ms in {
        0: (100, 4_050),
        1: (150, 4_050),
        2: (3_601, 4_090),
    }.items():
        lateness.see(rank, WORLD, [arrival(2, begun_ms[0]), arrival(3, begun_ms[1])])

    assert waited_ms(lateness) == [0, 0, 40]


def test_rank_waits_for_a_cpu_for_no_more_than_all_of_the_time() -> None:
    delay = Delay(rank=1, last=1.0, waited=Duration(SECOND))

    told = with_cpu_wait("rank 1 is late", delay, Duration(182 * SECOND), Duration(100 * SECOND))

    assert told == (
        "rank 1 is late; it had to wait for a CPU itself for 100 % of the time since the first "
        "call: the machine is busy"
    )
