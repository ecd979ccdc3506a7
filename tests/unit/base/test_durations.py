"""Durations as people write them."""

import pytest

from rankwise.base.units import DURATION_MAX, Duration, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("500ms", 500_000_000),
        ("1.5 s", 1_500_000_000),
        ("5m", 300_000_000_000),
        ("5min", 300_000_000_000),
        ("1h30m", 5_400_000_000_000),
        ("1 h 4 min", 3_840_000_000_000),
        ("2m5s", 125_000_000_000),
        ("1h1m1s1ms1us1ns", 3_661_001_001_001),
        ("0s", 0),
        (f"{'9' * 400}h", 2 * DURATION_MAX),
    ],
)
def test_a_duration_has_parts_with_units(text: str, nanoseconds: int) -> None:
    assert parse_duration(text) == nanoseconds


@pytest.mark.parametrize(
    "text", ["", "  ", "5", "5d", "30m1h", "1h30", "1h-5m", "1mm", "-5s", "inf", "1h 1h"]
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (500, "0.5 us"),
        (999_499, "999 us"),
        (999_500, "1 ms"),
        (999_500_000, "1 s"),
        (9_994_000_000, "9.99 s"),
        (125_000_000_000, "2 min 5 s"),
    ],
)
def test_a_duration_is_shown_with_three_digits_and_its_unit(nanoseconds: int, text: str) -> None:
    assert format_duration(Duration(nanoseconds)) == text
