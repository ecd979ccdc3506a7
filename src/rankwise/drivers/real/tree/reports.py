"""Report files: what children have to say that does not fit into a word, of any length.

Each child has a memfd. It appends records and then writes a word into the completion pipe; the
worker process reads what is new when the word comes, and empties the file between two runs, when no
child writes. A record is `<u32 length><u32 subject>` and a body.

An exception travels as `rankwise.base.exception_pickle` has it: itself when it can, and as text.
"""

import os
import struct
import time
import traceback

import msgspec

from rankwise.base.errors import TaskFailed
from rankwise.base.exception_pickle import dumps, loads, tell_traceback
from rankwise.base.failure import ErrorRecord, record_of
from rankwise.base.units import Instant

EXIT_REPORT = (1 << 32) - 1
"""The subject of what a child says when it ends."""
ANSWER = EXIT_REPORT - 1
"""The subject of what is no task's: an answer that its frame has no room for, a program's error."""
_HEADER = struct.Struct("=II")


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child has to say: what it raised, or what a task that went well has left.

    Attributes:
        error: the exception in text; None when there is none.
        pickled: the exception, as `exception_pickle.dumps` writes it; empty when there is none.
        loss: what the child has lost and cannot go on without, so that it ends after this.
        left: what a task that went well has left, when its frame was too short for it.
    """

    error: ErrorRecord | None = None
    pickled: bytes = b""
    loss: str = ""
    left: bytes = b""

    @property
    def summary(self) -> str:
        """One line: `ValueError: no such thing`."""
        return "" if self.error is None else self.error.in_a_line


def _in_words(reason: str) -> Report:
    """What went wrong where there is no exception, or none that could be written down."""
    return Report(
        ErrorRecord(type="", message=reason, traceback="", raised_at=Instant(0), wall_ns=0)
    )


UNTOLD = _in_words(
    "it raised, which could not be written down, but on standard error: see ulimit -f"
)
"""What is told in the place of an exception for which the report file had no room."""

_encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode


def report_of(error: BaseException, loss: str = "", raised_at: int | None = None) -> bytes:
    """Write an exception down, and what the child has lost."""
    at = Instant(time.monotonic_ns() if raised_at is None else raised_at)
    trace = "".join(traceback.format_exception(error))
    return _encode(Report(record_of(error, trace, at, time.time_ns()), dumps(error), loss))


def report_of_left(left: bytes) -> bytes:
    """Write down what a task has left."""
    return _encode(Report(left=left))


def report_of_refusal(reason: str) -> bytes:
    """Write down why there is no process."""
    return _encode(_in_words(reason))


def exception_of(report: Report) -> BaseException | None:
    """The exception itself; None when it could not travel."""
    return loads(report.pickled) if report.pickled else None


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
        why = "the exception itself could not be pickled" if report.pickled else None
        error = TaskFailed(report.summary, hint=why)
    error.add_note(f"in {where}")
    tell_traceback(error, "" if report.error is None else report.error.traceback)
    return error
