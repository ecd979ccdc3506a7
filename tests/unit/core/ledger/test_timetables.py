"""Who of the ranks of all nodes made the others wait, by clocks that differ."""

import random

import msgspec
import pytest

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.units import MILLISECOND, SECOND, Duration, Instant
from rankwise.core.ledger import (
    Arrival,
    Begun,
    Group,
    RankTimes,
    ReceivedTimetable,
    Timetable,
    late_over_nodes,
    pack_times,
    unpack_times,
)

STEP_MS, STEPS = 100, 120
ASKED_AT = Instant(10 * SECOND)


def timetable(rank: int, late_ms: float, *, clock: int = 0, is_of_cpp: bool = True) -> Timetable:
    """One node with one rank of two, whose clock is so far ahead and which comes so late."""
    group = Group(size=2, members=(rank,))
    begun = tuple(
        Begun("world", step, round((step * STEP_MS + late_ms) * MILLISECOND) + clock)
        for step in range(2, STEPS)
    )
    arrivals = tuple(
        # Both leave a call when the later one has come, 20 ms after the step began.
        Arrival("world", call.number, call.begun_at, clock + (call.number * STEP_MS + 20) * 10**6)
        for call in begun
    )
    times = RankTimes(
        rank=rank,
        groups={"world": group},
        arrivals=() if is_of_cpp else arrivals,
        begun=begun if is_of_cpp else (),
    )
    asked_at = Instant(ASKED_AT + 2 * MILLISECOND + clock)
    return Timetable(
        ranks=(times,),
        lasted=Duration(STEPS * STEP_MS * MILLISECOND),
        asked_at=asked_at,
        reported_at=Instant(asked_at + 300 * MILLISECOND),
    )


def blamed(own: Timetable, other: Timetable, there_and_back: int = 4 * MILLISECOND) -> int | None:
    received_at = Instant(ASKED_AT + 300 * MILLISECOND + there_and_back)
    tables = (
        ReceivedTimetable(own, None, None),
        ReceivedTimetable(unpack_times(pack_times(other)), ASKED_AT, received_at),
    )
    found = late_over_nodes(tables, 2)
    if found is None:
        return None
    delay, text = found
    assert text.startswith(f"rank {delay.rank} came last in ")
    return delay.rank


@pytest.mark.parametrize("is_of_cpp", [True, False])
@pytest.mark.parametrize("clock", [0, 7 * SECOND, -3 * SECOND])
def test_a_straggler_on_another_node_is_found_whatever_the_nodes_clocks_say(
    clock: int, is_of_cpp: bool
) -> None:
    on_time = timetable(0, 0, is_of_cpp=is_of_cpp)

    assert blamed(on_time, timetable(1, 20, clock=clock, is_of_cpp=is_of_cpp)) == 1
    assert blamed(timetable(0, 20, is_of_cpp=is_of_cpp),
                  timetable(1, 0, clock=clock, is_of_cpp=is_of_cpp)) == 0  # fmt: skip


def test_what_may_be_the_clocks_doing_is_nobodys() -> None:
    late, on_time = timetable(0, 20), timetable(1, 0, clock=SECOND)

    assert blamed(late, on_time, there_and_back=4 * MILLISECOND) == 0
    # By the middle of what is known of its clock, the one on time would be the last.
    assert blamed(late, on_time, there_and_back=80 * MILLISECOND) is None
    assert blamed(timetable(0, 0), on_time, there_and_back=80 * MILLISECOND) is None


def test_a_node_that_has_not_answered_leaves_nobody_to_blame() -> None:
    assert late_over_nodes([ReceivedTimetable(timetable(0, 0), None, None)], 2) is None


def test_a_machine_that_is_busy_is_named_beside_the_rank_that_had_no_cpu() -> None:
    late = timetable(1, 20)
    (times,) = late.ranks

    def told(cpu_wait: Duration) -> str:
        ranks = (msgspec.structs.replace(times, cpu_wait=cpu_wait),)
        table = msgspec.structs.replace(late, ranks=ranks)
        found = late_over_nodes(
            (ReceivedTimetable(timetable(0, 0), None, None), ReceivedTimetable(table, None, None)),
            2,
        )
        assert found is not None
        return found[1]

    # It has cost 2.4 s of 12 s.
    assert "; it had to wait for a CPU itself for 12 % of the time since the first call" in told(
        Duration(3 * SECOND // 2)
    )
    assert "CPU" not in told(Duration(SECOND))


def test_ranks_that_come_together_keep_nobody_waiting() -> None:
    assert blamed(timetable(0, 0), timetable(1, 1, clock=SECOND)) is None


def test_a_timetable_of_many_ranks_is_told_with_fewer_calls() -> None:
    chance = random.Random(1)

    def begun(group: str, steps: range) -> tuple[Begun, ...]:
        return tuple(Begun(group, step, chance.randrange(2**40)) for step in steps)

    ranks = tuple(
        RankTimes(rank=rank, begun=begun("seldom", range(40)) + begun("often", range(400, 528)))
        for rank in range(32)
    )
    table = Timetable(ranks=ranks, lasted=Duration(1), asked_at=Instant(0), reported_at=Instant(1))

    packed = pack_times(table, 16 * 1024)
    told = unpack_times(packed)

    assert len(packed) <= 16 * 1024
    assert len(told.ranks) == 32
    for before, after in zip(ranks, told.ranks, strict=True):  # of each group the latest
        assert after.begun == before.begun[24:40] + before.begun[-16:]
    assert unpack_times(pack_times(table, 64)).ranks == ()


def test_what_is_no_timetable_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        unpack_times(b"sheet")
