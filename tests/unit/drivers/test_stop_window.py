"""What the window tells of ranks that somebody else has signalled."""

import pytest
from tests.gangs import exited, running_gang

from rankwise.base.failure import FailureCause
from rankwise.core.gang.vocabulary import RecallRequested, Stimulus, StopRequested
from rankwise.drivers.sim.agenda import Agenda, VirtualClock
from rankwise.drivers.stop_window import StopWindow


@pytest.mark.parametrize("order", [StopRequested(15), RecallRequested()])
def test_a_rank_that_was_signalled_first_is_stopped_though_its_clock_stands_still(
    order: Stimulus,
) -> None:
    clock = VirtualClock()
    gang = running_gang(size=2)
    gang.recovers = True

    def tell(stimulus: Stimulus) -> None:
        gang.handle(stimulus, clock.now())

    window = StopWindow(clock, Agenda(clock).at, (15,), tell)

    is_held = window.holds(exited(0, -15), gang_runs=True)
    gang.handle(order, clock.now())
    window.look(gang_runs=False)

    assert is_held
    assert [failure.cause for failure in gang.failures_so_far] == [FailureCause.STOPPED]
