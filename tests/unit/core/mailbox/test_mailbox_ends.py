import pytest

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.mailbox.frames import Frame, FrameKind, Lane
from rankwise.core.mailbox.parent_end import ParentEnd, ParentPhase
from rankwise.core.mailbox.vocabulary import (
    AnnounceEnd,
    AnnounceReady,
    Called,
    CarryOut,
    ChannelBroke,
    CloseRequested,
    Deliver,
    FrameArrived,
    GiveUpCall,
    KillPeer,
    Leave,
    PeerEnded,
    SendFrame,
    Started,
    WorkFinished,
)
from rankwise.core.mailbox.worker_end import WorkerEnd, WorkerPhase

NOW = Instant(0)
SOON = Duration(5 * SECOND)
HELLO = Frame(FrameKind.HELLO, Lane.CONTROL, 0, b"chip 1")


def request(lane: Lane, sequence: int, body: bytes = b"") -> Frame:
    return Frame(FrameKind.REQUEST, lane, sequence, body)


def reply(lane: Lane, sequence: int, body: bytes = b"") -> Frame:
    return Frame(FrameKind.REPLY, lane, sequence, body)


def open_parent(depth: int = 1) -> ParentEnd:
    end = ParentEnd("chip 1", NOW, depth=depth)
    assert end.handle(FrameArrived(HELLO), NOW) == [AnnounceReady(b"chip 1")]
    return end


def open_worker() -> WorkerEnd:
    end = WorkerEnd()
    assert end.handle(Started(b"chip 1"), NOW) == [SendFrame(HELLO)]
    return end


def test_a_call_made_before_the_worker_is_up_is_sent_when_it_is() -> None:
    end = ParentEnd("chip 1", NOW)

    assert end.handle(Called(7, Lane.TASK, b"x"), NOW) == []
    assert end.handle(FrameArrived(HELLO), NOW) == [
        AnnounceReady(b"chip 1"),
        SendFrame(request(Lane.TASK, 1, b"x")),
    ]


def test_an_answer_is_delivered_once_and_lets_the_next_call_go() -> None:
    end = open_parent()
    end.handle(Called(1, Lane.TASK), NOW)
    assert end.handle(Called(2, Lane.TASK, b"y"), NOW) == []

    first = end.handle(FrameArrived(reply(Lane.TASK, 1, b"r")), NOW)
    again = end.handle(FrameArrived(reply(Lane.TASK, 1, b"r")), NOW)

    assert first == [Deliver(1, b"r", succeeded=True), SendFrame(request(Lane.TASK, 2, b"y"))]
    assert again == []


def test_a_failure_is_delivered_as_one() -> None:
    end = open_parent()
    end.handle(Called(1, Lane.CONTROL), NOW)

    answer = Frame(FrameKind.FAILURE, Lane.CONTROL, 1, b"why")

    assert end.handle(FrameArrived(answer), NOW) == [Deliver(1, b"why", succeeded=False)]


def test_control_does_not_wait_for_a_task() -> None:
    end = open_parent()
    end.handle(Called(1, Lane.TASK), NOW)

    assert end.handle(Called(2, Lane.CONTROL, b"malloc"), NOW) == [
        SendFrame(request(Lane.CONTROL, 1, b"malloc"))
    ]


def test_as_many_requests_of_a_lane_are_under_way_as_its_depth_says() -> None:
    end = open_parent(depth=2)

    sent = [end.handle(Called(call, Lane.TASK), NOW) for call in (1, 2, 3)]

    assert [len(effects) for effects in sent] == [1, 1, 0]


def test_the_end_of_the_worker_ends_all_calls_in_their_order() -> None:
    end = open_parent()
    end.handle(Called(4, Lane.TASK), NOW)
    end.handle(Called(5, Lane.TASK), NOW)
    end.handle(Called(6, Lane.CONTROL), NOW)

    effects = end.handle(PeerEnded("signal 9 (SIGKILL)"), NOW)

    words = "chip 1 is gone: signal 9 (SIGKILL)"
    assert effects == [
        GiveUpCall(4, words, timed_out=False, was_sent=True),
        GiveUpCall(5, words, timed_out=False, was_sent=False),
        GiveUpCall(6, words, timed_out=False, was_sent=True),
        AnnounceEnd("signal 9 (SIGKILL)"),
    ]
    assert end.phase is ParentPhase.ENDED
    assert end.handle(PeerEnded("again"), NOW) == []


def test_a_call_to_a_worker_that_is_gone_is_given_up_at_once() -> None:
    end = open_parent()
    end.handle(PeerEnded("exit code 3"), NOW)

    assert end.handle(Called(9, Lane.TASK), NOW) == [
        GiveUpCall(9, "chip 1 takes no more requests: exit code 3", timed_out=False, was_sent=False)
    ]


def test_a_late_answer_is_dropped_and_frees_its_place() -> None:
    end = open_parent()
    end.handle(Called(1, Lane.TASK, patience=SOON), NOW)
    end.handle(Called(2, Lane.TASK), NOW)
    assert end.next_deadline == Instant(SOON)

    too_early = end.tick(Instant(SOON - 1))
    effects = end.tick(Instant(SOON))
    late = end.handle(FrameArrived(reply(Lane.TASK, 1)), Instant(2 * SOON))

    assert too_early == []
    assert effects == [
        GiveUpCall(1, "chip 1 has not answered within 5 s", timed_out=True, was_sent=True)
    ]
    assert late == [SendFrame(request(Lane.TASK, 2))]


def test_a_call_that_times_out_before_it_was_sent_is_never_sent() -> None:
    end = open_parent()
    end.handle(Called(1, Lane.TASK), NOW)
    end.handle(Called(2, Lane.TASK, patience=SOON), NOW)

    effects = end.tick(Instant(SOON))

    assert effects == [
        GiveUpCall(2, "chip 1 has not answered within 5 s", timed_out=True, was_sent=False)
    ]
    assert end.handle(FrameArrived(reply(Lane.TASK, 1)), NOW) == [Deliver(1, b"", succeeded=True)]


def test_a_worker_that_does_not_come_up_is_killed_at_the_deadline() -> None:
    end = ParentEnd("chip 1", NOW, start_patience=SOON)
    end.handle(Called(1, Lane.TASK), NOW)

    effects = end.tick(Instant(SOON))

    assert effects == [
        GiveUpCall(
            1, "chip 1 is gone: it did not come up within 5 s", timed_out=False, was_sent=False
        ),
        KillPeer("chip 1: it did not come up within 5 s"),
    ]
    assert end.handle(PeerEnded("signal 9"), NOW) == [AnnounceEnd("it did not come up within 5 s")]


@pytest.mark.parametrize(
    ("stimulus", "reason"),
    [
        (ChannelBroke("a message was cut"), "a message was cut"),
        (FrameArrived(reply(Lane.TASK, 2)), "it answered task request #2 out of turn"),
        (FrameArrived(reply(Lane.CONTROL, 1)), "it answered control request #1 out of turn"),
        (
            FrameArrived(Frame(FrameKind.SHUTDOWN, Lane.CONTROL, 0)),
            "it sent a SHUTDOWN, which is the parent's to send",
        ),
    ],
)
def test_a_worker_that_breaks_the_rules_is_killed_and_its_calls_end(
    stimulus: ChannelBroke | FrameArrived, reason: str
) -> None:
    end = open_parent()
    end.handle(Called(1, Lane.TASK), NOW)

    effects = end.handle(stimulus, NOW)

    assert effects == [
        GiveUpCall(1, f"chip 1 is gone: {reason}", timed_out=False, was_sent=True),
        KillPeer(f"chip 1: {reason}"),
    ]
    assert end.handle(FrameArrived(reply(Lane.TASK, 1)), NOW) == []


def test_closing_lets_finish_what_was_called_and_then_says_so() -> None:
    end = open_parent()
    end.handle(Called(1, Lane.TASK), NOW)
    end.handle(Called(2, Lane.TASK), NOW)

    asked = end.handle(CloseRequested(SOON), NOW)
    first = end.handle(FrameArrived(reply(Lane.TASK, 1)), NOW)
    second = end.handle(FrameArrived(reply(Lane.TASK, 2)), NOW)

    shutdown = SendFrame(Frame(FrameKind.SHUTDOWN, Lane.CONTROL, 0))
    assert asked == []
    assert first == [Deliver(1, b"", succeeded=True), SendFrame(request(Lane.TASK, 2)), shutdown]
    assert second == [Deliver(2, b"", succeeded=True)]
    assert end.handle(PeerEnded("exit code 0"), NOW) == [AnnounceEnd("")]


def test_a_worker_that_does_not_end_when_told_is_killed() -> None:
    end = open_parent()
    end.handle(CloseRequested(SOON), NOW)

    assert end.tick(Instant(SOON)) == [KillPeer("chip 1 did not end when it was told to")]


def test_a_worker_that_is_closed_before_it_is_up_is_killed() -> None:
    end = ParentEnd("chip 1", NOW)

    effects = end.handle(CloseRequested(SOON), NOW)

    assert effects == [KillPeer("chip 1 was told to end before it was up")]
    assert end.handle(FrameArrived(HELLO), NOW) == []


def test_a_queued_call_that_times_out_while_closing_lets_the_worker_end() -> None:
    end = open_parent()
    end.handle(Called(1, Lane.TASK), NOW)
    end.handle(Called(2, Lane.TASK, patience=SOON), NOW)
    end.handle(CloseRequested(Duration(2 * SOON)), NOW)

    effects = end.tick(Instant(SOON))

    assert SendFrame(Frame(FrameKind.SHUTDOWN, Lane.CONTROL, 0)) in effects


def test_a_request_is_carried_out_once_and_its_answer_given_again_if_it_is_repeated() -> None:
    end = open_worker()

    first = end.handle(FrameArrived(request(Lane.TASK, 1, b"x")), NOW)
    while_running = end.handle(FrameArrived(request(Lane.TASK, 1, b"x")), NOW)
    done = end.handle(WorkFinished(Lane.TASK, 1, b"r"), NOW)
    afterwards = end.handle(FrameArrived(request(Lane.TASK, 1, b"x")), NOW)

    assert first == [CarryOut(Lane.TASK, 1, b"x")]
    assert while_running == []
    assert done == afterwards == [SendFrame(reply(Lane.TASK, 1, b"r"))]


def test_requests_of_a_busy_lane_wait_and_another_lane_does_not() -> None:
    end = open_worker()
    end.handle(FrameArrived(request(Lane.TASK, 1)), NOW)

    assert end.handle(FrameArrived(request(Lane.TASK, 2)), NOW) == []
    assert end.handle(FrameArrived(request(Lane.CONTROL, 1)), NOW) == [
        CarryOut(Lane.CONTROL, 1, b"")
    ]
    assert end.handle(WorkFinished(Lane.TASK, 1), NOW) == [
        SendFrame(reply(Lane.TASK, 1)),
        CarryOut(Lane.TASK, 2, b""),
    ]


def test_requests_that_come_before_the_worker_is_up_wait_for_it() -> None:
    end = WorkerEnd()

    assert end.handle(FrameArrived(request(Lane.TASK, 1)), NOW) == []
    assert end.handle(Started(b"chip 1"), NOW) == [SendFrame(HELLO), CarryOut(Lane.TASK, 1, b"")]


def test_failed_work_is_answered_as_a_failure() -> None:
    end = open_worker()
    end.handle(FrameArrived(request(Lane.TASK, 1)), NOW)

    effects = end.handle(WorkFinished(Lane.TASK, 1, b"why", succeeded=False), NOW)

    assert effects == [SendFrame(Frame(FrameKind.FAILURE, Lane.TASK, 1, b"why"))]


def test_a_worker_told_to_end_finishes_its_work_first() -> None:
    end = open_worker()
    end.handle(FrameArrived(request(Lane.TASK, 1)), NOW)
    end.handle(FrameArrived(request(Lane.TASK, 2)), NOW)

    told = end.handle(FrameArrived(Frame(FrameKind.SHUTDOWN, Lane.CONTROL, 0)), NOW)
    end.handle(WorkFinished(Lane.TASK, 1), NOW)
    last = end.handle(WorkFinished(Lane.TASK, 2), NOW)

    assert told == []
    assert last == [SendFrame(reply(Lane.TASK, 2)), Leave("")]
    assert end.phase is WorkerPhase.LEFT


@pytest.mark.parametrize(
    ("stimulus", "reason"),
    [
        (PeerEnded("signal 9"), "the parent is gone: signal 9"),
        (ChannelBroke("cut"), "the parent's messages cannot be read: cut"),
        (
            FrameArrived(request(Lane.TASK, 3)),
            "task request #2 was lost: #3 came in its place",
        ),
        (
            FrameArrived(reply(Lane.TASK, 1)),
            "the parent sent a REPLY, which is a worker's to send",
        ),
    ],
)
def test_a_worker_without_a_parent_that_it_understands_leaves_from_the_middle_of_its_work(
    stimulus: PeerEnded | ChannelBroke | FrameArrived, reason: str
) -> None:
    end = open_worker()
    end.handle(FrameArrived(request(Lane.TASK, 1)), NOW)

    assert end.handle(stimulus, NOW) == [Leave(reason)]
    assert end.handle(WorkFinished(Lane.TASK, 1), NOW) == []


def test_a_request_after_the_order_to_end_breaks_the_rules() -> None:
    end = open_worker()
    end.handle(FrameArrived(request(Lane.TASK, 1)), NOW)
    end.handle(FrameArrived(Frame(FrameKind.SHUTDOWN, Lane.CONTROL, 0)), NOW)

    effects = end.handle(FrameArrived(request(Lane.CONTROL, 1)), NOW)

    assert effects == [Leave("control request #1 came after the order to end")]


def test_work_that_nobody_asked_for_cannot_be_finished() -> None:
    end = open_worker()

    with pytest.raises(LocalProtocolError, match="task request #4 was finished, but #0"):
        end.handle(WorkFinished(Lane.TASK, 4), NOW)


def test_a_worker_is_started_once() -> None:
    with pytest.raises(LocalProtocolError, match="twice"):
        open_worker().handle(Started(), NOW)


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="depth is 0"):
        ParentEnd("chip 1", NOW, depth=0)
