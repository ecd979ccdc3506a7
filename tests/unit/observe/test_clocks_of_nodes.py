"""Clocks of nodes are aligned by the collectives that their ranks share."""

import random

import pytest

from rankwise.base.units import MICROSECOND, MILLISECOND, SECOND
from rankwise.core.ledger import Stage
from rankwise.core.matching import CallSignature
from rankwise.observe.clocks import align
from rankwise.observe.records import RecordedGroup
from rankwise.observe.story import NodeStory, RankLife, TimedCall

BARRIER = CallSignature("barrier")

START = 5_000 * SECOND


def nodes_with(
    offset: int, *, drift: float = 0.0, calls: int = 200, always_late: int | None = None
) -> list[NodeStory]:
    """Two nodes of a rank each, whose second clock shows `offset` less, and runs slower."""
    chance = random.Random(7)
    nodes = [NodeStory("j0"), NodeStory("j1")]
    nodes[1].wall_offset = offset + 3 * MILLISECOND  # its calendar is wrong
    lives = [RankLife(rank, 0, START) for rank in (0, 1)]
    for number in range(1, calls + 1):
        at = START + number * 200 * MILLISECOND
        late = always_late if always_late is not None else number % 2
        begins = [at + (10 * MILLISECOND if rank == late else 0) for rank in (0, 1)]
        done = max(begins) + 150 * MICROSECOND
        for rank, life in enumerate(lives):
            group = RecordedGroup("g", "", 2, (rank,))
            ended = done + round(chance.expovariate(1 / (60 * MICROSECOND)))

            def shown(instant: int, rank: int = rank) -> int:
                return instant - rank * (offset + round((instant - START) * drift))

            call = TimedCall(
                group, number, shown(begins[rank]), shown(ended), Stage.DONE, BARRIER, ""
            )
            life.calls.append(call)
    for node, life in zip(nodes, lives, strict=True):
        node.lives[0, life.rank] = life
    return nodes


@pytest.mark.parametrize("offset", [0, 3 * SECOND, -400 * SECOND])
def test_an_offset_is_found_within_the_error_that_is_told(offset: int) -> None:
    _, clock = align(nodes_with(offset))

    assert clock.error is not None
    assert clock.error < 100 * MICROSECOND
    assert clock.calls == 200
    found = clock.common(START + 20 * SECOND - offset)
    assert abs(found - (START + 20 * SECOND)) <= clock.error


def test_a_clock_that_drifts_is_followed() -> None:
    nodes = nodes_with(SECOND, drift=50e-6, calls=1000)  # 10 ms in 200 s

    _, clock = align(nodes)

    for seconds in (20, 100, 180):
        instant = START + seconds * SECOND
        shown = instant - SECOND - round(seconds * SECOND * 50e-6)
        assert abs(clock.common(shown) - instant) < MILLISECOND
    assert clock.error is not None
    assert clock.error < MILLISECOND


def test_where_one_node_is_always_late_the_bound_says_how_little_is_certain() -> None:
    _, clock = align(nodes_with(SECOND, always_late=1))

    assert clock.error is not None
    assert clock.error < 100 * MICROSECOND
    assert 9 * MILLISECOND < clock.bound < 11 * MILLISECOND


def test_without_a_shared_call_the_calendar_is_believed_and_no_error_is_known() -> None:
    _, clock = align(nodes_with(SECOND, calls=0))

    assert clock.error is None
    assert clock.common(0) == SECOND + 3 * MILLISECOND
