"""Report files: what children have to say that does not fit into a word, of any length.

Each child has a memfd. It appends records and then writes a word into the completion pipe; the
worker process reads what is new when the word comes, and empties the file between two runs, when no
child writes. A record is `<u32 length><u32 subject>` and a body.

An exception travels as `rankwise.base.exception_pickle` has it: itself when it can, else as text.
"""

import os
import struct
import traceback

import msgspec

from rankwise.base.errors import CollectiveError, TaskFailed
from rankwise.base.exception_pickle import dumps, loads, tell_traceback

EXIT_REPORT = (1 << 32) - 1
"""The subject of what a child says when it ends."""
ANSWER = EXIT_REPORT - 1
"""The subject of what is no task's: an answer that its frame has no room for, a program's error."""
_HEADER = struct.Struct("=II")


class Report(msgspec.Struct, frozen=True):
    """What went wrong in a child.

    Attributes:
        error: the exception, as `exception_pickle.dumps` writes it; empty when there is none.
        summary: `ValueError: no such thing`.
        trace: its traceback as text.
    """

    error: bytes
    summary: str
    trace: str
    is_consequence: bool = False
    """Whether it only tells that some other child has failed or died."""
    left: bytes = b""
    """What a task that went well has left, when its frame was too short for it."""
    loss: str = ""
    """What the child has lost and cannot go on without, so that it ends after this."""


UNTOLD = Report(
    b"", "it raised, which could not be written down, but on standard error: see ulimit -f", ""
)
"""What is told in the place of an exception for which the report file had no room."""

_encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode


def report_of(error: BaseException, loss: str = "") -> bytes:
    """Write an exception down, and what the child has lost."""
    trace = "".join(traceback.format_exception(error))
    is_consequence = isinstance(error, CollectiveError)
    summary = summary_of(error)
    return _encode(Report(dumps(error), summary, trace, is_consequence, loss=loss))


def summary_of(error: BaseException) -> str:
    """One line: `ValueError: no such thing`."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as trouble:  # noqa: BLE001  # whatever a foreign class does when it is printed
        return f"{name}, which raised {type(trouble).__name__} when it was to be printed"


def report_of_left(left: bytes) -> bytes:
    """Write down what a task has left."""
    return _encode(Report(b"", "", "", left=left))


def report_of_refusal(reason: str) -> bytes:
    """Write down why there is no process."""
    return _encode(Report(b"", reason, ""))


def exception_of(report: Report) -> BaseException | None:
    """The exception itself; None when it could not travel."""
    return loads(report.error) if report.error else None


class ReportFile:
    """One child's file, as both sides see it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("rankwise-reports", os.MFD_CLOEXEC)
        self._read_up_to = 0

    def append(self, subject: int, body: bytes) -> None:
        """Write a record; only the child does, or the fork server before there is one."""
        end = os.fstat(self.fd).st_size
        os.pwrite(self.fd, _HEADER.pack(len(body), subject) + body, end)

    def read_new(self) -> list[tuple[int, Report]]:
        """The records since the last time, with their subjects; only the worker process does."""
        found: list[tuple[int, Report]] = []
        end = os.fstat(self.fd).st_size
        while self._read_up_to < end:
            head = os.pread(self.fd, _HEADER.size, self._read_up_to)
            length, subject = _HEADER.unpack(head)
            body = os.pread(self.fd, length, self._read_up_to + _HEADER.size)
            if len(body) < length:
                break  # its writer was killed in the middle
            self._read_up_to += _HEADER.size + length
            found.append((subject, decode_report(body)))
        return found

    def empty(self) -> None:
        """Forget all records, while the child writes none."""
        if os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, 0)
        self._read_up_to = 0

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def rebuilt(report: Report, where: str) -> BaseException:
    """The exception that a child has told, or `TaskFailed` with its text if it could not travel."""
    error = exception_of(report)
    if error is not None and not isinstance(error, Exception):
        # A child's SystemExit must not end the worker process.
        error = TaskFailed(report.summary)
    if error is None:
        why = None if report is UNTOLD else "the exception itself could not be pickled"
        error = TaskFailed(report.summary, hint=why)
    error.add_note(f"in {where}")
    tell_traceback(error, report.trace)
    return error
