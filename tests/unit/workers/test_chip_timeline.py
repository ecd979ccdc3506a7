import json
from pathlib import Path

from rankwise.workers.platforms.port import Span, TaskReport
from rankwise.workers.timeline import end_ps, timeline_events, write_timeline

REPORTS = [
    TaskReport(
        chip=1,
        task="second",
        start_ps=2_000_001,
        end_ps=5_000_000,
        spans=(Span("copy", "MemoryWrite", "sip1", 2_000_001, 3_000_000),),
    ),
    TaskReport(chip=0, task="first", start_ps=0, end_ps=1_999_999),
]


def test_tasks_and_their_parts_become_slices_in_the_order_of_time() -> None:
    slices = [event for event in timeline_events(REPORTS) if event["ph"] == "X"]

    assert [(each["name"], each["pid"], each["ts"]) for each in slices] == [
        ("first", 0, 0.0),
        ("second", 1, 2.000001),
        ("copy", 1, 2.000001),
    ]
    assert slices[1]["dur"] == 2.999999


def test_each_chip_is_a_process_and_each_place_a_track() -> None:
    names = [
        (event["name"], event["pid"], event["args"]["name"])
        for event in timeline_events(REPORTS)
        if event["ph"] == "M"
    ]

    assert names == [
        ("process_name", 0, "chip 0"),
        ("process_name", 1, "chip 1"),
        ("thread_name", 0, "tasks"),
        ("thread_name", 1, "tasks"),
        ("thread_name", 1, "sip1"),
    ]


def test_equal_reports_give_equal_files_whatever_their_order(tmp_path: Path) -> None:
    write_timeline(tmp_path / "a.json", REPORTS)
    write_timeline(str(tmp_path / "b.json"), reversed(REPORTS))

    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert json.loads(text)["traceEvents"] == timeline_events(REPORTS)


def test_the_last_end_is_how_long_everything_takes() -> None:
    assert end_ps(REPORTS) == 5_000_000
    assert end_ps([]) == 0


def test_a_duration_is_rounded_up_to_whole_nanoseconds() -> None:
    assert [report.duration_ns for report in REPORTS] == [3000, 2000]
