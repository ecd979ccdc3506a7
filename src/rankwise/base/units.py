"""Time and size as integers with names.

Ten float steps of 0.1 do not reach 1.0; nanosecond integers do. An `Instant` is a reading of one
monotonic clock, so instants of two machines are never comparable; a `Duration` is the distance
between two instants of one clock.
"""

from typing import NewType

Instant = NewType("Instant", int)
"""Nanoseconds on a monotonic clock whose zero means nothing."""

Duration = NewType("Duration", int)
"""Nanoseconds between two instants."""

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000

ZERO = Duration(0)
DURATION_MAX = Duration(10 * 365 * 24 * 3600 * SECOND)
"""Ten years: no wait is longer, and all sums with it fit into the kernel's 64 bits."""


def after(instant: Instant, duration: Duration) -> Instant:
    """The instant that comes `duration` after `instant`."""
    return Instant(instant + duration)


def between(earlier: Instant, later: Instant) -> Duration:
    """The duration from `earlier` to `later`; negative when they are the other way round."""
    return Duration(later - earlier)


def postponed(instant: Instant | None, duration: Duration) -> Instant | None:
    """A deadline that comes so much later; none stays none."""
    return None if instant is None else after(instant, duration)


def duration_from_seconds(seconds: float) -> Duration:
    """Convert a user's figure in seconds, rounded to the nanosecond."""
    return Duration(round(seconds * SECOND))


_PARTS = (
    (r"h", 3600 * SECOND),
    (r"m(?:in)?", 60 * SECOND),
    (r"s", SECOND),
    (r"ms", MILLISECOND),
    (r"us", MICROSECOND),
    (r"ns", 1),
)
_DURATION = r"\s*".join(rf"(?:(\d+\.?\d*|\.\d+)\s*{unit}(?![a-z]))?" for unit, _ in _PARTS)


def parse_duration(text: str) -> Duration | None:
    """Read `500ms`, `30s`, `5 min`, `1h30m`: parts with their units, the largest first.

    None if it is none. More than `DURATION_MAX` is told as twice that.
    """
    import re  # noqa: PLC0415  # ranks read none

    found = re.fullmatch(_DURATION, text.strip())
    if found is None or not any(found.groups()):
        return None
    parts = zip(found.groups(), _PARTS, strict=True)
    total = sum(float(part) * unit for part, (_, unit) in parts if part)
    return Duration(round(min(total, 2.0 * DURATION_MAX)))


def format_duration(duration: Duration) -> str:
    """Write a duration for people: `850 us`, `12 ms`, `1.5 s`, `2 min 5 s`, `1 h 4 min`."""
    # Three digits make one unit of the next from here on: 1 s, and not 1e+03 ms.
    if duration < 0.9995 * MILLISECOND:
        return f"{duration / MICROSECOND:.3g} us"
    if duration < 0.9995 * SECOND:
        return f"{duration / MILLISECOND:.3g} ms"
    if duration < 60 * SECOND:
        return f"{duration / SECOND:.3g} s"
    minutes, seconds = divmod(round(duration / SECOND), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_bytes(size: int) -> str:
    """Write a size for people: `850 bytes`, `1.25 MiB`."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << exponent:
            return f"{size / (1 << exponent):.4g} {unit}"
    return f"{size} bytes"
