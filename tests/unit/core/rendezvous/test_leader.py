"""What a leader decides, given what it has heard and when."""

from typing import Any

import msgspec
import pytest

from rankwise.base.backoff import Backoff
from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause, OutcomeStatus
from rankwise.base.units import SECOND, ZERO, Duration, Instant
from rankwise.core.rendezvous.configuration import RendezvousConfig, RestartPolicy
from rankwise.core.rendezvous.leader import decide
from rankwise.core.rendezvous.records import (
    Departure,
    FailureNote,
    Lineup,
    NodeRecord,
    Round,
    RoundPhase,
)
from rankwise.core.rendezvous.view import ObservedRecord, View

BEGIN = Instant(100 * SECOND)


def config(nodes_min: int = 2, nodes_max: int = 2, **fields: Any) -> RendezvousConfig:
    return RendezvousConfig(nodes_min=nodes_min, nodes_max=nodes_max, **fields)


def record(node: str, **fields: Any) -> NodeRecord:
    return NodeRecord(host=f"host-{node}", address=f"addr-{node}", port=1, slots=2, **fields)


def hear(view: View, at: int, **records: NodeRecord) -> None:
    for node, observed in records.items():
        view.put(node, ObservedRecord(observed, Instant(at)))


def running(*members: str, settings: RendezvousConfig, **fields: Any) -> View:
    """A view of round 3, which runs on these nodes."""
    view = View(settings, BEGIN)
    hear(view, BEGIN, **{node: record(node, ready=3, ended=2) for node in members})
    view.turn_to(
        Round(number=3, phase=RoundPhase.RUNNING, members=members, slots=(2,), **fields), BEGIN
    )
    return view


def failure(rank: int = 0, code: int = 1, at: int = BEGIN, raises: str = "") -> FailureNote:
    error = None
    if raises:
        error = ErrorRecord(
            type=raises, message="m", traceback="t", raised_at=Instant(at), wall_ns=0
        )
    cause = FailureCause.RAISED if raises else FailureCause.EXITED
    return FailureNote(
        Failure(
            local_rank=rank % 2, rank=rank, attempt=3, cause=cause, at=Instant(at),
            exit=ExitStatus(code), error=error,
        )
    )  # fmt: skip


def led_anew(view: View, at: int) -> View:
    """What another leader knows, which reads the store when some have gone."""
    fresh = View(view.config, Instant(at))
    hear(fresh, at, **{n: h.record for n, h in view.nodes.items() if h.record is not None})
    fresh.done.update(view.done)
    assert view.round is not None
    fresh.turn_to(view.round, Instant(at))
    return fresh


def follow(view: View, now: int) -> Round:
    """Decide, and let what was decided be written."""
    decision = decide(view, Instant(now))
    assert decision.round is not None, decision
    view.turn_to(decision.round, Instant(now))
    return decision.round


def test_the_first_round_begins_at_once_when_all_who_may_run_are_ready() -> None:
    view = View(config(), BEGIN)
    hear(view, BEGIN, b=record("b", ready=0), a=record("a", ready=0))

    round_ = decide(view, BEGIN).round

    assert round_ is not None
    assert (round_.number, round_.phase, round_.members) == (0, RoundPhase.RUNNING, ("a", "b"))
    assert (round_.master_address, round_.master_port, round_.slots) == ("addr-a", 1, (2,))


def test_a_round_that_could_be_larger_waits_for_newcomers_until_none_comes() -> None:
    view = View(config(1, 4, last_call_min=Duration(3 * SECOND)), BEGIN)
    hear(view, BEGIN, a=record("a", ready=0))
    assert decide(view, BEGIN).wake_at == BEGIN + 3 * SECOND

    hear(view, BEGIN + 2 * SECOND, b=record("b", ready=0))

    assert decide(view, Instant(BEGIN + 3 * SECOND)).wake_at == BEGIN + 5 * SECOND
    round_ = decide(view, Instant(BEGIN + 5 * SECOND)).round
    assert round_ is not None
    assert round_.members == ("a", "b")


def test_a_round_names_the_hosts_of_who_is_in_it_who_came_who_left_and_who_waits() -> None:
    settings = config(2, 2, spares=0)
    view = running("a", "b", settings=settings)
    view.delete("b", BEGIN)
    gathering = decide(view, BEGIN).round
    assert gathering is not None
    view.turn_to(gathering, BEGIN)
    hear(view, BEGIN, a=record("a", ready=4), c=record("c", ready=0), d=record("d", ready=0))

    round_ = decide(view, Instant(BEGIN + 60 * SECOND)).round

    assert round_ is not None
    assert round_.lineup == Lineup(
        hosts=("host-a", "host-c"), came=("host-c",), left=("host-b",), reserve=("host-d",)
    )
    assert round_.why == "node b on host-b is lost"


def test_nodes_that_are_back_are_not_told_to_be_lost() -> None:
    view = running("a", "b", settings=config())
    hear(view, BEGIN, a=record("a", ready=4), b=record("b", ready=4))

    dissolved = decide(view, BEGIN).round

    assert dissolved is not None
    assert dissolved.why == "nodes a on host-a, b on host-b were cut off from the store"


def test_a_node_that_comes_back_into_the_next_round_was_cut_off_and_not_lost() -> None:
    view = running("a", "b", settings=config())
    view.delete("b", BEGIN)
    gathering = decide(view, BEGIN).round
    assert gathering is not None
    assert gathering.why == "node b on host-b is lost"
    view.turn_to(gathering, BEGIN)
    hear(view, BEGIN, a=record("a", ready=4), b=record("b", ready=4))

    round_ = decide(view, Instant(BEGIN + 60 * SECOND)).round

    assert round_ is not None
    assert (round_.why, round_.gone) == ("node b on host-b was cut off from the store", ())


def test_a_node_that_is_lost_is_told_before_one_that_is_back() -> None:
    view = running("a", "b", settings=config())
    hear(view, BEGIN, a=record("a", ready=4))
    view.delete("b", BEGIN)

    dissolved = decide(view, BEGIN).round

    assert dissolved is not None
    assert dissolved.why == "node b on host-b is lost"


def test_nodes_of_one_host_are_told_apart_by_their_ids() -> None:
    view = View(config(2, 2, spares=1), BEGIN)
    shared = [msgspec.structs.replace(record(each, ready=0), host="big") for each in "ab"]
    hear(view, BEGIN, a=shared[0], b=shared[1], c=record("c", ready=0))

    round_ = decide(view, BEGIN).round

    assert round_ is not None
    assert round_.lineup == Lineup(hosts=("big/a", "big/b"), reserve=("host-c",))
    later = View(config(2, 2, spares=1), BEGIN)  # of a leader that has never seen them
    later.turn_to(round_, BEGIN)
    assert later.label("a") == "a on big"


def test_the_last_call_is_not_waited_for_longer_than_it_lasts() -> None:
    view = View(config(1, 4, last_call=Duration(5 * SECOND)), BEGIN)
    hear(view, BEGIN, a=record("a", ready=0), b=record("b"))

    assert decide(view, BEGIN).wake_at == BEGIN + 5 * SECOND
    assert decide(view, Instant(BEGIN + 5 * SECOND)).round is not None


def test_too_few_nodes_close_the_run_and_are_named() -> None:
    view = View(config(2, 2), BEGIN)
    hear(view, BEGIN, a=record("a", ready=0))
    first = decide(view, BEGIN)

    assert first.wake_at == BEGIN + 600 * SECOND
    assert "1 of at least 2 nodes are ready (a on host-a)" in first.waiting
    closed = follow(view, BEGIN + 600 * SECOND)
    assert closed.verdict is not None
    assert closed.verdict.status is OutcomeStatus.FAILED
    assert "too few nodes came within 10 min" in closed.verdict.detail


def test_a_failure_dissolves_the_round_and_costs_a_restart_when_all_have_ended() -> None:
    settings = config(policy=RestartPolicy(restarts_max=1, backoff=Backoff(initial=ZERO)))
    view = running("a", "b", settings=settings)
    hear(view, BEGIN + 1, b=record("b", ready=3, ended=2, failing=3, failures=(failure(2),)))

    gathering = follow(view, BEGIN + 1)

    assert (gathering.number, gathering.phase, gathering.restarts) == (4, RoundPhase.GATHERING, 0)
    assert gathering.is_failure
    assert decide(view, Instant(BEGIN + 2)).round is None
    ended = record("b", ready=4, ended=3, failing=3, failures=(failure(2),))
    hear(view, BEGIN + 3, a=record("a", ready=4, ended=3), b=ended)
    again = follow(view, BEGIN + 3)
    assert (again.number, again.phase, again.restarts) == (4, RoundPhase.RUNNING, 1)
    assert again.strikes == {"host-b": 1}


def test_a_lost_member_explains_the_failures_of_the_others_and_costs_nothing() -> None:
    view = running("a", "b", "c", settings=config(2, 3))
    note = failure(2, raises="ConnectionResetError")
    hear(view, BEGIN + 1, b=record("b", ready=3, ended=2, failing=3, failures=(note,)))
    assert follow(view, BEGIN + 1).is_failure
    rest = record("b", ready=4, ended=3, failing=3, failures=(note,))
    hear(view, BEGIN + 2, a=record("a", ready=4, ended=3), b=rest)
    assert "until the workers of c" in decide(view, Instant(BEGIN + 3)).waiting

    view.delete("c", Instant(BEGIN + 5 * SECOND))

    assert decide(view, Instant(BEGIN + 5 * SECOND)).wake_at == BEGIN + 6 * SECOND
    again = follow(view, BEGIN + 6 * SECOND)
    assert (again.members, again.restarts) == (("a", "b"), 0)
    assert again.why == "node c on host-c is lost"


def test_a_new_leader_gives_a_missing_member_the_fence_from_now() -> None:
    view = View(config(1, 2), BEGIN)
    hear(view, BEGIN, a=record("a", ready=4, ended=3))
    view.turn_to(Round(number=4, phase=RoundPhase.GATHERING, members=("a", "b"), slots=(2,)), BEGIN)

    assert decide(view, BEGIN).wake_at == BEGIN + SECOND
    assert decide(view, Instant(BEGIN + SECOND)).round is not None


def test_a_member_that_said_that_it_had_ended_needs_no_fence() -> None:
    view = running("a", "b", settings=config(1, 2))
    hear(view, BEGIN, b=record("b", ready=3, ended=2, departure=Departure.LEAVES))
    assert follow(view, BEGIN).why == "node b on host-b is leaving"
    hear(view, BEGIN + 1, b=record("b", ready=3, ended=3, departure=Departure.LEAVES))
    view.delete("b", Instant(BEGIN + 2))
    hear(view, BEGIN + 3, a=record("a", ready=4, ended=3))

    assert follow(view, BEGIN + 3).members == ("a",)


@pytest.mark.parametrize(
    ("policy", "note", "told"),
    [
        (RestartPolicy(), failure(), ""),
        (RestartPolicy(restarts_max=5, final_exceptions=("ValueError",)),
         failure(raises="ValueError"), "--no-retry names ValueError"),
        (RestartPolicy(restarts_max=5, final_exit_codes=(17,)),
         failure(code=17), "--no-retry names exit code 17"),
        (RestartPolicy(restarts_max=5, rounds_without_progress_max=1),
         failure(), "1 attempt without progress"),
    ],
)  # fmt: skip
def test_a_failure_after_which_no_restart_is_due_closes_with_its_root_cause(
    policy: RestartPolicy, note: FailureNote, told: str
) -> None:
    view = running("a", "b", settings=config(policy=policy))
    ended = record("b", ready=4, ended=3, failing=3, failures=(note,))
    hear(view, BEGIN + 1, a=record("a", ready=3, ended=3), b=ended)

    follow(view, BEGIN + 1)
    closed = follow(view, BEGIN + 1)

    verdict = closed.verdict
    assert closed.phase is RoundPhase.CLOSED
    assert verdict is not None
    assert (verdict.status, verdict.node, verdict.host) == (OutcomeStatus.FAILED, "b", "host-b")
    assert told in verdict.detail


@pytest.mark.parametrize("leaves", [True, False])
def test_a_lost_node_ends_an_attempt_without_progress_and_one_that_leaves_does_not(
    leaves: bool,
) -> None:
    """The next leader misses one that has led and left, and does not know how it went."""
    view = running(
        "a", "b", settings=config(1, 2, policy=RestartPolicy(rounds_without_progress_max=1))
    )
    if leaves:
        hear(view, BEGIN, b=record("b", ready=3, ended=2, departure=Departure.LEAVES))
        follow(view, BEGIN)
    view.delete("b", BEGIN)
    if not leaves:
        follow(view, BEGIN)
    hear(view, BEGIN, a=record("a", ready=4, ended=3))
    led_now = led_anew(view, BEGIN)

    following = follow(led_now, BEGIN + SECOND)

    phase = RoundPhase.RUNNING if leaves else RoundPhase.CLOSED
    assert (following.phase, following.verdict is None) == (phase, leaves)


def test_the_root_cause_is_what_failed_first_on_the_leaders_clock() -> None:
    view = running("a", "b", settings=config())
    old = msgspec.structs.replace(failure(0, at=9 * 10**12), age=Duration(10))
    new = msgspec.structs.replace(failure(2, at=7), age=Duration(3))
    hear(view, BEGIN + 100, b=record("b", ready=3, ended=3, failing=3, failures=(new,)))
    hear(view, BEGIN + 105, a=record("a", ready=3, ended=3, failing=3, failures=(old,)))

    follow(view, BEGIN + 105)
    verdict = follow(view, BEGIN + 105).verdict

    assert verdict is not None
    assert (verdict.node, verdict.failure_count) == ("a", 2)


def test_all_done_is_a_success_and_newcomers_do_not_disturb_it() -> None:
    view = running("a", "b", settings=config(2, 3, settle_delay=ZERO))
    hear(view, BEGIN, c=record("c", ready=0), a=record("a", ready=3, ended=3, is_done=True))
    assert decide(view, BEGIN).round is None

    hear(view, BEGIN, b=record("b", ready=3, ended=3, is_done=True))

    verdict = follow(view, BEGIN).verdict
    assert verdict is not None
    assert verdict.status is OutcomeStatus.SUCCEEDED


def test_a_newcomer_is_taken_in_after_a_while() -> None:
    view = running("a", settings=config(1, 2, settle_delay=Duration(3 * SECOND)))
    hear(view, BEGIN + SECOND, b=record("b", ready=0))

    assert decide(view, Instant(BEGIN + SECOND)).wake_at == BEGIN + 4 * SECOND
    assert follow(view, BEGIN + 4 * SECOND).why == "node b on host-b is joining"


def test_who_comes_when_all_seats_are_taken_does_not_put_off_those_who_came_before() -> None:
    view = running("a", settings=config(1, 2, settle_delay=Duration(3 * SECOND)))
    hear(view, BEGIN + SECOND, b=record("b", ready=0))
    hear(view, BEGIN + 3 * SECOND, c=record("c", ready=0))

    assert follow(view, BEGIN + 4 * SECOND).why == "node b on host-b is joining"


def test_a_node_that_comes_and_goes_all_the_time_does_not_keep_others_out() -> None:
    patience = {"settle_delay": Duration(3 * SECOND), "last_call": Duration(5 * SECOND)}
    view = running("a", settings=config(1, 9, **patience))
    hear(view, BEGIN + SECOND, b=record("b", ready=0))
    for second in (3, 5):
        view.delete("c", Instant(BEGIN + second * SECOND))
        hear(view, BEGIN + second * SECOND, c=record("c", ready=0))

    assert decide(view, Instant(BEGIN + 5 * SECOND)).wake_at == BEGIN + 6 * SECOND
    assert follow(view, BEGIN + 6 * SECOND).why.endswith("are joining")


def test_a_member_that_is_getting_ready_again_is_waited_for_beyond_the_last_call() -> None:
    view = running("a", "b", "c", settings=config(2, 3, last_call=ZERO))
    hear(view, BEGIN, c=record("c", ready=3, ended=2, departure=Departure.LEAVES))
    follow(view, BEGIN)
    both = {"a": record("a", ready=4, ended=3), "b": record("b", ready=4, ended=3)}
    view.delete("c", BEGIN)
    hear(view, BEGIN, d=record("d"), **both)
    hear(view, BEGIN, a=record("a", ready=3, ended=3), d=record("d", ready=0))

    assert decide(view, BEGIN).wake_at == BEGIN + 60 * SECOND
    hear(view, BEGIN, a=both["a"])
    assert follow(view, BEGIN + 2 * SECOND).members == ("a", "b", "d")


def test_a_spare_leaves_its_seat_for_a_while_to_a_member_that_is_getting_ready_again() -> None:
    settings = config(settle_delay=Duration(3 * SECOND), policy=RestartPolicy(restarts_max=1))
    view = running("a", "b", settings=settings)
    hear(view, BEGIN, b=record("b", ready=3, ended=2, failing=3))
    follow(view, BEGIN)
    ready = {node: record(node, ready=4, ended=3) for node in ("a", "b")}
    hear(view, BEGIN, a=ready["a"], b=record("b", ready=3, ended=3), d=record("d", ready=0))

    assert decide(view, BEGIN).wake_at == BEGIN + 3 * SECOND

    assert decide(view, Instant(BEGIN + 3 * SECOND)).round is not None
    hear(view, BEGIN, b=ready["b"])
    assert follow(view, BEGIN + 2 * SECOND).members == ("a", "b")


def test_a_preempted_member_stops_all_at_the_largest_step() -> None:
    view = running("a", "b", settings=config())
    going = {"departure": Departure.PREEMPTED, "signal": 15}
    hear(view, BEGIN, b=record("b", ready=3, ended=2, **going))
    stopping = follow(view, BEGIN)
    assert (stopping.phase, stopping.signal) == (RoundPhase.STOPPING, 15)
    hear(view, BEGIN, a=record("a", ready=3, ended=2, arrived_at=41))
    assert decide(view, BEGIN).round is None
    hear(view, BEGIN, b=record("b", ready=3, ended=2, arrived_at=42, **going))
    assert follow(view, BEGIN).stop_at == 42

    hear(view, BEGIN, a=record("a", ready=3, ended=3), b=record("b", ready=3, ended=3, **going))

    verdict = follow(view, BEGIN).verdict
    assert verdict is not None
    assert (verdict.status, verdict.signal) == (OutcomeStatus.STOPPED, 15)


def test_two_nodes_that_want_one_seat_are_both_told_after_a_lease() -> None:
    view = View(config(is_static=True), BEGIN)
    hear(view, BEGIN, a=record("a", ready=0, static_rank=1), b=record("b", ready=0, static_rank=1))
    assert decide(view, BEGIN).wake_at == BEGIN + 6 * SECOND

    refusals = follow(view, BEGIN + 6 * SECOND).refusals

    assert refusals == {
        "a": "node rank 1 is claimed by b on host-b too",
        "b": "node rank 1 is claimed by a on host-a too",
    }


def test_hosts_whose_ranks_disagree_without_a_majority_are_not_left_out_for_it() -> None:
    settings = config(policy=RestartPolicy(restarts_max=1, backoff=Backoff(initial=ZERO)))
    view = running("a", "b", settings=settings)
    notes = [
        msgspec.structs.replace(
            note,
            failure=msgspec.structs.replace(
                note.failure, cause=FailureCause.OUT_OF_STEP, accused=(0, 2)
            ),
        )
        for note in (failure(0), failure(2))
    ]
    of_a, of_b = (
        record(node, ready=4, ended=3, failing=3, failures=(note,))
        for node, note in zip("ab", notes, strict=True)
    )
    hear(view, BEGIN + 1, b=msgspec.structs.replace(of_b, ended=2))
    follow(view, BEGIN + 1)
    hear(view, BEGIN + 3, a=of_a, b=of_b)

    again = follow(view, BEGIN + 3)

    assert (again.phase, again.restarts, again.strikes) == (RoundPhase.RUNNING, 1, {})


def test_a_host_that_fails_again_and_again_is_left_out_if_enough_remain() -> None:
    policy = RestartPolicy(restarts_max=9, strikes_max=2, backoff=Backoff(initial=ZERO))
    settings = config(1, 2, policy=policy)
    view = running("a", "b", settings=settings, strikes={"host-b": 1}, restarts=1)
    ended = record("b", ready=4, ended=3, failing=3, failures=(failure(2),))
    hear(view, BEGIN, a=record("a", ready=4, ended=3), b=ended)

    follow(view, BEGIN)
    again = follow(view, BEGIN)

    assert again.members == ("a",)
    assert again.refusals == {"b": "too many failures began on its host host-b"}


def test_a_new_leader_counts_those_who_were_done_before_they_went() -> None:
    view = running("a", "b", settings=config())
    view.delete("a", Instant(BEGIN + SECOND))
    view.done["a"] = record("a", ready=3, ended=3, is_done=True)

    anew = led_anew(view, BEGIN + 2 * SECOND)
    waits = decide(anew, Instant(BEGIN + 3 * SECOND))
    hear(anew, BEGIN + 4 * SECOND, b=record("b", ready=3, ended=3, is_done=True))

    assert waits.round is None
    verdict = follow(anew, BEGIN + 4 * SECOND).verdict
    assert verdict is not None
    assert verdict.status is OutcomeStatus.SUCCEEDED


def test_who_was_done_when_it_was_cut_off_is_done_when_it_is_back() -> None:
    view = running("a", "b", settings=config())
    view.done["a"] = done = record("a", ready=3, ended=3, is_done=True)
    view.delete("a", Instant(BEGIN + SECOND))
    anew = led_anew(view, BEGIN + 2 * SECOND)

    hear(anew, BEGIN + 3 * SECOND, a=done)

    assert decide(anew, Instant(BEGIN + 3 * SECOND)).round is None


def test_a_note_of_an_earlier_round_says_nothing_about_this_one() -> None:
    view = running("a", "b", settings=config())
    view.delete("a", Instant(BEGIN + SECOND))
    view.done["a"] = record("a", ready=2, ended=2, is_done=True)

    dissolved = follow(led_anew(view, BEGIN + 2 * SECOND), BEGIN + 3 * SECOND)

    assert (dissolved.number, dissolved.phase) == (4, RoundPhase.GATHERING)
    assert dissolved.why == "node a is lost"


def test_who_leaves_when_it_is_done_is_no_loss() -> None:
    view = running("a", "b", settings=config())
    leaving = record("a", ready=3, ended=3, is_done=True, departure=Departure.LEAVES)
    hear(view, BEGIN + SECOND, a=leaving)
    view.delete("a", Instant(BEGIN + 2 * SECOND))

    assert decide(view, Instant(BEGIN + 3 * SECOND)).round is None


def test_who_was_told_to_stop_when_all_were_done_stops_nobody() -> None:
    view = running("a", "b", settings=config())
    told = {"departure": Departure.PREEMPTED, "signal": 15}
    hear(view, BEGIN, a=record("a", ready=3, ended=3, is_done=True, **told))
    hear(view, BEGIN, b=record("b", ready=3, ended=3, is_done=True))

    closed = follow(view, BEGIN)

    assert closed.phase is RoundPhase.CLOSED
    assert closed.verdict is not None
    assert closed.verdict.status is OutcomeStatus.SUCCEEDED


def test_who_was_told_to_stop_when_it_was_done_stops_the_job_though_it_has_gone() -> None:
    view = running("a", "b", settings=config())
    preempted = Departure.PREEMPTED
    told = record("a", ready=3, ended=3, is_done=True, departure=preempted, signal=15)
    hear(view, BEGIN + SECOND, a=told)
    view.delete("a", Instant(BEGIN + SECOND))

    stopping = follow(view, BEGIN + 2 * SECOND)

    assert (stopping.phase, stopping.signal) == (RoundPhase.STOPPING, 15)
