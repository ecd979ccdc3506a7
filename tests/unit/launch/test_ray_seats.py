"""Agents in the seats of a placement group: when the job is over, and with which code."""

import signal

from hypothesis import given
from hypothesis import strategies as st

from rankwise.launch.on_ray.actor_placement import LOSSES_MAX, ActorPlacement, Seat


def running(count: int) -> ActorPlacement:
    seats = ActorPlacement(count)
    for seat in range(count):
        seats.begin(seat)
    return seats


def test_a_job_lasts_until_every_agent_has_ended() -> None:
    seats = running(2)

    seats.end(0, 0)
    assert not seats.is_over
    seats.end(1, 0)

    assert seats.is_over
    assert seats.code == 0


def test_agents_that_fail_say_the_jobs_code() -> None:
    seats = running(2)

    seats.end(1, 42)
    seats.end(0, 42)

    assert seats.code == 42


def test_a_lost_agent_is_replaced_and_the_job_goes_on() -> None:
    seats = running(2)

    assert seats.lose(1)
    assert seats.states == [Seat.RUNNING, Seat.PENDING]
    assert not seats.is_over


def test_who_waits_for_a_node_is_not_waited_for_once_the_others_have_finished() -> None:
    seats = running(2)
    seats.lose(1)

    seats.end(0, 0)

    assert seats.is_over
    assert seats.code == 0


def test_nobody_is_replaced_for_ever() -> None:
    seats = running(1)

    again = [seats.lose(0) for _ in range(LOSSES_MAX + 1)]

    assert again == [True] * LOSSES_MAX + [False]
    assert seats.is_over
    assert seats.code == 1


def test_a_signal_goes_to_those_who_run() -> None:
    seats = ActorPlacement(3)
    seats.begin(1)

    assert seats.stop(signal.SIGTERM) == [1]
    assert not seats.is_over
    seats.end(1, 143)

    assert seats.is_over
    assert seats.code == 143


def test_a_signal_before_anybody_runs_ends_the_wait_for_nodes() -> None:
    seats = ActorPlacement(2)

    seats.stop(signal.SIGINT)

    assert seats.is_over
    assert seats.code == 130


def test_success_of_the_run_outweighs_an_agent_that_left_it() -> None:
    seats = running(2)

    seats.end(0, 143)
    seats.end(1, 0)

    assert seats.code == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "lose", "stop"]), st.integers(0, 2)), max_size=40
    )
)
def test_once_over_a_job_stays_over(stimuli: list[tuple[str, int]]) -> None:
    seats = ActorPlacement(3)
    for what, seat in stimuli:
        if seats.is_over:
            assert Seat.RUNNING not in seats.states
            return
        state = seats.states[seat]
        if what == "begin" and state is Seat.PENDING:
            seats.begin(seat)
        elif what == "end" and state is Seat.RUNNING:
            seats.end(seat, 1)
        elif what == "lose" and state in (Seat.RUNNING, Seat.PENDING):
            seats.lose(seat)
        elif what == "stop":
            seats.stop(15)
    assert seats.is_over or {Seat.RUNNING, Seat.PENDING} & set(seats.states)
