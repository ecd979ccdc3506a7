"""The time of day, where a prefix asks for it: it differs from line to line.

A prefix has marks where its template says `${time}` and `${date}`, and is filled in when lines are
shown: all lines of a block were read at once, and have the same time. Local time, as in the report
of a failure, and real time also where ranks are simulated, whose `time` tells them another one.
"""

from time import gmtime, localtime, strftime, time_ns

TIME_MARK = "\0time\0"
DATE_MARK = "\0date\0"


def stamped(prefix: bytes, wall_ns: int | None = None) -> bytes:
    """A prefix with the time in place of its marks; `wall_ns` is that, since 1970, or now."""
    if b"\0" not in prefix:
        return prefix
    seconds, rest = divmod(time_ns() if wall_ns is None else wall_ns, 1_000_000_000)
    local = localtime(seconds)
    of_day = f"{strftime('%H:%M:%S', local)}.{rest // 1_000_000:03d}"
    return prefix.replace(TIME_MARK.encode(), of_day.encode()).replace(
        DATE_MARK.encode(), strftime("%Y-%m-%d", local).encode()
    )


def utc(wall_ns: int) -> str:
    """`2026-11-22T23:20:23.750123Z`: an instant for machines, in RFC 3339."""
    seconds, rest = divmod(wall_ns, 1_000_000_000)
    return f"{strftime('%Y-%m-%dT%H:%M:%S', gmtime(seconds))}.{rest // 1000:06d}Z"
