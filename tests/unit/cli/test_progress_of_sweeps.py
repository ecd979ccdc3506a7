"""The line that says how far a sweep has come."""

from rankwise.cli.sim_progress import Estimate, clock


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
