"""torch's error file: what a program leaves behind that rankwise did not boot.

An executable, or a script decorated with torch's own `record`, has no report pipe. It writes the
exception that it dies of as JSON to the file named by TORCHELASTIC_ERROR_FILE, in one of two forms:

    {"message": {"message": "ValueError: bad shape",
                 "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1790000000"}}}
    {"message": "ValueError: bad shape", "timestamp": 1790000000}

Its time is whole seconds, too coarse to tell which rank failed first. The file is written in the
moment of failure, though, so the time at which it was last changed tells it to the millisecond.
"""

import os
import re
import stat
import time
from typing import TYPE_CHECKING, Any

from rankwise.base.failure import ErrorRecord
from rankwise.base.units import SECOND, Instant

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILE_BYTES_MAX = 16 * 1024 * 1024
_TYPE_AND_MESSAGE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?", re.DOTALL)


def read_error_file(path: str) -> ErrorRecord | None:
    """Read the exception out of an error file; None when there is none that makes sense.

    Never raises and never waits, whatever stands at `path`: the program was free to write there.
    """
    try:
        content, changed_ns = _read_regular_file(path)
        document = _parse(content)
    except (OSError, ValueError, RecursionError):
        return None
    details: Mapping[Any, Any]
    match document:
        case {"message": {"message": str(told), "extraInfo": {**details}}}:
            pass
        case {"message": {"message": str(told)}}:
            details = {}
        case {"message": str(told), **details}:
            pass
        case _:
            return None
    callstack = details.get("py_callstack")
    type_name, message = _split(told)
    wall_ns = _moment(details.get("timestamp"), changed_ns)
    return ErrorRecord(
        type=type_name,
        message=message,
        traceback=_clean(callstack) if isinstance(callstack, str) else "",
        raised_at=Instant(time.monotonic_ns() - (time.time_ns() - wall_ns)),
        wall_ns=wall_ns,
    )


def _read_regular_file(path: str) -> tuple[bytes, int]:
    # Without blocking: the path may be a FIFO without a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # not a path
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _FILE_BYTES_MAX:
            raise ValueError(f"{path} is not an error file")
        return file.read(_FILE_BYTES_MAX), status.st_mtime_ns


def _parse(content: bytes) -> object:
    import json  # noqa: PLC0415  # only where a program failed; msgspec refuses half surrogates

    return json.loads(content)


def _split(told: str) -> tuple[str, str]:
    """Take `ValueError: bad shape` apart; text without a type is an `Exception` of that text."""
    text = _clean(told)
    match = _TYPE_AND_MESSAGE.fullmatch(text)
    if match is None:
        return "Exception", text
    return match[1], match[2] or ""


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _moment(timestamp: object, changed_ns: int) -> int:
    """The file's time where it agrees with the second that the file tells, else that second."""
    match timestamp:
        case int():
            reported_ns = timestamp * SECOND
        case str() if timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12:
            reported_ns = int(timestamp) * SECOND
        case _:
            return changed_ns
    return changed_ns if reported_ns <= changed_ns < reported_ns + 2 * SECOND else reported_ns
