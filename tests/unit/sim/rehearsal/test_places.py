"""Lines of a program that reports name."""

import sys
from typing import Any

import pytest

from rankwise.base.errors import CollectiveError
from rankwise.sim.rehearsal.meetings import Group
from rankwise.sim.rehearsal.places import place_here

NO_SCHEDULER: Any = None


def test_a_place_has_the_line_of_its_call() -> None:
    first, line = place_here(), sys._getframe().f_lineno
    second = place_here()

    assert first is not None
    assert second is not None
    assert (first.line, second.line) == (line, line + 1)
    assert str(first) == f"{__file__}:{line} in test_a_place_has_the_line_of_its_call"


def test_ranks_that_call_the_same_on_one_line_are_told_together() -> None:
    group = Group(NO_SCHEDULER, "default", (0, 1, 2))

    group.meet(0, "barrier #?", None, print), group.meet(1, "barrier #?", None, print)
    meeting = group.meet(2, "broadcast #?", None, print)

    with pytest.raises(CollectiveError) as raised:
        group.wait(meeting)
    assert "ranks 0-1 called barrier #1 at" in str(raised.value)
    assert "rank 2 called broadcast #1 at" in str(raised.value)
