"""Requests to one child: in whatever order things happen, each call ends once."""

from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import Instant
from rankwise.core.tasks.frames import Frame, FrameKind, RequestLane
from rankwise.core.tasks.request import (
    AnswerArrived,
    Called,
    ChannelBroke,
    Deliver,
    GiveUp,
    KillPeer,
    PeerEnded,
    Requests,
    SendFrame,
    Stimulus,
)

NOW = Instant(0)
STEPS = st.lists(st.sampled_from(["call", "answer", "answer", "repeat", "break", "end"]))


@given(STEPS)
def test_every_call_ends_exactly_once_and_one_is_under_way_at_a_time(steps: list[str]) -> None:
    requests, calls, kills = Requests("chip 0"), 0, 0
    sent: list[int] = []
    ended: list[int] = []

    for step in [*steps, "end"]:
        stimulus: Stimulus
        match step:
            case "call":
                calls += 1
                stimulus = Called(calls, b"")
            case "answer" | "repeat" if sent:
                number = sent[-1] if step == "answer" else sent[0]
                stimulus = AnswerArrived(Frame(FrameKind.REPLY, RequestLane.CONTROL, number))
            case "break":
                stimulus = ChannelBroke("cut")
            case _:
                stimulus = PeerEnded("it ended")
        for effect in requests.handle(stimulus, NOW):
            match effect:
                case SendFrame(frame=frame):
                    assert ended == sent, "one at a time"
                    sent.append(frame.sequence)
                case Deliver(call=call) | GiveUp(call=call):
                    ended.append(call)
                case KillPeer():
                    kills += 1

    assert ended == list(range(1, calls + 1))
    assert sent == ended[: len(sent)]
    assert kills <= 1
