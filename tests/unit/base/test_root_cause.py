"""Which of several failures explains the others."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.failure import (
    ErrorRecord,
    ExitStatus,
    Failure,
    FailureCause,
    failure_in_words,
)
from rankwise.base.root_cause import HEAD_START, root_cause_first
from rankwise.base.units import MILLISECOND, Instant

SIGABRT, SIGKILL, SIGSEGV, SIGPIPE = 6, 9, 11, 13
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def failure(
    rank: int, at: int, cause: FailureCause = FailureCause.RAISED, code: int = 1
) -> Failure:
    return Failure(local_rank=rank, attempt=0, cause=cause, at=Instant(at), exit=ExitStatus(code))


def killed(rank: int, at: int, signal: int = SIGKILL) -> Failure:
    return failure(rank, at, FailureCause.SIGNALED, -signal)


def raised(
    rank: int, at: int, type_name: str, message: str, traceback: str | None = None
) -> Failure:
    error = ErrorRecord(
        type=type_name,
        message=message,
        traceback=traceback or f"Traceback:\n    socket.recv()\n{type_name}: {message}\n",
        raised_at=Instant(at),
        wall_ns=0,
    )
    return msgspec.structs.replace(failure(rank, at), error=error)


def order_of(*failures: Failure) -> list[int]:
    return [failure.local_rank for failure in root_cause_first(failures)]


def test_the_earliest_failure_comes_first() -> None:
    assert order_of(failure(0, at=30), failure(1, at=10), failure(2, at=20)) == [1, 2, 0]


def test_ties_go_to_the_lower_rank() -> None:
    assert order_of(failure(2, at=5), failure(0, at=5), failure(1, at=5)) == [0, 1, 2]


@pytest.mark.parametrize("signal", [SIGKILL, SIGSEGV])
def test_a_violent_death_explains_an_exception_raised_just_before_it_was_seen(signal: int) -> None:
    assert order_of(failure(0, at=100 * MILLISECOND), killed(1, 349 * MILLISECOND, signal)) == [
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("EOFError", ""),
        ("rankwise.base.errors.PeerDied", "rank 1 died"),
        ("torch.distributed.DistBackendError", "NCCL error"),
        ("RuntimeError", "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
    ],
)
def test_a_violent_death_explains_what_tells_of_a_lost_peer(type_name: str, message: str) -> None:
    lost = raised(0, 100 * MILLISECOND, type_name, message)

    assert order_of(lost, killed(1, 349 * MILLISECOND)) == [1, 0]


@pytest.mark.parametrize("type_name", ["PeerDied", "CollectiveTimeout", "CollectiveError"])
def test_what_fails_by_itself_explains_an_exception_of_our_collectives_however_late(
    type_name: str,
) -> None:
    waited = raised(0, 5, f"rankwise.base.errors.{type_name}", "all_reduce #3 is not completed")
    lost = raised(2, 6, "ConnectionResetError", "[Errno 104]")
    stopped = failure(3, 8 * HEAD_START, FailureCause.STOPPED, -SIGKILL)
    later = 9 * HEAD_START

    assert order_of(waited, lost, stopped) == [0, 2, 3]
    for own in (
        raised(1, later, "ValueError", "boom"),
        killed(1, later),
        failure(1, later, FailureCause.EXITED, 3),
    ):
        assert order_of(waited, lost, stopped, own) == [1, 0, 2, 3]


def test_a_lost_peer_is_told_with_what_its_message_says_of_it() -> None:
    message = "all_reduce #51 cannot be completed on rank 1: rank 0 has ended\nand more"

    lost = msgspec.structs.replace(raised(1, 0, "rankwise.base.errors.PeerDied", message), rank=1)

    assert failure_in_words(lost, "n1") == (
        "rank 1 on n1 failed: PeerDied: all_reduce #51 cannot be completed on rank 1: "
        "rank 0 has ended"
    )


def test_a_lost_peer_is_found_among_the_causes_of_an_exception() -> None:
    lost = raised(
        0,
        100 * MILLISECOND,
        "ValueError",
        "no data",
        traceback="Traceback:\n    x\nConnectionResetError: gone\n\nValueError: no data\n",
    )

    assert order_of(lost, killed(1, 349 * MILLISECOND)) == [1, 0]


@pytest.mark.parametrize(
    ("type_name", "message"), [("ValueError", "boom"), ("RuntimeError", "loss is NaN")]
)
def test_it_does_not_explain_an_exception_that_tells_of_no_peer(
    type_name: str, message: str
) -> None:
    own = raised(0, 100 * MILLISECOND, type_name, message)

    assert order_of(own, killed(1, 128 * MILLISECOND)) == [0, 1]


def test_a_hang_explains_what_others_raised_while_it_lasted() -> None:
    timed_out = raised(0, 5, "RuntimeError", "Timed out waiting 4000ms for recv operation")
    own = raised(0, 5, "ValueError", "loss is NaN")
    hung = failure(1, 9, FailureCause.HUNG)

    assert order_of(timed_out, hung) == [1, 0]
    assert order_of(own, hung) == [0, 1]


def test_it_does_not_explain_an_exit_that_came_before() -> None:
    left = failure(0, 100 * MILLISECOND, FailureCause.EXITED, code=3)

    assert order_of(left, killed(1, 128 * MILLISECOND)) == [0, 1]


def exited(rank: int, at: int) -> Failure:
    return failure(rank, at, FailureCause.EXITED, code=3)


def test_an_exit_that_told_of_nothing_explains_a_lost_peer_that_was_told_of_just_before() -> None:
    lost = raised(0, 100 * MILLISECOND, "RuntimeError", "Connection reset by peer")

    assert order_of(lost, exited(1, 109 * MILLISECOND)) == [1, 0]
    assert order_of(lost, exited(1, 109 * MILLISECOND), killed(2, 120 * MILLISECOND)) == [2, 0, 1]


@pytest.mark.parametrize(
    "own",
    [
        exited(1, 40 * HEAD_START),
        killed(1, 40 * HEAD_START),
        msgspec.structs.replace(killed(1, 40 * HEAD_START, SIGABRT), seen_dying=True),
        killed(1, HEAD_START // 2, SIGABRT),
        raised(1, 40 * HEAD_START, "ValueError", "boom"),
    ],
)
def test_what_fails_by_itself_explains_a_lost_peer_however_late(own: Failure) -> None:
    lost = raised(0, 5, "RuntimeError", CLOSED)
    stopped = failure(2, 6, FailureCause.STOPPED, -SIGKILL)

    assert order_of(lost, stopped, own) == [1, 0, 2]


def test_lost_peer_is_the_cause_where_all_say_the_same() -> None:
    lost = [raised(rank, 5 + rank, "RuntimeError", CLOSED) for rank in (0, 1)]

    assert order_of(*lost) == [0, 1]


def test_death_by_another_signal_explains_more_than_an_abort() -> None:
    lost = raised(0, 5, "RuntimeError", CLOSED)

    assert order_of(lost, killed(1, 6, SIGABRT), killed(2, 7)) == [2, 0, 1]


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("TimeoutError", "HTTPSConnectionPool(host='data.example'): Read timed out."),
        ("RuntimeError", "NCCL error: Duplicate GPU detected : rank 0 and rank 1 both on 1000"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
    ],
)
@pytest.mark.parametrize(
    "later",
    [
        exited(1, 2 * HEAD_START),
        killed(1, 2 * HEAD_START),
        killed(1, HEAD_START // 2, SIGABRT),
        raised(1, 2 * HEAD_START, "FileNotFoundError", "/nonexistent/ready"),
    ],
)
def test_what_fails_later_does_not_explain_an_exception_that_names_no_lost_connection(
    type_name: str, message: str, later: Failure
) -> None:
    assert order_of(raised(0, 5, type_name, message), later) == [0, 1]


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("RuntimeError", CLOSED),
        ("RuntimeError", "gloo: Read error [10.0.0.1]:3: Connection reset by peer"),
        ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was"),
        ("torch.distributed.DistNetworkError", "recv, got 0 bytes. Connection was likely closed."),
        ("rankwise.base.errors.PeerDied", "all_reduce #1 cannot be completed: rank 1 has ended"),
    ],
)
def test_exception_that_names_a_lost_connection_is_explained_by_a_late_death(
    type_name: str, message: str
) -> None:
    assert order_of(raised(0, 5, type_name, message), killed(1, 40 * HEAD_START)) == [1, 0]


def test_late_abort_of_a_watchdog_does_not_explain_a_lost_connection() -> None:
    assert order_of(raised(0, 5, "RuntimeError", CLOSED), killed(1, 4 * HEAD_START, SIGABRT)) == [
        0,
        1,
    ]


def test_such_an_exit_does_not_explain_an_exception_that_tells_of_no_peer() -> None:
    own = raised(0, 100 * MILLISECOND, "ValueError", "boom")

    assert order_of(own, exited(1, 109 * MILLISECOND)) == [0, 1]


def test_it_does_not_explain_one_raised_long_before() -> None:
    assert order_of(failure(0, at=100 * MILLISECOND), killed(1, 351 * MILLISECOND)) == [0, 1]


@pytest.mark.parametrize("signal", [SIGABRT, SIGPIPE])
def test_an_abort_gets_no_head_start_over_the_exception_that_may_have_caused_it(
    signal: int,
) -> None:
    assert order_of(failure(0, at=100), killed(1, 101, signal)) == [0, 1]


def test_two_violent_deaths_are_compared_as_they_happened() -> None:
    assert order_of(killed(0, at=20), killed(1, at=10)) == [1, 0]


def test_what_was_told_to_stop_explains_nothing() -> None:
    stopped = failure(0, at=1, cause=FailureCause.STOPPED, code=-15)

    assert order_of(stopped, failure(1, at=50)) == [1, 0]


def test_nothing_is_the_cause_of_nothing() -> None:
    assert root_cause_first(()) == ()


@given(
    st.lists(
        st.builds(
            failure,
            st.integers(0, 63),
            st.integers(0, 2 * HEAD_START),
            st.sampled_from(sorted(FailureCause)),
            st.sampled_from([-9, -6, 1, 0]),
        ),
        unique_by=lambda failure: failure.local_rank,
    )
)
def test_the_order_does_not_depend_on_the_order_in_which_failures_are_told(
    failures: list[Failure],
) -> None:
    told = root_cause_first(failures)

    assert sorted(f.local_rank for f in told) == sorted(f.local_rank for f in failures)
    assert root_cause_first(reversed(failures)) == told
    is_stopped = [f.cause is FailureCause.STOPPED for f in told]
    assert is_stopped == sorted(is_stopped)
