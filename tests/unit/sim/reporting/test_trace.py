"""The timeline as trace-event JSON: what Perfetto needs to open it and to draw its arrows."""

import gzip
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from rankwise.sim.benches.session import Session, Settings
from rankwise.sim.reporting.trace import trace_events, write_trace


class Named(msgspec.Struct, tag_field="ph", tag="M", forbid_unknown_fields=True):
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    pid: int
    tid: int
    ts: float
    args: dict[str, str | int]


class Complete(msgspec.Struct, tag_field="ph", tag="X", forbid_unknown_fields=True):
    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, Any]


class FlowStart(msgspec.Struct, tag_field="ph", tag="s", forbid_unknown_fields=True):
    name: str
    cat: str
    id: int
    pid: int
    tid: int
    ts: float


class FlowEnd(msgspec.Struct, tag_field="ph", tag="f", forbid_unknown_fields=True):
    name: str
    cat: str
    id: int
    pid: int
    tid: int
    ts: float
    bp: Literal["e"]


class Trace(msgspec.Struct, forbid_unknown_fields=True):
    displayTimeUnit: Literal["ns", "ms"]  # noqa: N815  # the format's name
    traceEvents: list[Named | Complete | FlowStart | FlowEnd]  # noqa: N815


@pytest.fixture(scope="module")
def session() -> Session:
    session = Session(Settings(program="tp_mlp", fields={"tokens": "16"}), with_messages=True)
    session.run()
    return session


@pytest.fixture(scope="module")
def trace(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(str(path), session.engine)
    return msgspec.json.decode(path.read_bytes(), type=Trace)


def test_events_are_in_the_order_of_time(trace: Trace) -> None:
    instants = [event.ts for event in trace.traceEvents]

    assert instants == sorted(instants)


def test_slices_of_a_track_do_not_overlap(trace: Trace) -> None:
    ends: dict[tuple[int, int], float] = {}
    for event in trace.traceEvents:
        if isinstance(event, Complete):
            track = (event.pid, event.tid)
            assert event.ts >= ends.get(track, 0.0) - 1e-9
            ends[track] = event.ts + event.dur


def test_every_arrow_has_both_ends_inside_slices(trace: Trace) -> None:
    slices: dict[tuple[int, int], list[Complete]] = {}
    ends: dict[int, list[FlowStart | FlowEnd]] = {}
    for event in trace.traceEvents:
        if isinstance(event, Complete):
            slices.setdefault((event.pid, event.tid), []).append(event)
        elif isinstance(event, FlowStart | FlowEnd):
            ends.setdefault(event.id, []).append(event)

    assert ends
    for start, end in ends.values():
        assert isinstance(start, FlowStart)
        assert isinstance(end, FlowEnd)
        for each in (start, end):
            on_track = slices[each.pid, each.tid]
            assert any(one.ts <= each.ts <= one.ts + one.dur for one in on_track)


def test_there_is_a_process_per_sip_and_a_name_for_every_track(trace: Trace) -> None:
    names = [event for event in trace.traceEvents if isinstance(event, Named)]
    processes = {event.args["name"] for event in names if event.name == "process_name"}
    named = {(event.pid, event.tid) for event in names if event.name == "thread_name"}
    used = {(each.pid, each.tid) for each in trace.traceEvents if isinstance(each, Complete)}

    assert processes == {"SIP 0", "SIP 1", "SIP 2", "SIP 3"}
    assert used == named


def test_every_message_of_the_collective_is_there(session: Session) -> None:
    messages = session.engine.machine.messages
    assert messages
    arrows = [event for event in trace_events(session.engine) if event["ph"] == "s"]

    assert len(arrows) == len(messages)
    assert all(each.sent_at < each.arrived_at for each in messages)


def test_a_packed_trace_holds_the_same_and_is_the_same_every_time(
    session: Session, tmp_path: Path
) -> None:
    for name in ("plain.json", "one.json.gz", "two.json.gz"):
        write_trace(str(tmp_path / name), session.engine)

    packed = (tmp_path / "one.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "plain.json").read_bytes()
    assert packed == (tmp_path / "two.json.gz").read_bytes()
