"""What a worker costs its gang does not grow with the gang."""

import sys
from collections.abc import Iterable
from types import FrameType

import pytest
from gangs import exited, spawned, starting_gang

from rankwise.base.units import Instant
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import Stimulus, StopRequested

STEP, LARGE = 64, 512


def calls_of(size: int, *, is_stopped: bool, ranks: Iterable[int]) -> int:
    """How many functions of ours a gang calls while its workers come up and end, in this order."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    ranks = list(ranks)
    gang = starting_gang(size)
    life: list[Stimulus] = [spawned(local_rank) for local_rank in ranks]
    if is_stopped:
        life.append(StopRequested(15))
    life += [exited(local_rank) for local_rank in ranks]
    sys.setprofile(note)
    try:
        for stimulus in life:
            gang.handle(stimulus, Instant(1))
    finally:
        sys.setprofile(None)
    assert gang.phase is GangPhase.SWEEPING
    return count


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("step", [1, -1])
def test_it_is_as_cheap_in_a_large_gang(step: int, *, is_stopped: bool) -> None:
    few = calls_of(STEP, is_stopped=is_stopped, ranks=range(STEP)[::step])
    many = calls_of(LARGE, is_stopped=is_stopped, ranks=range(LARGE)[::step])

    assert many / LARGE < 1.2 * few / STEP
