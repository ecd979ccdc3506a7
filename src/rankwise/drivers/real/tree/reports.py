"""Report files: what children have to say that does not fit into a word, of any length.

Each child has a memfd. It appends records and then writes a word into the completion pipe; the
worker process reads what is new when the word comes, and empties the file between two runs, when no
child writes. A record is `<u32 length><u32 subject>` and a body.

An exception travels as itself when it can. It is pickled by reference first, so that `except
MyError` in the worker process finds the very class; a class that only the child knows goes by
value; one whose class cannot be called with its `args`, or that has attributes which cannot be
pickled, is made without calling it, and without them; and what all this does not help goes as text.
"""

import os
import pickle
import struct
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.errors import CollectiveError, RankwiseError, TaskFailed

if TYPE_CHECKING:
    from collections.abc import Callable

FAREWELL = (1 << 32) - 1
"""The subject of what a child says when it ends."""
ANSWER = FAREWELL - 1
"""The subject of what is no task's: an answer that its frame has no room for, a program's error."""
_HEADER = struct.Struct("=II")


class Report(msgspec.Struct, frozen=True):
    """What went wrong in a child.

    Attributes:
        error: the exception, pickled; empty when it cannot travel.
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
    return _encode(Report(_pickled(error), summary, trace, is_consequence, loss=loss))


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


def exception_of(report: Report) -> BaseException | None:
    """The exception itself; None when it could not travel."""
    if not report.error:
        return None
    try:
        error = pickle.loads(report.error)  # noqa: S301  # from our own child
    except Exception:  # noqa: BLE001  # whatever a foreign class does when it is rebuilt
        return None
    return error if isinstance(error, BaseException) else None


def _pickled(error: BaseException) -> bytes:
    ways: list[Callable[[], bytes]] = [lambda: pickle.dumps(error), lambda: _by_value(error)]
    if type(error).__reduce__ is BaseException.__reduce__:  # else its class has an opinion
        ways.append(lambda: _by_value(_Bare(error)))
    for way in ways:
        try:
            pickled = way()
            if isinstance(pickle.loads(pickled), BaseException):  # noqa: S301  # just written
                return pickled
        except Exception:  # noqa: BLE001, S112  # the next way, or none: then the text is told
            continue
    return b""


def _by_value(thing: object) -> bytes:
    import cloudpickle  # noqa: PLC0415  # only who fails pays for it, and it may be what fails

    pickled: bytes = cloudpickle.dumps(thing)
    return pickled


class _Bare:
    """Pickles as an exception of the same class, without calling it.

    Many classes take other arguments than they hand on to `Exception`, and cannot be called with
    those; many carry something that cannot travel, which stays behind.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        attributes = {name: it for name, it in vars(error).items() if _travels(it)}
        return _remade, (type(error), tuple(filter(_travels, error.args)), attributes)


def _remade(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _travels(thing: object) -> bool:
    try:
        pickle.loads(_by_value(thing))  # noqa: S301  # just written
    except Exception:  # noqa: BLE001  # whatever a foreign class does when it is pickled
        return False
    return True


class ReportFile:
    """One child's file, as both sides see it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("rankwise-reports", os.MFD_CLOEXEC)
        self._read_up_to = 0

    def append(self, subject: int, body: bytes) -> None:
        """Write a record; only the child does."""
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
    error.__cause__ = RemoteTraceback(report.trace)
    return error


class RemoteTraceback(RankwiseError):
    """Where in a child an exception was raised: its traceback, as text."""

    def __init__(self, trace: str) -> None:
        super().__init__(f"\n{trace.rstrip()}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteTraceback, (self.message,))
