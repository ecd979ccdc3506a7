"""The lines that say how far something has come."""

from pathlib import Path

from rankwise.cli.sim_progress import Estimate, FiguresOfOther, clock


def test_the_rest_takes_as_long_per_case_as_those_that_have_run() -> None:
    estimate = Estimate(10)
    assert not estimate.left_in_words(5)

    estimate.note(4, 4, 40)

    assert estimate.left_in_words(40) == ", about 1:00 left"
    assert estimate.left_in_words(50) == ", about 0:50 left"
    assert estimate.left_in_words(500) == ", about 0:01 left"


def test_cases_that_were_known_before_are_not_counted_as_fast() -> None:
    estimate = Estimate(10)
    estimate.note(8, 0, 0)
    assert not estimate.left_in_words(5)

    estimate.note(9, 1, 30)

    assert estimate.left_in_words(30) == ", about 0:30 left"


def test_durations_are_minutes_and_hours() -> None:
    assert [clock(each) for each in (3, 62, 754, 3723)] == ["0:03", "1:02", "12:34", "1:02:03"]


def test_the_line_names_what_is_counted() -> None:
    seeds = Estimate(2_000, "cluster", "seed")
    seeds.note(500, 500, 10)

    assert seeds.in_words(10) == "cluster: 500 of 2,000 seeds, 0:10, about 0:30 left"
    assert Estimate(1).in_words(3) == "sweep: 0 of 1 case, 0:03"


def test_figures_of_another_process_are_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "measurements.progress"
    figures = FiguresOfOther("calibrate", path)
    assert figures.in_words(2) == "calibrate: 0:02"

    path.write_text("1 81")
    assert figures.in_words(10) == "calibrate: 1 of 81 figures, 0:10"

    path.write_text("21 81")

    assert figures.in_words(20) == "calibrate: 21 of 81 figures, 0:20, about 0:30 left"
    assert figures.in_words(25) == "calibrate: 21 of 81 figures, 0:25, about 0:25 left"


def test_a_file_that_is_being_written_keeps_the_figures_of_before(tmp_path: Path) -> None:
    path = tmp_path / "measurements.progress"
    figures = FiguresOfOther("calibrate", path)
    path.write_text("20 80")
    figures.in_words(10)

    path.write_text("")

    assert figures.in_words(11) == "calibrate: 20 of 80 figures, 0:11"
