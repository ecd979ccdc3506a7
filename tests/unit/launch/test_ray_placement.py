"""Agents in the bundles of a placement group: when the job is over, and with which code."""

import signal

from hypothesis import given
from hypothesis import strategies as st

from rankwise.launch.on_ray.actor_placement import LOSSES_MAX, ActorPlacement, BundleState


def running(count: int) -> ActorPlacement:
    placement = ActorPlacement(count)
    for bundle in range(count):
        placement.begin(bundle)
    return placement


def test_a_job_lasts_until_every_agent_has_ended() -> None:
    placement = running(2)

    placement.end(0, 0)
    assert not placement.is_over
    placement.end(1, 0)

    assert placement.is_over
    assert placement.code == 0


def test_agents_that_fail_say_the_jobs_code() -> None:
    placement = running(2)

    placement.end(1, 42)
    placement.end(0, 42)

    assert placement.code == 42


def test_a_lost_agent_is_replaced_and_the_job_goes_on() -> None:
    placement = running(2)

    assert placement.lose(1)
    assert placement.states == [BundleState.RUNNING, BundleState.PENDING]
    assert not placement.is_over


def test_who_waits_for_a_node_is_not_waited_for_once_the_others_have_finished() -> None:
    placement = running(2)
    placement.lose(1)

    placement.end(0, 0)

    assert placement.is_over
    assert placement.code == 0


def test_nobody_is_replaced_for_ever() -> None:
    placement = running(1)

    again = [placement.lose(0) for _ in range(LOSSES_MAX + 1)]

    assert again == [True] * LOSSES_MAX + [False]
    assert placement.is_over
    assert placement.code == 1


def test_a_signal_goes_to_those_who_run() -> None:
    placement = ActorPlacement(3)
    placement.begin(1)

    assert placement.stop(signal.SIGTERM) == [1]
    assert not placement.is_over
    placement.end(1, 143)

    assert placement.is_over
    assert placement.code == 143


def test_a_signal_before_anybody_runs_ends_the_wait_for_nodes() -> None:
    placement = ActorPlacement(2)

    placement.stop(signal.SIGINT)

    assert placement.is_over
    assert placement.code == 130


def test_success_of_the_run_outweighs_an_agent_that_left_it() -> None:
    placement = running(2)

    placement.end(0, 143)
    placement.end(1, 0)

    assert placement.code == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "lose", "stop"]), st.integers(0, 2)), max_size=40
    )
)
def test_once_over_a_job_stays_over(stimuli: list[tuple[str, int]]) -> None:
    placement = ActorPlacement(3)
    for what, bundle in stimuli:
        if placement.is_over:
            assert BundleState.RUNNING not in placement.states
            return
        state = placement.states[bundle]
        if what == "begin" and state is BundleState.PENDING:
            placement.begin(bundle)
        elif what == "end" and state is BundleState.RUNNING:
            placement.end(bundle, 1)
        elif what == "lose" and state in (BundleState.RUNNING, BundleState.PENDING):
            placement.lose(bundle)
        elif what == "stop":
            placement.stop(15)
    assert placement.is_over or {BundleState.RUNNING, BundleState.PENDING} & set(placement.states)
