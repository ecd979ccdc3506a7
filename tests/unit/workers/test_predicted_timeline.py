"""What a tree of chips predicts, as a file for viewers of timelines."""

import json
from pathlib import Path
from typing import Any

from rankwise.workers import Timeline, TimelineEntry


def written(entries: list[TimelineEntry], tmp_path: Path) -> list[dict[str, Any]]:
    Timeline(entries).write_trace(tmp_path / "trace.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return events


def names(events: list[dict[str, Any]], kind: str) -> list[str]:
    """In the order in which a viewer shows them."""
    about = [event for event in events if event["name"] == kind]
    return [event["args"]["name"] for event in sorted(about, key=lambda each: each["tid"])]


def test_each_chip_is_a_process_with_its_tasks_first_and_then_its_parts(tmp_path: Path) -> None:
    entries = [
        TimelineEntry("chip 0", "step", 0, 5_000, task=0),
        TimelineEntry("chip 0", "dot", 0, 1_000, part="sip0.cube0.pe10"),
        TimelineEntry("chip 0", "dot", 0, 1_000, part="sip0.cube0.pe2"),
        TimelineEntry("chip 0", "kernel", 0, 5_000, part="sip0"),
    ]

    events = written(entries, tmp_path)

    assert names(events, "process_name") == ["chip 0"]
    assert names(events, "thread_name") == ["tasks", "sip0", "sip0.cube0.pe2", "sip0.cube0.pe10"]
    assert len([event for event in events if event["ph"] == "X"]) == len(entries)


def test_chips_are_in_the_order_of_the_tree(tmp_path: Path) -> None:
    places = ["chip 0 of worker 1", "chip 10 of worker 0", "chip 2 of worker 0"]

    events = written([TimelineEntry(place, "step", 0, 5, task=0) for place in places], tmp_path)

    about = [event for event in events if event["name"] == "process_name"]
    shown = [event["args"]["name"] for event in sorted(about, key=lambda each: each["pid"])]
    assert shown == ["chip 2 of worker 0", "chip 10 of worker 0", "chip 0 of worker 1"]
    assert all(event["pid"] > 0 for event in events)


def test_what_a_part_does_at_the_same_time_is_on_tracks_of_its_own(tmp_path: Path) -> None:
    entries = [
        TimelineEntry("chip 0", "load", 0, 9_000, part="sip0.cube0.pe0"),
        TimelineEntry("chip 0", "dot", 4_000, 7_000, part="sip0.cube0.pe0"),
        TimelineEntry("chip 0", "dot", 9_000, 12_000, part="sip0.cube0.pe0"),
    ]

    events = written(entries, tmp_path)

    assert names(events, "thread_name") == ["sip0.cube0.pe0", "sip0.cube0.pe0 (2)"]
    tracks = [event["tid"] for event in events if event["ph"] == "X"]
    assert tracks[0] == tracks[2] != tracks[1]
