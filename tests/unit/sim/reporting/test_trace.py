"""The timeline as trace-event JSON: what Perfetto needs to open it and to draw its arrows."""

import gzip
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from rankwise.sim.benches.session import BenchSession, BenchSettings
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


class Counted(msgspec.Struct, tag_field="ph", tag="C", forbid_unknown_fields=True):
    name: str
    pid: int
    ts: float
    args: dict[str, float]


class Trace(msgspec.Struct, forbid_unknown_fields=True):
    displayTimeUnit: Literal["ns", "ms"]  # noqa: N815  # the format's name
    traceEvents: list[Named | Complete | FlowStart | FlowEnd | Counted]  # noqa: N815


RUNS = {
    "layers": BenchSettings(program="tp_mlp", fields={"tokens": "16"}),
    "messages of less than a nanosecond": BenchSettings(
        program="ccl_allreduce", fields={"elements": "5"}
    ),
}


@pytest.fixture(scope="module", params=list(RUNS))
def session(request: pytest.FixtureRequest) -> BenchSession:
    session = BenchSession(RUNS[request.param], with_messages=True)
    session.run()
    return session


@pytest.fixture(scope="module")
def trace(session: BenchSession, tmp_path_factory: pytest.TempPathFactory) -> Trace:
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


def cut_off(microseconds: float) -> int:
    """As some versions of Perfetto's importer read them, in whole nanoseconds."""
    return int(microseconds * 1_000)


def rounded(microseconds: float) -> int:
    """As others read them."""
    return math.floor(microseconds * 1_000 + 0.5)


both_readings = pytest.mark.parametrize("nanoseconds", [cut_off, rounded])


@both_readings
def test_slices_do_not_overlap_in_whole_nanoseconds_either(
    trace: Trace, nanoseconds: Callable[[float], int]
) -> None:
    ends: dict[int, int] = {}
    for event in trace.traceEvents:
        if isinstance(event, Complete):
            start = nanoseconds(event.ts)
            assert start >= ends.get(event.tid, 0)
            ends[event.tid] = start + nanoseconds(event.dur)


@both_readings
def test_arrows_are_fastened_to_slices_that_last_in_whole_nanoseconds(
    trace: Trace, nanoseconds: Callable[[float], int]
) -> None:
    """An importer binds an end to the slice that is open on its track then; it goes forward."""
    open_until: dict[int, tuple[int, int]] = {}
    begun: dict[int, int] = {}
    for event in trace.traceEvents:
        match event:
            case Complete():
                start = nanoseconds(event.ts)
                open_until[event.tid] = (start, start + nanoseconds(event.dur))
            case FlowStart() | FlowEnd():
                start, end = open_until[event.tid]
                assert start <= nanoseconds(event.ts) < end
                if isinstance(event, FlowStart):
                    assert event.id not in begun
                    begun[event.id] = nanoseconds(event.ts)
                else:
                    assert begun.pop(event.id) <= nanoseconds(event.ts)
            case Named() | Counted():
                pass
    assert begun == {}


def test_engines_of_a_pe_do_one_thing_after_the_other(session: BenchSession) -> None:
    """However many operations were given to them at once; only DMA may overtake itself."""
    names = {
        event["args"]["name"]
        for event in trace_events(session.engine)
        if event["name"] == "thread_name"
    }

    assert not [name for name in names if re.search(r"(gemm|math) \(\d+\)$", name)]


def test_tracks_are_numbered_in_the_order_in_which_they_are_to_be_seen(trace: Trace) -> None:
    shown = [
        event.args["name"]
        for event in sorted(
            (each for each in trace.traceEvents if isinstance(each, Named)),
            key=lambda each: each.tid,
        )
        if event.name == "thread_name" and event.pid == trace.traceEvents[0].pid
    ]
    pes = [int(found[1]) for name in shown if (found := re.match(r"cube0\.pe(\d+)", str(name)))]

    assert shown[0] == "host"
    assert pes == sorted(pes)
    assert pes


def test_numbers_behind_names_cannot_be_taken_for_parts_of_them(trace: Trace) -> None:
    """Perfetto writes the number of a process or a track behind its name."""
    assert all(event.pid >= 1000 for event in trace.traceEvents)
    assert {event.pid for event in trace.traceEvents}.isdisjoint(
        event.tid for event in trace.traceEvents if not isinstance(event, Counted)
    )


def test_tracks_have_numbers_of_their_own_and_no_process_is_the_idle_task(trace: Trace) -> None:
    processes: dict[int, set[int]] = {}
    for event in trace.traceEvents:
        assert event.pid > 0
        if isinstance(event, Counted):
            continue
        if isinstance(event, Named) and event.name.startswith("process"):
            continue
        assert event.tid > 0
        processes.setdefault(event.tid, set()).add(event.pid)

    assert all(len(each) == 1 for each in processes.values())


def test_names_come_before_what_they_name(trace: Trace) -> None:
    kinds = [isinstance(event, Named) for event in trace.traceEvents]

    assert kinds == sorted(kinds, reverse=True)


def test_there_is_a_process_per_sip_and_a_name_for_every_track(trace: Trace) -> None:
    names = [event for event in trace.traceEvents if isinstance(event, Named)]
    processes = {event.args["name"] for event in names if event.name == "process_name"}
    named = {(event.pid, event.tid) for event in names if event.name == "thread_name"}
    used = {(each.pid, each.tid) for each in trace.traceEvents if isinstance(each, Complete)}

    assert processes == {"SIP 0", "SIP 1", "SIP 2", "SIP 3"}
    assert used == named


def test_names_of_processes_sort_as_their_numbers_do() -> None:
    """Perfetto shows processes in the order of their names."""
    session = BenchSession(
        BenchSettings(program="ccl_allreduce", topology="torus16", fields={"elements": "16"})
    )
    session.run()

    names = [
        event["args"]["name"]
        for event in trace_events(session.engine)
        if event["name"] == "process_name"
    ]

    assert names == sorted(names)
    assert (names[0], names[-1]) == ("SIP 00", "SIP 15")


def test_every_message_of_the_collective_is_there(session: BenchSession) -> None:
    messages = session.engine.machine.messages
    assert messages
    arrows = [event for event in trace_events(session.engine) if event["ph"] == "s"]

    assert len(arrows) == len(messages)
    assert all(each.sent_at < each.arrived_at for each in messages)


def test_a_packed_trace_holds_the_same_and_is_the_same_every_time(
    session: BenchSession, tmp_path: Path
) -> None:
    for name in ("plain.json", "one.json.gz", "two.json.gz"):
        write_trace(str(tmp_path / name), session.engine)

    packed = (tmp_path / "one.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "plain.json").read_bytes()
    assert packed == (tmp_path / "two.json.gz").read_bytes()
