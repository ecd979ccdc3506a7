"""Facts about ranks wait until it is known who is to blame, and then come in their order."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gangs import exited, reported

from rankwise.base.failure import ExitStatus
from rankwise.core.gang.state import GangPhase
from rankwise.core.gang.vocabulary import Stimulus, Swept, WorkerExited
from rankwise.launch.watches import Watches


class OneHold:
    """A call watch that wants to know more about the first thing that it hears of."""

    def __init__(self) -> None:
        self.let_go: Callable[[], None] | None = None
        self.lateness = SimpleNamespace(asks_who_is_late=False)

    def on_exit(self, _: int, __: ExitStatus, on_answers: Callable[[], None]) -> bool:
        return self._holds(on_answers)

    def on_error(self, _: int, __: object, on_answers: Callable[[], None]) -> bool:
        return self._holds(on_answers)

    def _holds(self, on_answers: Callable[[], None]) -> bool:
        is_first = self.let_go is None
        self.let_go = self.let_go or on_answers
        return is_first


def watched() -> tuple[Watches, OneHold, list[Stimulus], list[Stimulus]]:
    """Watches of a running gang of one node, and what its agent and its recorder have heard."""
    told: list[Stimulus] = []
    recorded: list[Stimulus] = []
    gang = SimpleNamespace(phase=GangPhase.RUNNING)
    recorder = SimpleNamespace(on_stimulus=recorded.append)
    nothing = cast("Any", None)
    watches = Watches(
        cast("Any", SimpleNamespace(gang=SimpleNamespace(hang_timeout=None))),
        cast("Any", SimpleNamespace(ranks=SimpleNamespace(node_count=1))),
        nothing,
        nothing,
        say=nothing,
        recorder=lambda: cast("Any", recorder),
        starting_server=lambda: None,
    )
    watches.attach(
        cast("Any", SimpleNamespace(links={})),
        cast("Any", SimpleNamespace(gang=gang, deliver=told.append)),
    )
    hold = OneHold()
    vars(watches)["_call_watch"] = hold
    return watches, hold, told, recorded


@pytest.mark.parametrize(
    ("first", "held"),
    [(reported(0), []), (exited(0, -6), [exited(0, -6)])],
    ids=["an exception", "an exit"],
)
def test_what_comes_after_it_waits_and_is_recorded_once(
    first: Stimulus, held: list[Stimulus]
) -> None:
    watches, hold, told, recorded = watched()
    later: list[Stimulus] = [exited(1, 1), reported(2), Swept(0, ())]

    for each in (first, *later):
        watches.deliver(each)
    before = [each for each in (first,) if each not in held]
    assert told == before
    assert hold.let_go is not None
    hold.let_go()

    assert told == [first, *later]
    assert recorded == [each for each in (first, *later) if isinstance(each, WorkerExited)]
