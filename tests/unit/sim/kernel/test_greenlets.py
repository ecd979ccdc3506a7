from typing import Any

import pytest
from greenlet import getcurrent

from rankwise.base.errors import Deadlock, LocalProtocolError
from rankwise.sim.kernel import Fiber, RankGreenlet, Simulator, main_greenlet, park, start_fiber


def test_a_fiber_waits_from_any_depth_of_calls() -> None:
    simulator = Simulator()
    chest = simulator.future()
    simulator.call_at(8, chest.succeed, "treasure")

    def deep(levels: int) -> Any:
        return deep(levels - 1) if levels else park(chest)

    def body(name: str) -> Any:
        park(3)
        return name, deep(10), simulator.now

    assert simulator.run(start_fiber(simulator, body, "diver")) == ("diver", "treasure", 8)


def test_a_fiber_is_a_child_of_the_main_greenlet_even_if_a_rank_starts_it() -> None:
    simulator, parents = Simulator(), []

    def body() -> None:
        park(1)
        current = getcurrent()
        assert isinstance(current, Fiber)
        parents.append(current.parent)

    RankGreenlet(0, lambda: start_fiber(simulator, body)).switch()
    simulator.run()

    assert parents == [main_greenlet()]


def test_fibers_work_when_the_agenda_is_driven_from_inside_a_rank() -> None:
    simulator = Simulator()

    def body() -> int:
        park(4)
        return simulator.now

    def rank_program() -> Any:
        return simulator.run(start_fiber(simulator, body))

    assert RankGreenlet(0, rank_program).switch() == 4


def test_a_failure_of_what_a_fiber_waits_for_is_raised_in_the_fiber() -> None:
    simulator = Simulator()
    bad = simulator.future()
    simulator.call_at(2, bad.fail, OSError("torn"))

    def body() -> str:
        try:
            park(bad)
        except OSError as error:
            return str(error)
        return "nothing"

    assert simulator.run(start_fiber(simulator, body)) == "torn"


def test_a_cancelled_fiber_runs_its_finally_blocks() -> None:
    simulator = Simulator()
    seen: list[Any] = []

    def body() -> None:
        try:
            park(simulator.future("never"))
        finally:
            seen.append(simulator.now)

    process = start_fiber(simulator, body)
    simulator.call_at(5, process.cancel, InterruptedError("enough"))

    with pytest.raises(InterruptedError):
        simulator.run()
    assert seen == [5]


def test_a_deadlock_names_the_line_of_user_code_inside_the_fiber() -> None:
    simulator = Simulator()

    def body() -> None:
        park(simulator.future("a message"))

    start_fiber(simulator, body, name="program 7")

    with pytest.raises(Deadlock) as caught:
        simulator.run()
    (waiting,) = caught.value.waiting
    assert waiting.who == "program 7"
    assert waiting.where == f"{__file__}:{body.__code__.co_firstlineno + 1} in body"


def test_parking_outside_of_a_fiber_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="outside a fiber"):
        park(3)
